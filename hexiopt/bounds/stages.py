"""Stage types: least times of a TP group of a machine kind for n layers and x sequences per micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.stage_cells import shares_across, stage_cells
from hexiopt.bounds.windows import Windows
from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, sharding_stages
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.schedule import BoundTerms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class OutOfTimeError(Exception):
    """The time limit of a bound is over before there is anything to prove it with."""


class StageTypes:
    """All stage types of a problem, one array element each; `machines` lists those of each kind, `supply` counts them.

    It has the types of every ZeRO stage; those of ZeRO-2 and 3 are `late`. A plan uses either late types or others.
    Raises OutOfTimeError once `on_time` says no: there may be thousands of types to judge.
    """

    def __init__(self, model: PlanPricer, on_time: Callable[[], bool] = lambda: True) -> None:
        problem = model.problem
        space, workload, devices = problem.space, problem.workload, problem.usable_by_machine
        self.num_layers, self.global_batch = problem.model.num_layers, workload.global_batch
        kinds: dict[object, list[int]] = {}
        for machine, usable in devices.items():
            kinds.setdefault((problem.cluster.machines[machine].kind, len(usable)), []).append(machine)
        examples = [problem.cluster.machines[same[0]] for same in kinds.values()]
        self.machines = tuple(tuple(same) for same in kinds.values())
        self.supply: Floats = np.array([len(same) for same in kinds.values()], float)
        self.machine_devices: Floats = np.array([len(devices[same[0]]) for same in kinds.values()], float)
        sizes = space.micro_batch_sizes(self.global_batch)
        shares = range(1, sizes[-1] + 1) if space.replicas else sizes
        rows, times, memory = _pareto_rows(
            model,
            on_time,
            [
                _Row(kind, examples[kind], cell, share, holders)
                for kind, same in enumerate(kinds.values())
                for share in shares
                for cell in stage_cells(model.stages, same[0], share)
                if cell.machines > 1 or cell.tp <= len(devices[same[0]])
                for holders in _holders(
                    sharding_stages(workload), len(problem.usable_devices), len(devices[same[0]]) // cell.tp, cell
                )
            ],
        )
        self.kind: Ints = np.array([row.kind for row in rows])
        self.devices: Floats = np.array([row.tp_group.tp / row.share for row in rows])
        self.share: Floats = np.array([row.share for row in rows], float)
        self.lockstep: NDArray[np.bool_] = np.array([row.holders.lockstep for row in rows])
        self.late: NDArray[np.bool_] = np.array([row.holders.sharding >= 2 for row in rows])
        self.interface_s, self.inner_s = _sync_s(model, rows, examples)
        self.shown = model.framework.share_after_backward(
            sharding_stages(workload), workload.sum_bytes, workload.states.weight
        )
        self._policies = recompute_policies(workload)
        self._windows = Windows(problem.model)
        self.several_kinds = len(Windows.kinds_of(problem.model)) > 1
        self._forward_s = times[:, :, 0].min(axis=1)  # [types, model's kinds]
        self._policy_s = self._forward_s[:, None] + times[:, :, 1]  # [types, policies, model's kinds]
        self.layer_s: Floats = self._policy_s.min(axis=(1, 2))
        self.late_s: Floats = np.array([row.late_s(model) for row in rows])
        # of a layer without weight gradients and recomputation
        self.forward_share = float((self._forward_s.min(axis=1) / (self.layer_s - self.late_s)).min())
        heads = [model.stages.ends_s(row.tp_group, row.share)[1] for row in rows]
        self.head_forward_s: Floats = np.array([head.forward_s for head in heads])
        self.head_s: Floats = np.array([head.forward_s + head.backward_s for head in heads])
        self._memory = dict(zip((False, True), memory, strict=True))
        self.forward_s: Memo[tuple[int, int], Floats] = Memo(
            lambda ranges: self._windows.least(self._forward_s, *ranges)
        )
        """Least forward seconds by the least and most layer ranges of a stage [types, layers + 1]."""
        self._seconds: dict[tuple[object, ...], Floats] = {}
        self._behind: dict[tuple[object, ...], Floats] = {}

    def numbers(self, late: bool) -> Ints:
        """The indices of the types of ZeRO-2 and 3, or of the others."""
        return np.flatnonzero(self.late == late)

    def seconds_behind(
        self, late: bool, terms: Sequence[BoundTerms], least_ranges: int, most_ranges: int, most_layers: int
    ) -> Floats:
        """`seconds` of stages followed by 0, 1, ... others, as many as there are `terms` [terms, `numbers(late)`,
        layers + 1]."""
        key = (late, tuple(terms), least_ranges, most_ranges, most_layers)
        seconds = self._behind.get(key)
        if seconds is None:
            seconds = np.stack(
                [
                    self.seconds(late, after, stage_terms, least_ranges, most_ranges, most_layers)
                    for after, stage_terms in enumerate(terms)
                ]
            )
            self._behind[key] = seconds
        return seconds

    def seconds(
        self,
        late: bool,
        after: int,
        terms: BoundTerms,
        least_ranges: int = 1,
        most_ranges: int = 1,
        most_layers: int | None = None,
    ) -> Floats:
        """Least forward and backward seconds of n layers in so many layer ranges, followed by `after` stages, with the
        micro-batches in flight that `terms` states [`numbers(late)`, layers + 1].

        They are infinite where memory does not suffice, and for more than `most_layers`.
        """
        most_layers = self.num_layers if most_layers is None else most_layers
        key = (late, after, terms, least_ranges, most_ranges, most_layers)
        least_s = self._seconds.get(key)
        if least_s is None:
            n = np.arange(most_layers + 1)
            stored = terms.in_flight * n - (terms.in_flight - terms.last_in_flight) * -(-n // least_ranges)
            more = terms.first_again * (n // most_ranges)
            held = min(after + 1, terms.last_in_flight)
            rows = self.numbers(late)
            least_s = np.full((len(rows), self.num_layers + 1), np.inf)
            ranges = least_ranges, most_ranges
            least_s[:, : most_layers + 1] = self._least_s(rows, after == 0, ranges, stored, more, terms.in_flight, held)
            self._seconds[key] = least_s
        return least_s

    def _least_s(
        self, rows: Ints, last: bool, ranges: tuple[int, int], stored: Ints, more: Ints, repeated: int, held: int
    ) -> Floats:
        """Least seconds [rows, layers + 1] where memory holds activations of `stored` layers, each at most `repeated`
        times, of `more` that may be the leanest [layers + 1], and what `held` micro-batches need outside layers."""
        count, n = len(self._policies), np.arange(len(stored))
        memory = self._memory[last][rows]
        of_kind = memory[:, 2 + count :].reshape(len(rows), -1, 1 + count)  # [rows, model's kinds, states and policies]
        layer_bytes, once = of_kind[:, :, 1:], memory[:, None, 2 : 2 + count]

        def least(values: Floats) -> Floats:
            return self._windows.least(values, *ranges)[..., : len(stored)]

        def least_s(values: Floats) -> Floats:
            """Of forward and backward seconds. Stages end by both (`chains.py`), so that each is the least there is."""
            if not self.several_kinds:
                return least(values)
            forward_s = self._forward_s[rows].reshape(len(rows), *[1] * (values.ndim - 2), -1)
            return least(forward_s) + least(values - forward_s)

        def stored_bytes(values: Floats) -> Floats:  # [rows, model's kinds] -> [rows, layers + 1]
            if ranges == (1, 1):  # of which every layer is held as often
                return np.asarray(self._windows.least(values)[:, : len(stored)] * (stored / np.maximum(n, 1)))
            return np.asarray(stored * values.min(axis=1)[:, None])

        policy_s = least_s(self._policy_s[rows])  # [rows, policies, layers + 1]
        free_bytes = memory[:, 0:1] * (1 + 1e-9) - least(of_kind[:, :, 0]) - memory[:, 1:2] * held
        with np.errstate(divide="ignore", invalid="ignore"):
            # Bytes for activations if a policy is the one of those used that stores least.
            spare = free_bytes[:, :, None] - once - more[None, :, None] * layer_bytes.min(axis=1)[:, None]
            seconds = np.full(free_bytes.shape, np.inf)
            for smaller in range(count):
                alone = spare[:, :, smaller] >= stored_bytes(layer_bytes[:, :, smaller])
                seconds = np.where(alone, np.minimum(seconds, policy_s[:, smaller]), seconds)
                for faster in range(count) if count > 1 else ():
                    # Whole layers by the policy that stores less; the others store as little as any other policy would.
                    stores = np.delete(layer_bytes, smaller, axis=2).min(axis=2)
                    saved = repeated * (stores - layer_bytes[:, :, smaller]).max(axis=1)[:, None]
                    some = np.ceil((stored_bytes(stores) - spare[:, :, smaller]) / saved * (1 - 1e-9) - 1e-9).clip(1, n)
                    slower_s = self._policy_s[rows, smaller] - self._policy_s[rows, faster]  # [rows, model's kinds]
                    mixed = policy_s[:, faster] + some * slower_s.min(axis=1)[:, None]
                    either = least_s(np.minimum(self._policy_s[rows, smaller], self._policy_s[rows, faster]))
                    mixed = np.where(slower_s.min(axis=1)[:, None] >= 0, mixed, either)
                    seconds = np.where(alone & (saved > 0), np.minimum(seconds, mixed), seconds)
            total_s = seconds + (self.head_s[rows, None] if last else 0.0)
        total_s[:, 0] = np.inf
        return np.where(free_bytes > 0, total_s, np.inf)


@dataclass(frozen=True, slots=True)
class _Holders:
    """A ZeRO stage, and the least and most devices over which the states of a stage are sharded.

    `lockstep` means that these may be in several machines and gather and scatter layer by layer.
    """

    sharding: int
    least: int
    most: int
    lockstep: bool


def _holders(stages: Sequence[int], devices: int, together: int, cell: TpGroup) -> list[_Holders]:
    """Classes of sharding with different conditions; `together` groups like `cell` fit in a machine.

    ZeRO-1 needs less memory than ZeRO-0 and in these bounds no more time, so it represents both. Replicas that share
    experts are several holders of all else, but what they gather and scatter of that is not counted.
    """
    early = max((stage for stage in stages if stage <= 1), default=None)
    classes = [] if early is None else [_Holders(early, 1, devices if early else 1, False)]
    for stage in stages:
        if stage >= 2 and cell.replicas > 1:
            classes.append(_Holders(stage, 1, devices, True))
        elif stage >= 2:
            classes.append(_Holders(stage, 1, 1, False))
            if together >= 2:
                classes.append(_Holders(stage, 2, together, False))
            if devices > together:
                classes.append(_Holders(stage, 2, devices, True))
    return classes


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage type: `share` sequences of a micro-batch on a TP group in a machine of `kind`."""

    kind: int
    machine: Machine
    tp_group: TpGroup
    share: int
    holders: _Holders

    @property
    def inside(self) -> float:
        """The fastest link inside the machine, bytes/s."""
        pairs = [(i, j) for i in range(self.machine.num_gpus) for j in range(i)]
        return max((self.machine.pair_bandwidth(i, j) for i, j in pairs), default=0.0)

    def layer_s(self, model: PlanPricer, policy: str, kinds: Sequence[int]) -> Floats:
        """Least forward and backward seconds of a layer of each of the model's kinds [2, kinds], under ZeRO-2 and 3 no
        less than those of its rings, and of the fastest kind: there prices know mean layers."""
        of_kind = np.array([model.stages.layer_s(self.tp_group, self.share, policy, kind) for kind in kinds]).T
        forward_s, backward_s = of_kind
        if self.holders.sharding <= 1:
            return of_kind
        forward_s, backward_s = (np.full(len(kinds), seconds.min()) for seconds in of_kind)
        if self.holders.least == 1:
            return np.stack([forward_s, backward_s])
        problem, n = model.problem, self.holders.least
        params = least_params(problem) * (n - 1) / n
        outside = self.machine.nic_bandwidth_bytes_per_s * self.machine.num_interfaces
        s_per_param = params / outside if self.holders.lockstep else params / self.tp_group.tp / self.inside
        scatter_s = s_per_param * problem.workload.states.gradient
        if self.holders.sharding == 2:
            return np.stack([forward_s, np.maximum(backward_s, scatter_s)])
        gather_s = s_per_param * problem.workload.states.weight
        return np.stack([np.maximum(forward_s, gather_s), np.maximum(backward_s, gather_s + scatter_s)])

    def late_s(self, model: PlanPricer) -> float:
        """Seconds of a layer's weight gradients: in a slower ring there may be more of them, but by no more than its
        forward and backward are longer."""
        if model.problem.model.layers:  # no schedule splits their backwards
            return 0.0
        _, backward_s = model.stages.layer_s(self.tp_group, self.share, "none")
        if model.stages.measurement(self.tp_group, self.share) is not None:  # one backward for rings of any speed
            return 0.5 * backward_s
        # So it is, too, where launches take longer than what they launch, in this ring or in all.
        return max(model.stages.layer_weights_s(self.tp_group, self.share), model.framework.layer_host_s)

    def bytes(self, model: PlanPricer, last: bool, kinds: Sequence[int]) -> list[float]:
        """Memory left by constant parts, and bytes per micro-batch in flight; for each policy the bytes that it needs
        once; then, for each of the model's kinds, bytes per layer, and for each policy per layer and micro-batch."""
        memory, holders = model.stages.memory_model(self.tp_group, self.share), self.holders
        policies = recompute_policies(model.problem.workload)
        # Of a tied matrix there are no more copies than two for each of the stage.
        shards = StateSharding(holders.sharding, holders.most, 2.0 * holders.most if holders.sharding == 1 else None)
        growth = _Growth(memory, kinds, last, shards, policies)
        free = self.tp_group.gpu.usable_memory_bytes - growth.fixed
        return [free, growth.held, *growth.once, *chain.from_iterable(growth.kinds)]


