"""Each inequality that proofs rest on holds for the exact recurrence of random pipelines; cases are exact."""

import itertools
import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.clock.folding import PipelineLanes, lane_shape
from hexiopt.cost.place import PlacedPipeline
from hexiopt.schedules.graph import pipeline_graph
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from solvers.exact.cp_sat import PackingProgram
from solvers.proof.joint import JointSeconds, ring_seconds
from solvers.proof.kernels import Messages, interfaces_s, least_ends
from solvers.proof.partitions import Packings, PackingTable, case_surroundings, surroundings
from solvers.proof.tables import Sharding
from solvers.proof.usages import Usages, Use, allowed, case_of, cases
from tests.stated_pipelines import chain_ends_s

ROUNDING = 1 - 1e-12
RANDOMS = st.randoms(use_true_random=False)


def draw_times(rng: random.Random, p: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Forward and backward seconds of p stages, messages ahead and back; from fast to very slow networks."""
    slow = rng.choice((0.0, 0.2, 2.0))
    return (
        [rng.uniform(0.1, 1.0) for _ in range(p)],
        [rng.uniform(0.1, 2.0) for _ in range(p)],
        [rng.uniform(0.0, slow) for _ in range(p - 1)],
        [rng.uniform(0.0, slow) for _ in range(p - 1)],
    )


@given(st.integers(1, 7), st.integers(1, 30), RANDOMS)
def test_cycles_of_messages_under_1f1b(p: int, count: int, rng: random.Random) -> None:
    """p T ≥ M S: of the stage with (M − 1) mod p behind it, and so of the step."""
    times = draw_times(rng, p)
    ends_s = chain_ends_s(ONE_F_ONE_B, *times, count)
    total_s = sum(map(sum, times))
    behind = (count - 1) % p
    assert p * ends_s[p - 1 - behind] >= count * total_s * ROUNDING


@given(st.integers(2, 7), st.integers(1, 30), RANDOMS)
def test_cycles_of_the_first_stages_under_1f1b(p: int, count: int, rng: random.Random) -> None:
    """c T ≥ (M − ρ) L of the first c stages, whose sum is L, with ρ behind: one of them ends no earlier."""
    forward_s, backward_s, ahead_s, back_s = draw_times(rng, p)
    ends_s = chain_ends_s(ONE_F_ONE_B, forward_s, backward_s, ahead_s, back_s, count)
    for c in range(1, p):
        own_s = sum(forward_s[:c]) + sum(backward_s[:c]) + sum(ahead_s[: c - 1]) + sum(back_s[: c - 1])
        assert c * max(ends_s[:c]) >= (count - (p - c)) * own_s * ROUNDING


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B], ids=str)
@given(st.integers(1, 7), st.integers(1, 30), RANDOMS)
def test_rounds_of_one_stage(schedule: object, p: int, count: int, rng: random.Random) -> None:
    """The first stage ends no earlier than S + (M − 1 − w) t + w b of any stage; w = min(r, M − 1), 0 under GPipe."""
    gpipe = schedule == GPIPE
    times = draw_times(rng, p)
    ends_s = chain_ends_s(GPIPE if gpipe else ONE_F_ONE_B, *times, count)
    for s, (forward_s, backward_s) in enumerate(zip(times[0], times[1], strict=True)):
        w = 0 if gpipe else min(p - 1 - s, count - 1)
        more_s = (count - 1 - w) * (forward_s + backward_s) + w * backward_s
        assert ends_s[0] >= (sum(map(sum, times)) + more_s) * ROUNDING
        own_s = count * (forward_s + backward_s) - w * forward_s
        assert ends_s[s] >= own_s * ROUNDING


@given(st.integers(2, 7), st.integers(1, 30), RANDOMS)
def test_rounds_of_two_stages_under_1f1b(p: int, count: int, rng: random.Random) -> None:
    """The first stage ends no earlier than S + (M − 1 − w) t + w b + ⌊(M − 1 − r)/2⌋ (hops + t' − t) of any stage that
    is followed by one of t'."""
    times = draw_times(rng, p)
    forward_s, backward_s, ahead_s, back_s = times
    ends_s = chain_ends_s(ONE_F_ONE_B, *times, count)
    for s in range(p - 1):
        behind = p - 1 - s
        w, turns = min(behind, count - 1), max(0, count - 1 - behind) // 2
        both_s, next_s = forward_s[s] + backward_s[s], forward_s[s + 1] + backward_s[s + 1]
        slower_s = max(0.0, ahead_s[s] + back_s[s] + next_s - both_s)
        more_s = (count - 1 - w) * both_s + w * backward_s[s] + turns * slower_s
        assert ends_s[0] >= (sum(map(sum, times)) + more_s) * ROUNDING


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B], ids=str)
@given(st.integers(1, 7), st.integers(1, 30), RANDOMS)
def test_closed_forms_end_no_later(schedule: object, p: int, count: int, rng: random.Random) -> None:
    """Nor does the first stage end before the way and what any stage adds to it; a single stage's bound is exact."""
    named = GPIPE if schedule == GPIPE else ONE_F_ONE_B
    times = draw_times(rng, p)
    ends_s, least_s = chain_ends_s(named, *times, count), np.zeros(p)
    arrays = [np.array(seconds, float) for seconds in times]
    way_s, most_s = least_ends(named == GPIPE, *arrays, p, count, least_s)  # type: ignore[call-arg]
    assert way_s == pytest.approx(sum(map(sum, times)))
    assert all(least * ROUNDING <= end_s for least, end_s in zip(least_s, ends_s, strict=True))
    assert (way_s + most_s) * ROUNDING <= ends_s[0]
    if p == 1:
        assert least_s[0] == pytest.approx(ends_s[0])


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B], ids=str)
@given(st.integers(2, 7), st.integers(1, 30), RANDOMS)
def test_a_suffix_alone_ends_no_later(schedule: object, p: int, count: int, rng: random.Random) -> None:
    """Stages of the last c as a pipeline of their own, later by the forwards before; the step by the whole prefix."""
    named = GPIPE if schedule == GPIPE else ONE_F_ONE_B
    forward_s, backward_s, ahead_s, back_s = draw_times(rng, p)
    ends_s = chain_ends_s(named, forward_s, backward_s, ahead_s, back_s, count)
    for first in range(1, p):
        own_s = chain_ends_s(named, forward_s[first:], backward_s[first:], ahead_s[first:], back_s[first:], count)
        before_s = sum(forward_s[:first]) + sum(ahead_s[:first])
        assert all(ends_s[first + k] >= (end_s + before_s) * ROUNDING for k, end_s in enumerate(own_s))
        assert ends_s[0] >= (own_s[0] + before_s + sum(backward_s[:first]) + sum(back_s[:first])) * ROUNDING


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B], ids=str)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(1, 3), RANDOMS)
def test_pipelines_that_share_the_network_end_no_earlier_than_alone(
    schedule: Schedule, p: int, count: int, num_lines: int, rng: random.Random
) -> None:
    """By the clock, over the interfaces of three machines: nor before an interface has passed the messages of one."""
    interface_s = np.array([rng.uniform(0.0, 1.0) for _ in range(3)])
    latency_s, placed, bounds = 0.01, [], list[tuple[tuple[float, ...], float]]()
    for _ in range(num_lines):
        forward_s, backward_s, *_ = draw_times(rng, p)
        machines = [rng.randrange(3) for _ in range(p)]
        shapes, resources, alone_s = [], list[int](), []
        for way in (list(pairwise(machines)), [(b, a) for a, b in pairwise(machines)]):
            for a, b in way:
                needs_s = () if a == b else (float(interface_s[a]), float(interface_s[b]))
                shapes.append((latency_s, math.inf, needs_s))
                resources += [] if a == b else [2 * a, 2 * b + 1]
                alone_s.append(latency_s + max(needs_s, default=0.0))
        links = (*((False, s, s + 1) for s in range(p - 1)), *((True, s + 1, s) for s in range(p - 1)))
        chunk_s = tuple([((f, b),) for f, b in zip(forward_s, backward_s, strict=True)])
        graph = pipeline_graph(schedule, p, count, tuple(range(p)), chunk_s, links)
        lanes = PipelineLanes(lane_shape(tuple(shapes)), tuple(resources))
        placed.append(PlacedPipeline(schedule, count, (), (), (), lanes, graph))
        ends_s = chain_ends_s(schedule, forward_s, backward_s, alone_s[: p - 1], alone_s[p - 1 :], count)
        messages = Messages(np.zeros((0, 0)), np.zeros((0, 0)), interface_s)
        bounds.append((ends_s, count * interfaces_s(messages, np.array(machines), p)))
    for (ends_s, *_), (least_s, network_s) in zip(Clock().times(placed), bounds, strict=True):
        assert all(end >= least * ROUNDING for end, least in zip(ends_s, least_s, strict=True))
        assert max(ends_s) >= network_s * ROUNDING


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(2, 4), RANDOMS)
def test_every_partition_is_of_one_case(most: list[int], count: int, rng: random.Random) -> None:
    usages = Usages(most, list(range(len(most))))
    parts = [rng.randrange(1, usages.size) for _ in range(count)]
    vectors = usages.vectors[parts]
    parts_case = case_of(vectors)
    assert [case for case in cases(usages) if case == parts_case] == [parts_case]
    assert allowed(parts_case, vectors).all()
    for m, use in enumerate(parts_case):
        used = (vectors[:, m] > 0).sum()
        wholly = any(row[m] > 0 and row.sum() == row[m] for row in vectors)
        assert {Use.NONE: used == 0, Use.ALL: used == count, Use.SOME: 0 < used < count and not wholly}.get(
            use, 0 < used < count and wholly
        )


