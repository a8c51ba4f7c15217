"""What tensor parallelism takes in a stage, by type of GPU and degree: tables for quick estimates."""

from collections.abc import Sequence

import numpy as np

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.plan.token_layout import Floats, Ints
from hexiopt.schedules.in_flight import holding


class TensorTable:
    """Seconds and bytes of layers of TP groups; groups of types in the order of `types`, degrees up to a machine's."""

    def __init__(self, model: CostModel, types: Sequence[str]) -> None:
        problem = self._problem = model.problem
        self._model = model
        self._examples: dict[tuple[int, int], tuple[int, ...]] = {}  # (type, degree): devices
        for machine, own in problem.usable_by_machine.items():
            kind = problem.cluster.machines[machine]
            for degree in problem.space.allowed_tp(kind.num_gpus):
                if degree <= len(own):
                    self._examples.setdefault((types.index(kind.gpu.name), degree), own[:degree])
        self._most = max(degree for _, degree in self._examples)
        self._shape = (len(model.policies()), len(types), self._most + 1)
        self._kept: dict[object, tuple[Floats, Floats]] = {}

    def of(self, counts: Floats, machines: Ints, held: Floats, size: int, shards: Shards) -> tuple[Floats, Floats]:
        """Of stages with `counts` [..., types] devices in as many `machines` [...] and `held` [...] micro-batches of
        `size` sequences in flight: seconds of a layer for a sequence, and layers that fit, both [policies, ...];
        infinite and none where tensor parallelism may not be."""
        layer_s, bytes_of = self._tables(size, shards)
        degree, types = counts.sum(axis=-1).astype(np.int64), (counts > 0).sum(axis=-1)
        may = (machines == 1) & (types == 1) & (degree <= self._most)
        kind, at = counts.argmax(axis=-1), np.where(may, degree, 0)
        room, each, flight, both = bytes_of[:, :, kind, at]
        most = np.floor((room - flight * held) / (each + both * held) + 1e-9)
        return np.where(may, layer_s[:, kind, at], np.inf), np.where(may, most, 0.0)

    def _tables(self, size: int, shards: Shards) -> tuple[Floats, Floats]:
        """Seconds [policies, types, degrees]; and bytes [parts, policies, types, degrees]: room without layers, of a
        layer, of a micro-batch in flight, of a layer's."""
        key = (size, shards)
        if key not in self._kept:
            model = self._model
            layer_s, bytes_of = np.full(self._shape, np.inf), np.zeros((4, *self._shape))
            bytes_of[1] = 1.0
            for (kind, degree), devices in self._examples.items():
                site = model.site(devices)
                memory, limit = model.memory_model(site, size), site.gpu.usable_memory_bytes
                for k, policy in enumerate(model.policies()):
                    layer_s[k, kind, degree] = sum(model.layer_s(site, size, policy)) / size
                    # From two layers on linear under ZeRO-3 too.
                    one, more, two, both = (
                        memory.stage(n, False, False, policy, holding(held), shards).total
                        for held in (1, 2)
                        for n in (2, 3)
                    )
                    ends = 0.5 * (memory.stage(2, True, True, policy, holding(1), shards).total - one)
                    grows = both - two - more + one
                    flight, each = two - one - 2 * grows, more - one - grows
                    room = limit - ends - (one - 2 * each - flight - 2 * grows)
                    bytes_of[:, k, kind, degree] = room, each, flight, grows
            self._kept[key] = layer_s, bytes_of
        return self._kept[key]
