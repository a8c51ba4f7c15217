"""What a stage of a pipeline costs, by itself: its times and memory wherever it stands in its pipeline."""

from typing import assert_never

from hexiopt.calibration.frameworks import Framework
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import Contention, StageModel, TpGroup
from hexiopt.cost.sequenced import sequenced_cost
from hexiopt.cost.sharding import Spread
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import Replicated, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.schedule import StagePosition

_KEPT = 50_000  # prices of stages
AnySpread = StateSharding | Spread  # of the states of a pipeline: alike for all parameters, or by layer


class StageCosts(StageModel):
    """Prices stages of one problem, and keeps what it has priced."""

    def __init__(self, problem: Problem, framework: Framework | None = None) -> None:
        super().__init__(problem, framework)
        self._plain = Memo(self._price_plain, _KEPT)
        self._replicas = Memo(self._price_replica, _KEPT)
        self._sequences = Memo(self._price_sequence, _KEPT)

    def forget_stages(self) -> None:
        """Give back the prices of whole stages; layers, routes and memory models stay."""
        for memo in (self._plain, self._replicas, self._sequences):
            memo.clear()

    def plain_cost(
        self, stage: Stage, first: bool, last: bool, size: int, held: InFlight, shards: StateSharding
    ) -> StageCost:
        """A stage of one replica and one layer range, whose states are spread alike.

        `held`: micro-batches in flight, of `size` sequences each.
        """
        tp_group = self.tp_group(stage.devices)
        return self._plain[tp_group, stage.num_layers, stage.recompute, first, last, size, held, shards]

    def _price_plain(self, key: tuple[TpGroup, int, Recompute, bool, bool, int, InFlight, StateSharding]) -> StageCost:
        tp_group, layers, recompute, first, last, size, held, shards = key
        model = self.memory_model(tp_group, size)
        return StageCost(
            *self.recomputing_s(tp_group, layers, first, last, size, recompute),
            model.recomputing(layers, first, last, recompute, held, shards),
            tp_group.gpu.usable_memory_bytes,
            model.num_params(layers, first, last),
        )

    def stage_cost(
        self, stage: Stage, size: int, at: StagePosition, held: InFlight, spread: AnySpread, contention: Contention
    ) -> StageCost:
        """A stage of replicas, layer ranges and policies as it likes, or of a sequence layout; `held` is in flight."""
        if isinstance(spread, StateSharding):
            holders = ((spread.num_devices,) * stage.num_layers,) * len(stage.copies)
        else:
            holders = spread.holders[at.stage]
        chunks = stage.policies()
        match stage.parallelism:
            case SequenceParallel() as layout:
                return self._sequences[
                    layout, chunks[0], size, at.first, at.last, held, spread.stage, holders, contention
                ]
            case TensorParallel(devices):
                return self._replicas[
                    self.tp_group(devices), chunks, size, at.first, at.last, held, spread.stage, holders[0]
                ]
            case Replicated(replicas):
                costs = tuple(
                    self._replicas[
                        self.tp_group(replica.devices), chunks, samples, at.first, at.last, held, spread.stage, own
                    ]
                    for replica, samples, own in zip(replicas, stage.samples(size), holders, strict=True)
                )
                return costs[0] if len(costs) == 1 else StageCost.of_replicas(costs)
            case never:
                assert_never(never)

    def _price_replica(
        self, key: tuple[TpGroup, tuple[Recompute, ...], int, bool, bool, InFlight, int, tuple[float, ...]]
    ) -> StageCost:
        """A replica of layer ranges with a policy per layer, each layer sharded by ZeRO stage `zero` over `holders`."""
        tp_group, chunks, samples, first, last, held, zero, holders = key
        model = self.memory_model(tp_group, samples)
        final = len(chunks) - 1
        chunk_s = tuple(
            self.layers_s(tp_group, policies, first and c == 0, last and c == final, samples)
            for c, policies in enumerate(chunks)
        )
        shards = StateSharding(zero, model.mean_holders(holders, first, last))
        return StageCost(
            sum(forward_s for forward_s, _ in chunk_s),
            sum(backward_s for _, backward_s in chunk_s),
            model.mixed_stage(chunks, first, last, model.chunks_held(chunks, first, last, held), shards),
            tp_group.gpu.usable_memory_bytes,
            model.num_params(len(holders), first, last),
            chunk_s if final else (),
        )

    def _price_sequence(
        self,
        key: tuple[
            SequenceParallel, Recompute, int, bool, bool, InFlight, int, tuple[tuple[float, ...], ...], Contention
        ],
    ) -> StageCost:
        """A stage with a sequence layout and a policy per layer, sharded as `_price_replica` on every device."""
        layout, policies, size, first, last, held, zero, holders, contention = key
        ((count,),) = held
        return sequenced_cost(
            self.contended_stage(layout, size, contention), policies, first, last, count, zero, holders
        )