@pytest.mark.parametrize("sharding", ["all", "machine"])
@given(st.integers(2, 4), RANDOMS)
def test_a_case_knows_no_more_than_its_partitions(sharding: Sharding, count: int, rng: random.Random) -> None:
    class Tables:
        usages = Usages([2, 3, 1], ["a", "b", "c"])

        def least_machines(self, parts: tuple[int, ...]) -> int:
            return 1

    tables = Tables()
    parts = tuple(sorted(rng.randrange(1, tables.usages.size) for _ in range(count)))
    case = case_of(tables.usages.vectors[list(parts)])
    known = case_surroundings(case, count, sharding)
    for around in surroundings(tables, parts, sharding).values():  # type: ignore[arg-type]
        assert (known.holders, known.forced, known.whole) == (around.holders, around.forced, around.whole)


@pytest.mark.parametrize("packings", [PackingTable, PackingProgram], ids=["table", "program"])
def test_partitions_of_all_cases_are_all_partitions(packings: type[Packings]) -> None:
    """On three machines of which two are equal, with any N: all multisets of usages that fit and suffice, once each."""
    usages = Usages([2, 2, 1], ["a", "a", "b"])

    class Tables:
        most_stages, batch = 5, 6

    Tables.usages = usages  # type: ignore[attr-defined]
    rng = random.Random(0)
    sequences = np.array([0, *(rng.randint(0, 4) for _ in range(usages.size - 1))])
    sequences = sequences[usages.representative]
    expected = set()
    for k in range(2, 6):
        for parts in itertools.combinations_with_replacement(range(1, usages.size), k):
            fits = (usages.vectors[list(parts)].sum(axis=0) <= usages.most).all()
            if fits and sequences[list(parts)].min() > 0 and sequences[list(parts)].sum() >= 6:
                expected.add(usages.canonical(parts))
    partitions = [
        usages.canonical(parts)
        for case in cases(usages)
        for k in range(2, 6)
        for parts in packings(Tables, np.where(allowed(case, usages.vectors), sequences, 0)).partitions(  # type: ignore[arg-type]
            k, case, lambda: None
        )
    ]
    assert len(partitions) == len(set(partitions)) > 20
    assert set(partitions) == expected


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), RANDOMS)
def test_usages_inside_others(most: list[int], rng: random.Random) -> None:
    usages = Usages(most, list(range(len(most))))
    marked = np.array([rng.random() < 0.1 for _ in range(usages.size)])
    expected = [any((vector <= other).all() for other in usages.vectors[marked]) for vector in usages.vectors]
    assert usages.inside(marked).tolist() == expected


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), RANDOMS)
def test_usages_that_stand_for_others(uses: list[int], rng: random.Random) -> None:
    """Those of machines that are equal and of one use in any order, and no others."""
    kinds = ["a", "a", "b", "a"]
    usages = Usages([2, 2, 2, 2], kinds)
    representatives = usages.representatives(uses)

    def signature(vector: list[int]) -> list[tuple[str, int, int]]:
        return sorted(zip(kinds, uses, vector, strict=True))

    for w in rng.sample(range(usages.size), 20):
        same = [signature(other) == signature(usages.vectors[w].tolist()) for other in usages.vectors.tolist()]
        assert (representatives == representatives[w]).tolist() == same
        assert same[representatives[w]]


@pytest.mark.parametrize("per_machine", [False, True])
@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 3), RANDOMS)
def test_rings_of_the_first_pipelines_take_no_longer(
    per_machine: bool, count: int, layers: int, num_machines: int, rng: random.Random
) -> None:
    """Whatever the missing pipelines are, neither rings nor what is passed inside machines gets less with them."""
    none = np.zeros(0)
    nic = np.array([rng.uniform(1.0, 9.0) for _ in range(num_machines)])
    units = rng.uniform(0.0, 2.0), rng.uniform(0.0, 2.0), rng.choice((0.0, 1.5))
    seconds = JointSeconds(none, False, none, none, none, none, none, nic, *units, 1.0, none, per_machine, 1.0)
    machines = np.array([[rng.randrange(num_machines) for _ in range(layers)] for _ in range(count)])
    times = []
    for missing in (0, rng.randrange(1, count)):
        ring_s, inside = np.zeros(layers + 1), np.zeros((layers + 1, num_machines))
        ring_seconds(machines[: count - missing], missing, seconds, ring_s, inside)
        times.append((ring_s, inside))
    (ring_s, inside), (first_s, first_inside) = times
    assert (first_s <= ring_s + 1e-12).all()
    assert (first_inside <= inside + 1e-12).all()
