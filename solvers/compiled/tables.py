"""What a problem costs, as flat arrays, made once from `StageModel` and `Network`. Seconds, bytes, parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hexiopt.cost.executors.communicators import RESERVED_GROUPS
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.states import products_s
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import WEIGHT_GATHERS
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, sharding_stages

MOST_DEVICES = 62  # of a machine: bits of a mask
MOST_UNEVEN = 8  # devices of a machine whose links or speeds differ: each mask has a row
MOST_PIPELINES, MOST_STAGES = 512, 64
_MANY = 1e15  # bytes beside which launches take nothing
SUMS = ("after", "beside", "by_part")  # when gradients are summed, by number

PROBLEM = np.dtype(
    [
        ("num_layers", "i8"),
        ("global_batch", "i8"),
        ("num_sizes", "i8"),
        ("num_policies", "i8"),
        ("most_pipelines", "i8"),
        ("most_stages", "i8"),
        ("num_pipelines", "i8"),  # 0: any
        ("num_stages", "i8"),  # 0: any
        ("policy", "i8"),  # the policy that all stages begin with where they have one together; -1: each its own
        ("mixed", "i8"),  # 1: layers of a stage may have two policies
        ("even_layers", "i8"),
        ("even_batch", "i8"),
        ("exact_batch", "i8"),  # even batches without a remainder
        ("one_degree", "i8"),
        ("only_forwards_first", "i8"),
        ("splits", "i8"),  # backwards, but where all forwards come first
        ("deep", "i8"),  # stages may have more in flight than 1F1B has there
        ("divided", "i8"),  # sequence parallelism: messages cross once
        ("sums", "i8"),  # number of `SUMS`
        ("tied", "i8"),
        ("num_interfaces", "i8"),  # of all machines: transmitting resources, as many receiving ones after them
        ("several_interfaces", "i8"),  # of a machine
        ("uneven_links", "i8"),
        ("sample_bytes", "f8"),  # a message's, for a sequence
        ("weight_bytes", "f8"),  # of a trained parameter, as all parameters here
        ("sum_bytes", "f8"),  # of a gradient on its way to a sum
        ("converted", "f8"),  # bytes that conversions of a gradient move, over those of an optimiser's step, by ZeRO
        ("converted_sharded", "f8"),
        ("layer_params", "f8"),  # of the model
        ("embedding_params", "f8"),  # that the first stage alone holds
        ("head_params", "f8"),  # that the last stage alone holds
        ("tied_params", "f8"),  # that both hold
        ("fragmentation", "f8"),  # share of activations, logits and buffers
        ("holder_s", "f8"),
        ("last_bucket", "f8"),
        ("gathers_beside", "f8"),  # number of `WEIGHT_GATHERS`
    ],
    align=True,
)
MACHINE = np.dtype(
    [
        ("kind", "i8"),  # equal for interchangeable machines
        ("first_device", "i8"),
        ("num_gpus", "i8"),
        ("usable", "i8"),  # mask
        ("num_interfaces", "i8"),
        ("first_interface", "i8"),  # its resource
        ("place", "i8"),  # in the network
        ("uneven", "i8"),  # row of `mask_group` and of the links inside; -1: devices are alike
        ("nic_latency_s", "f8"),
        ("port_s_per_byte", "f8"),  # of a device, to others of the machine
        ("port_latency_s", "f8"),
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("degree", "i8"),
        ("layer_bytes", "f8"),  # weights, frozen ones too, and gradients on the fullest rank, as all here
        ("embedding_bytes", "f8"),
        ("head_bytes", "f8"),
        ("head_bytes_beside", "f8"),  # beside the embedding: without a tied matrix
        ("layer_sharded_bytes", "f8"),  # master weights and moments
        ("embedding_sharded_bytes", "f8"),
        ("head_sharded_bytes", "f8"),
        ("head_sharded_bytes_beside", "f8"),
        ("tied_sharded_bytes", "f8"),  # of these, what first and last stages spread together
        ("layer_step_s", "f8"),  # optimizer step: memory traffic
        ("embedding_step_s", "f8"),
        ("head_step_s", "f8"),
        ("head_step_s_beside", "f8"),
        ("tied_step_s", "f8"),
        ("layer_products_s", "f8"),  # and products of whole matrices
        ("limit_bytes", "f8"),  # without communicators, and a rounding less
        ("sum_bytes", "f8"),  # of a group that sums gradients, beyond the reserved ones
        ("pair_bytes", "f8"),  # of a pair that exchanges messages, beyond the reserved ones
        ("launch_s", "f8"),  # the least of an optimizer step
    ],
    align=True,
)
COST = np.dtype(
    [
        ("forward_s", "f8"),  # of a layer
        ("embedding_forward_s", "f8"),
        ("embedding_backward_s", "f8"),
        ("head_forward_s", "f8"),
        ("head_backward_s", "f8"),
        ("quantization_s", "f8"),  # of a message, at either of its ends
        ("late_s", "f8"),  # weight gradients of a layer, where they may be put off
        ("late_bytes", "f8"),  # that a layer holds whose weight gradients are put off
        ("read_bytes", "f8"),  # of these, what recomputing the layer holds too
        ("token_bytes", "f8"),  # a micro-batch in flight keeps so many for the embedding
        ("head_bytes", "f8"),  # and for final norm and loss
        ("logits_bytes", "f8"),
        ("buffer_bytes", "f8"),
    ],
    align=True,
)
POLICY = np.dtype(
    [
        ("backward_s", "f8"),  # of a layer, recompute included
        ("stored_bytes", "f8"),  # of a layer and a micro-batch in flight
        ("working_bytes", "f8"),
        ("last_working_bytes", "f8"),  # in a last stage
    ],
    align=True,
)


class Tables(NamedTuple):
    """A problem as arrays.

    `problem` [1]; `machines` [machines]; `sizes` [sizes] of micro-batches in sequences; `modes` [modes, 2]: ZeRO stage,
    and 1 where sharding groups are machines; `degrees` [degrees] of TP, ascending; `kind_group` [kinds, devices + 1]
    and `mask_group` [uneven machine kinds, masks]: row of the TP class of so many devices, or of a mask, -1 where none
    is allowed; `groups` and `costs` [groups, sizes], `policies` [groups, sizes, policies]; `s_per_byte`
    [resources] of the network; `extra` [places, places, steps]: what a transfer crosses beside interfaces, then -1;
    `extra_latency_s` [places, places]; `pair_s_per_byte`, `pair_latency_s` [uneven kinds, devices, devices].
    """

    problem: Any
    machines: Any
    sizes: Any
    modes: Any
    degrees: Any
    kind_group: Any
    mask_group: Any
    groups: Any
    costs: Any
    policies: Any
    s_per_byte: Any
    extra: Any
    extra_latency_s: Any
    pair_s_per_byte: Any
    pair_latency_s: Any


def tables_of(pricer: PlanPricer) -> Tables:
    """The tables of the pricer's problem, which `supports` must not refuse."""
    problem = pricer.problem
    classes = _Classes(pricer.stages)
    machines, kind_group, mask_group, links = _machines(problem, pricer.stages, classes)
    extra, extra_latency_s = _network(problem, machines)
    sizes = np.array(problem.space.micro_batch_sizes(problem.workload.global_batch), np.int64)
    groups, costs, policies = classes.arrays(sizes.tolist(), pricer.policies())
    degrees = np.unique(groups["degree"])
    return Tables(
        _problem(pricer, machines, len(sizes)),
        machines,
        sizes,
        sharding_modes(problem),
        degrees,
        kind_group,
        mask_group,
        groups,
        costs,
        policies,
        1.0 / problem.cluster.network.capacity,
        extra,
        extra_latency_s,
        *links,
    )