def _pareto_rows(
    model: PlanPricer, on_time: Callable[[], bool], rows: Sequence[_Row]
) -> tuple[list[_Row], Floats, Floats]:
    """The rows that are not dominated in time and memory by another that differs only in its holders, or in the TP
    degree of as many devices; the `layer_s` of each [rows, policies, 2, model's kinds], and its `bytes` as an inner
    stage and as a last one [2, rows, ...].

    Without lockstep, a stage may be the only one with its layers, or synchronise gradients at the end.
    """
    policies, kinds = recompute_policies(model.problem.workload), Windows.kinds_of(model.problem.model)
    less_room = np.ones(2 + len(policies) + len(kinds) * (1 + len(policies)))
    less_room[0] = -1.0
    comparable: dict[tuple[object, ...], list[tuple[_Row, Floats, Floats, Floats]]] = {}
    for row in rows:
        if not on_time():
            raise OutOfTimeError
        seconds = np.array([row.layer_s(model, policy, kinds) for policy in policies])
        memory = np.array([row.bytes(model, last, kinds) for last in (False, True)])
        tail = row.holders.most == 1 or row.holders.sharding <= 1
        late = row.holders.sharding >= 2  # no stage of the other kind can replace it
        group, head = row.tp_group, model.stages.ends_s(row.tp_group, row.share)[1]
        same = row.kind, group.tp, group.machines > 1, row.share, row.holders.lockstep, late
        rivals = comparable.setdefault(same, [])
        ends = [head.forward_s, head.backward_s, tail]
        value = np.concatenate([seconds.ravel(), ends, (memory * less_room).ravel()])
        if not any((other <= value).all() for *_, other in rivals):
            rivals[:] = [rival for rival in rivals if not (value <= rival[3]).all()]
            rivals.append((row, seconds, memory, value))
    front = [rival for rivals in comparable.values() for rival in rivals]
    left, times, memories, _ = zip(*front, strict=True)
    return list(left), np.stack(times), np.stack(memories, axis=1)


