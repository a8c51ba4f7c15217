"""Every candidate of a few devices: all ways to form TP groups of some of them, and to order these in pipelines."""

from collections.abc import Iterator, Sequence
from typing import Any

from solvers.compiled.state import SearchState, new_state
from solvers.compiled.tables import Tables
from solvers.loop.edits import is_group

MOST_DEVICES = 5  # 6 have ten times as many ways
Block = tuple[int, int]  # machine, and mask of its devices


def every_candidate(tables: Tables) -> Iterator[SearchState]:
    """All candidates of the smallest micro-batches under the last sharding mode; of those that differ in which of a
    machine's like devices they use, one."""
    seen: set[Any] = set()
    state = new_state(tables)
    most_pipelines, most_stages = state.stages.shape
    state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = tables.modes[-1]
    for blocks in _groupings(tables, _devices(tables)):
        for pipelines in _arrangements(blocks):
            lengths = [len(pipeline) for pipeline in pipelines]
            if not pipelines or len(pipelines) > most_pipelines or max(lengths) > most_stages:
                continue
            alike = tuple(sorted(tuple(_sort(tables, block) for block in pipeline) for pipeline in pipelines))
            if alike not in seen:
                seen.add(alike)
                _write(tables, state, pipelines)
                yield state


def _devices(tables: Tables) -> list[Block]:
    masks = enumerate(tables.machines["usable"].tolist())
    return [(m, 1 << k) for m, mask in masks for k in range(mask.bit_length()) if mask >> k & 1]


def _sort(tables: Tables, block: Block) -> tuple[int, int]:
    m, mask = block
    alike = tables.machines[m]["uneven"] < 0 and tables.machines[m]["num_interfaces"] == 1
    return m, mask.bit_count() if alike else -mask


def _groupings(tables: Tables, devices: Sequence[Block]) -> Iterator[list[Block]]:
    """All ways to form TP groups of some devices; each device in one group, or idle."""
    if not devices:
        yield []
        return
    (m, mask), *others = devices
    for blocks in _groupings(tables, others):
        yield blocks
        yield [(m, mask), *blocks]
    mates = [block for block in others if block[0] == m]
    for number in range(1, 1 << len(mates)):
        joined = [block for k, block in enumerate(mates) if number >> k & 1]
        whole = mask | sum(mate for _, mate in joined)
        if is_group(tables, m, whole):
            for blocks in _groupings(tables, [block for block in others if block not in joined]):
                yield [(m, whole), *blocks]


def _arrangements(blocks: Sequence[Block]) -> Iterator[list[list[Block]]]:
    """All ways to order blocks in pipelines."""
    if not blocks:
        yield []
        return
    for pipelines in _arrangements(blocks[1:]):
        yield [[blocks[0]], *pipelines]
        for k, chain in enumerate(pipelines):
            for at in range(len(chain) + 1):
                yield [*pipelines[:k], [*chain[:at], blocks[0], *chain[at:]], *pipelines[k + 1 :]]


def _write(tables: Tables, state: SearchState, pipelines: Sequence[Sequence[Block]]) -> None:
    state.free[:] = tables.machines["usable"]
    state.plan[0]["num_pipelines"] = len(pipelines)
    for p, blocks in enumerate(pipelines):
        state.pipelines[p]["num_stages"], state.pipelines[p]["size"] = len(blocks), 0
        for s, (m, mask) in enumerate(blocks):
            state.stages[p, s]["machine"], state.stages[p, s]["mask"] = m, mask
            state.free[m] &= ~mask
