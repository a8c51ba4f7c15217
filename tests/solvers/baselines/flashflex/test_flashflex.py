"""FlashFlex: the released rules against what the released code gives, its space, and published against released."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.executors.memory import UNSHARDED
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica, Replicated
from hexiopt.plan.plan import Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from hexiopt.solving.result import Result
from solvers.baselines.flashflex.flashflex import FlashFlex
from solvers.baselines.flashflex.plans import ReleasedPlans
from solvers.baselines.flashflex.pricer import FlashFlexPricer
from solvers.baselines.flashflex.published import OurMemory, intra_gb_per_s
from solvers.baselines.flashflex.released import ReleasedSearch, StageSequence, _order_parts, memory_shares
from tests.conftest import ROOT
from tests.solvers import problems as small
from tests.solvers.baselines import problems
from tests.solvers.baselines.published_spaces import FLASHFLEX_AS_RELEASED, SPACES
from tests.solvers.baselines.random_plans import random_plans

pytest.importorskip("pymetis")

NETWORK = {"inter_machine": {"bandwidth_gb_per_s": 10, "latency_us": 20}}
CONF = ROOT / "conf"


def setting_2() -> Problem:
    """HexiScale's setting 2: 8 × 3080 Ti (0 to 7), 3090, 4090, A800 (24 to 31); Llama-2 7B."""
    cluster = read_cluster(CONF / "cluster" / "hexiscale_setting_2.yaml")
    return Problem(cluster, read_model(CONF / "model" / "llama2_7b.yaml"))


# The released rules. Expected values: functions of its folder `experimental/`, run on the same input.


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        (((0, 1), (8,), (16, 17, 18, 19)), [5, 5, 22]),
        (((24,), (25,), (0, 1, 2, 3), (4,)), [12, 12, 7, 1]),
        (((0,), (1,), (2,), (8, 9), (10, 11, 12, 13), (24, 25)), [1, 1, 1, 4, 9, 16]),
    ],
)
def test_layers_follow_the_memory_of_stages(line: StageSequence, layers: list[int]) -> None:
    """`create_layer_partition` of `layer_partition.py`."""
    assert memory_shares(setting_2(), line) == layers


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ([[0, 5], [5, 0]], [0, 1]),
        ([[0, 9, 1], [9, 0, 5], [1, 5, 0]], [0, 2, 1]),
        ([[0, 1, 9], [1, 0, 5], [9, 5, 0]], [2, 1, 0]),
        ([[0, 5, 9], [5, 0, 1], [9, 1, 0]], [2, 1, 0]),
    ],
)
def test_the_released_order_of_parts(weights: list[list[int]], order: list[int]) -> None:
    """`get_stage_order` of `stage_order.py` and `gen_strategy` of `strategy.py`."""
    parts = [[k] for k in range(len(weights))]
    assert _order_parts(parts, np.array(weights, float)) == [[k] for k in order]


@pytest.mark.parametrize(("inside", "between", "weighs"), [(25, 400, [0, 0]), (400, 15, [0, 1]), (5, 1, [2, 9])])
def test_released_reciprocals_are_rounded(inside: float, between: float, weighs: list[int]) -> None:
    """25 and 400 GB/s look alike."""
    cluster = problems.cluster(("l40s", 2, inside), ("l40s", 2, inside), network_gb_per_s=between)
    search = ReleasedSearch(FlashFlexPricer(Problem(cluster, problems.model("llama2_7b", 4))), random.Random(0))
    assert [search.reciprocal[0, 1], search.reciprocal[0, 2]] == weighs


def test_released_micro_batches_are_fixed_at_the_start() -> None:
    """256 sequences in 8 micro-batches: 16 each for two pipelines at the start, however many there are then."""
    problem = setting_2()
    half = tuple((2 * k, 2 * k + 1) for k in range(16))
    assert list(ReleasedPlans(problem, 2).sizes()) == [16]
    assert list(ReleasedPlans(problem, 5).sizes()) == [4]
    plan = ReleasedPlans(problem, 2).plan((half[:8], half[8:]), (ONE_F_ONE_B, 16, "full", False, 0))
    assert plan is not None
    assert [line.num_micro_batches for line in plan.pipelines] == [8, 8]


def test_its_own_memory_formula_refuses() -> None:
    """One 3080 Ti does not hold Llama-2 7B; a machine of A800 does."""
    problem = setting_2()
    plans = ReleasedPlans(problem, 1)
    assert plans.estimate_s((((0,),),)) == float("inf")
    assert plans.estimate_s(((tuple(range(24, 32)),),)) < float("inf")


# As published.


