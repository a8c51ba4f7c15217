"""Grids over machines in order, and the estimates of them, against the cost model."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.frameworks import default_framework
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from solvers.baselines._estimates import GridEstimates, one_f_one_b_s, sharded_s
from solvers.baselines._grids import (
    StageGrid,
    grids,
    lay_out,
    machine_orders,
    processes_per_machine,
    rank_groups,
    tp_degrees,
)
from solvers.baselines._plans import balanced_layers, divides_model, shift_layers
from solvers.frame.starts import machine_classes
from tests.estimate import Static
from tests.solvers import problems as small
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import follows_ranks

GROUPS = [(0,), (1,), (2,), (3,)]


def plan_of(grid: StageGrid, problem: Problem) -> Plan:
    """Equal layers, micro-batches of one."""
    stages, layers = len(grid.stages), problem.model.num_layers
    ends = [layers * s // stages for s in range(stages + 1)]
    return Plan(
        tuple(
            Pipeline(
                tuple(Stage.of(stage_groups[k], ends[s], ends[s + 1]) for s, stage_groups in enumerate(grid.stages)),
                problem.workload.global_batch // grid.width,
            )
            for k in range(grid.width)
        )
    )


def drawn_grids(kind: str, draws: int) -> Iterator[StageGrid]:
    """Grids of random machines in random order."""
    problem, rng = problems.MIXED[kind](), random.Random(0)
    for _ in range(draws):
        machines = list(problem.usable_by_machine)
        rng.shuffle(machines)
        some = machines[: rng.randint(1, len(machines))]
        groups = rank_groups(problem, some, rng.choice(tp_degrees(problem)), rng.choice(processes_per_machine(problem)))
        all_grids = list(grids(problem, groups, both=True))
        if all_grids:
            yield rng.choice(all_grids)


def test_neighbours_form_a_stage_or_a_pipeline() -> None:
    assert lay_out(GROUPS, 2, along=False).stages == (((0,), (1,)), ((2,), (3,)))
    assert lay_out(GROUPS, 2, along=True).stages == (((0,), (2,)), ((1,), (3,)))


def test_grids_share_the_batch_and_give_every_stage_a_layer() -> None:
    problem = small.loose()  # 4 layers, 4 sequences
    shapes = [(len(grid.stages), grid.width) for grid in grids(problem, GROUPS, both=True)]
    assert shapes == [(1, 4), (2, 2), (2, 2), (4, 1)]
    assert [len(grid.stages) for grid in grids(problem, [(d,) for d in range(6)], both=False)] == [3]


def test_machines_stand_for_each_other_only_where_their_links_are_alike() -> None:
    assert machine_classes(small.easy()) == [[2], [0, 1]]
    assert machine_classes(problems.racks()) == [[1], [3], [0], [2]]
    assert machine_classes(problems.one_kind()) == [[0, 1]]


def test_orders_of_machines() -> None:
    problem = small.easy()  # classes {c} and {a, b}
    assert set(machine_orders(problem, 100, subsets=False)) == {(0, 1, 2), (0, 2, 1), (2, 0, 1)}
    some = {(0,), (0, 1), (2,), (0, 2), (2, 0), (0, 1, 2), (0, 2, 1), (2, 0, 1)}
    assert set(machine_orders(problem, 100, subsets=True)) == some
    assert set(machine_orders(problem, 7, subsets=True)) == some - {(0, 2, 1)}  # classes together
    assert set(machine_orders(problem, 4, subsets=True)) == {(0, 1, 2), (2, 0, 1), (0, 1), (2,)}


def test_groups_follow_the_machines() -> None:
    problem = problems.odd_machines()
    assert rank_groups(problem, (1, 0), 2, 4) == [(3, 4), (5, 6), (0, 1)]
    assert rank_groups(problem, (1, 0), 1, 1) == [(3,), (0,)]
    assert not divides_model(problem, 3)


@pytest.mark.parametrize("kind", problems.MIXED)
def test_a_grid_follows_its_ranks(kind: str) -> None:
    problem, sample = problems.MIXED[kind](), list(drawn_grids(kind, 50))
    assert sample
    for grid in sample:
        assert follows_ranks(problem, plan_of(grid, problem), processes_per_machine(problem), both=True)


@pytest.mark.parametrize(
    ("groups", "follows"),
    [
        ([(0,), (1,), (2,), (3,)], True),
        ([(2,), (3,), (0,), (1,)], True),
        ([(0,), (2,), (1,), (3,)], False),  # comes back to a machine
        ([(1,), (0,), (2,), (3,)], False),  # not in the order of devices
        ([(0,), (1,), (4,), (5,)], True),  # as many of each machine
        ([(0,), (1,), (2,), (4,)], False),  # one of two
    ],
)
def test_what_follows_ranks(groups: list[tuple[int, ...]], follows: bool) -> None:
    """Machines a: 0, 1; b: 2, 3; c: 4 to 7, up to two of each."""
    problem = small.easy()
    plan = plan_of(lay_out(groups, 2, along=False), problem)
    assert follows_ranks(problem, plan, [2], both=False) == follows


@pytest.mark.parametrize("kind", problems.MIXED)
def test_estimated_messages_share_the_network_all_the_time(kind: str) -> None:
    problem = problems.MIXED[kind]()
    model = PlanPricer(problem, network=Static())
    estimates = GridEstimates(model)
    seen = 0
    for grid in drawn_grids(kind, 40):
        if len(grid.stages) == 1:
            continue
        seen += 1
        priced = model.pipelines(plan_of(grid, problem))
        ahead = [max(p.send_forward_s[s] for p in priced) for s in range(len(grid.stages) - 1)]
        back = [max(p.send_backward_s[s] for p in priced) for s in range(len(grid.stages) - 1)]
        exact = [a + b for a, b in zip(ahead, back, strict=True)]
        assert estimates.messages(grid).seconds(estimates.sequence_bytes) == pytest.approx(exact)
    assert seen


@pytest.mark.parametrize("kind", problems.MIXED)
def test_estimated_gradients_are_near_those_of_the_cost_model(kind: str) -> None:
    """One stage over all pipelines: only the count of latencies differs, and where pipelines are alike, what is left of
    the sums after the last backward."""
    problem = problems.MIXED[kind]()
    groups = rank_groups(problem, problem.usable_by_machine, 1, 8)
    grid = next(
        lay_out(groups[:n], 1, along=False)
        for n in (8, 4)
        if n <= len(groups) and problem.workload.global_batch % n == 0
    )
    plan, layers, estimates = plan_of(grid, problem), [problem.model.num_layers], GridEstimates(PlanPricer(problem))
    [sync_s] = estimates.rings(grid).sync_s(estimates.gradient_bytes(layers))
    after = PlanPricer(problem, replace(default_framework(), gradient_sums="after")).price(plan)
    assert after.gradient_sync_s == pytest.approx(sync_s, rel=0.02)
    cost = PlanPricer(problem).price(plan)
    backward_s = min(executor.backward_s for p in cost.pipelines for stage in p.stages for executor in stage.executors)
    [exposed_s] = estimates.exposed_s([sync_s], [backward_s], layers, plan.sharding.stage)
    alike = len({p.end_s for p in cost.pipelines}) == 1
    assert cost.gradient_sync_s <= exposed_s * 1.02
    assert not alike or cost.gradient_sync_s == pytest.approx(exposed_s, rel=0.02)
    assert max(p.end_s for p in cost.pipelines) == cost.pipeline_s


def test_the_estimate_of_1f1b() -> None:
    assert one_f_one_b_s([3.0], [], 5) == 15.0
    assert one_f_one_b_s([3.0, 1.0], [0.0], 5) == 4.0 + 4 * 3.0
    assert one_f_one_b_s([3.0, 1.0], [4.0], 2) == 8.0 + (3.0 + 4.0 + 1.0) / 2


def test_layers_are_shifted_to_faster_stages_within_rooms() -> None:
    speeds = (1.0, 3.0, 1.0)

    def seconds(layers: tuple[int, ...]) -> float:
        return max(n * s for n, s in zip(layers, speeds, strict=True))

    assert shift_layers((4, 4, 4), (12, 12, 12), seconds) == ((5, 2, 5), 6.0)  # type: ignore[arg-type]
    assert shift_layers((4, 4, 4), (12, 12, 4), seconds)[0][2] == 4  # type: ignore[arg-type]


def test_balanced_layers_are_the_fastest_that_fit_and_then_their_neighbours() -> None:
    """Against every split of ten layers over three stages, of times that rise in uneven steps."""
    rng = random.Random(3)
    for _ in range(50):
        times = [sorted(rng.uniform(1, 9) for _ in range(rng.randint(1, 8))) for _ in range(3)]
        every = [
            layers for layers in product(*(range(1, len(stage_s) + 1) for stage_s in times)) if sum(layers) == 10
        ]  # all that fit

        def slowest_s(layers: tuple[int, ...], times: list[list[float]] = times) -> float:
            return max(stage_s[n - 1] for stage_s, n in zip(times, layers, strict=True))

        splits = balanced_layers(times, 10)
        assert bool(splits) == bool(every)
        if splits:
            assert slowest_s(splits[0]) == min(map(slowest_s, every))
            apart = [layers for layers in every if sum(abs(a - b) for a, b in zip(layers, splits[0], strict=True)) == 2]
            assert sorted(splits[1:]) == sorted(apart)


@pytest.mark.parametrize("kind", problems.MIXED)
def test_tables_of_layers_end_where_memory_does(kind: str) -> None:
    """Times of layers are those of stages one by one, for as many layers as the model has and memory allows."""
    problem = problems.MIXED[kind]()
    estimates, ends = GridEstimates(PlanPricer(problem)), set()
    for grid in drawn_grids(kind, 10):
        tp_groups, last = estimates.tp_groups(grid), len(grid.stages) - 1
        for policy, shards in product(estimates.pricer.policies(), {1, grid.width}):
            most = estimates.max_layers_by_stage(tp_groups, 2, policy, 8, shards)
            tables = estimates.layer_times_s(tp_groups, 2, policy, 8, shards)
            assert list(map(len, tables)) == [min(n, problem.model.num_layers) for n in most]
            ends |= {n < problem.model.num_layers for n in most}
            for s, (groups, table) in enumerate(zip(tp_groups, tables, strict=True)):
                alone = [estimates.stage_s(groups, n, s == 0, s == last, 2, policy) for n in range(1, len(table) + 1)]
                assert table == alone
    assert kind != "tight_memory" or ends == {True, False}


def test_of_compute_and_communication_the_longer_counts() -> None:
    """Of four layers, one layer's gathers and scatter are exposed."""
    assert sharded_s(0, 2.0, 4.0, 100.0, 100.0, 4) == 6.0
    assert sharded_s(2, 2.0, 4.0, 100.0, 1.0, 4) == 6.0 + 0.25
    assert sharded_s(2, 2.0, 4.0, 100.0, 8.0, 4) == 2.0 + 8.0 + 2.0
    assert sharded_s(3, 2.0, 4.0, 1.0, 2.0, 4) == 6.0 + 1.0
    assert sharded_s(3, 2.0, 4.0, 3.0, 2.0, 4) == 3.0 + 5.0 + 2.0
