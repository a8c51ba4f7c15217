"""The plans that a machine is tried with: one of a single device, and one of each way of communicating."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import Range
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B

_LEAST_LAYERS = 4  # that two stages of two ranges need
PlanOf = Callable[[ModelSpec, Workload], Plan]


@dataclass(frozen=True)
class TrialPlan:
    """A plan to try, and the problem that it solves; `name` says what is tried."""

    name: str
    problem: Problem
    plan: Plan


def trial_plans(cluster: Cluster, single: list[ModelSpec], several: ModelSpec, workload: Workload) -> list[TrialPlan]:
    """For a device, each of the `single` models; for more, every way that so many devices can share `several`.

    Models are cut to as many layers as fit the devices; those of which fewer than four do, or fewer than there are
    stages, are left out.
    """
    tried = [(f"{model.name}, 1 device", model, _stages_of([(0,)])) for model in single]
    tried += [
        (f"{several.name}, {name}", several, plan_of)
        for name, plan_of in _layouts(cluster.num_devices, several.num_layers)
    ]
    trials = []
    for name, model, plan_of in tried:
        fitting = _cut_to_fit(Problem(cluster, model, workload, Space(sequence=True)), plan_of)
        if fitting is not None:
            layers = fitting.model.num_layers
            what = name if layers == model.num_layers else f"{name}, {layers} layers"
            trials.append(TrialPlan(what, fitting, plan_of(fitting.model, workload)))
    return trials


def _cut_to_fit(problem: Problem, plan_of: PlanOf) -> Problem | None:
    stages = max(len(pipeline.stages) for pipeline in plan_of(problem.model, problem.workload).pipelines)
    for layers in range(problem.model.num_layers, max(stages, _LEAST_LAYERS) - 1, -1):
        cut = replace(problem, model=replace(problem.model, num_layers=layers))
        if PlanPricer(cut).price(plan_of(cut.model, cut.workload)).fits:
            return cut
    return None


def _layouts(num_devices: int, num_layers: int) -> Iterator[tuple[str, PlanOf]]:
    if num_devices < 2:
        return
    yield "2 stages", _stages_of([(0,), (1,)])
    yield "2 interleaved stages", _interleaved_plan
    yield "2 pipelines, ZeRO-1", _pipelines_of([[(0,)], [(1,)]])
    yield "TP 2", _stages_of([(0, 1)])
    yield "ring attention of 2", _in_sequence(all_to_all=False)
    yield "all-to-all of heads, 2", _in_sequence(all_to_all=True)
    if num_devices > 2:
        yield "a stage of TP 2, one of 1", _stages_of([(0, 1), (2,)])
        yield "a pipeline of 2 stages beside one device", _pipelines_of([[(0,), (1,)], [(2,)]])
    if num_devices > 3:
        whole = tuple(range(num_devices))
        yield f"{min(num_devices, num_layers)} stages", _stages_of([(device,) for device in whole[:num_layers]])
        yield "2 pipelines of 2 stages, ZeRO-1", _pipelines_of([[(0,), (1,)], [(2,), (3,)]])
        yield f"TP {num_devices}", _stages_of([whole])


def _cuts(num_layers: int, count: int) -> list[Range]:
    ends = [num_layers * k // count for k in range(count + 1)]
    return list(pairwise(ends))


def _pipelines_of(pipelines: list[list[tuple[int, ...]]]) -> PlanOf:
    """Pipelines of stages of TP groups; each takes an equal share of the batch."""

    def plan_of(model: ModelSpec, workload: Workload) -> Plan:
        share = workload.global_batch // len(pipelines)
        plan_pipelines = [
            Pipeline(
                tuple(
                    Stage(TensorParallel(devices), (layers,))
                    for devices, layers in zip(groups, _cuts(model.num_layers, len(groups)), strict=True)
                ),
                share,
            )
            for groups in pipelines
        ]
        return Plan(tuple(plan_pipelines), ONE_F_ONE_B, Sharding(int(len(pipelines) > 1)))

    return plan_of


def _stages_of(groups: list[tuple[int, ...]]) -> PlanOf:
    return _pipelines_of([groups])


def _interleaved_plan(model: ModelSpec, workload: Workload) -> Plan:
    ranges = _cuts(model.num_layers, 4)
    stages = tuple(Stage(TensorParallel((s,)), (ranges[s], ranges[s + 2])) for s in range(2))
    return Plan((Pipeline(stages, workload.global_batch),), INTERLEAVED)


def _in_sequence(*, all_to_all: bool) -> PlanOf:
    def plan_of(model: ModelSpec, workload: Workload) -> Plan:
        tokens, heads = workload.seq_len // 2, model.num_heads // 2
        if all_to_all:
            groups = [SequenceGroup((0, 1), (tokens, tokens), (heads, heads))]
        else:
            groups = [SequenceGroup((device,), (tokens,), (model.num_heads,)) for device in range(2)]
        stage = Stage(SequenceParallel(tuple(groups)), ((0, model.num_layers),))
        return Plan((Pipeline((stage,), workload.global_batch),), ONE_F_ONE_B)

    return plan_of
