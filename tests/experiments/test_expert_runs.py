"""Published runs of models with experts: what their rows become, and the targets."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from experiments.validation.cases import Measurements, case_of
from experiments.validation.memory import allocated_ratios
from experiments.validation.predict import Case, predict, step_time_s
from experiments.validation.rows import Row, read_rows
from experiments.validation.shapes import InexpressibleError, expert_model
from experiments.validation.shipped import EXPERT_RUNS
from experiments.validation.stage_layers import stage_layers
from hexiopt import Cluster
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.frameworks import frameworks
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import NOTHING_MEASURED
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.units import GIB

NOTHING = Measurements(NOTHING_MEASURED, None)


@cache
def rows() -> dict[int, Row]:
    return {row.line: row for row in read_rows(EXPERT_RUNS)}


def case(line: int) -> Case:
    return case_of(rows()[line], NOTHING)


def error(line: int) -> float:
    """Predicted over measured step time, less one."""
    run = case(line)
    return predict(run).step_time_s / step_time_s(run) - 1


def test_devices_that_share_experts_are_a_group_of_replicas() -> None:
    # DeepSeek-V3 on 1,024 H100: TP 2, EP 64 over eight machines, a micro-batch of one sequence a replica.
    run = case(2)
    pipelines, workload = run.plan.pipelines, run.problem.workload
    group = pipelines[0].stages[0].parallelism
    assert isinstance(group, TensorParallel)
    assert (len(pipelines), len(group.devices), group.degree, group.num_replicas) == (2, 64, 2, 32)
    assert (pipelines[0].micro_batch_size, pipelines[0].num_micro_batches) == (32, 256)
    assert (workload.routing, run.framework) == ("forced", "megatron_moe_2026_overlapped")
    assert [stage.num_layers for stage in pipelines[0].stages] == [7, 8, 8, 8, 8, 8, 8, 6]
    violations = check(run.problem, run.plan)
    assert {violation.rule for violation in violations} == {"batch"}, "micro-batches are those of all replicas"


def test_only_replicas_in_a_machine_share_experts_over_machines() -> None:
    run = case(123)
    plan, group = run.plan, run.plan.pipelines[0].stages[0].parallelism
    assert isinstance(group, TensorParallel)
    for wrong in (replace(group, degree=None), replace(group, degree=16)):
        stage = replace(plan.pipelines[0].stages[0], parallelism=wrong)
        changed = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
        assert "tp" in {violation.rule for violation in check(run.problem, changed)}
    assert "tp" not in {violation.rule for violation in check(run.problem, plan)}


@pytest.mark.parametrize(
    ("layout", "stages", "counts"),
    [
        ("layout Et*4|(tttt|)*14tmL", 8, [8, 8, 8, 8, 8, 8, 8, 5]),
        ("layout=Et*11|t*11|t*11|t*10mL", 4, [11, 11, 11, 10]),
        # the further layer stands before the last stage, which gives it a layer for that
        ("layout Et*3|(tt|)*29m|L", 8, [9, 8, 8, 8, 8, 8, 7, 5]),
    ],
)
def test_layouts_of_megatron(layout: str, stages: int, counts: list[int]) -> None:
    model = expert_model("deepseek-v3")
    assert isinstance(model, ModelSpec)
    assert stage_layers(replace(rows()[2], notes=f"EP=32;{layout};DeepEP"), model, stages) == counts


def test_what_is_not_priced_is_counted() -> None:
    for line, reason in ((5, "mixture of experts"), (24, "LoRA"), (97, "ZeRO-2 or 3"), (124, "not stated")):
        with pytest.raises(InexpressibleError, match=reason):
            case(line)
    with pytest.raises(InexpressibleError, match="by columns"):
        case_of(replace(rows()[123], notes="EP=8;ETP=2"), NOTHING)


# Qwen3-235B on 256 H100, with overlapped all-to-alls and without, EP 8 with 32 stages, TP 4, in the measured order.
STRATEGIES = (96, 95, 98, 99)


def test_strategies_are_ranked_as_measured() -> None:
    measured = [step_time_s(case(line)) for line in STRATEGIES]
    seconds = [predict(case(line)).step_time_s for line in STRATEGIES]
    assert measured == sorted(measured)
    assert seconds == sorted(seconds)
    assert max(abs(error(line)) for line in STRATEGIES) < 0.13


@pytest.mark.parametrize("line", [101, 103, 105, 107])
def test_natural_routing_takes_longer_by_what_was_measured(line: int) -> None:
    """16K to 128K tokens, forced and natural: the four pairs that the imbalance is from."""
    ratios = [f(case(line)) / f(case(line + 1)) for f in (step_time_s, lambda run: predict(run).step_time_s)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.01)


@pytest.mark.parametrize(
    ("line", "percent"), [(2, -2.1), (56, 2.4), (82, -2.0), (86, 0.6), (123, -1.5), (50, 3.7), (57, -1.0), (117, 4.7)]
)
def test_rows_that_are_pinned(line: int, percent: float) -> None:
    assert 100 * error(line) == pytest.approx(percent, abs=0.1)


# Peaks of torch's allocated memory in GiB by SimuMax (MooreThreads/SimuMax, 8 B200, four layers of which the first is
# dense, EP over all devices of a stage, a sequence of 4,096 tokens a device, four micro-batches).
@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("deepseek-v2", (45.63,)),
        ("deepseek-v2", (31.59, 44.70)),
        ("deepseek-v3", (104.3,)),
        ("deepseek-v3", (71.24, 114.0)),
    ],
)
def test_peaks_of_memory_within_three_percent(name: str, peaks: tuple[float, ...]) -> None:
    whole = expert_model(name)
    assert whole is not None
    model = replace(whole, num_layers=4, layers=whole.layers[:1] + whole.layers[-3:], extra_layers=())
    size, each = 8 // len(peaks), 4 // len(peaks)
    workload = Workload(global_batch=4 * size, seq_len=4096, gradient_bytes=4, routing="forced")

    def stage(s: int) -> Stage:
        group = TensorParallel(tuple(range(s * size, (s + 1) * size)), degree=1)
        return Stage(group, ((s * each, (s + 1) * each),), ("none",))

    stages = tuple(map(stage, range(len(peaks))))
    plan = Plan((Pipeline(stages, 4, size),), ONE_F_ONE_B, Sharding(1))
    problem = Problem(Cluster.of({"b200": 8}), model, workload)
    cost = PlanPricer(problem, frameworks()["megatron_exposed"]).price(plan)
    tensors = [stage.memory.tensors / GIB for stage in cost.pipelines[0].stages]
    assert tensors == pytest.approx(peaks, rel=0.03)


def test_peaks_of_functional_tests_are_read_in_gb() -> None:
    path = EXPERT_RUNS.with_name("expert_memory_runs.csv")
    ratios = []
    for row in [row for row in read_rows(path) if row.model_name == "ci-moe" and row.note("max_memory_gb")][::2]:
        try:
            run = case_of(row, NOTHING)
        except InexpressibleError:
            continue
        ratios += allocated_ratios(run, predict(run))
    assert len(ratios) >= 15
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.2


def test_every_fourth_row_is_predicted_within_the_aims() -> None:
    """Medians of pretraining: H100 and H800 within 11 %, Blackwell within 15 %."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for line in sorted(rows())[::4]:
        row = rows()[line]
        if row.says("sft", "lora") or "fsdp" in row.zero_stage_or_fsdp:
            continue
        try:
            errors[row.gpu.startswith("H")].append(abs(error(line)))
        except InexpressibleError:
            continue
    assert min(map(len, errors.values())) >= 6
    assert np.median(errors[True]) < 0.11
    assert np.median(errors[False]) < 0.15
