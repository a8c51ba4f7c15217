"""The reference of the Python API is as the code says, and leaves nothing out."""

import inspect

import pytest

import hexiopt
from hexiopt import plot, testing
from tests import api_reference


def test_the_pages_are_as_the_code_says() -> None:
    for page, text in api_reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run make reference"


def test_all_that_is_public_is_on_it() -> None:
    parts = (*api_reference.PARTS.values(), *api_reference.RESULTS.values())
    named = [name for names in parts for name in names]
    assert sorted([*named, "plot"]) == sorted(hexiopt.__all__)


@pytest.mark.parametrize("name", [name for name in hexiopt.__all__ if name != "plot"])
def test_all_that_is_public_is_described(name: str) -> None:
    value = getattr(hexiopt, name)
    assert inspect.getdoc(value)
    if isinstance(value, type):
        for member_name, member in api_reference.members(value):
            assert inspect.getdoc(member) or inspect.getdoc(getattr(member, "func", None)), member_name


@pytest.mark.parametrize("module", [plot, testing])
def test_so_are_pictures_and_contracts(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert "\n" in inspect.getdoc(getattr(module, name)) or inspect.getdoc(getattr(module, name)).endswith(".")  # type: ignore[operator, union-attr]