def sharding_modes(problem: Problem) -> Any:
    """The modes that candidates may have [modes, 2]: ZeRO stages below 2, over all holders or inside machines."""
    several = len(problem.usable_by_machine) > 1 and problem.space.machine_sharding
    stages = [stage for stage in sharding_stages(problem.workload) if stage < 2]
    modes = [(stage, 0) for stage in stages] + [(stage, 1) for stage in stages if stage and several]
    return np.array(modes, np.int64).reshape(-1, 2)


def _problem(pricer: PlanPricer, machines: Any, num_sizes: int) -> Any:
    problem, stages, framework = pricer.problem, pricer.stages, pricer.framework
    model, workload, space, cluster = problem.model, problem.workload, problem.space, problem.cluster
    trained = problem.parameters
    found = np.zeros(1, PROBLEM)
    own = found[0]
    devices, policies = len(problem.usable_devices), pricer.policies()
    one_policy = len(policies) == 1 or not space.recompute_per_stage
    values = {
        "num_layers": model.num_layers,
        "global_batch": workload.global_batch,
        "num_sizes": num_sizes,
        "num_policies": len(policies),
        "most_pipelines": min(devices, workload.global_batch, MOST_PIPELINES),
        "most_stages": min(devices, model.num_layers, MOST_STAGES),
        "num_pipelines": space.num_pipelines or 0,
        "num_stages": space.num_stages or 0,
        "policy": 0 if one_policy else -1,
        "mixed": space.recompute_per_layer and not one_policy,
        "even_layers": not space.uneven_layers,
        "even_batch": not space.uneven_batch,
        "exact_batch": not space.uneven_batch and not space.batch_remainder,
        "one_degree": not space.uneven_tp,
        "only_forwards_first": all(schedule.all_forwards_first for schedule in problem.schedules),
        "splits": problem.default_schedule.splits,
        "deep": problem.space.depth,
        "divided": workload.sequence_parallel,
        "sums": SUMS.index(framework.gradient_sums),
        "tied": trained.tied_params > 0,
        "num_interfaces": sum(machine.num_interfaces for machine in cluster.machines),
        "several_interfaces": (machines["num_interfaces"] > 1).any(),
        "uneven_links": any(machine.intra_links for machine in cluster.machines),
        "sample_bytes": stages.routes.message_bytes(1),
        "weight_bytes": workload.states.weight,
        "sum_bytes": workload.sum_bytes,
        "converted": workload.quantization_bytes(0) / workload.states.step_bytes,
        "converted_sharded": workload.quantization_bytes(1) / workload.states.step_bytes,
        "layer_params": trained.layer_params,
        "embedding_params": trained.first_params,
        "head_params": trained.last_params,
        "tied_params": trained.tied_params,
        "fragmentation": c.FRAGMENTATION,
        "holder_s": framework.holder_s,
        "last_bucket": c.LAST_BUCKET,
        "gathers_beside": WEIGHT_GATHERS.index(framework.weight_gathers),
    }
    for name, value in values.items():
        own[name] = value
    return found


