"""Under another cost model nothing is certified by ours: no false `optimal`, no bound, no proof about memory."""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

import hexiopt as hx
from hexiopt import bounds
from hexiopt.bounds import bound_under_s, lower_bound_s, our_model
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.pricer import PlanPricer, PricerFeatures
from hexiopt.numbers.frameworks import default_framework
from hexiopt.plan.plan import Plan
from hexiopt.solving import Pricer, solver
from hexiopt.solving.referee import InvalidPlanError
from hexiopt.solving.result import OPTIMALITY_TOLERANCE, Status
from hexiopt.testing import check_pricer
from solvers.core import search
from solvers.registry import names
from tests.alone import Alone
from tests.conftest import STRESS
from tests.slow import slow_but

LONG_S = 600.0
SOLVERS = (("local_search", 60), ("portfolio", 24), ("random", 60), ("exact", 400), ("cp_sat", 400))
GPUS = ("rtx_4090", "rtx_3090", "t4", "v100_32gb_sxm")
NUM_PROBLEMS = 200 if STRESS else 30


class Foreign:
    """Ours behind another name, with all that ours says of itself."""

    def __init__(self, problem: hx.Problem) -> None:
        self._ours = PlanPricer(problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def step_s(self, plan: Plan, cost: Cost) -> float:
        """Seconds of a step of `plan`, whose price by our model is `cost`."""
        return cost.step_time_s

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        cost = self._ours.price(plan, pipelines)
        return replace(cost, step_time_s=self.step_s(plan, cost))


class Faster(Foreign):
    """Better kernels: everything takes a third."""

    def step_s(self, plan: Plan, cost: Cost) -> float:
        return cost.step_time_s / 3


class HiddenSync(Foreign):
    """Gradient sync takes no time, and messages a little more."""

    def step_s(self, plan: Plan, cost: Cost) -> float:
        stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
        return (cost.step_time_s - cost.gradient_sync_s) * (1 + 0.01 * stages)


class Reordered(Foreign):
    """What is slow is fast, and the other way round."""

    def step_s(self, plan: Plan, cost: Cost) -> float:
        return 1e-3 / cost.step_time_s


class BringsABound(Faster):
    """As fast, and says how fast a step can be."""

    @property
    def features(self) -> PricerFeatures:
        return replace(self._ours.features, bound_s=lower_bound_s(self._ours) / 3)


FOREIGN = {made.__name__: made for made in (Faster, HiddenSync, Reordered)}


def small_problem(seed: int) -> hx.Problem:
    """Four GPUs in two to four machines, and few choices."""
    rng = random.Random(seed)
    counts = dict.fromkeys(GPUS, 0)
    for _ in range(4):
        counts[rng.choice(GPUS)] += 1
    rate, per_machine = rng.choice((0.2, 0.5, 2.0, 10.0)), rng.choice((1, 2))
    workload = hx.Workload(
        global_batch=rng.choice((4, 8)),
        seq_len=rng.choice((128, 256)),
        precision="fp16",
        schedule=rng.choice(("1f1b", "gpipe")),
        optimizer_sharding=rng.choice(("0", "1")),
    )
    held = {gpu: count for gpu, count in counts.items() if count}
    cluster = hx.Cluster.of(held, inter_gb_per_s=rate, gpus_per_machine=per_machine)
    return hx.Problem(cluster, hx.model("tiny"), workload, hx.Space(replicas=False, max_micro_batch_size=4))


def false_certificates(problem: hx.Problem, made: Callable[[hx.Problem], Pricer], solvers: Any = SOLVERS) -> list[str]:
    """What solvers certify of `problem` that another solver's plan refutes; what a plan by our model costs under it is
    looked at too."""
    answers = []
    for name, steps in solvers:
        try:
            answers.append(hx.solve(problem, name, LONG_S, max_steps=steps, pricer=made, progress=False))
        except hx.InputError as error:
            if not re.search("its bounds hold for our own cost model only", str(error)):
                raise
    seen = [answer.objective for answer in answers]
    ours = hx.solve(problem, "local_search", LONG_S, max_steps=40, progress=False)
    if ours.plan is not None:
        seen.append(made(problem).price(ours.plan).step_time_s)
    best_s = min(seen)
    faults = []
    for result in answers:
        if result.status is Status.OPTIMAL and result.objective > best_s * (1 + 2 * OPTIMALITY_TOLERANCE):
            faults.append(f"{result.solver}: optimal at {result.objective:.6g} s, and a plan takes {best_s:.6g} s")
        if result.bound_s > best_s * (1 + OPTIMALITY_TOLERANCE):
            faults.append(f"{result.solver}: a bound of {result.bound_s:.6g} s, and a plan takes {best_s:.6g} s")
        if result.status is Status.INFEASIBLE:
            faults.append(f"{result.solver}: infeasible, and a plan takes {best_s:.6g} s")
    return faults


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("seed", slow_but(range(2), range(NUM_PROBLEMS)))
def test_nothing_false_is_certified(seed: int, foreign: str) -> None:
    assert false_certificates(small_problem(seed), FOREIGN[foreign]) == []


@pytest.mark.parametrize("seed", slow_but(range(1), range(20)))
def test_a_bound_that_a_pricer_brings_is_used(seed: int) -> None:
    problem = small_problem(seed)
    assert false_certificates(problem, BringsABound) == []
    result = hx.solve(problem, "local_search", LONG_S, max_steps=20, pricer=BringsABound, progress=False)
    assert result.bound_s == pytest.approx(lower_bound_s(PlanPricer(problem)) / 3)
    assert "lower bound" in str(result)


@pytest.mark.slow
def test_the_oracle_finds_false_certificates_where_what_a_pricer_says_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it was: a wrapper of ours that forwards all was taken for ours."""

    def believe(pricer: Any, problem: hx.Problem) -> PlanPricer | None:
        model: PlanPricer = getattr(pricer, "_ours", pricer)
        return model

    for module in (bounds, search, solver):
        monkeypatch.setattr(module, "our_model", believe)
    cluster = hx.Cluster.of({"rtx_4090": 2, "rtx_3090": 2}, inter_gb_per_s=2.0, gpus_per_machine=1)
    workload = hx.Workload(global_batch=8, seq_len=256, precision="fp16", schedule="1f1b", optimizer_sharding="0")
    problem = hx.Problem(cluster, hx.model("gpt2_345m"), workload, hx.Space(replicas=False, max_micro_batch_size=4))

    class Hidden(HiddenSync):
        def step_s(self, plan: Plan, cost: Cost) -> float:
            return cost.step_time_s - cost.gradient_sync_s

    budgets = ("exact", 150), ("exact", 300), ("exact", 600), ("local_search", 3000)
    certificates = false_certificates(problem, Hidden, budgets)
    assert any(line.startswith("exact: optimal at") for line in certificates), certificates
    with pytest.raises(InvalidPlanError, match="it states a lower bound of"):  # and the solver was blamed
        hx.solve(problem, "local_search", LONG_S, max_steps=20, pricer=Reordered, progress=False)


def test_every_solver_takes_or_refuses_a_stranger() -> None:
    """In one line, and without a bound of ours."""
    problem = small_problem(1)
    for name in names(lambda able: able.sequence != "only"):
        try:
            result = hx.solve(problem, name, LONG_S, max_steps=6, pricer=Faster, progress=False)
        except hx.InputError as error:
            if not re.search("for our own cost model only, not for Faster; use ", str(error)):
                raise
        else:
            assert (result.bound_s, result.restricted_bound) == (0.0, None), name
            assert result.status in (Status.FEASIBLE, Status.NOT_FOUND), name


def patch_price(problem: hx.Problem) -> PlanPricer:
    pricer = PlanPricer(problem)
    pricer.price = Faster(problem).price  # type: ignore[method-assign]
    return pricer


class Subclass(PlanPricer):
    """Ours by inheritance."""

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        cost = super().price(plan, pipelines)
        return replace(cost, step_time_s=cost.step_time_s / 3)


def copy_ours(problem: hx.Problem) -> PlanPricer:
    """A copy of ours, over stages of a faster framework."""
    other = copy(PlanPricer(problem))
    other.stages = PlanPricer(problem, replace(default_framework(), gradient_sums="beside")).stages
    return other


def of_other_stages(problem: hx.Problem) -> PlanPricer:
    """A copy of ours, over stages of a smaller workload."""
    other = copy(PlanPricer(problem))
    other.stages = PlanPricer(problem.replace(workload=replace(problem.workload, seq_len=64))).stages
    return other


def with_framework(**changes: Any) -> Callable[[hx.Problem], PlanPricer]:
    """Ours over a framework that differs so from our own runtime."""
    return lambda problem: PlanPricer(problem, replace(default_framework(), **changes))


def steps_of_another(problem: hx.Problem) -> PlanPricer:
    """A copy of ours that ends steps as another framework does."""
    other = copy(PlanPricer(problem))
    other.framework = replace(default_framework(), weight_gathers="after")
    return other


STRANGERS: dict[str, Callable[[hx.Problem], Any]] = {
    "a wrapper": Foreign,
    "a subclass": Subclass,
    "an object with another price": patch_price,
    "another network": lambda problem: PlanPricer(problem, network=Alone()),
    "another framework": with_framework(gradient_sums="beside"),
    "a framework that gathers early": with_framework(weight_gathers="beside"),
    "a framework that could be bounded": with_framework(gradient_sums="after"),
    "a framework without sequence parallelism": with_framework(sequence_parallel=False),
    "a copy over other stages": copy_ours,
    "a copy over stages of another problem": of_other_stages,
    "a copy with steps of another framework": steps_of_another,
    "another problem": lambda problem: PlanPricer(problem.replace(space=hx.Space(max_tp=1))),
    "no pricer": lambda problem: problem,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_a_pricer_is_decides_not_what_it_says(stranger: str) -> None:
    problem = small_problem(0)
    assert our_model(STRANGERS[stranger](problem), problem) is None


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ours_is_known(sequence_parallel: bool) -> None:
    problem = small_problem(0)
    problem = problem.replace(workload=replace(problem.workload, sequence_parallel=sequence_parallel))
    ours = PlanPricer(problem)
    again = hx.Problem(problem.cluster, problem.model, problem.workload, problem.space)
    for pricer in (ours, copy(ours)):
        pricer.price(hx.solve(problem, "random", LONG_S, max_steps=3, progress=False).found())
        assert our_model(pricer, problem) is our_model(pricer, again) is pricer
    assert bound_under_s(ours, problem) == lower_bound_s(ours) > 0
    assert bound_under_s(Foreign(problem), problem) == 0.0
    result = hx.solve(problem, "exact", LONG_S, max_steps=400, pricer=PlanPricer, progress=False)
    plain = hx.solve(problem, "exact", LONG_S, max_steps=400, progress=False)
    assert (result.plan, result.bound_s, result.status) == (plain.plan, plain.bound_s, plain.status)
    assert "pricer" not in result.found().solver


class Fickle(Foreign):
    """Never the same price twice."""

    calls = itertools.count(1)

    def step_s(self, plan: Plan, cost: Cost) -> float:
        return cost.step_time_s * (1 + 1e-3 * next(self.calls))


class Nothing(Foreign):
    """A step takes no time."""

    def step_s(self, plan: Plan, cost: Cost) -> float:
        return 0.0


class Boastful(Foreign):
    """A bound above its prices."""

    @property
    def features(self) -> PricerFeatures:
        return PricerFeatures(bound_s=1e9)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Fickle, "pricer: Fickle: it prices one plan at"),
        (Nothing, "pricer: Nothing: it prices a plan at 0 s a step"),
        (Boastful, r"pricer: Boastful: it states a lower bound of 1e\+09 s, and prices a plan at"),
    ],
)
def test_a_pricer_at_fault_is_named_not_the_solver(made: type[Foreign], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=f"^{message}"):
        hx.solve(small_problem(0), "random", LONG_S, max_steps=5, pricer=made, progress=False)


class FalseStages(Foreign):
    """Other stages than those that it says it has."""

    def stage_s(self, *how: Any) -> tuple[float, float]:
        forward_s, backward_s = self._ours.stage_s(*how)
        return 2 * forward_s, backward_s


class FalseMemory(Foreign):
    """Another memory than that which it says it has."""

    def max_layers(self, *how: Any) -> int:
        return self._ours.max_layers(*how) - 1


class NoReplicas(Foreign):
    """No price for what it says it prices."""

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        if any(len(stage.parallelism.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages):
            raise KeyError("replicas")
        return super().price(plan, pipelines)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (FalseStages, "its features state what holds: features.stages says that its stages are ours"),
        (FalseMemory, "features.stages says that its memory is ours"),
        (NoReplicas, "its features state what holds: unexpected KeyError"),
        (Boastful, "its features state what holds: a bound of 1000000000.0 s"),
        (type("Mute", (Foreign,), {"features": None}), "features are None"),
    ],
)
def test_check_pricer_refuses_what_a_pricer_claims_wrongly(made: type[Foreign], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_pricer(made)
    assert message in str(caught.value)
