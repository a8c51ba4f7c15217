"""Which recompute policies fit a replica's memory, where its states are spread over as many holders as may be."""

from collections.abc import Sequence

from hexiopt.cost.memory import Shards, chunks_in_flight, in_flight
from hexiopt.cost.model import CostModel
from hexiopt.cost.sites import Site
from hexiopt.cost.stage_costs import Place

_SLACK = 1e-9  # of the memory, for rounding


class Rooms:
    """Answers for one cost model. Keeps what it has computed."""

    def __init__(self, model: CostModel, policies: tuple[str, ...]) -> None:
        self._model, self._policies = model, policies
        self._most_samples = model.problem.space.micro_batch_sizes(model.problem.workload.global_batch)[-1]
        self._found: dict[tuple[object, ...], list[int]] = {}

    def policies(self, site: Site, ranges: tuple[int, ...], place: Place, shards: Shards) -> list[int]:
        """For 1, 2, ... samples, the number of the first policy that fits; it ends where none does.

        `ranges` are the lengths of the stage's layer ranges.
        """
        if len(ranges) == 1:
            held: object = in_flight(place.schedule, place.position, place.num_stages, place.num_micro_batches)
        else:  # repeats from three micro-batches a stage on
            held = (place.position, place.num_stages, min(place.num_micro_batches, 3 * place.num_stages))
        key = (site, ranges, place.first, place.last, held, shards)
        found = self._found.get(key)
        if found is None:
            found, at = [], 0
            for samples in range(1, self._most_samples + 1):
                # More samples never fit with a faster policy.
                while at < len(self._policies) and not self._fits(
                    site, ranges, place, shards, samples, self._policies[at]
                ):
                    at += 1
                if at == len(self._policies):
                    break
                found.append(at)
            self._found[key] = found
        return found

    def _fits(self, site: Site, ranges: Sequence[int], place: Place, shards: Shards, samples: int, policy: str) -> bool:
        model = self._model.memory_model(site, samples)
        chunks = [(policy,) * length for length in ranges]
        if len(chunks) == 1:
            held = in_flight(place.schedule, place.position, place.num_stages, place.num_micro_batches)
            memory = model.stage(ranges[0], place.first, place.last, policy, held, shards)
        else:
            final = len(chunks) - 1
            stored = tuple(
                model.chunk_bytes(own, place.first and c == 0, place.last and c == final)
                for c, own in enumerate(chunks)
            )
            each = chunks_in_flight(place.position, place.num_stages, place.num_micro_batches, stored)
            memory = model.mixed_stage(chunks, place.first, place.last, each, shards)
        return memory.total <= site.gpu.usable_memory_bytes * (1 + _SLACK)
