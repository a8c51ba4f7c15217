"""Stage types: what a TP group of a machine kind takes at least for n layers and x sequences of a micro-batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.memory import MemoryModel, Shards
from hexiopt.cost.model import CostModel, Site
from hexiopt.machine import Machine
from hexiopt.space import recompute_policies

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageTypes:
    """All stage types of a problem, one array element each; `supply` is in devices of each machine kind.

    `sharding` is the ZeRO stage, its states spread over as many devices as may be.
    """

    def __init__(self, model: CostModel, sharding: int) -> None:
        problem = model.problem
        space, workload, devices = problem.space, problem.workload, problem.usable_by_machine
        self.num_layers, self.global_batch = problem.model.num_layers, workload.global_batch
        kinds: dict[object, list[int]] = {}
        for machine, own in devices.items():
            kinds.setdefault((problem.cluster.machines[machine].kind, len(own)), []).append(machine)
        self.supply: Floats = np.array([sum(len(devices[m]) for m in same) for same in kinds.values()], float)
        sizes = space.micro_batch_sizes(self.global_batch)
        shares = range(1, sizes[-1] + 1) if space.replicas else sizes
        rows = [
            _Row(kind, problem.cluster.machines[same[0]], site, share, held_by)
            for kind, same in enumerate(kinds.values())
            for site in model.best_sites(same[0])
            if site.tp <= len(devices[same[0]])
            for held_by in _holders(sharding, len(problem.usable_devices), len(devices[same[0]]) // site.tp)
            for share in shares
        ]
        self.kind: Ints = np.array([row.kind for row in rows])
        self.devices: Floats = np.array([row.site.tp / row.share for row in rows])
        self.share: Floats = np.array([row.share for row in rows], float)
        self._policies = recompute_policies(workload)
        times = np.array([[row.layer_s(model, sharding, policy) for policy in self._policies] for row in rows])
        self._policy_s = times.sum(axis=2)  # [types, policies]
        self.forward_s: Floats = times[:, :, 0].min(axis=1)
        self.layer_s: Floats = self._policy_s.min(axis=1)
        heads = [model.ends_s(row.site, row.share)[1] for row in rows]
        self.head_forward_s: Floats = np.array([head.forward_s for head in heads])
        self._head_s = np.array([head.forward_s + head.backward_s for head in heads])
        self._memory = {
            last: np.array([self._bytes(model, row, last, sharding) for row in rows]) for last in (False, True)
        }
        self._seconds: dict[tuple[int, ...], Floats] = {}

    def _bytes(self, model: CostModel, row: "_Row", last: bool, sharding: int) -> list[float]:
        """Room beside what does not grow; bytes per layer, per micro-batch in flight; then, for each policy, bytes
        per layer and micro-batch; and what each needs once."""
        memory = model.memory_model(row.site, row.share)
        growth = _Growth(memory, last, Shards(sharding, row.holders.most), self._policies)
        return [row.site.gpu.usable_memory_bytes - growth.fixed, growth.layer, growth.held, *growth.both, *growth.once]

    def seconds(self, after: int, held: int) -> Floats:
        """Least forward and backward seconds of n layers with `after` stages behind and `held` micro-batches in
        flight, infinite where memory lacks [types, layers + 1]."""
        n = np.arange(self.num_layers + 1)
        return self._kept((after, held), after == 0, held * n, 0 * n, held, held)

    def interleaved_s(self, after: int, stages: int, least_ranges: int, most_ranges: int, many: bool) -> Floats:
        """As `seconds`, of a stage of a pipeline of so many stages at least, in so many layer ranges; `many`
        micro-batches are at least twice the stages.

        Before its first backward such a stage has run `stages` forwards of each range but the last, of that one
        2 · after + 1 or as many, and then of the first range again (Narayanan et al., as in `schedule_graph.py`).
        """
        n = np.arange(self.num_layers + 1)
        begun = 2 * after + 1
        stored = stages * n - max(0, stages - begun) * -(-n // least_ranges)
        more = max(0, begun - stages) * many * (n // most_ranges)
        return self._kept((after, stages, least_ranges, most_ranges, many), after == 0, stored, more, stages, after + 1)

    def _kept(self, key: tuple[int, ...], last: bool, stored: Ints, more: Ints, repeated: int, held: int) -> Floats:
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._least_s(last, stored, more, repeated, held)
        return found

    def _least_s(self, last: bool, stored: Ints, more: Ints, repeated: int, held: int) -> Floats:
        """Seconds when activations of `stored` layers, each at most `repeated` times, and of `more` that may be the
        leanest [layers + 1] must fit beside what `held` micro-batches need beside layers."""
        count, n = len(self._policies), np.arange(self.num_layers + 1)
        memory = self._memory[last]
        room = (memory[:, 0:1] * (1 + 1e-9) - memory[:, 1:2] * n - memory[:, 2:3] * held)[:, :, None]
        each, once = memory[:, None, 3 : 3 + count], memory[:, None, 3 + count :]
        with np.errstate(divide="ignore", invalid="ignore"):
            # Bytes for activations where a policy is the leanest of those used.
            spare = room - once - more[None, :, None] * each
            seconds = np.full(room.shape[:2], np.inf)
            for lean in range(count):
                alone = spare[:, :, lean] >= stored * each[:, :, lean]
                seconds = np.where(alone, np.minimum(seconds, n * self._policy_s[:, lean : lean + 1]), seconds)
                for rich in range(count) if count > 1 else ():
                    # Whole layers by the leaner policy; the others store as little as any other policy would.
                    stores = np.delete(each, lean, axis=2).min(axis=2)
                    saved = repeated * (stores - each[:, :, lean])
                    some = np.ceil((stored * stores - spare[:, :, lean]) / saved * (1 - 1e-9) - 1e-9).clip(1, n)
                    mixed = (n - some) * self._policy_s[:, rich : rich + 1] + some * self._policy_s[:, lean : lean + 1]
                    seconds = np.where(alone & (saved > 0), np.minimum(seconds, mixed), seconds)
            found = seconds + (self._head_s[:, None] if last else 0.0)
        found[:, 0] = np.inf
        return np.where(room[:, :, 0] > 0, found, np.inf)


@dataclass(frozen=True, slots=True)
class _Holders:
    """Over how many devices a stage's states are spread, from `least` to `most`, and whether in one machine."""

    least: int
    most: int
    together: bool