def _sync_s(model: PlanPricer, rows: Sequence[_Row], examples: Sequence[Machine]) -> tuple[Floats, Floats]:
    """Seconds of gradient sync per layer, if the layer has many holders.

    The first is that of a machine's interface for a layer held by many machines [kinds], zero where a machine has
    several interfaces, since no stage need wait for the busiest; the second is that of a device's own links for a layer
    that many replicas hold whole [types].
    """
    workload = model.problem.workload
    weight_bytes = model.framework.late_bytes(workload.states.weight)
    passes = workload.sum_bytes + min(workload.sum_bytes, weight_bytes)
    layer_bytes = passes * least_params(model.problem)
    machine_bytes = passes * machine_params(model.problem)
    interface = [
        machine_bytes / machine.nic_bandwidth_bytes_per_s if machine.num_interfaces == 1 else 0.0
        for machine in examples
    ]
    inner = [
        layer_bytes / row.tp_group.tp / (row.inside + row.machine.nic_bandwidth_bytes_per_s)
        if (row.holders.sharding <= 1 or row.holders.most == 1) and row.tp_group.machines == 1
        else 0.0
        for row in rows
    ]
    return np.array(interface), np.array(inner)


def least_params(problem: Problem, experts: bool = True) -> float:
    """The least trained parameters of a layer of any kind, with or without its experts."""
    kinds = dict.fromkeys(Windows.kinds_of(problem.model), 0.0)
    for row in problem.parameters.trained_groups:
        if row.holder == "layer" and row.kind in kinds and (experts or not row.experts):
            kinds[row.kind] += row.params
    return min(kinds.values())


