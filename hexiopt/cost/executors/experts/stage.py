"""Seconds and bytes of a stage whose replicas, on any machines and GPU types, share the experts of each layer.

A layer with experts is phases, and in each phase all wait for the slowest: what mixes tokens and dense parts on the
replicas, copies of tokens to experts, the experts, copies back. Layers without experts wait at the next exchange, and
are priced as if they waited at their ends, which is never less. Devices that hold experts alone take part in the
exchanges and compute their experts. Where a stage has two waves, `waves.py` says how they overlap.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

from hexiopt.cost.executors.compute import ComputeTimes, LayerTimes
from hexiopt.cost.executors.executor import ExecutorCost, ForwardLayers, ParameterCopy
from hexiopt.cost.executors.experts.times import DeviceShare, ExpertSharing, ExpertTimes, uneven_exchange_s
from hexiopt.cost.executors.experts.waves import WavePhases, wave_times
from hexiopt.cost.executors.memory import Holders, Memory, MemoryModel, StateSharding
from hexiopt.cost.executors.states import Layers
from hexiopt.cost.executors.tp_groups import TpGroup, TpGroups
from hexiopt.errors import InputError
from hexiopt.memo import Memo
from hexiopt.numbers.frameworks import Framework
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.parallelism import ExpertParallel
from hexiopt.problem.kinds import Experts
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import JOINED
from hexiopt.schedules.in_flight import InFlight

LayerCounts = Sequence[Counter[str]]  # of each kind, the number of layers of each recompute policy


class StageParts(Protocol):
    """What is asked about single TP groups, sequences and GPUs: a `StageModel`."""

    problem: Problem
    framework: Framework
    tp_groups: TpGroups
    memory_models: Memo[tuple[str, int, int, ExpertSharing], MemoryModel]
    expert_times: Memo[str, ExpertTimes]

    def whole_group(self, devices: tuple[int, ...]) -> TpGroup: ...
    def layer_apart(self, tp_group: TpGroup, size: int, number: int) -> LayerTimes: ...
    def ends_s(self, tp_group: TpGroup, micro_batch_size: int) -> tuple[ComputeTimes, ComputeTimes]: ...
    def quantization_s(self, tp_group: TpGroup, micro_batch_size: int) -> float: ...
    def copy_of(
        self,
        model: MemoryModel,
        memory: Memory,
        gpu: Gpu,
        num_layers: Layers,
        ends: tuple[bool, bool],
        shards: StateSharding,
    ) -> ParameterCopy: ...


class ExpertParallelStage:
    """A stage whose replicas share experts. Raises InputError for models that predict further tokens, whose layers
    after the last stage's are not shared."""

    def __init__(self, parts: StageParts, group: ExpertParallel) -> None:
        model = parts.problem.model
        if model.extra_layers:
            raise InputError(
                f"plan: stages of {model.name} that state experts have no price, as the model predicts further tokens; "
                "plan with space.uneven_experts=false"
            )
        self._parts, self._waves = parts, group.waves
        self._replicas = [(parts.whole_group(m.devices), m.samples) for m in group.members if m.samples]
        self._devices = _device_shares(parts, group)
        sharing = ExpertSharing(len(self._devices), len(self._replicas), group.num_samples)
        columns = group.parameter_copies, group.samples_of_copies, group.experts_of_copies
        self._copies = [  # of each copy its GPU, TP degree, samples and experts
            (parts.tp_groups.of(devices[:1]).gpu, len(devices), samples, sharing._replace(held=held, alone=not samples))
            for devices, samples, held in zip(*columns, strict=True)
        ]
        numbers = iter(range(len(self._replicas)))
        self._replica_of = list[int | None]()  # of each device
        for member in group.members:
            self._replica_of += [next(numbers) if member.samples else None] * len(member.devices)
        self._layers, self._exchanges = Memo(self._time_layer), Memo(self._time_exchange)

    def layer_s(self, kind: int, policy: str, silent: bool = False) -> tuple[float, float]:
        """Forward and backward seconds of a layer of a kind for one micro-batch; `silent`: with exchanges that take no
        time."""
        return self._layers[kind, policy, silent][0]

    def fill_s(self, kind: int, policy: str) -> tuple[float, float]:
        """Seconds by which the first layer of a kind lasts longer than a further one, as waves have yet to overlap."""
        return self._layers[kind, policy, False][1]

    def _time_layer(self, key: tuple[int, str, bool]) -> tuple[tuple[float, float], tuple[float, float]]:
        kind, policy, silent = key
        experts, waves = self._parts.problem.model.kinds[kind].experts, self._waves
        exchange_s = 0.0 if silent else 0.5 * self.exchange_s(kind)
        apart = [self._parts.layer_apart(cell, samples // waves, kind) for cell, samples in self._replicas]
        if experts is None or waves == 1:
            there_s, back_s = (0.0, 0.0) if experts is None else map(max, self._experts_s(experts))
            both_s = 2 * exchange_s
            times = [times.with_experts(there_s + both_s, back_s + both_s).under(policy) for times in apart]
            forward_s, backward_s = (waves * max(column) for column in zip(*times, strict=True))
            return (forward_s, backward_s), (0.0, 0.0)
        experts_s = self._experts_s(experts)
        again = policy in ("full", JOINED)  # what is recomputed has exchanges and experts too
        there, recomputed, back = (
            wave_times(WavePhases([0.0 if r is None else seconds[r] for r in self._replica_of], of_experts, exchange_s))
            for seconds, of_experts in (
                ([times.forward_s for times in apart], experts_s[0]),
                ([times.recompute_s for times in apart], experts_s[0]),
                ([times.backward_s + (policy == "selective") * times.attention_s for times in apart], experts_s[1]),
            )
        )
        passes = (back, recomputed) if again else (back,)
        host_s = waves * max(times.host_s for times in apart)
        forward_s, backward_s = max(there.further_s, host_s), sum(times.further_s for times in passes)
        fill_s = there.first_s - there.further_s, sum(times.first_s - times.further_s for times in passes)
        return (forward_s, max(backward_s, len(passes) * host_s)), fill_s

    def exchange_s(self, kind: int) -> float:
        """Seconds of both all-to-alls of a wave in a pass through a layer of a kind; 0 where it has no experts."""
        return self._exchanges[kind]

    def _time_exchange(self, kind: int) -> float:
        problem, framework = self._parts.problem, self._parts.framework
        model, part = problem.model, problem.model.kinds[kind].experts
        if part is None:
            return 0.0
        network, to_machines = problem.cluster.network, framework.copies_to_machines
        shares = [share._replace(tokens=share.tokens / self._waves) for share in self._devices]
        there_s = uneven_exchange_s(part, problem.workload, model.hidden_size, network, shares, to_machines)
        return 2 * framework.exchange_exposed * there_s

    def _experts_s(self, part: Experts) -> list[list[float]]:
        """Forward, and backward, seconds of the experts of a layer on each device for a wave."""
        times_of, groups, waves = self._parts.expert_times, self._parts.tp_groups, self._waves
        sharing = ExpertSharing(len(self._devices), len(self._replicas), sum(n for _, n in self._replicas) // waves)
        times = [
            times_of[groups.of((share.device,)).gpu.name].seconds(
                part, sharing._replace(held=share.experts), share.tokens / waves
            )
            for share in self._devices
        ]
        return [list(column) for column in zip(*times, strict=True)]

    def ends_s(self) -> tuple[ComputeTimes, ComputeTimes]:
        """The times of the embedding on a first stage, and of head and loss on a last one, on the slowest replica."""
        ends = [self._parts.ends_s(cell, samples) for cell, samples in self._replicas]
        embedding, head = (
            ComputeTimes(max(times.forward_s for times in column), max(times.backward_s for times in column))
            for column in zip(*ends, strict=True)
        )
        return embedding, head

    @property
    def quantization_s(self) -> float:
        """Seconds in which the slowest replica quantises a message of a micro-batch, or dequantises one."""
        return max(self._parts.quantization_s(cell, samples) for cell, samples in self._replicas)

    def cost(
        self,
        ranges: Sequence[LayerCounts],
        together: int,
        first_policy: str,
        place: tuple[bool, bool, InFlight, int, int],
        holders: Sequence[Holders],
    ) -> ExecutorCost:
        """The cost of the stage at its `place` (`StagePlace`) with so many layers of each kind and policy
        [ranges][kinds], up to so many recomputed `together`; states of a copy are spread over `holders`
        [copies]."""
        first, last, in_flight, zero_stage, queued = place
        final = len(ranges) - 1
        ends = [(first and k == 0, last and k == final) for k in range(final + 1)]
        chunk_s = tuple([self.range_s(counts, *at) for counts, at in zip(ranges, ends, strict=True)])
        layers = tuple([sum([counts.total() for counts in column]) for column in zip(*ranges, strict=True)])
        copies = []
        for (model, gpu), spread in zip(self.memory_models, holders, strict=True):
            shards = model.sharding(zero_stage, spread, first, last)
            memory = model.stage_of_kinds(ranges, first, last, in_flight, shards, together)
            memory = memory.with_buffers(queued * model.activations.message)
            copies.append(self._parts.copy_of(model, memory, gpu, layers, (first, last), shards))
        message_s = (2 * len(ranges) - first - last) * self.quantization_s
        kind = next(k for k, n in enumerate(layers) if n)
        forwards = ForwardLayers(sum(layers), self.layer_s(kind, first_policy)[0], together)
        return ExecutorCost(chunk_s, tuple(copies), quantization_s=message_s, layers=forwards)

    @property
    def memory_models(self) -> list[tuple[MemoryModel, Gpu]]:
        """The memory of each parameter copy, and its GPU."""
        models = self._parts.memory_models
        return [(models[gpu.name, tp, samples, sharing], gpu) for gpu, tp, samples, sharing in self._copies]

    def range_s(self, counts: LayerCounts, first: bool, last: bool) -> tuple[float, float]:
        """Forward and backward seconds of a layer range for one micro-batch."""
        message_s, (embedding, head) = (2 - first - last) * self.quantization_s, self.ends_s()
        forward_s = message_s + first * embedding.forward_s + last * head.forward_s
        backward_s = message_s + first * embedding.backward_s + last * head.backward_s
        layers, fills_s = _flat(counts), [(0.0, 0.0)]
        for kind, policy, n in layers:
            layer_s = self.layer_s(kind, policy)
            forward_s, backward_s = forward_s + n * layer_s[0], backward_s + n * layer_s[1]
            fills_s.append(self.fill_s(kind, policy))
        return forward_s + max(fill for fill, _ in fills_s), backward_s + max(fill for _, fill in fills_s)


def _flat(counts: Sequence[Mapping[str, int]]) -> list[tuple[int, str, int]]:
    return list(
        chain.from_iterable([(k, policy, n) for policy, n in of_kind.items()] for k, of_kind in enumerate(counts))
    )


def _device_shares(parts: StageParts, group: ExpertParallel) -> list[DeviceShare]:
    """What each device of the stage has, in their order."""
    cluster, seq_len = parts.problem.cluster, parts.problem.workload.seq_len
    machine_of: list[int] = cluster.machine_of.tolist()
    inside: dict[int, list[int]] = {}
    for device in group.devices:
        inside.setdefault(machine_of[device], []).append(device)
    bandwidth = {m: parts.tp_groups.of(tuple(devices)).bandwidth for m, devices in inside.items()}
    return [
        DeviceShare(device, m := machine_of[device], bandwidth[m], member.samples * seq_len / len(member.devices), held)
        for member in group.members
        for device, held in zip(member.devices, member.experts, strict=True)
    ]
