"""What a stage of a pipeline costs, by itself: its times and memory wherever it stands in its pipeline."""

from hexiopt.calibration.frameworks import Framework
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.executors.sequenced import sequenced_cost
from hexiopt.cost.executors.sites import Crowd, Sites
from hexiopt.cost.sharding import Spread
from hexiopt.plan.plan import Replica, SequenceLayout, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import InFlight
from hexiopt.schedules.schedule import StagePosition

AnySpread = Shards | Spread  # of the states of a pipeline: alike for all parameters, or by layer


class StageCosts(Sites):
    """Prices stages of one problem, and keeps what it has priced."""

    def __init__(self, problem: Problem, framework: Framework | None = None) -> None:
        super().__init__(problem, framework)
        self._stages: dict[tuple[object, ...], StageCost] = {}

    def plain_cost(
        self, stage: Stage, first: bool, last: bool, size: int, held: InFlight, shards: Shards
    ) -> StageCost:
        """A stage of one replica and one layer range, whose states are spread alike.

        `held`: micro-batches in flight, of `size` sequences each.
        """
        site, layers, recompute = self.site(stage.devices), stage.num_layers, stage.recompute
        key = (site, layers, recompute, first, last, size, held, shards)
        found = self._stages.get(key)
        if found is None:
            forward_s, backward_s = self.recomputing_s(site, layers, first, last, size, recompute)
            model = self.memory_model(site, size)
            found = self._stages[key] = StageCost(
                forward_s,
                backward_s,
                model.recomputing(layers, first, last, recompute, held, shards),
                site.gpu.usable_memory_bytes,
                model.num_params(layers, first, last),
            )
        return found

    def stage_cost(
        self, stage: Stage, size: int, at: StagePosition, held: InFlight, spread: AnySpread, crowd: Crowd
    ) -> StageCost:
        """A stage of replicas, layer ranges and policies as it likes, or of a sequence layout; `held` is in flight."""
        if isinstance(spread, Shards):
            holders = ((spread.num_devices,) * stage.num_layers,) * len(stage.copies)
        else:
            holders = spread.holders[at.stage]
        if stage.sequence is not None:
            policies = stage.policies()[0]
            return self._sequence_cost(stage.sequence, policies, size, at, held, spread.stage, holders, crowd)
        replicas = tuple(
            self._replica_cost(replica, stage.policies(), samples, at, held, spread.stage, own)
            for replica, samples, own in zip(stage.replicas, stage.samples(size), holders, strict=True)
        )
        return replicas[0] if len(replicas) == 1 else StageCost.of_replicas(replicas)

    def _replica_cost(
        self,
        replica: Replica,
        chunks: tuple[tuple[str, ...], ...],
        samples: int,
        at: StagePosition,
        held: InFlight,
        zero: int,
        holders: tuple[float, ...],
    ) -> StageCost:
        """A replica of layer ranges with a policy per layer, each layer sharded by ZeRO stage `zero` over `holders`."""
        site = self.site(replica.devices)
        first, last = at.first, at.last
        key = (site, chunks, samples, first, last, held, zero, holders)
        found = self._stages.get(key)
        if found is None:
            model = self.memory_model(site, samples)
            final = len(chunks) - 1
            chunk_s = tuple(
                self.layers_s(site, policies, first and c == 0, last and c == final, samples)
                for c, policies in enumerate(chunks)
            )
            shards = Shards(zero, model.mean_holders(holders, first, last))
            found = self._stages[key] = StageCost(
                sum(forward_s for forward_s, _ in chunk_s),
                sum(backward_s for _, backward_s in chunk_s),
                model.mixed_stage(chunks, first, last, model.chunks_held(chunks, first, last, held), shards),
                site.gpu.usable_memory_bytes,
                model.num_params(len(holders), first, last),
                chunk_s if final else (),
            )
        return found

    def _sequence_cost(
        self,
        layout: SequenceLayout,
        policies: tuple[str, ...],
        size: int,
        at: StagePosition,
        held: InFlight,
        zero: int,
        holders: tuple[tuple[float, ...], ...],
        crowd: Crowd,
    ) -> StageCost:
        """A stage with a sequence layout and a policy per layer, sharded as `_replica_cost` of every device."""
        key = (layout, policies, size, at.first, at.last, held, zero, holders, crowd)
        found = self._stages.get(key)
        if found is None:
            stage = self.crowded_stage(layout, size, crowd)
            ((count,),) = held
            found = self._stages[key] = sequenced_cost(stage, policies, at.first, at.last, count, zero, holders)
        return found