def machine_params(problem: Problem) -> float:
    """The least trained parameters of a layer that every machine with devices of it holds: all but those of experts,
    where machines may share these."""
    return least_params(problem, not shares_across(problem))


class _Growth:
    """The growth of a stage's bytes with layers of each kind and micro-batches in flight, derived from the memory
    model: `kinds` has bytes of a layer, then of its activations by policy."""

    def __init__(
        self, memory: MemoryModel, kinds: Sequence[int], last: bool, shards: StateSharding, policies: tuple[str, ...]
    ) -> None:
        @cache
        def total(layers: int, policy: str, held: int, kind: int) -> float:
            if len(memory.of_kind) == 1:
                return memory.stage(layers, False, last, policy, holding(held), shards).total
            counts = [{policy: layers} if k == kind and layers else {} for k in range(len(memory.of_kind))]
            return memory.stage_of_kinds([counts], False, last, holding(held), shards).total

        base = 3  # number of layers above which ZeRO-3 does not gather more of them at once
        first, one_policy = kinds[0], policies[0]
        self.held = total(0, one_policy, 1, first) - total(0, one_policy, 0, first)
        self.kinds, constant = list[list[float]](), {policy: list[float]() for policy in policies}
        for kind in kinds:
            layer = total(base + 1, one_policy, 0, kind) - total(base, one_policy, 0, kind)
            stored = [total(base + 1, p, 1, kind) - total(base, p, 1, kind) - layer for p in policies]
            self.kinds.append([layer, *stored])
            # With fewer layers than `base`, less is gathered; the lower of both lines is valid for all.
            fewer = 0 if len(memory.of_kind) == 1 else 1
            whole = total(base, one_policy, 0, kind)
            less = min(0.0, total(fewer, one_policy, 0, kind) - fewer * layer - (whole - base * layer))
            for policy, least in constant.items():
                least.append(total(base, policy, 0, kind) - base * layer + less)
        self.fixed = min(map(min, constant.values()))
        self.once = [max(0.0, min(constant[policy]) - self.fixed) for policy in policies]
