"""The plan space: degrees, sizes, choices, switches, and its mapping."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.problem_file import space_from_dict, space_from_sections, space_to_dict
from hexiopt.problem.space import (
    EXACT_SWITCHES,
    MORE_FREEDOMS,
    SWITCHES,
    Space,
    recompute_chains,
    recompute_first,
    recompute_policies,
    schedules,
    sharding_stages,
)
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import GPIPE, SCHEDULES

LIMITS = st.none() | st.integers(1, 10**6)
SPACES = st.builds(
    Space,
    tp_degrees=st.sampled_from(("powers_of_two", "all")),
    max_micro_batch_size=st.integers(1, 1024),
    max_chunks=st.integers(1, 1024),
    **{name: st.booleans() for name in (*SWITCHES, *EXACT_SWITCHES, *MORE_FREEDOMS)},
    num_pipelines=LIMITS,
    num_stages=LIMITS,
    max_tp=LIMITS,
    exclude=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    memory_headroom=st.just(0.0) | st.floats(0.0, 0.5),
)


@given(SPACES)
def test_round_trip(space: Space) -> None:
    data = space_to_dict(space)
    later = {*EXACT_SWITCHES, *MORE_FREEDOMS, "memory_headroom"}
    assert set(data) | later == {field.name for field in fields(Space)}
    assert space_from_dict(data, "space") == space


def test_defaults() -> None:
    assert space_from_dict({}, "space") == Space()
    assert space_from_sections(Section({}, "space"), Section({}, "constraints")) == Space()
    assert all(getattr(Space(), name) for name in SWITCHES)


@pytest.mark.parametrize(
    ("space", "num_gpus", "expected"),
    [
        (Space(), 1, (1,)),
        (Space(), 6, (1, 2, 4)),
        (Space(), 8, (1, 2, 4, 8)),
        (Space(max_tp=3), 8, (1, 2)),
        (Space(tp_degrees="all"), 6, (1, 2, 3, 4, 5, 6)),
        (Space(tp_degrees="all", max_tp=3), 6, (1, 2, 3)),
        (Space(max_tp=64), 2, (1, 2)),
    ],
)
def test_tp_degrees(space: Space, num_gpus: int, expected: tuple[int, ...]) -> None:
    assert space.allowed_tp(num_gpus) == expected


@given(limit=st.integers(1, 1024), global_batch=st.integers(1, 10**7))
def test_micro_batch_sizes_are_all_powers_of_two_up_to_both_limits(limit: int, global_batch: int) -> None:
    sizes = Space(max_micro_batch_size=limit).micro_batch_sizes(global_batch)
    assert sizes == tuple(b for b in (2**k for k in range(11)) if b <= min(limit, global_batch))
    assert sizes[0] == 1


def test_choices_follow_the_workload() -> None:
    free = Workload()
    assert recompute_policies(free) == ("none", "selective", "full")
    assert schedules(free) == SCHEDULES
    assert sharding_stages(free) == (0, 1, 2, 3)
    assert sharding_stages(Workload(schedule="interleaved")) == (0, 1)
    bound = Workload(recompute="full", schedule="gpipe", optimizer_sharding="1")
    assert (recompute_policies(bound), schedules(bound), sharding_stages(bound)) == (
        ("full",),
        (GPIPE,),
        (1,),
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tp_degrees", "even", "known"),
        ("tp_degrees", None, "null"),
        ("max_micro_batch_size", 0, "out of range"),
        ("max_micro_batch_size", 2000, "out of range"),
        ("max_chunks", 0, "out of range"),
        ("uneven_tp", "no", "true or false"),
        ("uneven_tp", 0, "true or false"),
        ("num_pipelines", 0, "out of range"),
        ("num_stages", 1.5, "whole number"),
        ("max_tp", True, "not a number"),
        ("exclude", "a:0", "not a list"),
        ("exclude", [3], "not a name"),
        ("exclude", [""], "not a name"),
        ("memory_headroom", 0.51, "out of range; it must be"),
        ("memory_headroom", -0.01, "out of range"),
        ("memory_headroom", "5%", "not a number"),
        ("memory_headroom", float("nan"), "not finite"),
        ("uneven_pp", True, "unknown key"),
    ],
)
def test_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        space_from_dict({key: value}, "space")
    assert key in str(caught.value)


def test_what_a_stage_may_recompute() -> None:
    """One layer more at each step, by every way from the fastest policy to the leanest; or all layers at once."""
    none, some, full = policies = ("none", "selective", "full")
    assert recompute_chains(policies, 2, False) == (((none,), (some,), (full,)),)
    assert recompute_chains(policies, 1, True) == (((none,), (some,), (full,)),)
    assert recompute_chains((none,), 2, True) == (((none,),),)
    assert recompute_chains(policies, 2, True) == (
        ((none,), (some, none), (some,), (full, some), (full,)),
        ((none,), (full, none), (full,)),
    )
    assert recompute_first(full, 2, none, 3) == (full, full, none)
    assert recompute_first(full, 0, none, 3) == (none,)
    assert recompute_first(full, 3, none, 3) == recompute_first(full, 1, full, 3) == (full,)
