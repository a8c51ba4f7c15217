"""The search of the released scheduler, defects and all: github.com/Relaxed-System-Lab/FlashFlex, `experimental/`.

The GPUs are partitioned into pipelines by METIS on reciprocal bandwidths, those of a pipeline into one to three parts
on true ones; parts are ordered, and the GPUs of a machine in a part cut into TP groups. Its defects:

- reciprocals are rounded to whole numbers of 1e10/(bytes/s) (`globals.py`, `graph.py`), so that all links faster
  than 18 GB/s weigh nothing;
- the order of parts (`stage_order.py`) is, from each start, the path that is last in the alphabet instead of the
  heaviest; of these the lightest; and `strategy.py` reads it as ranks;
- TP degrees come from a table, in which four GPUs and more are never single, and are those with which the machine
  alone is fastest (`strategy.py`);
- layers follow the memory of stages (`layer_partition.py`);
- the number of pipelines walks at random, and merged parts are never partitioned again (`main.py`).
"""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from hexiopt.problem.problem import Problem
from hexiopt.units import GB
from solvers.baselines.flashflex.pricer import BINARY_GIGA, RULE_MICRO_BATCHES, FlashFlexPricer, stage_ends_s
from solvers.core.partition import DeviceGroup, devices_by_machine
from solvers.heuristics.graph import device_graph, partition_graph
from solvers.heuristics.hexiscale import compositions

StageSequence = tuple[DeviceGroup, ...]  # TP groups of a pipeline, in order

_SECONDARY_DRAWS, _SECONDARY_CHANCE = 2, 0.2  # `param` of `config.py`: parts of a pipeline are 1 + binomial
_RECIPROCAL_UNIT = 1e10  # `globals.py`
_DEGREES: dict[int, tuple[tuple[int, ...], ...]] = {  # `get_considered_stragegies` of `strategy.py`
    1: ((1,),),
    2: ((2,), (1, 1)),
    3: ((2, 1), (1, 1, 1)),
    4: ((4,), (2, 2), (2, 1, 1)),
    5: ((4, 1), (2, 2, 1)),
    6: ((4, 2), (2, 2, 2)),
    7: ((4, 2, 1), (2, 2, 2, 1)),
    8: ((8,), (4, 4), (4, 2, 2)),
}


class ReleasedSearch:
    """Partitions of one problem's devices. `reciprocal` holds the weights of edges between them."""

    def __init__(self, pricer: FlashFlexPricer, rng: random.Random) -> None:
        self.problem: Problem = pricer.problem
        self.rng, self._pricer = rng, pricer
        self._graph = device_graph(self.problem)
        with np.errstate(divide="ignore"):
            reciprocal = _RECIPROCAL_UNIT / (self._graph.bandwidth / GB * BINARY_GIGA)
        np.fill_diagonal(reciprocal, 0.0)
        self.reciprocal = np.rint(reciprocal)
        self._degrees: Memo[DeviceGroup, tuple[int, ...]] = Memo(self._best_degrees)

    def walk(self, start: int, passes: int) -> Iterator[tuple[StageSequence, ...]]:
        """Pipelines of each pass, beginning with `start` of them; a pass may fail."""
        devices, count = len(self.problem.usable_devices), start
        for _ in range(passes):
            parts = partition_graph(self._graph, count, self.reciprocal, self._seed())
            if len(parts) == count:
                yield tuple(self._line(part) for part in parts)
            if self.rng.random() < 0.5:
                count = max(1, min(devices // 5, count + 1))
            else:
                count = max(count - 1, devices // self.problem.model.num_layers + 1)

    def _seed(self) -> int:
        return self.rng.randrange(1 << 30)

    def _line(self, part: list[int]) -> StageSequence:
        """The TP groups of a pipeline of the GPUs at positions `part`."""
        count = 1 + sum(self.rng.random() < _SECONDARY_CHANCE for _ in range(_SECONDARY_DRAWS))
        graph = self._graph.subset(part)
        parts = [
            [part[i] for i in positions] for positions in partition_graph(graph, count, graph.bandwidth, self._seed())
        ]
        line: list[DeviceGroup] = []
        for positions in _order_parts(parts, self._graph.bandwidth):
            for block in self._blocks(positions):
                line += _cut(block, self._degrees[block])
        return tuple(line)

    def _blocks(self, part: Sequence[int]) -> list[DeviceGroup]:
        """The devices of a part by machine, ascending."""
        by_machine = devices_by_machine(self.problem.cluster, [self._graph.devices[i] for i in sorted(part)])
        return [tuple(devices) for _, devices in sorted(by_machine.items())]

    def _best_degrees(self, block: DeviceGroup) -> tuple[int, ...]:
        """The degrees of the table with which a block that holds all layers is fastest."""
        cluster, count = self.problem.cluster, len(block)
        allowed = self.problem.space.allowed_tp(cluster.machines[int(cluster.machine_of[block[0]])].num_gpus)
        table = [degrees for degrees in _DEGREES.get(count, ()) if set(degrees) <= set(allowed)]
        return min(table or compositions(count, allowed), key=lambda degrees: self._block_s(_cut(block, degrees)))

    def _block_s(self, line: StageSequence) -> float:
        """Seconds of TP groups of one machine that hold all layers by their share of devices (`tp_pp_tradeoff`)."""
        total, devices, pricer = self.problem.model.num_layers, sum(map(len, line)), self._pricer
        layers = [total * len(group) // devices for group in line]
        layers[-1] += total - sum(layers)
        busy = []
        for k, (group, count) in enumerate(zip(line, layers, strict=True)):
            seconds = sum(pricer.stage_s(pricer.tp_group(group), count, False, False, 1, "full"))
            busy.append(seconds + (2.0 * pricer.message_s(group, line[k + 1], 1) if k + 1 < len(line) else 0.0))
        return stage_ends_s(busy, RULE_MICRO_BATCHES)[-1]


def _cut(block: DeviceGroup, degrees: Sequence[int]) -> StageSequence:
    return tuple(block[a:b] for a, b in pairwise([0, *accumulate(degrees)]))


def _order_parts(parts: list[list[int]], bandwidth: NDArray[np.float64]) -> list[list[int]]:
    """Parts as the defects order them; of at most three parts, the search meets every path from a start."""
    count = len(parts)
    paths = [[start, *(k for k in reversed(range(count)) if k != start)] for start in range(count)]

    weights = [sum(float(bandwidth[np.ix_(parts[a], parts[b])].sum()) for a, b in pairwise(path)) for path in paths]
    ranks = paths[weights.index(min(weights))]
    return [part for _, part in sorted(zip(ranks, parts, strict=True))]


def memory_shares(problem: Problem, line: StageSequence) -> list[int]:
    """Layers per stage, allocated in turns while a stage has less than its share of memory (`create_layer_partition`).

    Layers left over go to the stages of most memory. A stage may end up with none.
    """
    cluster, total = problem.cluster, problem.model.num_layers
    memory = np.array([len(group) * cluster.gpu_of(group[0]).memory_bytes for group in line])
    share = memory / memory.sum()
    layers = [0] * len(line)
    left, filled = total, False
    while left and not filled:
        filled = True
        for k in range(len(line)):
            if left and (layers[k] + 1) / total <= share[k]:
                layers[k] += 1
                left, filled = left - 1, False
    largest = np.argsort(memory, kind="stable")[::-1]
    for turn in range(left):
        layers[int(largest[turn % len(line)])] += 1
    return layers
