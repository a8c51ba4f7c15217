"""A lower bound on the step time from what machines receive: activations, and gradients of layers held by several.

A sequence that passes a machine brings it the hidden states of its first layer there, and the gradients of its last:
A bytes each, but for the *ends*, the first and the last layer of the model. So p sequences bring 2p − e messages, e of
their ends in the machine, and Σ e ≤ 2 · global batch over all machines. With R layers of sequences computed per second
and c bytes received per second, a machine does W layers of sequences in a step of T seconds:

    alone:   it holds a layer that no other does: all sequences pass, 2 · batch − e ≤ c · T / A,  W ≤ R · T
    shared:  others hold all of its layers too:   2p − e ≤ c · (T − s · tail) / A,                W ≤ min(R · T, a · p)

where a layer held by h machines counts 1 − 1/h in s, so that the a layers of a machine are no more than 2s. Gradient
sync (`columns.py`) receives the gradients of s layers, by an interface that all stages wait for: for s · tail seconds
after the last message that any of them needs. Stages in lockstep sync during every backward, beside messages: then only
what follows the last backward counts as tail, and s is limited by what all micro-batches take.

Layers of several kinds count as in `compute.py`, and a as so many of the kind that counts most, but not more than all.
Σ W ≥ layers · batch. At a price μ of ends, no cluster does more than Σ over machines of max (W − μ · e), plus
2 · batch · μ: where that is less, no plan takes T seconds. The largest such T is the bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.compute import device_rates, kind_weights
from hexiopt.bounds.stages import machine_params
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.space import sharding_stages

Floats = NDArray[np.float64]
_INTERVALS = 256  # of s: each has the sync of its low end and the layers of its high end
_CLOSE = 1e-3  # share of the step to which the bound is sought
_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 25  # of the interval of μ: to 1e-5 of it
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Sync:
    """Seconds that a shared layer takes of one machine's interface: `tail_s` after the last message that the stages
    need, and `whole_s` in all, none of which fit beside others."""

    tail_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """Machines of a kind: how many, layers of sequences computed and messages received per second, the most sequences
    that may pass one, and gradient sync by each way of sharding."""

    supply: int
    layers_per_s: float
    messages_per_s: float
    most_sequences: float
    syncs: tuple[_Sync, ...]


class InterfaceBound:
    """The bound for pipelines of any number of micro-batches under ZeRO-0 and 1 (`micro_batches` None), or of so many
    each under ZeRO-2 and 3."""

    def __init__(self, model: PlanPricer, micro_batches: int | None) -> None:
        problem = model.problem
        self._num_layers, self._batch = problem.model.num_layers, problem.workload.global_batch
        self._most_weight = max(kind_weights(model).values())
        self._kinds = list(_kinds(model, micro_batches))
        self._ways = len(self._kinds[0].syncs)

    def seconds(self, lower_s: float) -> float:
        """The bound in seconds, raised from `lower_s`, which must hold; infinite where there are no such pipelines."""
        if sum(kind.supply * kind.most_sequences for kind in self._kinds) < self._batch:
            return inf
        return min(self._raise_s(lower_s, way) for way in range(self._ways))

    def _raise_s(self, lower_s: float, way: int) -> float:
        low_s, high_s = lower_s, lower_s * (1 + _CLOSE)
        while self._refutes(high_s, way):
            low_s, high_s = high_s, high_s + 2 * (high_s - low_s)
        while high_s - low_s > _CLOSE * low_s:
            middle_s = 0.5 * (low_s + high_s)
            low_s, high_s = (middle_s, high_s) if self._refutes(middle_s, way) else (low_s, middle_s)
        return low_s

    def _refutes(self, step_s: float, way: int) -> bool:
        """Whether no cluster with gradient sync of this `way` does all the work in `step_s`."""
        options = [(kind.supply, *self._options(kind, step_s, kind.syncs[way])) for kind in self._kinds]
        needed = (1 - _ROUNDING) * self._num_layers * self._batch

        def most(price: float) -> float:
            work = sum(supply * float((work - price * ends).max()) for supply, work, ends in options)
            return work + 2 * self._batch * price

        # `most` is convex; whatever the price, it is an upper bound.
        low, high = 0.0, float(self._num_layers)
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_a, at_b, least = most(a), most(b), most(0.0)
        for _ in range(_NARROWINGS):
            least = min(least, at_a, at_b)
            if least < needed:
                return True
            if at_a < at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = most(a)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = most(b)
        return False

    def _options(self, kind: _Kind, step_s: float, sync: _Sync) -> tuple[Floats, Floats]:
        """What a machine may do in a step: layers of sequences, and the ends among them [options]."""
        most_work, received = kind.layers_per_s * step_s, kind.messages_per_s * step_s
        low = np.arange(_INTERVALS) * (self._num_layers / _INTERVALS)  # of s
        most_layers = np.minimum(2 * (low + self._num_layers / _INTERVALS), self._num_layers)
        layers = np.minimum(self._most_weight * most_layers, self._num_layers)
        within = np.maximum(sync.tail_s, sync.whole_s) * low <= step_s * (1 + _ROUNDING)
        layers, messages = layers[within], np.maximum(0.0, received - kind.messages_per_s * sync.tail_s * low[within])
        # W − μ · e is concave in p: as many sequences as need no ends, or as many as there may be.
        most = np.minimum(kind.most_sequences, most_work / layers)
        without_ends = np.minimum(most, messages / 2)
        work, ends = [np.zeros(1), layers * without_ends, layers * most], [np.zeros(1), 0.0 * most, 2 * most - messages]
        if kind.most_sequences >= self._batch:
            work.append(np.array([most_work]))
            ends.append(np.array([2 * self._batch - received]))
        return np.concatenate(work), np.maximum(0.0, np.concatenate(ends))


def _kinds(model: PlanPricer, micro_batches: int | None) -> Iterator[_Kind]:
    problem, workload = model.problem, model.problem.workload
    batch, layer_params = workload.global_batch, machine_params(problem)
    gradient, weight = layer_params * workload.sum_bytes, layer_params * workload.states.weight
    late = layer_params * model.framework.late_bytes(workload.states.weight)
    stages = [stage for stage in sharding_stages(workload) if (stage < 2) == (micro_batches is None)]
    most_size = problem.space.micro_batch_sizes(batch)[-1]
    rates = {machine.kind: rate for machine, _, rate in device_rates(model)}
    machines: dict[tuple[object, int], list[int]] = {}
    for m, usable in problem.usable_by_machine.items():
        machines.setdefault((problem.cluster.machines[m].kind, len(usable)), []).append(m)
    for (name, devices), same in machines.items():
        machine = problem.cluster.machines[same[0]]
        # Of several interfaces, no stage need wait for the busiest.
        per_byte = 1.0 / machine.nic_bandwidth_bytes_per_s if machine.num_interfaces == 1 else 0.0
        syncs: list[_Sync] = []
        for stage in stages:
            if stage < 2:
                syncs.append(_Sync(per_byte * (gradient + min(gradient, late)), 0.0))
                continue
            assert micro_batches is not None, "the number is that of stages in lockstep"
            gathers = 1 if stage == 2 else 2 * micro_batches
            tail = weight if stage == 2 else 0.0
            syncs.append(_Sync(per_byte * tail, per_byte * (micro_batches * gradient + gathers * weight)))
            syncs.append(_Sync(per_byte * 2 * gradient, 0.0))  # groups of a machine, which sum their shards at the end
        passing = batch if micro_batches is None else min(batch, devices * micro_batches * most_size)
        rate = machine.nic_bandwidth_bytes_per_s * machine.num_interfaces
        yield _Kind(
            len(same), devices * rates[name], rate / model.stages.routes.message_bytes(1), float(passing), tuple(syncs)
        )
