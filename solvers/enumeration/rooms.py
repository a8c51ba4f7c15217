"""Which recompute policies fit a replica's memory, where its states are spread over as many holders as may be."""

from hexiopt.cost.memory import Flight, Shards, flight
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

        `ranges` are the lengths of the stage's layer ranges, as equal as they go.
        """
        held = flight(place.schedule, place.position, place.num_stages, place.num_micro_batches, len(ranges))
        key = (site, ranges, place.first, place.last, held, shards)
        found = self._found.get(key)
        if found is None:
            found, at = [], 0
            for samples in range(1, self._most_samples + 1):
                # More samples never fit with a faster policy.
                while at < len(self._policies) and not self._fits(
                    site, sum(ranges), place, held, shards, samples, self._policies[at]
                ):
                    at += 1
                if at == len(self._policies):
                    break
                found.append(at)
            self._found[key] = found
        return found

    def _fits(
        self, site: Site, num_layers: int, place: Place, held: Flight, shards: Shards, samples: int, policy: str
    ) -> bool:
        model = self._model.memory_model(site, samples)
        memory = model.stage(num_layers, place.first, place.last, policy, held, shards)
        return memory.total <= site.gpu.usable_memory_bytes * (1 + _SLACK)
