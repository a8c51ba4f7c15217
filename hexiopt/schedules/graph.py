"""When the stages of a pipeline end, under any schedule, with unequal stages, replicas and layer ranges.

Every replica of a stage is an *executor*. It runs its stage's programme, each operation when the executor is free and
all its messages have come. Executors that exchange samples have a link in each direction. A message starts when its
operation ends and the messages before it on the link are through; receives are posted early, so an executor computes
while messages travel. Layer range c of stage s is virtual stage c · p + s of p stages, so that with several ranges the
last stage sends to the first as well. `hexiopt/simulation/engine.py` replays the same rules event by event.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import isnan

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import InputError
from hexiopt.schedules.operation import OperationKind, Turn, next_place
from hexiopt.schedules.schedule import Depths, Schedule, StagePosition, positions
from hexiopt.schedules.split import LateWeights

Ints = NDArray[np.int64]


_Links = tuple[tuple[bool, int, int], ...]  # backward, sender, receiver


@dataclass(frozen=True, slots=True, eq=False)
class PipelineGraph:
    """A pipeline whose executors take given times; one object for all that are equal (`pipeline_graph`).

    `stages` [executors]; `chunk_s` [executors] has the seconds of each layer range, by the schedule's kinds of
    operations; `links` lists (backward, sender, receiver) by the executors' numbers. Where backwards are split, `split`
    [executors] says what they put off; such pipelines are timed by the clock (`hexiopt/cost/clock`).
    """

    schedule: Schedule
    num_stages: int
    num_micro_batches: int
    stages: tuple[int, ...]
    chunk_s: tuple[tuple[tuple[float, ...], ...], ...]
    links: _Links
    split: tuple[LateWeights, ...] = ()
    depths: Depths = ()

    def with_times(self, chunk_s: tuple[tuple[tuple[float, ...], ...], ...]) -> "PipelineGraph":
        """The same pipeline whose executors take `chunk_s`."""
        assert not self.split, "split backwards do not run in lockstep"
        shape = self.schedule, self.num_stages, self.num_micro_batches, self.stages
        return pipeline_graph(*shape, chunk_s, self.links, depths=self.depths)

    def operation_s(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Seconds of one operation of each kind [executors][layer ranges]: weight gradients are of a layer."""
        if not self.split:
            return self.chunk_s
        executors = zip(self.chunk_s, self.split, strict=True)
        return tuple([tuple([(*chunk[:-1], late.weights_s) for chunk in chunks]) for chunks, late in executors])

    def positions(self) -> tuple[StagePosition, ...]:
        """The positions of its stages, in order."""
        return positions(self.num_stages, self.num_micro_batches, len(self.chunk_s[0]), self.depths)

    def order(self) -> tuple[Ints, Ints, Ints]:
        """`first`, `blocks` and `turns` of the clock's `Programmes`."""
        return _order(self.schedule, self.positions(), self.stages)

    def wiring(self) -> tuple[int, Ints, Ints, Ints]:
        """The number of queues, and `at`, `takes` and `sends` of the clock's `Programmes`."""
        return _wiring(self.schedule.kinds, self.num_stages, len(self.chunk_s[0]), self.stages, self.links)


def refuse_deadlock(schedule: Schedule, ends_s: list[float]) -> list[float]:
    """`ends_s` of executors. Raises InputError where one is NaN: executors wait for each other."""
    if any(map(isnan, ends_s)):
        raise InputError(f"schedule {schedule}: operations wait for each other for ever; run what they wait for before")
    return ends_s


@lru_cache(maxsize=65_536)
def pipeline_graph(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stages: tuple[int, ...],
    chunk_s: tuple[tuple[tuple[float, ...], ...], ...],
    links: _Links,
    split: tuple[LateWeights, ...] = (),
    depths: Depths = (),
) -> PipelineGraph:
    """The graph of a pipeline: equal pipelines have the same one, so that their ends are computed once."""
    return PipelineGraph(schedule, num_stages, num_micro_batches, stages, chunk_s, links, split, depths)


@lru_cache(maxsize=4096)
def _order(schedule: Schedule, places: tuple[StagePosition, ...], stages: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """`PipelineGraph.order` of executors that are replicas of `stages`, which stand at `places`."""
    numbers: list[int] = []
    kinds = schedule.kinds
    start_of: dict[tuple[Turn, ...], int] = {}
    rows: list[list[int]] = []  # per stage, of all its blocks: start, length, repeats
    for at in places:
        row: list[int] = []
        for turns, repeats in schedule.programme(at):
            if repeats and turns:
                if turns not in start_of:
                    start_of[turns] = len(numbers)
                    numbers += [len(kinds) * chunk + kinds.index(kind) for kind, chunk in turns]
                row += (start_of[turns], len(turns), repeats)
        rows.append(row)
    first, blocks = [0], list[int]()
    for s in stages:
        blocks += rows[s]
        first.append(len(blocks) // 3)
    return np.array(first), np.array(blocks, np.int64).reshape(-1, 3), np.array(numbers, np.int64)


@lru_cache(maxsize=1024)
def _wiring(
    kinds: tuple[OperationKind, ...], num_stages: int, num_chunks: int, stages: tuple[int, ...], links: _Links
) -> tuple[int, Ints, Ints, Ints]:
    """`PipelineGraph.wiring`. Every link has a queue for each layer range of its receiver."""
    incoming: list[tuple[list[int], list[int]]] = [([], []) for _ in stages]
    outgoing: list[tuple[list[int], list[int]]] = [([], []) for _ in stages]
    for k, (backward, sender, receiver) in enumerate(links):
        outgoing[sender][backward].append(k)
        incoming[receiver][backward].append(k)
    at, takes, sends = list[int](), list[int](), list[int]()
    for e, s in enumerate(stages):
        for chunk in range(num_chunks):
            for kind in kinds:
                source, target = (next_place(kind, s, chunk, num_stages, num_chunks, steps) for steps in (-1, 1))
                at += (len(takes), len(takes), len(sends) // 2, len(sends) // 2)
                for k in incoming[e][kind.step < 0] if source else ():
                    takes.append(k * num_chunks + chunk)
                for k in outgoing[e][kind.step < 0]:
                    sends += (k, k * num_chunks + target[1]) if target else ()
                at[-3], at[-1] = len(takes), len(sends) // 2
    wires = np.array(at).reshape(-1, 4), np.array(takes, np.int64), np.array(sends, np.int64).reshape(-1, 2)
    return len(links) * num_chunks, *wires
