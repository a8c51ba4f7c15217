"""The reference of the Python API is as the code says, and leaves nothing out."""

import inspect

import pytest

import hexiopt
from hexiopt import plot, testing
from tests import api_reference


def test_the_page_is_as_the_code_says() -> None:
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.written(), "run make reference"


def test_all_that_is_public_is_on_it() -> None:
    named = [name for names in api_reference.PARTS.values() for name in names]
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
