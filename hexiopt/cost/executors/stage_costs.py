"""What a stage of a pipeline costs, by itself: its times and memory wherever it stands in its pipeline."""

from dataclasses import dataclass

from hexiopt.calibration.frameworks import Framework
from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.executors.sequenced import sequenced_cost
from hexiopt.cost.executors.sites import Crowd, Sites
from hexiopt.cost.flight import Turns, in_flight
from hexiopt.cost.sharding import Spread
from hexiopt.plan.plan import Replica, SequenceLayout, Stage
from hexiopt.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Place:
    """Which stage of its pipeline a stage is, and what the schedule does there."""

    schedule: str
    position: int
    num_stages: int
    num_micro_batches: int

    @property
    def first(self) -> bool:
        """Whether the stage holds the embedding."""
        return self.position == 0

    @property
    def last(self) -> bool:
        """Whether the stage holds the LM head."""
        return self.position == self.num_stages - 1


AnySpread = Shards | Spread  # of the states of a pipeline: alike for all parameters, or by layer


class StageCosts(Sites):
    """Prices stages of one problem, and keeps what it has priced."""

    def __init__(self, problem: Problem, framework: Framework | None = None) -> None:
        super().__init__(problem, framework)
        self._stages: dict[tuple[object, ...], StageCost] = {}

    def plain_cost(
        self, stage: Stage, position: int, num_stages: int, size: int, held: int, shards: Shards
    ) -> StageCost:
        """A stage of one replica and one layer range, whose states are spread alike.

        `held`: micro-batches in flight, of `size` sequences each.
        """
        site, layers, recompute = self.site(stage.devices), stage.num_layers, stage.recompute
        first, last = position == 0, position == num_stages - 1
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

    def stage_cost(self, stage: Stage, size: int, place: Place, spread: AnySpread, crowd: Crowd) -> StageCost:
        """A stage of replicas, layer ranges and policies as it likes, or of a sequence layout."""
        if isinstance(spread, Shards):
            holders = ((spread.num_devices,) * stage.num_layers,) * len(stage.copies)
        else:
            holders = spread.holders[place.position]
        if stage.sequence is not None:
            return self._sequence_cost(stage.sequence, stage.policies()[0], size, place, spread.stage, holders, crowd)
        replicas = tuple(
            self._replica_cost(replica, stage.policies(), samples, place, spread.stage, own)
            for replica, samples, own in zip(stage.replicas, stage.samples(size), holders, strict=True)
        )
        return replicas[0] if len(replicas) == 1 else StageCost.of_replicas(replicas)

    def _replica_cost(
        self,
        replica: Replica,
        chunks: tuple[tuple[str, ...], ...],
        samples: int,
        place: Place,
        zero: int,
        holders: tuple[float, ...],
    ) -> StageCost:
        """A replica of layer ranges with a policy per layer, each layer sharded by ZeRO stage `zero` over `holders`."""
        site = self.site(replica.devices)
        key = (site, chunks, samples, place, zero, holders)
        found = self._stages.get(key)
        if found is None:
            first, last, model = place.first, place.last, self.memory_model(site, samples)
            final = len(chunks) - 1
            chunk_s = tuple(
                self.layers_s(site, policies, first and c == 0, last and c == final, samples)
                for c, policies in enumerate(chunks)
            )
            if final:
                turns = Turns(place.position, place.num_stages, place.num_micro_batches, len(chunks))
                held = model.chunks_held(chunks, first, last, turns)
            else:
                held = (in_flight(place.schedule, place.position, place.num_stages, place.num_micro_batches),)
            mean = model.mean_holders(holders, first, last)
            found = self._stages[key] = StageCost(
                sum(forward_s for forward_s, _ in chunk_s),
                sum(backward_s for _, backward_s in chunk_s),
                model.mixed_stage(chunks, first, last, held, Shards(zero, mean)),
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
        place: Place,
        zero: int,
        holders: tuple[tuple[float, ...], ...],
        crowd: Crowd,
    ) -> StageCost:
        """A stage with a sequence layout and a policy per layer, sharded as `_replica_cost` of every device."""
        key = (layout, policies, size, place, zero, holders, crowd)
        found = self._stages.get(key)
        if found is None:
            stage = self.crowded_stage(layout, size, crowd)
            held = in_flight(place.schedule, place.position, place.num_stages, place.num_micro_batches)
            found = self._stages[key] = sequenced_cost(stage, policies, place.first, place.last, held, zero, holders)
        return found
