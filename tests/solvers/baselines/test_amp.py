"""AMP: its dynamic program over layers against all splits, its space, and what it plans where the answer is known."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan.parallelism import Replica, Replicated
from hexiopt.plan.plan import Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import GPIPE
from hexiopt.solving import Budget
from solvers.baselines.amp import Amp, best_splits
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import SPACES
from tests.solvers.baselines.random_plans import random_plans


@given(st.data())
def test_the_best_split_is_the_best_of_all(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 4))
    num_layers = data.draw(st.integers(stages, 10))
    some = st.lists(st.floats(0.1, 5.0), min_size=stages, max_size=stages)
    layer_s, added_s = data.draw(some), data.draw(some)
    rooms = data.draw(st.lists(st.integers(0, num_layers), min_size=stages, max_size=stages))
    batches = data.draw(st.integers(1, 40))

    def seconds(layers: tuple[int, ...]) -> float:
        stage_s = [n * a + b for n, a, b in zip(layers, layer_s, added_s, strict=True)]
        return (batches - 1) * max(stage_s) + sum(stage_s)

    all_splits = [
        tuple(b - a for a, b in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), stages - 1)
    ]
    fitting = [s for s in all_splits if all(n <= room for n, room in zip(s, rooms, strict=True))]
    splits = best_splits(layer_s, added_s, rooms, num_layers, batches)
    assert bool(splits) == bool(fitting)
    assert [value for value, _ in splits] == sorted(value for value, _ in splits)
    for value, layers in splits:
        assert layers in fitting
        assert value == pytest.approx(seconds(layers))
    if splits:
        assert splits[0][0] == pytest.approx(min(map(seconds, fitting)))


def mixed_problem() -> Problem:
    """A fast and a slow machine of four on a fast network."""
    cluster = problems.cluster(("a100_40gb_sxm", 4, 200), ("v100_16gb_sxm", 4, 60), network_gb_per_s=50)
    return Problem(cluster, problems.model("gpt2_345m", 24), Workload(64, 1024, precision="fp16"))


def test_all_devices_work_and_the_fast_ones_hold_more_layers() -> None:
    problem = mixed_problem()
    plan = Amp().solve(problem, Budget(3600.0)).plan
    assert plan is not None
    assert sorted(plan.devices()) == list(range(8))
    held = {"a100_40gb_sxm": 0, "v100_16gb_sxm": 0}
    for line in plan.pipelines:
        for stage in line.stages:
            held[problem.cluster.gpu_of(stage.devices[0]).name] += stage.num_layers
    assert held["a100_40gb_sxm"] > held["v100_16gb_sxm"] > 0


def test_what_is_not_in_its_space() -> None:
    problem = mixed_problem()
    drawn = random_plans(SPACES["amp"], problem, random.Random(0), 2000)
    plan: Plan = next(
        p for p in drawn if (len(p.pipelines), len(p.pipelines[0].stages), p.pipelines[0].stages[0].tp) == (2, 4, 1)
    )
    assert SPACES["amp"].first_violation(problem, plan) is None
    line, other_line = plan.pipelines
    first, second = line.stages[0], other_line.stages[0]
    policy = "full" if first.policy != "full" else "none"
    replicas = Replica(first.devices, 1), Replica(second.devices, 1)
    together = Stage(Replicated(replicas), first.layers, first.recompute)
    last = replace(line.stages[-2], layers=((line.stages[-2].layers[0][0], line.num_layers),))
    rules = {
        "schedule": replace(plan, schedule=GPIPE),
        "ZeRO-2": replace(plan, sharding=Sharding(2)),
        "replicated": replace(
            plan, pipelines=(replace(line, stages=(together, *line.stages[1:]), micro_batch_size=2),)
        ),
        "unequal batches": replace(
            plan, pipelines=(replace(line, num_micro_batches=line.num_micro_batches + 1), other_line)
        ),
        "different layers": replace(plan, pipelines=(replace(line, stages=(*line.stages[:-2], last)), other_line)),
        "recompute": replace(
            plan, pipelines=(replace(line, stages=(replace(first, recompute=(policy,)), *line.stages[1:])), other_line)
        ),
        "left out": replace(plan, pipelines=(line,)),
        "in order": replace(
            plan,
            pipelines=(
                replace(line, stages=(second, *line.stages[1:])),
                replace(other_line, stages=(first, *other_line.stages[1:])),
            ),
        ),
    }
    for word, broken in rules.items():
        assert word in (SPACES["amp"].first_violation(problem, broken) or ""), word


def test_odd_numbers_of_devices_have_few_grids() -> None:
    """Seven devices: one pipeline of seven, since seven pipelines do not share the batch."""
    cluster = problems.cluster(("a100_40gb_sxm", 3, 200), ("v100_16gb_sxm", 4, 60), network_gb_per_s=12.5)
    problem = Problem(cluster, problems.model("gpt2_345m", 10), Workload(24, 1024, precision="fp16"))
    plan = Amp().solve(problem, Budget(3600.0)).plan
    assert plan is not None
    assert [len(line.stages) for line in plan.pipelines] == [7]
    few = replace(problem, model=problems.model("gpt2_345m", 6))
    result = Amp().solve(few, Budget(3600.0))
    assert result.plan is None
    assert result.reason
