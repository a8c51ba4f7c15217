"""The contracts of solvers and of cost models, each checked by one call in the tests of any package.

    from hexiopt.testing import check_solver

    def test_contract():
        check_solver("mine")

Our own solvers keep the same contract.
"""

import itertools
import math
import os
import random
from collections.abc import Callable, Mapping
from functools import partial

from hexiopt.cost.cost import violations
from hexiopt.cost.executors.limits import MemoryLimits
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer, PricerFeatures
from hexiopt.frame import Frame
from hexiopt.plan.parallelism import Replica, Replicated
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import holding
from hexiopt.solving import Budget, Pricer, Progress, Solver
from hexiopt.solving.referee import InvalidPlanError
from hexiopt.solving.registry import make_solver, pricer_maker
from hexiopt.solving.result import Result, Status

__all__ = ["assert_sound", "check_pricer", "check_solver", "problems"]

LONG_S = 3600.0  # a time limit that a search of few steps never reaches
SHORT_S = 2.0
LATE_S = 10.0  # tolerated after the time limit, on a busy machine
STEPS = 20


def problems(*, sequence: bool = False) -> dict[str, Problem]:
    """Small feasible problems by their special feature: two GPU types, little memory, one machine, constraints."""
    model = ModelSpec(
        name="small",
        architecture="llama",
        num_layers=6,
        hidden_size=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=2816,
        vocab_size=8000,
        max_positions=4096,
    )
    mixed = Cluster.of({"a100_40gb_sxm": 4, "rtx_3090": 4}, inter_gb_per_s=5, gpus_per_machine=2, name="mixed")
    plain = Problem(mixed, model, Workload(global_batch=16, seq_len=512), Space(sequence=sequence))
    free = plain.space
    large = model.replace(num_layers=24, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11_008)
    return {
        "two GPU types": plain,
        "one machine": plain.replace(cluster=Cluster.of({"rtx_4090": 4}, name="one")),
        "little memory": plain.replace(model=large, workload=plain.workload.replace(seq_len=4096)),
        "no tensor parallelism": plain.replace(space=free.replace(max_tp=1)),
        "two pipelines": plain.replace(space=free.replace(num_pipelines=2)),
        "excluded devices": plain.replace(space=free.replace(exclude=("rtx_3090-0:1", "a100_40gb_sxm-1"))),
        "equal layers": plain.replace(space=free.replace(uneven_layers=False)),
        "fixed choices": plain.replace(
            workload=plain.workload.replace(schedule="gpipe", recompute="full", optimizer_sharding=0)
        ),
    }


def hopeless(*, sequence: bool = False) -> Problem:
    """A problem without a feasible plan: the model is too large for all devices together, though each layer fits."""
    plain = problems(sequence=sequence)["two GPU types"]
    return plain.replace(model=plain.model.replace(num_layers=9000))


def assert_sound(problem: Problem, result: Result) -> None:
    """Check that `result` has a plan that obeys every rule and fits, the price of that plan, a valid bound, and a
    consistent trajectory. Raises AssertionError.
    """
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL), result.reason
    assert result.plan is not None
    assert result.cost is not None
    priced = PlanPricer(problem).price(result.plan)
    broken = violations(problem, result.plan, priced)
    assert not broken, f"the plan breaks the rule {broken[0]}"
    assert math.isclose(result.cost.step_time_s, priced.step_time_s, rel_tol=1e-12), "the price is not that of the plan"
    assert 0.0 <= result.bound_s <= priced.step_time_s * (1 + 1e-12), "the bound is above the plan's own price"
    assert set(result.plan.devices()) <= set(problem.usable_devices), "the plan uses excluded devices"
    bests = [point.step_time_s for point in result.trajectory]
    assert bests == sorted(set(bests), reverse=True), "the trajectory gets worse"
    assert not bests or math.isclose(bests[-1], priced.step_time_s, rel_tol=1e-12), "the trajectory ends elsewhere"
    times = [point.runtime_s for point in result.trajectory]
    assert times == sorted(times), "the trajectory goes back in time"
    assert not times or 0.0 <= times[0] <= times[-1] <= result.runtime_s, "the trajectory is outside the search"
    assert result.reason == "", f"a plan, and yet a reason why there is none: {result.reason}"


