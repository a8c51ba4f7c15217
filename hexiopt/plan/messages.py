"""The messages of a pipeline: who sends samples of a micro-batch to whom.

Executors of a stage take consecutive samples of a micro-batch: each sends to those of the next stage whose samples
overlap its own, and gets the gradients back. With several layer ranges the last stage also sends to the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from hexiopt.plan.plan import Pipeline


@dataclass(frozen=True, slots=True)
class Message:
    """The messages of one direction from an executor of `stage` to one of the next stage (before, if `backward`).

    `sender` and `receiver` number the executors of their stages; `samples` of a micro-batch go over, from
    `first_sample` on.
    """

    backward: bool
    stage: int
    sender: int
    receiver: int
    samples: int
    first_sample: int = 0

    def target(self, num_stages: int) -> int:
        """The stage that receives the message."""
        return (self.stage + (-1 if self.backward else 1)) % num_stages


def sample_overlaps(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, samples that both have), a micro-batch's samples dealt to either side in order."""
    i = j = 0
    here, there = senders[0], receivers[0]  # samples not yet sent, not yet received
    while True:
        common = min(here, there)
        yield i, j, common
        here, there = here - common, there - common
        if not here:
            i += 1
            if i == len(senders):
                return
            here = senders[i]
        if not there:
            j += 1
            there = receivers[j]


def messages(pipeline: Pipeline) -> tuple[Message, ...]:
    """All messages of a pipeline for one micro-batch, boundary by boundary: a forward one, then its backward one."""
    size = pipeline.micro_batch_size
    return messages_of(tuple([stage.parallelism.samples(size) for stage in pipeline.stages]), pipeline.num_chunks > 1)


@lru_cache(maxsize=4096)
def messages_of(samples: tuple[tuple[int, ...], ...], wraps: bool) -> tuple[Message, ...]:
    """As `messages`: executor r of stage s takes `samples[s][r]` of a micro-batch. If the pipeline `wraps`, its last
    stage sends to the first too."""
    count = len(samples)
    ordered = []
    for s in range(count if wraps else count - 1):
        t = (s + 1) % count
        at = 0
        for a, b, common in sample_overlaps(samples[s], samples[t]):
            ordered.append(Message(False, s, a, b, common, at))
            ordered.append(Message(True, t, b, a, common, at))
            at += common
    return tuple(ordered)


@lru_cache(maxsize=4096)
def executor_links(samples: tuple[tuple[int, ...], ...], wraps: bool) -> tuple[tuple[bool, int, int], ...]:
    """(backward, sender, receiver) of each of `messages_of`, where executors are numbered through all stages."""
    first, count = [0, *accumulate(map(len, samples))], len(samples)
    return tuple(
        [
            (message.backward, first[message.stage] + message.sender, first[message.target(count)] + message.receiver)
            for message in messages_of(samples, wraps)
        ]
    )


def longest_s(
    messages: Sequence[Message], message_s: Sequence[float], num_stages: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The longest message ahead and the longest back at each boundary [stages − 1], in seconds.

    Messages between the last stage and the first are left out.
    """
    ahead, back = [0.0] * num_stages, [0.0] * num_stages
    for message, seconds in zip(messages, message_s, strict=True):
        longest, boundary = (back, message.stage - 1) if message.backward else (ahead, message.stage)
        if seconds > longest[boundary]:
            longest[boundary] = seconds
    return tuple(ahead[: num_stages - 1]), tuple(back[: num_stages - 1])


def round_trips_s(messages: Sequence[Message], message_s: Sequence[float], num_stages: int) -> list[float]:
    """Seconds of the longest message ahead plus the longest back, at each boundary of a pipeline [stages − 1]."""
    return [ahead + back for ahead, back in zip(*longest_s(messages, message_s, num_stages), strict=True)]
