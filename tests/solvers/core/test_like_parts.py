"""Clusters that are copies of a smaller one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.readers.cluster_file import cluster_to_dict
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.like_parts import LikeParts, like_parts
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Search
from solvers.portfolio.many_gpus import COPIED, of_one_part
from solvers.registry import make_solver

MACHINES = (
    {"gpu": "a100_80gb_sxm", "num_gpus": 2, "intra_bandwidth_gb_per_s": 100},
    {"gpu": "rtx_4090", "num_gpus": 3, "intra_bandwidth_gb_per_s": 10},
    {"gpu": "rtx_4090", "num_gpus": 1},
)


def problem_of(counts: tuple[int, ...], batch: int, **space: object) -> Problem:
    machines = [
        {"name": f"m{k}", "count": count, **machine}
        for k, (machine, count) in enumerate(zip(MACHINES, counts, strict=False))
        if count
    ]
    cluster = hx.cluster({"name": "c", "inter_machine": {"bandwidth_gb_per_s": 5}, "machines": machines})
    return Problem(cluster, hx.model("tiny"), hx.Workload(batch, 512), hx.Space(**space))


def parts_of(problem: Problem) -> LikeParts:
    parts = like_parts(problem)
    assert parts is not None
    return parts


@given(st.tuples(*[st.integers(0, 6)] * 3).filter(any), st.integers(1, 24))
def test_parts_are_alike_and_make_up_the_whole(counts: tuple[int, ...], batch: int) -> None:
    problem = problem_of(counts, batch)
    parts = like_parts(problem)
    if parts is None:
        return
    small, cluster = parts.problem, problem.cluster
    assert len(parts.places) * small.workload.global_batch == batch
    taken = [device for place in parts.places for device in place.values()]
    assert sorted(taken) == list(range(cluster.num_devices))
    for place in parts.places:
        assert sorted(place) == list(range(small.cluster.num_devices))
        for here, there in place.items():
            mine, whole = small.cluster.machine_of[here], cluster.machine_of[there]
            assert small.cluster.machines[mine].kind == cluster.machines[whole].kind
            assert small.cluster.index_in_machine[here] == cluster.index_in_machine[there]


@pytest.mark.parametrize(
    ("counts", "batch", "space", "parts", "machines"),
    [
        ((4, 6), 8, {}, 2, 5),
        ((4, 6), 9, {}, 1, 10),  # the batch cannot be shared
        ((4, 4), 64, {}, 4, 2),
        ((6,), 64, {}, 2, 3),  # three parts of two would do, but 64 sequences are not three times as many
        ((6,), 60, {}, 3, 2),
        ((4, 4), 64, {"num_pipelines": 6}, 2, 4),
        ((3, 2), 64, {}, 1, 5),
    ],
)
def test_the_most_parts(counts: tuple[int, ...], batch: int, space: dict[str, int], parts: int, machines: int) -> None:
    found = like_parts(problem_of(counts, batch, **space))
    assert (1 if found is None else len(found.places)) == parts
    if found is not None:
        assert len(found.problem.cluster.machines) == machines
        pipelines = space.get("num_pipelines")
        assert found.problem.space.num_pipelines == (None if pipelines is None else pipelines // parts)


def test_what_is_left_out_is_left_out_of_every_part() -> None:
    parts = parts_of(problem_of((4, 4), 8, exclude=("m0-0:1", "m0-1:1", "m0-2:1", "m0-3:1", "m1-0", "m1-2")))
    assert (len(parts.places), len(parts.problem.usable_devices)) == (2, 2 * 1 + 3)
    assert like_parts(problem_of((4, 4), 8, exclude=("m0-0:1",))) is None


def test_a_network_that_is_not_flat_has_no_parts() -> None:
    flat = problem_of((4, 4), 8)
    group = {"name": "rack", "members": ["m0-0", "m0-1"], "uplink_gb_per_s": 1}
    racks = hx.cluster({**cluster_to_dict(flat.cluster), "groups": [group]})
    assert like_parts(flat) is not None
    assert like_parts(flat.replace(cluster=racks)) is None


def test_pipelines_are_copied_to_each_part() -> None:
    """Those of a group stand side by side; a pipeline of replicated stages is one of its own for each part."""
    parts = parts_of(problem_of((4, 4), 32))
    side_by_side = PipelineGroup((((0,), (1,)), ((2,), (3,))))
    replicated = PipelineGroup((((0,), (1,)), ((2,), (3,))), replicated=True)
    partition = Partition((side_by_side, replicated), ONE_F_ONE_B, 1)
    first, *others = parts.copied(partition).pipeline_groups
    assert (first.width, len(others), {group.width for group in others}) == (
        2 * len(parts.places),
        len(parts.places),
        {1},
    )
    for place, group in zip(parts.places, others, strict=True):
        assert group.stages == (((place[0],), (place[1],)), ((place[2],), (place[3],)))


@pytest.mark.slow
def test_the_default_copies_what_it_finds_for_a_part() -> None:
    problem = problem_of((30, 30), 300)
    parts, run = parts_of(problem), Search("portfolio", problem, Budget(3600.0, 100), 0)
    copies, _ = of_one_part(run, parts, run.until(COPIED))
    assert 0 < run.steps <= 46
    completer = PlanCompleter(run.pricer, replicates=False)
    prices = []
    for partition in copies:
        completed = completer.complete(partition)
        priced = completer.price(completed) if completed else None
        assert priced is not None
        assert not check(problem, priced.plan)
        prices.append(priced.cost.step_time_s)
    found_s = make_solver("portfolio").solve(problem, Budget(3600.0, 200)).objective
    assert found_s <= min(prices)