def check_solver(solver: str | Solver | type, steps: int = STEPS, **options: object) -> Frame:
    """Check that a solver, given by name, class or object, keeps the contract of all solvers; returns a table.

    The solver must return valid plans with correct prices on small problems, or decline with a reason; find the same
    plan again for the same seed and `steps`; count its steps; keep its time limit; stop when its listener asks for it;
    and explain why there is no plan. Raises AssertionError with every broken rule.
    """
    refereed = make_solver(solver, options)
    rules: dict[str, Callable[[Solver, int], str]] = {
        "its plans are valid and truly priced": _valid,
        "the same seed and steps give the same plan": _repeats,
        "it counts its steps and keeps to them": _counts,
        "it keeps the time limit": _in_time,
        "it tells true progress, and stops when told": _listens,
        "it says why there is no plan": _explains,
    }
    return _judge(f"solver {refereed.name}", {rule: partial(check, refereed, steps) for rule, check in rules.items()})


def check_pricer(pricer: str | Callable[[Problem], Pricer]) -> Frame:
    """Check that a cost model answers what searches ask; returns a table.

    `pricer` is a declared name, or a class or function that makes a cost model for a problem. Prices must be positive,
    repeatable, and consistent with those of pipelines; stages with more layers must take longer; fewer layers must fit
    with larger micro-batches; and what its `features` state must hold. Raises AssertionError with every broken rule.
    """
    make = pricer_maker(pricer)
    problem = problems()["two GPU types"]
    model = make(problem)
    rules: dict[str, Callable[[], str]] = {
        "it prices plans, the same way each time": lambda: _prices(make, problem),
        "its stages take longer with more layers": lambda: _stages_grow(model),
        "its memory shrinks with the micro-batch": lambda: _memory_shrinks(model),
        "its features state what holds": lambda: _features_hold(model),
    }
    return _judge(f"pricer {getattr(pricer, '__name__', pricer)}", rules)


def _judge(name: str, rules: Mapping[str, Callable[[], str]]) -> Frame:
    rows, broken = [], []
    for rule, check in rules.items():
        try:
            rows.append((rule, check()))
        except (AssertionError, InvalidPlanError) as error:
            broken.append(f"{rule}: {' '.join(str(error).split()) or 'it does not'}")
        except Exception as error:  # foreign code may raise anything
            broken.append(f"{rule}: unexpected {type(error).__name__}: {error}")
    if broken:
        lines = "\n".join(f"- {line}" for line in broken)
        raise AssertionError(f"{name} breaks {len(broken)} of {len(rules)} rules\n{lines}")
    return Frame(("rule", "checked"), tuple(rows), title=name)


def _suitable(solver: Solver) -> dict[str, Problem]:
    """The problems that the solver's capabilities cover; if they cover none, a smaller one that they do."""
    able = solver.capabilities
    shipped = problems(sequence=able.sequence == "only")
    suitable = {name: problem for name, problem in shipped.items() if _covers(solver, problem)}
    if not suitable:  # fewer devices or layers than in any of them
        plain = shipped["one machine"]
        small = plain.replace(model=plain.model.replace(num_layers=min(6, able.max_layers or 6)))
        cluster = Cluster.of({"rtx_4090": min(4, able.max_devices or 4)}, name="one")
        suitable = {"one machine": small.replace(cluster=cluster)}
    return suitable


def _first(solver: Solver) -> Problem:
    return next(iter(_suitable(solver).values()))


def _declines(result: Result) -> bool:
    """Whether the solver found no plan. Raises AssertionError unless it then gives a reason in one line."""
    if result.plan is not None:
        return False
    assert result.status in (Status.NOT_FOUND, Status.INFEASIBLE), f"no plan, and status {result.status}"
    assert result.reason.strip(), "no plan, and no reason"
    assert "\n" not in result.reason, "the reason is more than one line"
    return True


