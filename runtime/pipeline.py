"""One training step of one rank: its stage's operations in order, messages beside them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hexiopt.schedules.schedule import Operation, Schedule, StagePosition, operations
from runtime.decoder import DecoderChunk
from runtime.emulation import Pace, pace_until
from runtime.gradient_sync import GradientSync
from runtime.layout import Executor, Line
from runtime.messages import Messages
from runtime.parts import Range

Sequences = Callable[[int, int], Tensor]  # samples [first, end) of the global batch, [samples, seq_len + 1]


@dataclass(slots=True)
class _Held:
    """What a forward leaves for its backward: what had entered, if gradients go back to it, and where the backward
    begins. Hidden states that left are not among it: once sent, nobody needs their values."""

    entered: Tensor | None
    left: GradientEdge


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation, and when its computation began and ended: seconds since 1970."""

    operation: Operation
    began_s: float
    ended_s: float


class Pipeline:
    """What one rank does in a step of its pipeline; it `reads` these runs of tokens, or the labels after them."""

    def __init__(
        self,
        schedule: Schedule,
        line: Line,
        executor: Executor,
        reads: Sequence[Range],
        chunks: list[DecoderChunk],
        names: list[list[str]],
        messages: Messages,
        sync: GradientSync,
        device: torch.device,
        pace: Pace | None = None,
    ) -> None:
        self._line, self._executor, self._reads, self._chunks, self._names = line, executor, reads, chunks, names
        self._messages, self._sync, self._device, self._pace = messages, sync, device, pace
        self.timeline: list[Timed] = []
        at = StagePosition(executor.stage, len(line.stages), line.num_micro_batches, line.num_chunks)
        self.operations = operations(schedule, at)

    def step(self, sequences: Sequences, num_tokens: int) -> float:
        """Gradients of the mean loss over `num_tokens`, in the buckets of `sync`; `timeline` has when what was done.

        Returns the loss that this rank's tokens add to the mean: zero but at the end of a pipeline.
        """
        held: dict[tuple[int, int], _Held] = {}
        total = 0.0
        self.timeline = []
        self._sync.begin()
        for now, then in zip(self.operations, [*self.operations[1:], None], strict=True):
            if self._waits(now):
                self._messages.expect(*self._key(now))
            # One operation ahead, so that its message can come while this one runs.
            if then is not None and self._waits(then):
                self._messages.expect(*self._key(then))
            total += self._run(now, held, sequences, num_tokens)
        self._messages.finish()
        self._sync.finish()
        return total

    def _run(self, now: Operation, held: dict[tuple[int, int], _Held], sequences: Sequences, num_tokens: int) -> float:
        """One operation, and the message that it leads to. Returns the loss of a last forward, otherwise zero."""
        came = self._messages.receive(*self._key(now)) if self._waits(now) else None
        began = self._clock()
        if now.backward:
            outgoing = self._backward(now, held.pop((now.chunk, now.micro_batch)), came)
        else:
            held[now.chunk, now.micro_batch], outgoing = self._forward(now, sequences, num_tokens, came)
        if self._pace is not None:
            pace_until(began, self._pace.operation_s(now.backward, now.chunk))
        self.timeline.append(Timed(now, began, self._clock()))
        if now.backward and self._pace is not None and self._is_last_of(now):
            self._sync.ended(self._names[now.chunk])
        chunk = self._chunks[now.chunk].chunk
        if not (chunk.first if now.backward else chunk.last):
            assert outgoing is not None
            self._messages.send(chunk.number, now.backward, now.micro_batch, outgoing)
        elif not now.backward:
            assert outgoing is not None
            return float(outgoing)
        return 0.0

    def _clock(self) -> float:
        """Seconds since 1970, after all that was begun."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    def _key(self, operation: Operation) -> tuple[int, bool, int]:
        return self._chunks[operation.chunk].chunk.number, operation.backward, operation.micro_batch

    def _waits(self, operation: Operation) -> bool:
        chunk = self._chunks[operation.chunk].chunk
        return not (chunk.last if operation.backward else chunk.first)

    def _forward(
        self, operation: Operation, sequences: Sequences, num_tokens: int, came: Tensor | None
    ) -> tuple[_Held, Tensor]:
        chunk, own = self._chunks[operation.chunk], self._executor.samples
        start = self._line.first_sample + operation.micro_batch * self._line.micro_batch_size
        tokens_tb = sequences(start + own[0], start + own[1]).T if chunk.chunk.first or chunk.chunk.last else None
        if came is not None:
            left = chunk.hidden(came.requires_grad_())
        else:
            assert tokens_tb is not None
            left = chunk.hidden(self._read(tokens_tb[:-1]))
        if chunk.chunk.last:
            assert tokens_tb is not None
            left = chunk.loss(left, self._read(tokens_tb[1:])) / num_tokens
        return _Held(came, get_gradient_edge(left)), left.detach()

    def _read(self, x_tb: Tensor) -> Tensor:
        runs = [x_tb[first:end] for first, end in self._reads]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _backward(self, operation: Operation, held: _Held, gradient: Tensor | None) -> Tensor | None:
        """The gradient of what had entered; None of tokens."""
        if self._pace is None and self._is_last_of(operation):
            self._sync.ending(self._names[operation.chunk])
        torch.autograd.backward([held.left], None if gradient is None else [gradient])
        return None if held.entered is None else held.entered.grad

    def _is_last_of(self, backward: Operation) -> bool:
        """Whether no further gradients of its layers follow in this step."""
        return backward.micro_batch == self._line.num_micro_batches - 1
