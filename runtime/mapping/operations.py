"""The order in which a stage works through its micro-batches, as the cost model counts it."""

from dataclasses import dataclass

from hexiopt.cost.schedule import forward_chunk, num_warm_up


@dataclass(frozen=True, slots=True)
class Operation:
    """A forward or a backward of one range of layers (by its number in the stage) for one micro-batch."""

    backward: bool
    chunk: int
    micro_batch: int


def operations(schedule: str, stage: int, num_stages: int, num_chunks: int, num_micro_batches: int) -> list[Operation]:
    """All operations of a stage: forwards before the first backward, then in turns, then the backwards left.

    Forwards of a range take its micro-batches in order, and so do its backwards.
    """
    total = num_micro_batches * num_chunks
    begun = {False: [0] * num_chunks, True: [0] * num_chunks}

    def next_of(number: int, backward: bool) -> Operation:
        chunk = forward_chunk(number, num_stages, num_chunks)
        if backward:
            chunk = num_chunks - 1 - chunk
        begun[backward][chunk] += 1
        return Operation(backward, chunk, begun[backward][chunk] - 1)

    warm_up = num_warm_up(schedule, stage, num_stages, num_chunks, num_micro_batches)
    found = [next_of(k, False) for k in range(warm_up)]
    for k in range(total):
        if warm_up + k < total:
            found.append(next_of(warm_up + k, False))
        found.append(next_of(k, True))
    return found