def _valid(solver: Solver, steps: int) -> str:
    solved, suitable = 0, _suitable(solver)
    for name, problem in suitable.items():
        try:
            result = solver.solve(problem, Budget(LONG_S, steps))
            if not _declines(result):
                assert_sound(problem, result)
                solved += 1
        except (AssertionError, InvalidPlanError) as error:
            raise AssertionError(f"on the problem with {name}: {error}") from None
    assert solved, f"it declines all {len(suitable)} problems"
    return f"{solved} of {len(suitable)} problems, {len(suitable) - solved} declined"


def _repeats(solver: Solver, steps: int) -> str:
    problem = _first(solver)
    state = random.getstate()
    try:
        once = solver.solve(problem, Budget(LONG_S, steps), seed=7)
        random.seed(1)  # global state must not matter
        again = solver.solve(problem, Budget(LONG_S, steps), seed=7)
    finally:
        random.setstate(state)
    assert (once.plan, once.objective, once.steps) == (again.plan, again.objective, again.steps), (
        f"{once.objective:.9g} s after {once.steps} steps, then {again.objective:.9g} s after {again.steps}"
    )
    return f"seed 7, {steps} steps"


def _counts(solver: Solver, steps: int) -> str:
    few = max(1, steps // 4)
    counted = [solver.solve(_first(solver), Budget(LONG_S, most)).steps for most in (few, steps)]
    assert counted[0] <= few, f"{counted[0]} steps of {few}"
    assert counted[1] <= steps, f"{counted[1]} steps of {steps}"
    return f"{counted[1]} of {steps} steps"


def _in_time(solver: Solver, steps: int) -> str:
    began_s = _busy_s()
    result = solver.solve(_first(solver), Budget(SHORT_S))
    late_s = min(result.runtime_s, _busy_s() - began_s) - SHORT_S  # others may keep the processor busy
    assert late_s <= LATE_S, f"{result.runtime_s:.1f} s of {SHORT_S:g} s"
    return f"{min(result.runtime_s, SHORT_S):.2g} s of {SHORT_S:g} s"


def _busy_s() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _listens(solver: Solver, steps: int) -> str:
    reports: list[Progress] = []

    def listen(progress: Progress) -> bool:
        reports.append(progress)
        return False

    problem = _first(solver)
    result = solver.solve(problem, Budget(SHORT_S), on_progress=listen)
    assert len(reports) <= 1, f"it went on, and told {len(reports)} times"
    if not _declines(result):
        assert_sound(problem, result)
    for progress in reports:
        assert progress.bound_s <= progress.best_s, "it tells a bound above its best plan"
        assert result.objective <= progress.best_s, "its result is worse than what it told"
    return "stopped" if reports else "it ended before it told anything"


def _explains(solver: Solver, steps: int) -> str:
    problem = hopeless(sequence=solver.capabilities.sequence == "only")
    if not _covers(solver, problem):
        return "not asked: it takes no problem so large"
    result = solver.solve(problem, Budget(LONG_S, steps))
    assert _declines(result), "it found a plan for a model that does not fit"
    assert (result.cost, result.trajectory) == (None, ()), "no plan, and yet a cost or a trajectory"
    return result.reason


def _covers(solver: Solver, problem: Problem) -> bool:
    able = solver.capabilities
    sizes = (able.max_devices, len(problem.usable_devices)), (able.max_layers, problem.model.num_layers)
    return all(most is None or size <= most for most, size in sizes)


def _plain_plan(problem: Problem) -> Plan:
    """Two pipelines of two single-GPU stages."""
    layers, half = problem.model.num_layers, problem.workload.global_batch // 2
    first = [machine[0] for machine in problem.usable_by_machine.values()]
    ends = (
        (Stage.of((first[k],), 0, layers // 2) for k in (0, 1)),
        (Stage.of((first[k],), layers // 2, layers) for k in (2, 3)),
    )
    return Plan(tuple(Pipeline(stages, half) for stages in zip(*ends, strict=True)))


def _prices(make: Callable[[Problem], Pricer], problem: Problem) -> str:
    plan, pricer = _plain_plan(problem), make(problem)
    cost = pricer.price(plan)
    assert 0.0 < cost.step_time_s < math.inf, f"a step of {cost.step_time_s} s"
    pipelines = pricer.pipelines(plan)
    assert len(pipelines) == len(plan.pipelines), f"{len(pipelines)} prices for {len(plan.pipelines)} pipelines"
    latest_s = max(pipeline.end_s for pipeline in pipelines)
    assert latest_s <= cost.step_time_s * (1 + 1e-9), "a pipeline ends after the step"
    assert pricer.price(plan, pipelines) == cost, "the price from priced pipelines is another"
    assert make(problem).price(plan) == cost, "another pricer of the kind gives another price"
    return f"{cost.step_time_s:.4g} s"


def _stages_grow(pricer: Pricer) -> str:
    group = pricer.tp_group(pricer.problem.usable_devices[:1])
    hash(group)
    for policy in pricer.policies():
        times = [sum(pricer.stage_s(group, n, False, False, 1, policy)) for n in (1, 2, 4)]
        assert 0.0 < times[0] < times[1] < times[2], f"{times} s for 1, 2 and 4 layers with recompute {policy}"
    devices = pricer.problem.usable_devices
    assert pricer.message_s(devices[:1], devices[-1:], 1) >= 0.0, "a message of negative time"
    return ", ".join(pricer.policies())


def _features_hold(pricer: Pricer) -> str:
    """Check that stages are ours if `features` says so, replicas have a price, and no plan is below its bound."""
    features, problem = pricer.features, pricer.problem
    assert isinstance(features, PricerFeatures), f"features are {features!r}, no hexiopt.cost.pricer.PricerFeatures"
    devices = problem.usable_devices
    if (stages := features.stages) is not None:
        limits = MemoryLimits(stages)
        for ends in ((devices[0],), (devices[-1],), devices[:2]):
            ours, group, shards = stages.tp_group(ends), pricer.tp_group(ends), StateSharding(1, 2)
            for policy, size in itertools.product(pricer.policies(), (1, 4)):
                seconds = sum(stages.stage_s(ours, 2, True, False, size, (policy,)))
                stage_s = sum(pricer.stage_s(group, 2, True, False, size, policy))
                assert math.isclose(seconds, stage_s, rel_tol=1e-9), (
                    f"features.stages says that its stages are ours; one takes {stage_s:.6g} s, ours {seconds:.6g} s"
                )
                setting = True, False, size, policy, holding(2), shards
                most = pricer.max_layers(group, *setting), limits.max_layers(ours, *setting)
                assert most[0] == most[1], (
                    f"features.stages says that its memory is ours; {most[0]} layers, not {most[1]}"
                )
    plans = [_plain_plan(problem), _replica_plan(problem)] if features.replicas else [_plain_plan(problem)]
    prices = [pricer.price(plan).step_time_s for plan in plans]
    assert features.bound_s <= min(prices) * (1 + 1e-9), (
        f"a bound of {features.bound_s} s, and a plan of {min(prices)} s"
    )
    claims = [name for name in ("stages", "replicas", "sends_occupy_stages", "bound_s") if getattr(features, name)]
    return ", ".join(claims) or "none"


def _replica_plan(problem: Problem) -> Plan:
    """One pipeline whose first stage has two replicas."""
    layers, half = problem.model.num_layers, problem.model.num_layers // 2
    a, b, c = [machine[0] for machine in problem.usable_by_machine.values()][:3]
    first = Stage(Replicated((Replica((a,), 1), Replica((b,), 1))), ((0, half),), ("none",))
    return Plan((Pipeline((first, Stage.of((c,), half, layers)), problem.workload.global_batch // 2, 2),))


def _memory_shrinks(pricer: Pricer) -> str:
    group, alone = pricer.tp_group(pricer.problem.usable_devices[:1]), StateSharding(0, 1)
    most = [pricer.max_layers(group, True, True, size, "none", holding(1), alone) for size in (1, 4, 16)]
    assert most == sorted(most, reverse=True), f"at most {most} layers at micro-batches of 1, 4 and 16"
    return f"{most[0]} layers at a micro-batch of 1"
