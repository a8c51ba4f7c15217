"""FlashFlex's formulas: against a slow evaluation device by device, and against the released code."""

import random
from dataclasses import replace
from statistics import geometric_mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.studies.cases.flashflex import problem_of, read_rows
from hexiopt.cost.executors.memory import UNSHARDED
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.registry import GPIPE
from hexiopt.solving import Pricer
from hexiopt.units import GIB
from solvers.baselines.flashflex.pricer import FlashFlexPricer, stage_ends_s

ROWS = read_rows()
TFLOPS = {"rtx_3080_ti": 56.9, "rtx_3090": 80.0, "rtx_4090": 165.2, "a800_80gb_sxm": 312.0}
MEMORY = {"rtx_3080_ti": 12.0, "rtx_3090": 24.0, "rtx_4090": 24.0, "a800_80gb_sxm": 80.0}

# Step times and largest excesses in GiB that the released code itself gives: `TimeCost.overall_cost` and
# `MemoryCost.overall_memory` of experimental/cost_modeling.py (github.com/Relaxed-System-Lab/FlashFlex)
# called on random plans, its configuration filled with a row's setting. Row of the data, micro-batches and
# sequences in each, then per pipeline the stages as (devices, layers).
GOLDEN = [
    (
        (0, 32, 1),
        [
            [((31, 28), 32)],
            [((22,), 5), ((18, 21, 16, 20), 4), ((25,), 23)],
            [((30,), 17), ((24, 26), 15)],
        ],
        59.57478007463277,
        -15.1796875,
    ),
    (
        (4, 3, 2),
        [
            [((30,), 13), ((5,), 10), ((2, 6), 1), ((25, 29), 8)],
            [((7,), 20), ((31,), 4), ((18,), 3), ((3, 0), 5)],
        ],
        54.148666554536476,
        20.4765625,
    ),
    (
        (6, 16, 1),
        [
            [((2, 1, 0, 5), 35), ((34,), 25)],
            [((13,), 45), ((32, 39), 4), ((36,), 3), ((15, 12), 8)],
        ],
        437.3409155273438,
        158.4189453125,
    ),
    (
        (2, 8, 4),
        [
            [((31, 24, 30, 29), 32)],
            [((22, 23), 7), ((0,), 9), ((2, 5), 13), ((3,), 3)],
            [((11, 8, 13, 14, 9, 10, 15, 12), 19), ((16,), 13)],
        ],
        91.7882367020992,
        2.875,
    ),
]


def make_plan(
    pipelines: list[list[tuple[tuple[int, ...], int]]], num_micro_batches: int, micro_batch_size: int
) -> Plan:
    built = []
    for stages in pipelines:
        ends = np.cumsum([layers for _, layers in stages]).tolist()
        built.append(
            Pipeline(
                tuple(
                    Stage.of(devices, end - layers, end, "full")
                    for (devices, layers), end in zip(stages, ends, strict=True)
                ),
                num_micro_batches,
                micro_batch_size,
            )
        )
    return Plan(tuple(built))


def aligned_plan(num_micro_batches: int, micro_batch_size: int) -> Plan:
    """Setting 2: eight pipelines, each with one device of every machine; aligned layers."""
    pipelines = [[((8 * m + q,), n) for m, n in enumerate((2, 3, 7, 20))] for q in range(8)]
    return make_plan(pipelines, num_micro_batches, micro_batch_size)