class _Classes:
    """Numbers the TP classes that candidates may have."""

    def __init__(self, stages: StageModel) -> None:
        self._stages = stages
        self._rows: dict[TpGroup, int] = {}

    def row(self, devices: tuple[int, ...]) -> int:
        """The row of the class of `devices`, which are of one machine."""
        return self._rows.setdefault(self._stages.tp_group(devices), len(self._rows))

    def arrays(self, sizes: Sequence[int], policies: Sequence[str]) -> tuple[Any, Any, Any]:
        """`groups`, `costs` and `policies` of `Tables`."""
        shape = len(self._rows), len(sizes)
        groups, costs, by_policy = (
            np.zeros(shape, GROUP),
            np.zeros(shape, COST),
            np.zeros((*shape, len(policies)), POLICY),
        )
        for group, row in self._rows.items():
            for k, size in enumerate(sizes):
                groups[row, k] = self._group(group, size)
                costs[row, k] = self._cost(group, size)
                kept = self._stages.memory_model(group, size).activations
                for q, policy in enumerate(policies):
                    by_policy[row, k, q] = (
                        self._stages.layer_s(group, size, policy)[1],
                        kept.layer_bytes(policy),
                        kept.working_set(policy, False),
                        kept.working_set(policy, True),
                    )
        return groups, costs, by_policy

    def _group(self, group: TpGroup, size: int) -> tuple[float, ...]:
        stages = self._stages
        memory, held = stages.memory_model(group, size), stages.communicators.total_bytes
        clock, own, sizes = stages.clock(group.gpu), memory.sharded_states, stages.problem.workload.states
        held_bytes = sizes.weight + sizes.gradient + stages.problem.workload.sum_buffer_bytes
        # Searches count the copies of a stage; each of its replicas that share experts is one more that ZeRO counts.
        per_copy = (1.0 / stages.cell(group, size).replicas,) * 2
        s_per_byte, tied = clock.memory_s(_MANY) / _MANY, float(stages.spreads_over_ends(1))
        sharded = own.moment_bytes.plus(own.spread.times(sizes.master, sizes.master)).times(*per_copy)
        step_bytes = own.step_bytes.times(*per_copy)
        return (
            group.tp,
            *own.frozen_bytes.plus(own.params.times(held_bytes, held_bytes)).units,
            *sharded.units,
            tied * sharded.tied,
            *(s_per_byte * num_bytes for num_bytes in (*step_bytes.units, tied * step_bytes.tied)),
            products_s(stages.problem.parameters, clock.gemm_s),
            group.gpu.usable_memory_bytes * (1 - 1e-12) - memory.communicator_bytes,
            held(group.gpu, 0.0, RESERVED_GROUPS + 1) - held(group.gpu, 0.0, RESERVED_GROUPS),
            held(group.gpu, 0.0, 0, RESERVED_GROUPS + 1) - held(group.gpu, 0.0, 0, RESERVED_GROUPS),
            clock.memory_s(0.0),
        )

    def _cost(self, group: TpGroup, size: int) -> tuple[float, ...]:
        stages = self._stages
        memory, (embedding, head) = stages.memory_model(group, size), stages.ends_s(group, size)
        kept, splits = memory.activations, stages.problem.default_schedule.splits
        return (
            stages.layer_s(group, size, recompute_policies(stages.problem.workload)[0])[0],
            embedding.forward_s,
            embedding.backward_s,
            head.forward_s,
            head.backward_s,
            stages.quantization_s(group, size),
            stages.layer_weights_s(group, size) if splits else 0.0,
            memory.late_bytes,
            memory.product_input_bytes,
            kept.token_ids,
            kept.final_norm + kept.loss,
            kept.logits,
            kept.buffers,
        )


