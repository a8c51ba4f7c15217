"""Cases that `make test` has no time for."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` of a parametrized test: `make test` runs the `quick` ones, `make test-slow` the others."""
    listed = list(cases)
    unknown = [case for case in quick if case not in listed]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in quick else _slow(case) for case in listed]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
