"""The cost of a stage with a sequence layout: its devices work together and differ in memory."""

from collections.abc import Sequence

from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.memory import Memory, StateSharding
from hexiopt.cost.executors.sequence_parallel import SequenceStage


def sequenced_cost(
    stage: SequenceStage,
    policies: tuple[str, ...],
    first: bool,
    last: bool,
    held: int,
    zero: int,
    holders: Sequence[tuple[float, ...]],
) -> StageCost:
    """The stage with a policy for each layer and `held` micro-batches in flight.

    States are sharded by ZeRO stage `zero`, on each device over `holders` of each layer.
    """
    forward_s, backward_s = stage.stage_s(policies, first, last)
    memories: dict[tuple[float, ...], tuple[Memory, ...]] = {}
    for same in set(holders):
        shards = StateSharding(zero, stage.alone.mean_holders(same, first, last))
        memories[same] = stage.memory.each(stage.memory.stage((policies,), first, last, (held,), shards))
    params = stage.alone.num_params(len(policies), first, last)
    limits: list[float] = stage.limit_bytes.tolist()
    return StageCost.of_devices(
        tuple(
            StageCost(forward_s, backward_s, memories[own][k], limit, params)
            for k, (own, limit) in enumerate(zip(holders, limits, strict=True))
        )
    )
