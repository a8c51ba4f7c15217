"""Values that constructors refuse, told in the words of the file that states them."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.checks import flag_in, is_number, number_in, word_in
from hexiopt.errors import MISSING, FieldError, InputError
from hexiopt.reading import Section
from hexiopt.units import GB, MICROSECOND
from tests.strategies import JSON

FILE = {
    "rate_gb_per_s": 2e5,
    "delay_us": math.inf,
    "links": [{"between": ["a", "x"]}, {"from": "b", "to": "x"}],
    "size": 0,
}
KEYS_OF_FIELDS = {"links[*].target": ("links[*].between", "links[*].to"), "number": ("size",)}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (lambda: number_in(2e14, "owner: rate_bytes_per_s", above=0, at_most=1e14), "my.yaml: rate_gb_per_s: 200000.0"),
        (
            lambda: number_in(0, "owner: number", at_least=1, at_most=4),
            "my.yaml: size: 0 is out of range; it must be at",
        ),
        (
            lambda: number_in(math.nan, "owner: delay_s", above=0, at_most=1),
            "my.yaml: delay_us: inf is not finite; state",
        ),
        (lambda: word_in("x", "owner: links[0].target", ("a",)), "my.yaml: links[0].between: ['a', 'x'] is not known;"),
        (lambda: word_in("x", "owner: links[1].target", ("a",)), "my.yaml: links[1].to: 'x' is not known; known: a"),
        (lambda: flag_in((1, 2), "owner: lost"), "my.yaml: lost: [1, 2] is not true or false; write one of them"),
    ],
)
def test_what_a_constructor_refuses_is_named_by_key_value_and_unit_of_the_file(
    error: Callable[[], object], line: str
) -> None:
    """Bounds too; the value is that of the file where it states the field by another key."""
    with pytest.raises(InputError) as caught, Section(FILE, "my.yaml").building(KEYS_OF_FIELDS):
        error()
    assert str(caught.value).startswith(line)
    if "rate" in line:
        assert str(caught.value).endswith("it must be above 0 and at most 100000")


def test_other_refusals_name_the_mapping_and_devices_their_names() -> None:
    with pytest.raises(InputError, match=r"^my.yaml: no such thing$"), Section({}, "my.yaml").building():
        raise InputError("no such thing")
    error = FieldError("owner: plan", MISSING, lambda name: f"device {name(7)} is used twice", str)
    line = str(Section({}, "my.yaml").refusal(error, name=lambda device: f"a:{device}"))
    assert line == "my.yaml: plan: device a:7 is used twice"


def test_a_refusal_of_a_field_goes_to_other_processes() -> None:
    with pytest.raises(FieldError) as caught:
        number_in("fast", "machine a: rate", above=0, at_most=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, InputError)
    assert str(again) == "machine a: rate: 'fast' is not a number; state one above 0 and at most 1"


@given(st.sampled_from(["x_gb_per_s", "x_us"]), JSON)
def test_numbers_are_read_in_si_units_and_what_is_none_stays(key: str, value: Any) -> None:
    section = Section({key: value}, "my.yaml")
    if value is None:
        with pytest.raises(InputError, match="is unknown"):
            section.si(key)
    elif not is_number(value):
        assert section.si(key) == value
    elif math.isfinite(value) and abs(value) < 1e100:
        assert section.si(key) == value * (GB if key.startswith("x_gb") else MICROSECOND)