def _holders(sharding: int, devices: int, together: int) -> list[_Holders]:
    """Classes that share their conditions; `together` TP groups have room in a machine."""
    if sharding <= 1:
        return [_Holders(1, devices if sharding else 1, True)]
    found = [_Holders(1, 1, True)]
    for low, high in ((2, 2), (3, 4), (5, 8), (9, together)):
        if low <= together:
            found.append(_Holders(low, min(high, together), True))
    return [*found, _Holders(max(2, together + 1), max(devices, together + 1), False)]


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage type: `share` sequences of a micro-batch at a site of a machine of `kind`."""

    kind: int
    machine: Machine
    site: Site
    share: int
    holders: _Holders

    def layer_s(self, model: CostModel, sharding: int, policy: str) -> tuple[float, float]:
        """Least forward and backward seconds of a layer. From ZeRO-2 on, a layer takes as long as its rings."""
        forward_s, backward_s = model.layer_s(self.site, self.share, policy)
        if sharding <= 1 or self.holders.most == 1:
            return forward_s, backward_s
        problem, n = model.problem, self.holders.least
        params = problem.model.layer_params * (n - 1) / n
        outside = self.machine.nic_bandwidth_bytes_per_s * self.machine.num_interfaces
        if self.holders.together:  # or some elsewhere, if that is faster
            pairs = [(i, j) for i in range(self.machine.num_gpus) for j in range(i)]
            inside = max((self.machine.pair_bandwidth(i, j) for i, j in pairs), default=0.0)
            s_per_param = params / self.site.tp / max(inside, outside)
        else:
            s_per_param = params / outside
        scatter_s = s_per_param * problem.workload.stored_gradient_bytes
        if sharding == 2:
            return forward_s, max(backward_s, scatter_s)
        gather_s = s_per_param * problem.workload.element_bytes
        return max(forward_s, gather_s), max(backward_s, gather_s + scatter_s)


class _Growth:
    """How a stage's bytes grow with layers and micro-batches in flight, taken from the memory model itself."""

    def __init__(self, memory: MemoryModel, last: bool, shards: Shards, policies: tuple[str, ...]) -> None:
        def total(layers: int, policy: str, held: int) -> float:
            return memory.stage(layers, False, last, policy, held, shards).total

        base = 3  # layers beyond which ZeRO-3 gathers no more of them at once
        lean = min(policies, key=lambda policy: total(base, policy, 0))
        self.layer = total(base + 1, lean, 0) - total(base, lean, 0)
        self.held = total(0, lean, 1) - total(0, lean, 0)
        self.both = [total(base + 1, p, 1) - total(base, p, 1) - self.layer for p in policies]
        self.once = [total(base, p, 0) - total(base, lean, 0) for p in policies]
        # With fewer layers than `base` less is gathered; the least of both lines holds for all.
        self.fixed = min(total(0, lean, 0), total(base, lean, 0) - base * self.layer)