def devices_alike(machine: Machine) -> bool:
    """Whether TP groups of equally many devices of the machine are of one class."""
    return not machine.intra_links and not machine.slow


def _machines(problem: Problem, stages: StageModel, classes: _Classes) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    cluster, network = problem.cluster, problem.cluster.network
    found = np.zeros(len(cluster.machines), MACHINE)
    kinds: dict[Any, int] = {}
    used = {cluster.machines[m].kind for m in problem.usable_by_machine}
    most = max(machine.num_gpus for machine in cluster.machines)
    kind_group = np.full((len({machine.kind for machine in cluster.machines}), most + 1), -1, np.int64)
    masks: list[Any] = []
    pairs: list[tuple[Any, Any]] = []
    uneven: dict[Any, int] = {}
    for m, machine in enumerate(cluster.machines):
        first = int(cluster.first_device[m])
        new = machine.kind not in kinds
        kind = kinds.setdefault(machine.kind, len(kinds))
        degrees = problem.space.allowed_tp(machine.num_gpus)
        if new and machine.kind in used:
            if devices_alike(machine):
                for degree in degrees:
                    kind_group[kind, degree] = classes.row(tuple(range(first, first + degree)))
            else:
                uneven[machine.kind] = len(masks)
                masks.append(_mask_rows(classes, first, machine.num_gpus, degrees))
                pairs.append(_pairs(machine))
        own = found[m]
        usable = sum(1 << (d - first) for d in problem.usable_by_machine.get(m, ()))
        own["kind"], own["first_device"], own["num_gpus"], own["usable"] = kind, first, machine.num_gpus, usable
        own["num_interfaces"], own["first_interface"] = machine.num_interfaces, network.transmit_interface(first)
        own["uneven"] = uneven.get(machine.kind, -1)
        own["nic_latency_s"] = machine.nic_latency_s
        own["port_s_per_byte"] = 1.0 / machine.intra_bandwidth_bytes_per_s
        own["port_latency_s"] = machine.intra_latency_s
    mask_group = np.full((max(1, len(masks)), 1 << MOST_UNEVEN if masks else 1), -1, np.int64)
    side = MOST_UNEVEN if masks else 1
    links = np.zeros((len(mask_group), side, side)), np.zeros((len(mask_group), side, side))
    for k, (row, own_pairs) in enumerate(zip(masks, pairs, strict=True)):
        mask_group[k, : len(row)] = row
        for table, values in zip(links, own_pairs, strict=True):
            table[k, : len(values), : len(values)] = values
    return found, kind_group, mask_group, links


