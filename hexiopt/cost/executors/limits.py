"""The layers that fit the memory of a device, and how few of them must recompute: what searches ask of memory."""

from typing import NamedTuple

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup
from hexiopt.memo import Memo
from hexiopt.schedules.in_flight import InFlight


class _Query(NamedTuple):
    tp_group: TpGroup
    first: bool
    last: bool
    micro_batch_size: int
    policy: str
    held: InFlight
    shards: StateSharding


class MemoryLimits:
    """Limits on the layers of stages, beside the communicators that are reserved on every device."""

    def __init__(self, stages: StageModel) -> None:
        self._stages = stages
        self._most_layers = Memo(self._count_layers)

    def max_layers(
        self,
        tp_group: TpGroup,
        first: bool,
        last: bool,
        micro_batch_size: int,
        policy: str,
        held: InFlight,
        shards: StateSharding,
    ) -> int:
        """The most layers that fit a device of `tp_group` with `held` in flight; negative where not even zero fit."""
        return self._most_layers[_Query(tp_group, first, last, micro_batch_size, policy, held, shards)]

    def _count_layers(self, query: _Query) -> int:
        tp_group, first, last, micro_batch_size, policy, held, shards = query
        memory = self._stages.memory_model(tp_group, micro_batch_size)
        return memory.max_layers(tp_group.gpu.usable_memory_bytes, first, last, policy, held, shards)

    def min_recompute_layers(
        self,
        tp_group: TpGroup,
        counts: range,
        first: bool,
        last: bool,
        micro_batch_size: int,
        smaller: str,
        faster: str,
        held: InFlight,
        shards: StateSharding,
    ) -> list[int]:
        """As `MemoryModel.min_recompute_layers`, for the usable memory of a device of `tp_group`."""
        memory, limit_bytes = self._stages.memory_model(tp_group, micro_batch_size), tp_group.gpu.usable_memory_bytes
        return memory.min_recompute_layers(limit_bytes, counts, first, last, smaller, faster, held, shards)
