"""For which problems and pricers the arrays speak."""

from typing import TypeGuard

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from hexiopt.solving import Pricer
from solvers.compiled.layers import MOST_GROUPS, MOST_IN_FLIGHT
from solvers.compiled.plans import SIMULATED
from solvers.compiled.tables import MOST_DEVICES, MOST_UNEVEN, devices_alike
from solvers.core.zero import LOCKSTEP

_MOST_LINKED = 256  # machines of a cluster that states links between machines: each is a place of its own
_MOST_LAYERS = 1024
_MOST_SIZES = 16


def unsupported(problem: Problem, pricer: Pricer) -> str | None:
    """Why the tables do not speak for `problem` and `pricer`, in words; None where they do.

    They then estimate the price of every candidate, but not all plans of the space are candidates:
    replicas, interleaved stages and sequence layouts are not, nor is ZeRO-2 or 3.
    """
    if not has_tables(pricer):
        return f"the pricer is a {type(pricer).__name__} of another kind, which has no tables"
    if not problem.space.uneven_structure:
        return "all pipelines must be alike"
    if not set(SIMULATED) & set(problem.schedules):
        return "no schedule that plans may have is compiled"
    if min(sharding_stages(problem.workload)) >= LOCKSTEP:
        return "every plan works in lockstep"
    return _too_large(problem, pricer)


def has_tables(pricer: Pricer) -> TypeGuard[PlanPricer]:
    """Whether a pricer is ours, messages share the network while they are under way, and sequences are whole."""
    if type(pricer) is not PlanPricer:
        return False
    return isinstance(pricer.network, FairShares) and pricer.stages.context is None


def _too_large(problem: Problem, pricer: PlanPricer) -> str | None:
    cluster, workload = problem.cluster, problem.workload
    if max(machine.num_gpus for machine in cluster.machines) > MOST_DEVICES:
        return f"a machine has more than {MOST_DEVICES} devices"
    if any(not devices_alike(machine) and machine.num_gpus > MOST_UNEVEN for machine in cluster.machines):
        return f"links or speeds differ inside a machine of more than {MOST_UNEVEN} devices"
    if cluster.links and len(cluster.machines) > _MOST_LINKED:
        return f"links are stated in a cluster of more than {_MOST_LINKED} machines"
    if problem.model.num_layers > _MOST_LAYERS:
        return f"the model has more than {_MOST_LAYERS} layers"
    if len(problem.space.micro_batch_sizes(workload.global_batch)) > _MOST_SIZES:
        return f"micro-batches may have more than {_MOST_SIZES} sizes"
    all_forwards_first = all(schedule.all_forwards_first for schedule in problem.schedules)
    if all_forwards_first and workload.global_batch > MOST_IN_FLIGHT:
        return f"GPipe may hold more than {MOST_IN_FLIGHT} micro-batches"
    kinds = {machine.kind: machine for machine in cluster.machines}.values()
    rows = [len(problem.space.allowed_tp(m.num_gpus)) if devices_alike(m) else 1 << m.num_gpus for m in kinds]
    return f"TP groups may be of more than {MOST_GROUPS} classes" if sum(rows) > MOST_GROUPS else None