def test_published_seconds_are_flashflex_s_and_memory_is_ours() -> None:
    problem = setting_2()
    pricer, ours = OurMemory(problem), PlanPricer(problem)
    theirs = FlashFlexPricer(problem, intra_gb_per_s=intra_gb_per_s(problem))
    for group in ((0,), (8, 9), (24, 25, 26, 27)):
        tp_group = pricer.tp_group(group)
        seconds = theirs.stage_s(theirs.tp_group(group), 3, True, False, 2, "full")
        assert pricer.stage_s(tp_group, 3, True, False, 2, "none") == seconds
        room = ours.max_layers(ours.tp_group(group), True, False, 1, "none", holding(2), UNSHARDED)
        assert pricer.max_layers(tp_group, True, False, 1, "none", holding(2), UNSHARDED) == room


@cache
def solve_setting_2(defects: str) -> Result:
    return FlashFlex(defects).solve(setting_2(), Budget(3600.0))


@pytest.mark.slow  # of a smaller problem, as published, `test_every_baseline` asks it
@pytest.mark.parametrize("defects", ["as_published", "as_released"])
def test_plans_are_in_the_space_of_their_search(defects: str) -> None:
    problem, solver, result = setting_2(), FlashFlex(defects), solve_setting_2(defects)
    assert result.plan is not None
    assert violations(problem, result.plan, result.cost) == []
    space = FLASHFLEX_AS_RELEASED if solver.released else SPACES["flashflex"]
    assert space.first_violation(problem, result.plan) is None
    assert sorted(result.plan.devices()) == list(range(32))


@pytest.mark.slow
def test_the_defects_cost_much() -> None:
    assert 1.1 * solve_setting_2("as_published").objective < solve_setting_2("as_released").objective


def test_what_is_not_in_its_space() -> None:
    problem = small.easy()
    drawn = random_plans(SPACES["flashflex"], problem, random.Random(0), 1000)
    plan: Plan = next(p for p in drawn if len(p.pipelines) == 1 and len(p.pipelines[0].stages) > 4)
    [line] = plan.pipelines
    first = line.stages[0]
    second = line.stages[1]
    policy = "full" if first.policy != "full" else "none"
    replicas, layers = (Replica(first.devices, 1), Replica(second.devices, 1)), ((0, second.layers[0][1]),)
    together = Stage(Replicated(replicas), layers, (first.policy,))
    rules = {
        "schedule": replace(plan, schedule=INTERLEAVED),
        "ZeRO-3": replace(plan, sharding=Sharding(3)),
        "replicated": [together, *line.stages[2:]],
        "recompute": [replace(first, recompute=(policy,)), *line.stages[1:]],
        "left out": [replace(second, layers=layers, recompute=(second.policy,)), *line.stages[2:]],
    }
    for word, broken in rules.items():
        if not isinstance(broken, Plan):
            size = 2 if word == "replicated" else line.micro_batch_size
            broken = replace(plan, pipelines=(replace(line, stages=tuple(broken), micro_batch_size=size),))
        assert word in (SPACES["flashflex"].first_violation(problem, broken) or ""), word


def two_together(problem: Problem, plan: Plan) -> list[int]:
    """Stages of the first pipeline that stand on the machine of the next, but not on that of the one after."""
    machines = [int(problem.cluster.machine_of[stage.devices[0]]) for stage in plan.pipelines[0].stages]
    return [k for k in range(len(machines) - 2) if machines[k] == machines[k + 1] != machines[k + 2]]


def test_a_pipeline_does_not_come_back_to_a_machine() -> None:
    """Machines a: 0, 1; b: 2, 3; c: 4 to 7. One device a stage, two of them swapped."""
    problem = small.easy()
    drawn = random_plans(SPACES["flashflex"], problem, random.Random(0), 5000)
    plan: Plan = next(p for p in drawn if [len(q.stages) for q in p.pipelines] == [5] and two_together(problem, p))
    [line] = plan.pipelines
    k = two_together(problem, plan)[0]
    stages = list(line.stages)
    devices = stages[k + 1].parallelism, stages[k + 2].parallelism
    stages[k + 1], stages[k + 2] = (
        replace(stages[k + 1], parallelism=devices[1]),
        replace(stages[k + 2], parallelism=devices[0]),
    )
    broken = replace(plan, pipelines=(replace(line, stages=tuple(stages)),))
    assert check(problem, broken) == []
    assert "comes back" in (SPACES["flashflex"].first_violation(problem, broken) or "")
    assert "comes back" not in (FLASHFLEX_AS_RELEASED.first_violation(problem, broken) or "")


def test_a_graph_of_too_many_gpus_is_refused() -> None:
    data = {"name": "many", "gpu": "l40s", "num_gpus": 8, "intra_bandwidth_gb_per_s": 20, "count": 65}
    cluster = cluster_from_section(Section({"name": "large", "machines": [data], **NETWORK}, "large"))
    with pytest.raises(InputError, match="520 devices are more than the 512"):
        FlashFlex().solve(Problem(cluster, problems.model("llama2_7b", 8)), Budget(1.0))
