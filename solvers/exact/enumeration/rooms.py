"""What a replica may recompute to fit its memory, where its states are spread over as many holders as may be."""

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.executors.sites import Site
from hexiopt.cost.model import CostModel
from hexiopt.problem.space import Recompute
from hexiopt.schedules.in_flight import InFlight, in_flight
from hexiopt.schedules.schedule import Schedule, StagePosition

_SLACK = 1e-9  # of the memory, for rounding


class Rooms:
    """Answers for one cost model. Keeps what it has computed."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._most_samples = model.problem.space.micro_batch_sizes(model.problem.workload.global_batch)[-1]
        self._found: dict[tuple[object, ...], list[int]] = {}

    def first_fits(
        self,
        site: Site,
        ranges: tuple[int, ...],
        schedule: Schedule,
        position: StagePosition,
        shards: Shards,
        chain: tuple[Recompute, ...],
    ) -> list[int]:
        """For 1, 2, ... samples, the number of the first of `chain` that fits; it ends where none does.

        `ranges` are the lengths of the stage's layer ranges, as equal as they go; `chain` as `recompute_chains` has it.
        """
        held = in_flight(schedule, position)
        key = (site, ranges, position.first, position.last, held, shards, chain)
        found = self._found.get(key)
        if found is None:
            found, at = [], 0
            for samples in range(1, self._most_samples + 1):
                # More samples never fit with less recompute.
                while at < len(chain) and not self._fits(site, sum(ranges), position, held, shards, samples, chain[at]):
                    at += 1
                if at == len(chain):
                    break
                found.append(at)
            self._found[key] = found
        return found

    def _fits(
        self,
        site: Site,
        num_layers: int,
        position: StagePosition,
        held: InFlight,
        shards: Shards,
        samples: int,
        recompute: Recompute,
    ) -> bool:
        model = self._model.memory_model(site, samples)
        memory = model.recomputing(num_layers, position.first, position.last, recompute, held, shards)
        return memory.total <= site.gpu.usable_memory_bytes * (1 + _SLACK)
