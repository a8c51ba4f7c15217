"""Quick estimates of the step time for many shapes at once, from what GPUs of a type have in common.

The devices of a stage are counted by type. Each takes tokens in proportion to its speed or up to its memory; keys and
values travel round the machines while attention is computed, or an all-to-all exchanges everything. Layers are
allocated to stages, and sequences to pipelines, by speed. Contention on the network and idle time beyond the pipeline
fill are left to pricing.
"""

from dataclasses import dataclass

import numpy as np

from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.token_layout import Floats, Ints
from solvers.core.zero import LOCKSTEP
from solvers.sequence.shapes import SequenceShape, ShapePipeline
from solvers.sequence.stage_tables import TensorTable
from solvers.sequence.token_allocation import RateTable

_FILLINGS = 3  # rounds in which tokens move from full devices to others
_SPLITS = 24  # bisections of the seconds of a step


@dataclass(frozen=True)
class Cells:
    """The stages of many shapes with equally many pipelines and stages each.

    `counts` [shapes, pipelines, stages, types] devices; `machines` [shapes, pipelines, stages] that they span; `nic_s`
    seconds per byte of the slowest network interface of these.
    """

    counts: Floats
    machines: Ints
    nic_s: Floats


class SequenceEstimates:
    """Estimates for one problem and ZeRO stage.

    With `tensor`, a stage uses tensor parallelism instead of a layout where that is allowed and faster.
    """

    def __init__(self, model: PlanPricer, zero: int, *, tensor: bool = False) -> None:
        problem = self.problem = model.problem
        cluster, spec, workload = problem.cluster, problem.model, problem.workload
        first: dict[str, int] = {}
        for d in problem.usable_devices:
            first.setdefault(cluster.gpu_of(d).name, d)
        self.types = tuple(first)
        examples = list(first.values())
        number = {name: k for k, name in enumerate(self.types)}
        self.type_of_machine = np.array([number.get(m.gpu.name, 0) for m in cluster.machines])
        self._nic_s = np.zeros(len(number))
        for m in problem.usable_by_machine:
            machine = cluster.machines[m]
            nic_s = 1.0 / (machine.nic_bandwidth_bytes_per_s * machine.num_interfaces)
            np.maximum.at(self._nic_s, self.type_of_machine[m], nic_s)
        self._pipelines: Memo[tuple[ShapePipeline, int, int], tuple[float, float, float]] = Memo(
            lambda key: self._pipeline_s(*key)
        )
        self._policies = model.policies()
        table = RateTable(model)
        self._tensor = TensorTable(model, self.types) if tensor else None
        self._speed = np.array(
            [1.0 / table.of(examples, p).of_sequence_s(workload.seq_len, spec.num_heads) for p in self._policies]
        )
        self.speed: Floats = self._speed[0]
        self._limit = np.array([cluster.gpu_of(d).usable_memory_bytes for d in examples])
        by_size = sorted(cluster.machines, key=lambda m: m.num_gpus)
        most = {gpu.name: m.num_gpus for m in by_size for gpu in m.types}
        self._per_machine = np.array([most[name] for name in self.types])
        self.zero = zero
        alone = MemoryModel(spec, workload, cluster.gpu_of(examples[0]), 1, 1)
        spread = StateSharding(self.zero, len(problem.usable_devices))
        # From two layers on linear under ZeRO-3 too, where what is gathered stays the same.
        two, three = (sum(alone.states(n, False, False, spread)) for n in (2, 3))
        self._layer_bytes = three - two
        outside = sum(alone.states(2, True, True, spread)) - 2 * self._layer_bytes
        self._ends_bytes = outside if zero >= LOCKSTEP else outside / 2
        self._layer_params = alone.num_params(1, False, False)
        self._token_bytes = np.array([_token_bytes(model, examples[0], policy) for policy in self._policies])
        width, dim = workload.element_bytes, spec.head_dim
        self._kv_bytes = 2.0 * workload.seq_len * spec.num_kv_heads * dim * width
        self._qo_bytes = 2.0 * workload.seq_len * spec.num_heads * dim * width

    def step_s(self, fills: Floats, periods: Floats, size: int) -> Floats:
        """Seconds of the global batch [shapes] from the fills and periods of the pipelines [shapes, pipelines].

        In lockstep all pipelines have equally many micro-batches.
        """
        count = -(-self.problem.workload.global_batch // size)
        if self.zero < LOCKSTEP:
            return split_s(fills, periods, count)
        seconds: Floats = (fills + periods * (count / periods.shape[1])).max(axis=1)
        return seconds

    def shape_s(self, shape: SequenceShape) -> float:
        """As `step_s`, for one shape whose pipelines may differ in their numbers of stages."""
        rows = [self._pipelines[pipeline, shape.size, len(shape.pipelines)] for pipeline in shape.pipelines]
        fills, periods, syncs = (np.array([column]) for column in zip(*rows, strict=True))
        return float(self.step_s(fills, periods, shape.size)[0] + syncs.max())

    def _pipeline_s(self, pipeline: ShapePipeline, size: int, pipelines: int) -> tuple[float, float, float]:
        machine_of = self.problem.cluster.machine_of
        machines = [machine_of[list(own)] for own in pipeline]
        types = len(self.types)
        counts = np.array([[[np.bincount(self.type_of_machine[own], minlength=types) for own in machines]]], float)
        cells = Cells(counts, np.array([[[len(np.unique(own)) for own in machines]]]), self.slowest_nic_s(counts))
        fills, periods, sync_s = self.rhythms_s(cells, size, pipelines)
        return float(fills[0, 0]), float(periods[0, 0]), float(sync_s[0])

    def slowest_nic_s(self, counts: Floats) -> Floats:
        """Seconds per byte of the slowest network interface of stages with `counts` [..., types] devices."""
        found: Floats = np.where(counts > 0, self._nic_s, 0.0).max(axis=-1)
        return found

    def rhythms_s(self, cells: Cells, size: int, pipelines: int = 0) -> tuple[Floats, Floats, Floats]:
        """Fill and period of every pipeline [shapes, pipelines], and seconds of gradient sync [shapes].

        m micro-batches take about fill + m · period seconds; both are infinite where memory does not suffice.
        `pipelines`: the number of pipelines of the whole shape, where it has more than `cells`.
        """
        workload = self.problem.workload
        pipelines, stages = max(pipelines, cells.machines.shape[1]), cells.machines.shape[2]
        held = np.minimum(np.arange(stages, 0, -1.0), max(1, workload.global_batch // (pipelines * size)))
        most = np.maximum(0.0, np.floor((self._least(cells) - self._ends_bytes) / self._layer_bytes))
        rate = cells.counts @ self._speed[0]
        if self._tensor is not None:
            shards = StateSharding(self.zero, pipelines)
            tensor_s, layer_limits = self._tensor.of(cells.counts, cells.machines, held, size, shards)
            best_layer_limit = np.maximum(most, layer_limits.max(axis=0))
        else:
            best_layer_limit = most
        share = self._share(1.0 / rate, best_layer_limit)
        best = self._layouts_s(cells, size, share, held)
        if self._tensor is not None:
            best = np.minimum(best, np.where(share <= layer_limits, tensor_s, np.inf).min(axis=0))
        share = self._share(best, best_layer_limit)
        with np.errstate(invalid="ignore"):
            periods = size * (share * best).max(axis=2)
            fills = size * (share * best).sum(axis=2) - periods
        lost = ~(np.isfinite(periods) & np.isfinite(fills))
        periods[lost] = fills[lost] = np.inf
        together = (cells.machines > 1) | (pipelines > 1)
        share = np.where(np.isfinite(share), share, 0.0)
        sync = 2.0 * share * self._layer_params * workload.sum_bytes * cells.nic_s * together
        return fills, periods, sync.max(axis=(1, 2))

    def _layouts_s(self, cells: Cells, size: int, share: Floats, held: Floats) -> Floats:
        """Seconds of a layer per sequence with a sequence layout under the best policy [shapes, pipelines, stages]."""
        seq_len, stages = self.problem.workload.seq_len, cells.machines.shape[2]
        exchange_s = self._exchange_s(cells)
        best: Floats = np.full(cells.machines.shape, np.inf)
        for k, speed in enumerate(self._speed):
            free = self._limit - (share * self._layer_bytes + self._ends_bytes)[..., None]
            layer, outside, head = self._token_bytes[k]
            need = size * (share * held * layer + outside + head * (np.arange(stages) == stages - 1))
            caps = np.maximum(free, 0.0) / need[..., None]  # tokens of a device
            tokens = self._tokens(cells.counts, caps, speed, seq_len)
            compute_s = (tokens / (speed * seq_len)).max(axis=-1)
            # A ring over machines or devices: every turn takes as long as the largest shard. Keys and values move in
            # all turns but the last, forward and backward, and their gradients in all turns.
            most = tokens.max(axis=-1) / seq_len
            largest = np.minimum(1.0, (tokens * np.minimum(cells.counts, self._per_machine)).max(axis=-1) / seq_len)
            moved = np.minimum(largest * (3 * cells.machines - 2), most * (3 * cells.counts.sum(axis=-1) - 2))
            ring_s = self._kv_bytes * cells.nic_s * moved
            across_s = np.minimum(np.maximum(compute_s, ring_s), compute_s + exchange_s)
            best = np.minimum(best, np.where(cells.machines > 1, across_s, compute_s))
        return best

    def _least(self, cells: Cells) -> Floats:
        """The least device memory of each stage [shapes, pipelines, stages]."""
        least: Floats = np.where(cells.counts > 0, self._limit, np.inf).min(axis=-1)
        return least

    def _share(self, layer_s: Floats, most: Floats) -> Floats:
        """Layers of every stage in proportion to speed, up to what fits [shapes, pipelines, stages]."""
        total = float(self.problem.model.num_layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(np.isfinite(layer_s), 1.0 / layer_s, 0.0)
            share = np.zeros_like(rate)
            for _ in range(_FILLINGS):
                open_ = np.where(share < most, rate, 0.0)
                missing = total - share.sum(axis=2, keepdims=True)
                share = np.minimum(most, share + open_ * _over(missing, open_.sum(axis=2, keepdims=True)))
        share[share.sum(axis=2) < total - 1e-6] = np.inf
        return share

    def _tokens(self, counts: Floats, caps: Floats, speed: Floats, seq_len: int) -> Floats:
        """Tokens of a device of each type in proportion to speed, up to its cap; infinite where they do not fit."""
        tokens = np.zeros(counts.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            for _ in range(_FILLINGS):
                open_ = np.where(tokens < caps, counts * speed, 0.0)
                missing = seq_len - (counts * tokens).sum(axis=-1, keepdims=True)
                more = _over(missing, open_.sum(axis=-1, keepdims=True)) * speed
                tokens = np.where(tokens < caps, np.minimum(caps, tokens + more), tokens)
        tokens = np.where(counts > 0, tokens, 0.0)
        short = (counts * tokens).sum(axis=-1, keepdims=True) < 0.999 * seq_len
        found: Floats = np.where(short & (counts > 0), np.inf, tokens)
        return found

    def _exchange_s(self, cells: Cells) -> Floats:
        """Seconds of the all-to-alls of one group over all machines; infinite where there are fewer heads than
        devices.
        """
        away = (1.0 - 1.0 / cells.machines) / cells.machines
        seconds = 2.0 * (self._kv_bytes + self._qo_bytes) * cells.nic_s * away
        whole = cells.counts.sum(axis=-1) <= self.problem.model.num_heads
        found: Floats = np.where(whole, seconds, np.inf)
        return found


def _token_bytes(model: PlanPricer, device: int, policy: str) -> tuple[float, float, float]:
    """Activation bytes per token of a device with all heads: of a layer, outside the layers, and of the output head."""
    problem = model.problem
    tokens = problem.workload.seq_len
    layout = SequenceParallel((SequenceGroup((device,), (tokens,), (problem.model.num_heads,)),))
    stage = SequenceStage(problem, model.framework, layout, 1)

    def held(layers: int, last: bool) -> float:
        return float(stage.memory.stage(((policy,) * layers,), False, last, (1,))[4:].sum()) / tokens

    one, two, head = held(1, False), held(2, False), held(1, True)
    return two - one, max(0.0, 2 * one - two), head - one


def _over(amount: Floats, parts: Floats) -> Floats:
    """`amount` / `parts`; 0 where there is no part."""
    found: Floats = np.divide(amount, parts, out=np.zeros_like(amount), where=parts > 0)
    return found


def split_s(fills: Floats, periods: Floats, count: int | Floats) -> Floats:
    """Seconds until the pipelines of each shape [shapes, pipelines] have processed `count` micro-batches, at least one
    each.

    Infinite where a pipeline never finishes. A missing pipeline has an infinite period and a fill of 0.
    """
    found = np.full(len(periods), np.inf)
    good = np.flatnonzero(np.isfinite(fills).all(axis=1) & np.isfinite(periods).any(axis=1))
    fills, periods, counts = fills[good], periods[good], np.broadcast_to(count, len(found))[good]
    there = np.isfinite(periods)
    first_s = np.where(there, fills + periods, 0.0).max(axis=1, initial=0.0)
    low, high = np.zeros(len(periods)), np.where(there, fills + periods * counts[:, None], 0.0).max(axis=1, initial=0.0)
    for _ in range(_SPLITS):
        middle = 0.5 * (low + high)
        done = np.where(there, np.maximum(1.0, np.floor((middle[:, None] - fills) / periods + 1e-9)), 0.0).sum(axis=1)
        enough = (done >= counts) & (middle >= first_s)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    found[good] = high
    return found
