"""Why no plan was found: the binding device, what it lacks in GiB, and the nearest change that fits."""

from dataclasses import replace

from hexiopt.cost.model import CostModel
from hexiopt.problem import Problem
from hexiopt.result import Result, Status
from hexiopt.space import recompute_policies, sharding_stages
from hexiopt.units import GIB
from solvers.base import Search
from solvers.starts import machine_devices
from solvers.structure import Builder


def explain(search: Search, builder: Builder) -> Result:
    """The result of `search`; without a plan, with the reason, and `infeasible` where that is proven."""
    result = search.result()
    if result.plan is not None or not isinstance(search.pricer, CostModel):
        return result
    shortfall = _total_shortfall(search.problem, search.pricer)
    if shortfall is not None:
        return replace(result, status=Status.INFEASIBLE, reason=shortfall)
    return replace(result, reason=_not_found(search))


def _total_shortfall(problem: Problem, model: CostModel) -> str | None:
    """A proof that nothing fits: even one pipeline of all devices, at its leanest, holds too few layers."""
    policies, shards = recompute_policies(problem.workload), 1
    if sharding_stages(problem.workload)[-1]:
        shards = min(len(problem.usable_devices), problem.workload.global_batch)
    layers = 0
    best: tuple[float, int, str] | None = None
    for machine, own in machine_devices(problem).items():
        allowed = problem.space.allowed_tp(len(own))
        room = 0
        for tp in allowed:
            site = model.site(own[:tp])
            held = [max(0, model.max_layers(site, False, False, 1, policy, 1, shards)) for policy in policies]
            room = max(room, max(held) * (len(own) // tp))
            memory = min(
                model.memory_model(site, 1).stage(1, False, False, policy, 1, shards).total for policy in policies
            )
            excess = memory - site.gpu.usable_memory_bytes
            if best is None or excess < best[0]:
                best = (excess, own[0], site.gpu.name)
        layers += room
    needed = problem.model.num_layers
    if layers >= needed or best is None:
        return None
    excess, device, gpu = best
    name = problem.cluster.device_name(device)
    if excess > 0:
        return (
            f"no plan fits: one layer of {problem.model.name} does not fit any device; the nearest, {name} ({gpu}), "
            f"lacks {excess / GIB:.2f} GiB even at its largest TP degree with {policies[-1]} recompute; "
            f"{_remedy(problem)}"
        )
    share = _layer_gib(problem, model, device)
    return (
        f"no plan fits: all devices together hold {layers} of the {needed} layers of {problem.model.name}; "
        f"memory binds everywhere, {name} ({gpu}) first, and {(needed - layers) * share:.2f} GiB are missing; "
        f"{_remedy(problem)}"
    )


def _layer_gib(problem: Problem, model: CostModel, device: int) -> float:
    memory = model.memory_model(model.site((device,)), 1)
    policy = recompute_policies(problem.workload)[-1]
    one, two = (memory.stage(n, False, False, policy, 1).total for n in (1, 2))
    return (two - one) / GIB


def _not_found(search: Search) -> str:
    problem = search.problem
    if search.nearest is not None:
        plan, cost = search.nearest
        p, s = cost.binding_stage()
        stage = plan.pipelines[p].stages[s]
        device = problem.cluster.device_name(stage.devices[0])
        return (
            f"no plan found in {search.steps} steps; in the nearest one device {device} lacks "
            f"{cost.excess_bytes / GIB:.2f} GiB; {_remedy(problem)}, or a longer solver.time_limit_s"
        )
    return (
        f"no plan found in {search.steps} steps: no arrangement tried has room for all "
        f"{problem.model.num_layers} layers within the constraints; {_remedy(problem)}, or a longer solver.time_limit_s"
    )


def _remedy(problem: Problem) -> str:
    """The nearest change that may fit, by what the workload and the space still withhold."""
    workload, space = problem.workload, problem.space
    if recompute_policies(workload) != ("full",) and "full" not in recompute_policies(workload):
        return "try workload.recompute=full"
    if 1 not in sharding_stages(workload):
        return "try workload.optimizer_sharding=1"
    if space.num_pipelines is not None or space.num_stages is not None or space.max_tp is not None:
        return "try without constraints"
    if workload.seq_len > 1024:
        return f"try workload.seq_len={workload.seq_len // 2}, a smaller model, or more memory"
    return "try a smaller model, or more memory"
