"""Why no plan was found: the binding device, how many GiB it lacks, and the smallest change of the request that
fits.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from hexiopt.bounds.stage_cells import cells_across, shares_across
from hexiopt.cost.cost import copy_costs
from hexiopt.cost.executors.memory import UNSHARDED, StateSharding
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, default_schedule, recompute_policies, sharding_stages
from hexiopt.problem.workload import AUTO
from hexiopt.schedules.in_flight import holding
from hexiopt.solving.result import Result, Status
from hexiopt.units import GIB
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.core.zero import first_stage, requires_lockstep
from solvers.frame.starts import chain_partitions, cut

_TRIED = 24  # most rule-based partitions completed to see whether a changed problem has a plan
_PLACED = 24_000  # devices in all of them together; the time is proportional, a second or two
_MORE_MACHINES = tuple(sorted(base << k for k in range(6) for base in (1, 3)))


def proven_infeasible(search: Search) -> bool:
    """Whether counting the layers that fit each device proves that no plan fits, so that a search would be
    pointless.
    """
    return _memory_proof(search) is not None


def conclude(search: Search) -> Result:
    """The result of `search`; without a plan, it says why, and is `infeasible` where that is proven.

    Where the search met no plan, the plainest plans are priced. If one fits, it is the result, provided the solver
    searches the whole plan space; a solver with a smaller space (`search.remedy`) only reports that such plans exist.
    """
    result, remedy = search.result(), search.remedy
    if result.plan is not None:
        return result
    if search.reason:
        return replace(result, reason=search.reason)
    proof = _memory_proof(search)
    if proof is not None:
        reason = f"no plan fits: {proof}; {_nearest(search)}; {_states(search.problem)}"
        return replace(result, status=Status.INFEASIBLE, reason=reason)
    ended = search.stopped or search.spent >= 1.0 or search.left_s() <= 0.0
    met = _closest_to_fitting(search)
    if search.plan is not None:
        if remedy is None:
            return search.result()
        met = "the plain plans that fit are outside its plan space"
        if ended:
            met, remedy = "the budget ended before one of those that fit was met", f"{_more(search)}; {remedy}"
    if remedy is None and search.our_model is not None:
        remedy = _nearest(search)
    return replace(result, reason="; ".join(filter(None, (f"no plan found in {search.steps} steps: {met}", remedy))))


def _states(problem: Problem) -> str:
    """In words: the states of the model next to the memory of all devices, and what tells a model that fits."""
    model, parameters, each = problem.model, problem.parameters, problem.workload.states.total
    memory = sum(
        len(devices) * problem.cluster.machines[machine].gpu.usable_memory_bytes
        for machine, devices in problem.usable_by_machine.items()
    )
    need, rest = f"{parameters.bytes / GIB:.4g}", f"GiB of {memory / GIB:.4g} GiB; hexiopt fit says what does"
    if parameters.frozen_groups or parameters.end_states != problem.workload.states:
        return f"states ({parameters.in_words}) of {need} {rest}"
    return f"states of {each:g} B a parameter × {model.num_params / 1e9:.3g} B = {need} {rest}"


def _more(search: Search) -> str:
    """In words: which part of the budget ran out, and to raise it."""
    most = search.budget.max_steps
    if most is not None and search.left_s() > 0.0:
        return f"raise solver.max_steps above {most}"
    return f"raise solver.time_limit_s above {search.budget.time_limit_s:g}"


def _memory_proof(search: Search) -> str | None:
    """`memory_infeasibility`, where plans are priced by our cost model."""
    ours = search.our_model
    return None if ours is None else memory_infeasibility(search.problem, ours.stages)


def memory_infeasibility(problem: Problem, model: StageModel) -> str | None:
    """The proof, in words, that no plan fits memory, if counting the layers that fit gives one; else None.

    Every device holds at most as many layers as fit with one micro-batch in flight, at the best TP degree and the
    policy that needs least memory; all devices together must hold the model once. Sharding does not help in total: n
    holders of a layer need at least the states of one, and n times its activations; it only allows fractions of layers,
    as do replicas in several machines that share experts. Layers of several kinds count by their bytes on some device:
    another holds at most what it would if all were of the kind that needs least of it beside that. Devices with a
    sequence layout hold the states of whole layers each and share their activations, so where layouts are allowed only
    states count. Where replicas on any devices may share experts in any numbers, nothing is proved.
    """
    if problem.space.uneven_experts and problem.model.shares_experts:
        return None
    layouts, most = problem.space.sequence, len(problem.usable_devices)
    zero = sharding_stages(problem.workload)[-1]
    widest = StateSharding(zero, most if layouts else min(most, problem.workload.global_batch))
    whole = not zero and len(problem.model.kinds) == 1 and not shares_across(problem)
    shares, needed = problem.model.weight_of_kinds, problem.model.num_layers
    total, weights, held_by = 0.0, list[float](), dict[object, float]()
    nearest = dict.fromkeys([kind for kind, share in enumerate(shares) if share], (math.inf, 0, ""))
    mean_gib, roomiest = 0.0, (math.inf, 0, "")
    for machine, own in problem.usable_by_machine.items():
        key = (problem.cluster.machines[machine].kind, len(own))
        if key not in held_by:
            held: dict[int, float] = {}  # layers that a group of devices can hold, by their number
            for cell, count in _holders(problem, model, machine):
                held.setdefault(count, 0.0)
                limit = cell.gpu.usable_memory_bytes
                for policy in recompute_policies(problem.workload):
                    sizes = [_LayerBytes.of(model, cell, kind, policy, layouts, widest) for kind in nearest]
                    weights = weights or [size.layer for size in sizes]
                    mean = sum(shares[kind] * weight for kind, weight in zip(nearest, weights, strict=True))
                    worth = max(weight / size.layer for weight, size in zip(weights, sizes, strict=True)) / mean
                    room = (limit - min(size.fixed for size in sizes)) * worth * (1 + 1e-9)
                    held[count] = max(held[count], (math.floor(room) if whole else room) * count / cell.tp)
                    for kind, size in zip(nearest, sizes, strict=True):
                        nearest[kind] = min(nearest[kind], (size.sharded - limit, own[0], cell.gpu.name))
                    excess = max(size.sharded for size in sizes) - limit
                    if excess < roomiest[0]:
                        roomiest, mean_gib = (excess, own[0], cell.gpu.name), cell.tp / worth / GIB
            held_by[key] = _most_layers(held, len(own))
        total += held_by[key]
    excess, device, gpu = max(nearest.values())
    if total >= needed and excess <= 0:
        return None
    if excess > 0:
        return (
            f"not one layer of {problem.model.name} fits a device; the nearest, {problem.cluster.device_name(device)} "
            f"({gpu}), lacks {excess / GIB:.2f} GiB even at its best TP degree"
        )
    _, device, gpu = roomiest
    return (
        f"all devices together have room for at most {math.floor(total)} of the {needed} layers of "
        f"{problem.model.name}; memory binds on every device, {problem.cluster.device_name(device)} ({gpu}) the "
        f"roomiest, and {(needed - total) * mean_gib:.2f} GiB are missing"
    )


def _holders(problem: Problem, model: StageModel, machine: int) -> Iterator[tuple[TpGroup, int]]:
    """The groups of devices that may hold layers with devices of `machine`, and how many of them at a time these are:
    TP groups, which hold a layer and its experts once, and one by one those of groups in several machines."""
    own = problem.usable_by_machine[machine]
    for tp in problem.space.allowed_tp(len(own)):
        yield model.tp_group(own[:tp]), tp
    if shares_across(problem):
        for replicas in problem.space.micro_batch_sizes(problem.workload.global_batch)[1:]:
            for cell in cells_across(model, machine, replicas):
                yield cell, 1


class _LayerBytes(NamedTuple):
    """Least bytes on each device of a group with one micro-batch in flight: of a layer of a kind, of what is beside
    layers, and of both where all who may hold the layer share its states."""

    layer: float
    fixed: float
    sharded: float

    @classmethod
    def of(
        cls, model: StageModel, cell: TpGroup, kind: int, policy: str, layouts: bool, widest: StateSharding
    ) -> "_LayerBytes":
        memory = model.memory_model(cell, cell.replicas if cell.degree else 1)
        count = len(model.problem.model.kinds)

        def used(num_layers: int, shards: StateSharding = UNSHARDED) -> float:
            if count == 1:
                found = memory.stage(num_layers, False, False, policy, holding(1), shards)
            else:
                of_kinds = [{policy: num_layers} if k == kind else {} for k in range(count)]
                found = memory.stage_of_kinds([of_kinds], False, False, holding(1), shards)
            return found.states if layouts else found.total

        one, layer = used(1), used(2) - used(1)
        return cls(layer, one - layer, used(1, widest))


def _most_layers(held: dict[int, float], devices: int) -> float:
    """The most layers on a machine of `devices` whose TP groups hold `held` layers by degree: an unbounded knapsack."""
    best = [0.0] * (devices + 1)
    for size in range(1, devices + 1):
        best[size] = max([best[size - 1], *(best[size - tp] + n for tp, n in held.items() if tp <= size)])
    return best[devices]


def _closest_to_fitting(search: Search) -> str:
    """In words: the plan met that is closest to fitting or, without one, the plainest plan that obeys the
    constraints.
    """
    problem = search.problem
    if search.closest_to_fitting is None:
        for plan in _plain_plans(problem):
            if not check(problem, plan):
                search.offer(plan)
    if search.closest_to_fitting is None:
        return "the TP degrees and numbers of pipelines and stages asked for do not go together"
    plan, cost = search.closest_to_fitting
    _, _, fullest, _ = max(copy_costs(plan, cost), key=lambda row: row[3].excess_bytes)
    device = problem.cluster.device_name(fullest[0])
    return f"in the nearest one device {device} lacks {cost.excess_bytes / GIB:.2f} GiB"


def _plain_plans(problem: Problem) -> Iterator[Plan]:
    """Equal pipelines of equal stages along the order of devices, with the least memory use; one for each TP degree."""
    space, workload, layers = problem.space, problem.workload, problem.model.num_layers
    machines = problem.usable_by_machine.values()
    for tp in sorted({t for own in machines for t in space.allowed_tp(len(own))}):
        groups = [group for own in machines if tp in space.allowed_tp(len(own)) for group in cut(own, tp)]
        pipelines = space.num_pipelines or 1
        stages = space.num_stages or min(layers, len(groups) // pipelines)
        equal = workload.global_batch % pipelines == 0
        zero = sharding_stages(workload)[-1] if equal else first_stage(problem)
        if pipelines > workload.global_batch or (requires_lockstep(problem) and not equal):
            continue
        if not stages or pipelines * stages > len(groups):
            continue
        ends = [layers * s // stages for s in range(stages + 1)]
        counts = [
            workload.global_batch // pipelines + (k < workload.global_batch % pipelines) for k in range(pipelines)
        ]
        policy = recompute_policies(workload)[-1]
        yield Plan(
            tuple(
                Pipeline(
                    tuple(Stage.of(groups[k * stages + s], ends[s], ends[s + 1], policy) for s in range(stages)),
                    counts[k],
                )
                for k in range(pipelines)
            ),
            default_schedule(workload),
            Sharding(zero),
        )


def _nearest(search: Search) -> str:
    network = None if search.our_model is None else search.our_model.network
    return nearest_change(search.problem, compiled=not isinstance(network, FairShares) or network.compiled)


def nearest_change(problem: Problem, *, compiled: bool = True) -> str:
    """In words: the smallest change of the request under which a plan was found to fit; `compiled` as of
    `FairShares`."""
    changes, left, words = list(_changes(problem)), _PLACED, "nothing"
    for turn, (changed, words) in enumerate(changes):
        devices = len(changed.usable_devices)
        fair = left // (devices * (len(changes) - turn))  # later changes share what earlier ones leave
        for fits in islice(_fitting(changed, compiled), min(max(fair, 1), _TRIED)):
            if fits:
                return f"it fits with {words}"
            left -= devices
        if left <= 0:
            break
    return f"no change was seen to fit (the last tried: {words}); choose a smaller model"


def _changes(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """Changed problems, the smallest change first, each with a description."""
    workload = problem.workload
    space = problem.space
    beside = " but for memory_headroom" if space.memory_headroom else ""  # which later changes keep
    if space.memory_headroom:
        yield replace(problem, space=replace(space, memory_headroom=0.0)), "constraints.memory_headroom=0"
    if (space.num_pipelines, space.num_stages, space.max_tp, space.exclude) != (None, None, None, ()):
        yield (
            replace(problem, space=replace(space, num_pipelines=None, num_stages=None, max_tp=None, exclude=())),
            f"the constraints left out{beside}",
        )
    free = Space(sequence=space.sequence, memory_headroom=space.memory_headroom)
    if space != free:
        yield replace(problem, space=free), f"all freedoms of the plan space and no constraints{beside}"
        problem = replace(problem, space=free)
    if workload.recompute not in (AUTO, "full"):
        workload = replace(workload, recompute=AUTO)
        yield replace(problem, workload=workload), "workload.recompute=auto"
    if workload.optimizer_sharding == "0":
        workload = replace(workload, optimizer_sharding=AUTO)
        yield replace(problem, workload=workload), "workload.optimizer_sharding=auto"
    if workload.gradient_bytes == 4 and workload.element_bytes == 2:
        yield replace(problem, workload=replace(workload, gradient_bytes=2)), "workload.gradient_bytes=2"
    stored, beside = workload, ""
    if workload.adapters is not None and workload.lora.storage == "16bit":
        stored, beside = replace(workload, lora=replace(workload.lora, storage="nf4")), " workload.lora.storage=nf4"
        yield replace(problem, workload=stored), beside.strip()
    for factor in (2, 4, 8):
        if workload.seq_len // factor >= 512:
            shorter = replace(stored, seq_len=workload.seq_len // factor)
            yield replace(problem, workload=shorter), f"workload.seq_len={shorter.seq_len}{beside}"
    yield from _larger_clusters(replace(problem, workload=workload))


def _larger_clusters(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """Clusters with 1, 2, 3, 4, 6, 8, 12, ... more machines of the kind that has most memory."""
    machine = max(problem.cluster.machines, key=lambda m: m.num_gpus * m.gpu.usable_memory_bytes)
    for more in _MORE_MACHINES:
        extra = tuple(replace(machine, name=f"more-{k}", spec_name="more") for k in range(more))
        try:
            cluster = replace(problem.cluster, machines=problem.cluster.machines + extra)
        except InputError:  # a single machine without a network: it is unknown how more of them would be connected
            return
        plural = "machine" if more == 1 else "machines"
        words = f"{more} more {plural} like {machine.name} ({machine.num_gpus} × {machine.gpu.name})"
        yield replace(problem, cluster=cluster), words


def _fitting(problem: Problem, compiled: bool) -> Iterator[bool]:
    """For each rule-based partition in turn, whether its plan fits; nothing where no plan can."""
    try:
        model = PlanPricer(problem, network=FairShares(compiled))
    except InputError:
        return
    if memory_infeasibility(problem, model.stages) is not None:
        return
    completer = PlanCompleter(model)
    for partition in chain_partitions(problem):
        completed = completer.allowed(partition) and completer.complete(partition)
        priced = completer.price(completed) if completed else None
        yield priced is not None and priced.cost.fits