def random_plan(problem: Problem, rng: random.Random) -> Plan:
    cluster, layers = problem.cluster, problem.model.num_layers
    groups = []
    for first, machine in zip(cluster.first_device.tolist(), cluster.machines, strict=True):
        left = list(range(first, first + machine.num_gpus))
        rng.shuffle(left)
        while left:
            tp = rng.choice([tp for tp in (1, 2, 4, 8) if tp <= len(left)])
            groups.append(tuple(left[:tp]))
            del left[:tp]
    rng.shuffle(groups)
    groups = groups[: rng.randint(1, len(groups))]
    count = rng.randint(1, min(6, len(groups)))
    pipelines = []
    for p in range(count):
        pipeline_groups = groups[p::count][:layers]
        cuts = [0, *sorted(rng.sample(range(1, layers), len(pipeline_groups) - 1)), layers]
        stages = tuple(Stage.of(g, a, b, "full") for g, a, b in zip(pipeline_groups, cuts[:-1], cuts[1:], strict=True))
        pipelines.append(Pipeline(stages, rng.choice([1, 2, 3, 5, 16, 40]), rng.choice([1, 2, 4])))
    return Plan(tuple(pipelines))


class Slow:
    """The published formulas, device by device and column by column."""

    def __init__(self, problem: Problem, inter_gb_per_s: float) -> None:
        cluster, model = problem.cluster, problem.model
        self.gpu = [cluster.gpu_of(d).name for d in range(cluster.num_devices)]
        self.machine = cluster.machine_of.tolist()
        self.inter = inter_gb_per_s
        self.h, self.layers, self.v = model.hidden_size, model.num_layers, model.vocab_size
        self.s = problem.workload.seq_len

    def rate(self, i: int, j: int) -> float:
        inside = 400.0 if self.gpu[i].startswith("a800") else 20.0
        return (inside if self.machine[i] == self.machine[j] else self.inter) * 1024**3

    def stage_s(self, pipeline: Pipeline, k: int) -> float:
        stage, b = pipeline.stages[k], pipeline.micro_batch_size
        group, t = stage.devices, stage.tp
        flop = 96 * b * self.s * self.h**2 * (1 + self.s / (6 * self.h) + self.v / (16 * self.layers * self.h))
        message = 2 * b * self.s * self.h
        layer_s = flop / (t * TFLOPS[self.gpu[group[0]]] * 1024**4)
        layer_s += 12 * max(sum(message / t / self.rate(i, j) for j in group if j != i) for i in group)
        total_s = stage.num_layers * layer_s
        if k + 1 < len(pipeline.stages):
            after = pipeline.stages[k + 1].devices
            ways = [
                message / self.rate(i, j)
                + sum(message / len(after) / self.rate(j, other) for other in after if other != j)
                for i in group
                for j in after
            ]
            total_s += 2 * min(ways)
        return total_s

    def pipeline_s(self, pipeline: Pipeline) -> float:
        busy = [self.stage_s(pipeline, k) for k in range(len(pipeline.stages))]
        return columns_s(busy, pipeline.num_micro_batches)[-1]

    def gradients_s(self, plan: Plan) -> float:
        total_s = 0.0
        for layer in range(self.layers):
            groups = [
                next(s.devices for s in p.stages if s.layers[0][0] <= layer < s.layers[0][1]) for p in plan.pipelines
            ]
            least, largest = min(map(len, groups)), max(map(len, groups))
            for k in range(largest // least):
                holders = [group[k * len(group) // largest] for group in groups]
                size = 12 * self.h**2 * 2 / (least * len(holders))
                total_s += 2 * max(sum(size / self.rate(i, j) for j in holders if j != i) for i in holders)
        return total_s

    def step_s(self, plan: Plan) -> float:
        return 1.8 * max(map(self.pipeline_s, plan.pipelines)) + 1.1 * self.gradients_s(plan)

    def excess_gib(self, plan: Plan) -> float:
        excess = []
        for pipeline in plan.pipelines:
            b, last = pipeline.micro_batch_size, len(pipeline.stages) - 1
            for k, stage in enumerate(pipeline.stages):
                params = stage.num_layers * 12 * self.h**2 / stage.tp
                params += (self.h + self.v * self.h) * (k == last) + self.h * (self.v + self.s) * (k == 0)
                elements = b * self.s * self.h * (stage.num_layers / stage.tp + 2)
                excess.append((8 * params + 2 * elements) / 1024**3 - MEMORY[self.gpu[stage.devices[0]]])
        return max(excess)


def columns_s(busy_s: list[float], num_micro_batches: int) -> list[float]:
    """When each stage ends: in column j the stages k with k ≤ j < k + M are busy."""
    columns = [
        max(seconds for k, seconds in enumerate(busy_s) if k <= j < k + num_micro_batches)
        for j in range(num_micro_batches + len(busy_s) - 1)
    ]
    ends = np.cumsum(columns)
    return [float(ends[k + num_micro_batches - 1]) for k in range(len(busy_s))]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.integers(1, 30))
def test_stage_ends_are_those_of_the_columns(busy_s: list[float], num_micro_batches: int) -> None:
    assert stage_ends_s(busy_s, num_micro_batches) == pytest.approx(columns_s(busy_s, num_micro_batches))


@pytest.mark.parametrize("row", ROWS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_price_equals_slow_evaluation(row, seed: int) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(row)
    plan = random_plan(problem, random.Random(seed))
    slow, cost = Slow(problem, row.inter_gb_per_s), FlashFlexPricer(problem).price(plan)
    assert cost.step_time_s == pytest.approx(slow.step_s(plan), rel=1e-9)
    assert cost.excess_bytes / GIB == pytest.approx(slow.excess_gib(plan), rel=1e-9, abs=1e-9)
    assert cost.pipeline_s == pytest.approx(max(part.end_s for part in cost.pipelines))
    assert cost.step_time_s == pytest.approx(cost.pipeline_s + cost.gradient_sync_s + cost.optimizer_s)


@pytest.mark.parametrize(("where", "pipelines", "step_s", "excess_gib"), GOLDEN)
def test_price_equals_released_code(where, pipelines, step_s: float, excess_gib: float) -> None:  # type: ignore[no-untyped-def]
    row, num_micro_batches, micro_batch_size = where
    cost = FlashFlexPricer(problem_of(ROWS[row])).price(make_plan(pipelines, num_micro_batches, micro_batch_size))
    assert cost.step_time_s == pytest.approx(step_s, rel=1e-12)
    assert cost.excess_bytes / GIB == pytest.approx(excess_gib, rel=1e-12)


def test_aligned_plan_gives_the_annealers_figure() -> None:
    """The released code gives 35.226356021636725 s and 28.796649101563027 s for these two."""
    problem = problem_of(ROWS[0])
    pricer, by_rule = FlashFlexPricer(problem), FlashFlexPricer(problem, micro_batch_rule=True)
    cost = pricer.price(aligned_plan(8, 4))
    assert cost.step_time_s == pytest.approx(35.226356021636725, rel=1e-12)
    assert round(cost.tokens_per_s) == ROWS[0].annealer_tokens_per_s
    assert pricer.price(aligned_plan(32, 1)).step_time_s == pytest.approx(28.796649101563027, rel=1e-12)
    assert by_rule.price(aligned_plan(32, 1)).step_time_s == pytest.approx(cost.step_time_s, rel=1e-12)


def test_rule_counts_only_the_sequences_really_processed() -> None:
    problem = problem_of(ROWS[0])
    by_rule = FlashFlexPricer(problem, micro_batch_rule=True)
    three = replace(aligned_plan(1, 1), pipelines=aligned_plan(1, 1).pipelines[:3])
    tens = replace(
        aligned_plan(8, 1), pipelines=tuple(replace(p, micro_batch_size=10) for p in aligned_plan(8, 1).pipelines[:3])
    )
    as_planned = FlashFlexPricer(problem).price(tens)
    cost = by_rule.price(three)
    assert cost.tokens_per_s == pytest.approx(as_planned.tokens_per_s)
    assert as_planned.tokens_per_s == pytest.approx(240 * 4096 / as_planned.step_time_s)
    assert cost.step_time_s == pytest.approx(256 * 4096 / cost.tokens_per_s)
    assert all(part.end_s <= cost.step_time_s for part in by_rule.pipelines(three))


def test_pricer_is_what_a_search_asks() -> None:
    problem = problem_of(ROWS[0])
    pricer: Pricer = FlashFlexPricer(problem)
    plan = aligned_plan(32, 1)
    assert pricer.policies() == ("full",)
    assert pricer.tp_group((0,)) == pricer.tp_group((5,)) != pricer.tp_group((8,))
    assert len({pricer.tp_group((0, 1)), pricer.tp_group((1, 0)), pricer.tp_group((0,))}) == 2
    pipelines = pricer.pipelines(plan)
    assert pricer.price(plan, pipelines) == pricer.price(plan) == FlashFlexPricer(problem).price(plan)
    stages = plan.pipelines[0].stages
    busy = []
    for k, stage in enumerate(stages):
        seconds = sum(pricer.stage_s(pricer.tp_group(stage.devices), stage.num_layers, k == 0, k == 3, 1, "full"))
        if k < 3:
            seconds += 2 * pricer.message_s(stage.devices, stages[k + 1].devices, 1)
        busy.append(seconds)
    assert pipelines[0].end_s == pytest.approx(columns_s(busy, 32)[-1])


@pytest.mark.parametrize("row", ROWS)
def test_max_layers_is_where_the_excess_begins(row) -> None:  # type: ignore[no-untyped-def]
    pricer = FlashFlexPricer(problem_of(row))
    total = pricer.problem.model.num_layers
    for machine, first in zip(pricer.problem.cluster.machines, pricer.problem.cluster.first_device, strict=True):
        for tp in (1, 2, 4):
            devices = tuple(range(int(first), int(first) + tp))
            assert tp <= machine.num_gpus
            most = pricer.max_layers(pricer.tp_group(devices), True, True, 2, "full", holding(3), UNSHARDED)
            for layers in range(1, total + 1):
                stages = (Stage.of(devices, 0, layers, "full"),)
                assert pricer.price(Plan((Pipeline(stages, 1, 2),))).fits == (layers <= most)


def test_refuses_what_the_formulas_do_not_cover() -> None:
    problem = problem_of(ROWS[0])
    pricer, layers = FlashFlexPricer(problem), problem.model.num_layers
    with pytest.raises(ValueError, match="recompute"):
        pricer.price(Plan((Pipeline((Stage.of((0,), 0, layers, "none"),), 256),)))
    two = Stage.of_replicas((Replica((0,), 1), Replica((1,), 1)), ((0, layers),), ("full",))
    with pytest.raises(ValueError, match="replicated"):
        pricer.price(Plan((Pipeline((two,), 128, 2),)))
    with pytest.raises(ValueError, match="different machines"):
        pricer.tp_group((0, 8))


def test_schedule_and_sharding_do_not_matter() -> None:
    pricer = FlashFlexPricer(problem_of(ROWS[0]))
    plan = aligned_plan(32, 1)
    assert pricer.price(plan) == pricer.price(replace(plan, schedule=GPIPE, sharding=Sharding(1)))


def test_rate_inside_machines_can_be_stated() -> None:
    problem = problem_of(ROWS[0])
    plan = make_plan([[(tuple(range(8, 16)), problem.model.num_layers)]], 256, 1)
    usual = FlashFlexPricer(problem).price(plan).step_time_s
    assert FlashFlexPricer(problem, intra_gb_per_s={"rtx_3090": 20.0}).price(plan).step_time_s == usual
    assert FlashFlexPricer(problem, intra_gb_per_s={"rtx_3090": 2.0}).price(plan).step_time_s > 2 * usual


def test_rows_are_the_published_comparison() -> None:
    assert len(ROWS) == 7
    ratios = [row.annealer_tokens_per_s / row.flashflex_tokens_per_s for row in ROWS]
    assert geometric_mean(ratios) == pytest.approx(2.31, abs=0.01)


def test_the_comparison_searches_what_the_formulas_price() -> None:
    """Every freedom but replicas, which have no price there."""
    assert {problem_of(row).space for row in ROWS} == {Space(replicas=False)}
