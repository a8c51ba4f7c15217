"""Times of all stages of a proof, and the surroundings of a pipeline in its plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import sharding_stages
from hexiopt.schedules.schedule import Schedule
from solvers.proof.kernels import NEVER_S, Groups, Messages, StageSeconds, Tails
from solvers.proof.stage_times import StageTable
from solvers.proof.usages import Usages

Sharding = Literal["all", "machine", "any"]
KINDS = ((False, False), (True, False), (False, True), (True, True))  # first, last: inner, first, last, alone


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The known facts about the plan around a pipeline; more facts give higher bounds.

    `holders` is the most holders of a parameter, the number of pipelines of the plan. `sharding` states the sharding
    groups. `forced` [machines]: some pipeline uses the machine and another does not, so every layer on it is also held
    elsewhere. `least_machines` is the least number of machines that hold a layer, `whole` the forced machines that hold
    a whole pipeline. `inside` [machines] counts other pipelines that are wholly in the machine.
    """

    holders: int
    sharding: Sharding = "any"
    forced: tuple[bool, ...] = ()
    least_machines: int = 2
    whole: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()


class ProofTables:
    """All times of one problem in seconds, under one schedule (1F1B or GPipe). Machines are uniform and have one
    interface each, on a flat network. A group is a machine and a number of devices, and represents all TP groups like
    it; where devices may share experts, there is one for each TP degree."""

    def __init__(self, pricer: PlanPricer, schedule: Schedule) -> None:
        problem = pricer.problem
        self.pricer, self.problem, self.schedule = pricer, problem, schedule
        self.all_forward_first = schedule.all_forwards_first
        self.devices = list(problem.usable_by_machine.values())
        self.machines = [problem.cluster.machines[m] for m in problem.usable_by_machine]
        self.num_layers, self.batch = problem.model.num_layers, problem.workload.global_batch
        self.usages = Usages([len(own) for own in self.devices], [machine.kind for machine in self.machines])
        self.sizes = problem.space.micro_batch_sizes(self.batch)
        cells = [
            (m, cell)
            for m, machine in enumerate(self.machines)
            for tp in problem.space.allowed_tp(machine.num_gpus)
            if tp <= len(self.devices[m])
            for cell in pricer.stages.tp_groups.with_every_degree(pricer.tp_group(self.devices[m][:tp]))
            if self.sizes[-1] % cell.replicas == 0
        ]
        self.group_list, self.tp_groups = [(m, cell.tp) for m, cell in cells], [cell for _, cell in cells]
        machine, tp = np.array(self.group_list, np.int64).T
        self.groups = Groups(machine.copy(), tp.copy())
        self._most_replicas = max(cell.replicas for cell in self.tp_groups)
        self.nic: Floats = np.array([machine.nic_bandwidth_bytes_per_s for machine in self.machines], float)
        self.zero_stage = min(1, max(sharding_stages(problem.workload)))
        workload, trained = problem.workload, problem.parameters
        gradient_bytes = workload.sum_bytes
        # Gradients are all-reduced (ZeRO-0), or scattered and weights gathered (ZeRO-1); the smaller time counts.
        late_bytes = pricer.framework.late_bytes(workload.states.weight)
        weight_bytes = min(gradient_bytes, late_bytes) if self.zero_stage else gradient_bytes
        self.layer_bytes = float(trained.layer_params) * (gradient_bytes + weight_bytes)
        self.shown = pricer.framework.share_after_backward(
            sharding_stages(workload), gradient_bytes, workload.states.weight
        )
        self.first_units = trained.first_params / trained.layer_params
        self.last_units = trained.last_params / trained.layer_params
        self.tied_units = trained.tied_params / trained.layer_params
        ends = np.array([self.first_units, self.last_units, self.first_units + self.last_units])
        self.units: Floats = np.concatenate(([0.0], ends + self.tied_units))
        self._stages = StageTable(pricer)
        self._seconds = Memo(self._new_seconds, 256)
        self.tails = Memo(self._new_tails, 4096)
        self.after_s_kept = Memo(self.after_s, 64)

    def sharding_of(self, group: TpGroup, pipelines: int) -> StateSharding:
        """The states of a stage on `group`, over the most copies that so many pipelines may have of it."""
        most, others = group.replicas + (pipelines - 1) * self._most_replicas, pipelines * self._most_replicas
        return StateSharding(self.zero_stage, most, float(most + others) if self.zero_stage == 1 else None)

    @property
    def most_stages(self) -> int:
        """The most stages of a pipeline."""
        return int(self.usages.most.sum())

    def seconds(self, holders: int, size: int, num_micro_batches: int) -> StageSeconds:
        """Stage times of pipelines in plans of `holders` pipelines; under 1F1B they hold for any number of
        micro-batches."""
        return self._seconds[holders, size, num_micro_batches if self.all_forward_first else 0]

    def _new_seconds(self, key: tuple[int, int, int]) -> StageSeconds:
        holders, size, num_micro_batches = key
        shape = (len(KINDS), len(self.tp_groups), self.num_layers + 1)
        flights = [num_micro_batches] if self.all_forward_first else range(1, self.most_stages + 1)
        forward_s = np.full(shape, NEVER_S)
        both_s = np.full((shape[0], len(flights), *shape[1:]), NEVER_S)
        for g, group in enumerate(self.tp_groups):
            if size % group.replicas:
                continue
            sharding = self.sharding_of(group, holders)
            for kind, (first, last) in enumerate(KINDS):
                for k, in_flight in enumerate(flights):
                    if last and k:  # the last stage holds one micro-batch
                        break
                    times = self._stages.times(group, size, first, last, in_flight, sharding)
                    forward_s[kind, g] = times.forward_s
                    both_s[kind, k, g, 1:] = np.where(np.isfinite(times.both_s), times.both_s, NEVER_S)[1:]
        return StageSeconds(forward_s, both_s, self.all_forward_first)

    def after_s(self, holders: int) -> Floats:
        """Optimiser seconds of every stage [kinds, groups, layers + 1] with states sharded over all `holders`."""
        found = np.zeros((len(KINDS), len(self.tp_groups), self.num_layers + 1))
        for g, group in enumerate(self.tp_groups):
            shards = self.sharding_of(group, holders)
            for kind, (first, last) in enumerate(KINDS):
                for n in range(self.num_layers + 1):
                    found[kind, g, n] = self.pricer.stages.optimizer_s(group, n, first, last, shards)
        return found

    def ring_s(self, share: float, of_tied: bool = False) -> Floats:
        """Seconds in which a stage's own links pass `share` of its parameters once around [kinds, groups, layers + 1];
        with `of_tied`, only of the matrix that the first and the last stage of one pipeline share."""
        found = np.zeros((len(KINDS), len(self.tp_groups), self.num_layers + 1))
        layers = np.arange(self.num_layers + 1)
        for g, (m, tp) in enumerate(self.group_list):
            rate = self._rate(m, tp)
            if rate == 0.0:
                continue
            for kind, (first, last) in enumerate(KINDS):
                units = self.tied_units * (first != last) if of_tied else layers + self.units[kind]
                found[kind, g] = share * self.layer_bytes * units / rate
        return found

    def across_bytes(self, sharding: Sharding) -> float:
        """Bytes of a layer that a ring between machines passes, on all its passes: with states sharded within machines
        gradients are all-reduced between them."""
        if sharding == "machine":
            return 2.0 * float(self.problem.parameters.layer_params) * self.problem.workload.sum_bytes
        return self.layer_bytes

    @cached_property
    def port_s(self) -> Floats:
        """Seconds in which each group passes a layer once around over its ports [groups]; 0 on single devices."""
        rates = [tp * self.machines[m].intra_bandwidth_bytes_per_s for m, tp in self.group_list]
        return np.array([self.layer_bytes / rate if math.isfinite(rate) else 0.0 for rate in rates])

    def _rate(self, machine: int, tp: int) -> float:
        """The most bytes/s that `tp` devices of a machine send, limited by its interface and by their ports."""
        across = self.nic[machine] if len(self.machines) > 1 else 0.0
        spec = self.machines[machine]
        return float(across + (tp * spec.intra_bandwidth_bytes_per_s if spec.num_gpus > 1 else 0.0))

    def _new_tails(self, around: Surroundings) -> Tails:
        k, h = around.holders, max(around.least_machines, 2)
        shape = (len(KINDS), len(self.tp_groups), self.num_layers + 1)
        after_s, layer_s, all_s = self.after_s_kept[k], np.zeros(len(self.machines)), 0.0
        across_bytes = self.across_bytes(around.sharding)
        if k == 1:
            local_s = self.ring_s(0.5, of_tied=True) if self.tied_units else np.zeros(shape)
        else:
            # A ring of n holders passes (n − 1)/n of its bytes.
            share = (k - 1) / k if around.sharding == "all" else 0.5
            across = (k - 1) / k if around.sharding == "all" else (h - 1) / h
            local_s = self.ring_s(share)
            if around.sharding == "machine":
                # Beside the last backward run those rings, or the ones between machines: there is room for one of them.
                after_s = after_s + self.shown * self._port_s(around)
            for m, forced in enumerate(around.forced):
                if forced:
                    layer_s[m] = across * across_bytes / self.nic[m]
            for m in around.whole:
                all_s = max(all_s, float(layer_s[m] * (self.num_layers + self.units[3])))
        # A matrix that the first and the last stage of this pipeline share has one holder more than pipelines.
        tied_share = k / (k + 1) if k == 1 or around.sharding == "all" else 0.5
        tied_s = self.shown * tied_share * across_bytes * self.tied_units / self.nic
        return Tails(local_s, layer_s, all_s, after_s, self.units, self.tied_units, tied_s, self.shown)

    def _port_s(self, around: Surroundings) -> Floats:
        """Seconds of rings inside machines where states are sharded within machines: stages next to pipelines that are
        wholly in the same machine pass their shares over their own ports, after the rings between machines."""
        found = np.zeros((len(KINDS), len(self.tp_groups), self.num_layers + 1))
        layers = np.arange(self.num_layers + 1)
        for g, (m, tp) in enumerate(self.group_list):
            beside, rate = around.inside[m], self.machines[m].intra_bandwidth_bytes_per_s
            if around.forced[m] and beside and self.machines[m].num_gpus > 1:
                share = beside / (beside + 1)
                for kind in range(len(KINDS)):
                    found[kind, g] = share * self.layer_bytes * (layers + self.units[kind]) / (tp * rate)
        return found

    @cached_property
    def messages(self) -> dict[int, Messages]:
        """Messages of micro-batches of each size."""
        return {size: self._messages(size) for size in self.sizes}

    def _messages(self, size: int) -> Messages:
        interface_s = self.pricer.stages.routes.message_bytes(size) / self.nic
        count = len(self.group_list)
        alone_s, round_trip_s = np.zeros((count, count)), np.full((len(self.machines),) * 2, NEVER_S)
        for a, (m, tp) in enumerate(self.group_list):
            for b, (other, width) in enumerate(self.group_list):
                if m != other:
                    alone_s[a, b] = max(interface_s[m], interface_s[other]) + self.latency_s
                elif tp + width <= len(self.devices[m]):
                    ends = self.devices[m][:tp], self.devices[m][tp : tp + width]
                    alone_s[a, b] = self.pricer.message_s(*ends, size)
        for a, (m, tp) in enumerate(self.group_list):
            for b, (other, width) in enumerate(self.group_list):
                if m != other or tp + width <= len(self.devices[m]):
                    round_trip_s[m, other] = min(round_trip_s[m, other], alone_s[a, b] + alone_s[b, a])
        return Messages(alone_s, round_trip_s, interface_s)

    @cached_property
    def latency_s(self) -> float:
        """The least latency between two machines."""
        network, firsts = self.problem.cluster.network, [own[0] for own in self.devices]
        pairs = [(a, b) for a in firsts for b in firsts if a != b]
        return min((network.pair_latency(a, b) for a, b in pairs), default=0.0)

    def least_machines(self, usages: Sequence[int]) -> int:
        """The least number of machines of which every usage has a device on one."""
        used = self.usages.vectors[list(usages)] > 0
        count = len(self.machines)
        return next(
            h for h in range(1, count + 1) for s in combinations(range(count), h) if used[:, s].any(axis=1).all()
        )

    def representative(self, around: Surroundings, usage: int) -> tuple[Surroundings, int]:
        """What stands for a usage in surroundings and for all that differ only in which of equal machines is which."""
        vector, source = self.usages.vectors[usage].tolist(), list(range(len(self.machines)))
        facts = [vector, *(own for own in (around.forced, around.inside) if own)]
        for machines in self.usages.alike:
            order = sorted(machines, key=lambda m: (*(own[m] for own in facts), m in around.whole), reverse=True)
            for m, other in zip(machines, order, strict=True):
                source[m] = other
        if source == sorted(source):
            return around, usage
        moved = replace(
            around,
            forced=tuple(around.forced[m] for m in source if around.forced),
            whole=tuple(m for m, other in enumerate(source) if other in around.whole),
            inside=tuple(around.inside[m] for m in source if around.inside),
        )
        return moved, self.usages.number([vector[m] for m in source])