def _mask_rows(classes: _Classes, first: int, num_gpus: int, degrees: Sequence[int]) -> Any:
    found = np.full(1 << num_gpus, -1, np.int64)
    for mask in range(1, 1 << num_gpus):
        if mask.bit_count() in degrees:
            found[mask] = classes.row(tuple(first + k for k in range(num_gpus) if mask >> k & 1))
    return found


def _pairs(machine: Machine) -> tuple[Any, Any]:
    each = range(machine.num_gpus)
    rates = np.array([[1.0 / machine.pair_bandwidth(i, j) for j in each] for i in each])
    return rates, np.array([[machine.pair_latency(i, j) for j in each] for i in each])


def _network(problem: Problem, machines: Any) -> tuple[Any, Any]:
    """What transfers between places cross beside interfaces; a place is a group of machines or, where links between
    machines are stated or members of a group share something, a machine."""
    cluster, network = problem.cluster, problem.cluster.network
    first_at: list[int] = []
    places: dict[Any, int] = {}
    for m in range(len(cluster.machines)):
        key = m if cluster.links or network.shares_inside else network.group_of(m)
        if key not in places:
            places[key] = len(places)
            first_at.append(m)
        machines[m]["place"] = places[key]
    device = cluster.first_device
    ways = [[_way(network, int(device[a]), int(device[b]), a == b) for b in first_at] for a in first_at]
    most = max(1, max(len(way) for row in ways for way in row))
    extra = np.full((len(ways), len(ways), most), -1, np.int64)
    latency_s = np.zeros((len(ways), len(ways)))
    for a, row in enumerate(ways):
        for b, way in enumerate(row):
            extra[a, b, : len(way)] = way
            if a != b:
                beside = max(machines[first_at[a]]["nic_latency_s"], machines[first_at[b]]["nic_latency_s"])
                latency_s[a, b] = network.pair_latency(int(device[first_at[a]]), int(device[first_at[b]]))
                if not cluster.links:
                    latency_s[a, b] -= beside
    if cluster.links:
        machines["nic_latency_s"] = 0.0  # links state the whole latency
    return extra, latency_s


def _way(network: Any, a: int, b: int, same: bool) -> tuple[int, ...]:
    return () if same else tuple(network.route(a, b)[1:-1])
