"""Bounds where layers have experts or are of several kinds: below every plan, whatever degrees it states."""

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from hexiopt.bounds import compute_bound_s
from hexiopt.bounds.stage_cells import shares_across, stage_cells
from hexiopt.bounds.windows import Windows
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.kinds import Experts, LayerKind
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import range_lengths
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.conftest import STRESS
from tests.hexiopt.bounds.test_bounds import counted_bound_s
from tests.hexiopt.shapes_of_kinds import ATTENTION, DENSE_LAYER, EXPERT_LAYER, KINDS, model_of
from tests.slow import slow_but
from tests.solvers.drawn_experts import drawn_with_experts
from tests.solvers.oracle import TooManyError, every_plan

SOME = 400  # plans of a problem to price
MET = 20_000  # to choose them from


def some_plans(problem: Problem, rng: random.Random) -> list[Plan]:
    """Of the first plans that an oracle makes, some."""
    plans = list[Plan]()
    with suppress(TooManyError):
        plans += itertools.islice(every_plan(problem, 3 * MET), MET)
    return plans if len(plans) <= SOME else rng.sample(plans, SOME)


@pytest.mark.parametrize(
    ("several", "readings"),
    slow_but([(False, 20), (True, 20)], itertools.product((False, True), (20, 80, 400))),
)
def test_no_plan_beats_the_bounds(several: bool, readings: int) -> None:
    """One group of devices with every degree, over machines too, replicas, interleaving, sharding."""
    compared = shared = 0
    for number in range(200 if STRESS else 14):
        problem = drawn_with_experts(number, num_layers=2 + several * (number % 3), several=several)
        model = PlanPricer(problem)
        costs = [(plan, model.price(plan)) for plan in some_plans(problem, random.Random(number))]
        fitting: list[tuple[Plan, Cost]] = [(plan, cost) for plan, cost in costs if cost.fits]
        if not fitting:
            continue
        best, cost = min(fitting, key=lambda pair: pair[1].step_time_s)
        bound_s = counted_bound_s(model, readings)
        assert compute_bound_s(model) <= bound_s <= cost.step_time_s, (number, best)
        compared += 1
        shared += any(len(stage.parallelism.parameter_copies) > 1 for plan, _ in fitting for stage in _stages(plan))
    assert compared > 6
    assert shared


def _stages(plan: Plan) -> Iterator[Stage]:
    return (stage for pipeline in plan.pipelines for stage in pipeline.stages)


def one_gpu_machines(count: int) -> Problem:
    """Experts so large beside a short sequence that reading their weights takes longest, on a very fast network."""
    machines = [{"name": "m", "gpu": "fast", "num_gpus": 1, "count": count}]
    network = {"bandwidth_gb_per_s": 10_000, "latency_us": 1}
    gpus = {"fast": {"tflops": 1000, "memory_gib": 80, "hbm_gb_per_s": 500}}
    data = {"name": "m", "inter_machine": network, "machines": machines, "gpus": gpus}
    kind = LayerKind((ATTENTION,), (Experts(count=32, top_k=1, ffn_size=4096),))
    workload = Workload(count, 64, schedule="1f1b", optimizer_sharding="0", routing="forced")
    return Problem(cluster_from_section(Section(data, "m")), model_of(kind, kind), workload)


def test_replicas_in_several_machines_are_counted() -> None:
    """Devices that share experts read fewer weights each than any alone, so that a bound of machines alone is false."""
    problem = one_gpu_machines(8)
    model, alone = PlanPricer(problem), PlanPricer(one_gpu_machines(1))
    stage = Stage(TensorParallel(tuple(range(8)), None, 1), ((0, 2),), ("none",))
    step_s = model.price(Plan((Pipeline((stage,), 1, 8),))).step_time_s
    assert shares_across(problem)
    assert not shares_across(alone.problem)
    assert step_s < compute_bound_s(alone)
    assert counted_bound_s(model, 40) <= step_s
    assert {cell.machines for cell in stage_cells(model.stages, 0, 8)} == {1, 2, 4, 8}


def test_the_least_windows_are_those_of_all_ranges() -> None:
    for number in range(1000 if STRESS else 200):
        rng = random.Random(number)
        model = model_of(EXPERT_LAYER, *rng.choices((EXPERT_LAYER, DENSE_LAYER, KINDS[6]), k=rng.randint(0, 9)))
        of_kind = {kind: rng.uniform(0.1, 2.0) for kind in Windows.kinds_of(model)}
        layers = [of_kind[kind] for kind in model.depth]
        windows, values = Windows(model), np.array(list(of_kind.values()))
        least = [min(sum(layers[at : at + n]) for at in range(len(layers) - n + 1)) for n in range(len(layers) + 1)]
        assert windows.least(values) == pytest.approx(least)
        low, high = sorted(rng.choices(range(2, 5), k=2))
        for n, least_s in enumerate(windows.least(values, low, high)):
            splits = [sum(least[m] for m in range_lengths(n, c)) for c in range(low, min(high, len(layers)) + 1)]
            if splits:
                assert least_s == pytest.approx(min(splits))


def test_bounds_know_kinds_of_layers() -> None:
    """Layers that take longer raise the bound, wherever they stand; and of equal kinds there is one."""
    cheap = drawn_with_experts(3, num_layers=4)
    kind = cheap.model.layers[0]
    heavy = LayerKind((ATTENTION,), (Experts(count=16, top_k=8, ffn_size=8192),))
    bounds = []
    for place in range(4):
        layers = [heavy if at == place else kind for at in range(4)]
        problem = replace(cheap, model=model_of(*layers))
        bounds.append(compute_bound_s(PlanPricer(problem)))
    assert min(bounds) > 1.1 * compute_bound_s(PlanPricer(cheap))
    assert max(bounds) == pytest.approx(min(bounds), rel=0.3)
