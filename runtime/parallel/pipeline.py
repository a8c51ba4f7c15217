"""One training step of one rank: its stage's operations in order, messages beside them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hexiopt.schedules.schedule import Operation, Schedule, StagePosition, operations
from runtime.device import DeviceClock
from runtime.mapping.layout import PipelineLayout, RankExecutor
from runtime.mapping.parts import Range
from runtime.model.decoder import DecoderChunk
from runtime.pace import Pace, pace_until
from runtime.parallel.gradient_sync import GradientSync
from runtime.parallel.messages import StageMessages

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


class StageRunner:
    """Runs one rank's operations of a step. `reads` are the runs of tokens that it embeds or has the labels after."""

    def __init__(
        self,
        schedule: Schedule,
        line: PipelineLayout,
        executor: RankExecutor,
        reads: Sequence[Range],
        chunks: list[DecoderChunk],
        names: list[list[str]],
        messages: StageMessages,
        sync: GradientSync,
        clock: DeviceClock,
        pace: Pace | None = None,
    ) -> None:
        self._line, self._executor, self._reads, self._chunks, self._names = line, executor, reads, chunks, names
        self._messages, self._sync, self._clock, self._pace = messages, sync, clock, pace
        self._marks: list[tuple[Operation, Any, Any]] = []  # of the last step: when each began and ended
        at = StagePosition(executor.stage, len(line.stages), line.num_micro_batches, line.num_chunks)
        self.operations = operations(schedule, at)

    def step(self, sequences: Sequences, num_tokens: int) -> Tensor:
        """Gradients of the mean loss over `num_tokens`, in the buckets of `sync`; `timeline` has when what was done.

        Returns the loss that this rank's tokens add to the mean, a float64 scalar: zero but at the end of a pipeline.
        The host never waits for the device in here: what it waits for could depend on what it has yet to send.
        """
        held: dict[tuple[int, int], _Held] = {}
        total = self._messages.like.new_zeros((), dtype=torch.float64)
        self._marks = []
        self._sync.begin()
        for now, then in zip(self.operations, [*self.operations[1:], None], strict=True):
            if self._waits(now):
                self._messages.expect(*self._key(now))
            # One operation ahead, so that its message can come while this one runs.
            if then is not None and self._waits(then):
                self._messages.expect(*self._key(then))
            loss = self._run(now, held, sequences, num_tokens)
            if loss is not None:
                total += loss
        self._messages.finish()
        self._sync.finish()
        return total

    def timeline(self) -> list[Timed]:
        """The operations of the last step, with their times. Call it between steps only: it waits for the device."""
        read_s = self._clock.read([mark for _, *marks in self._marks for mark in marks])
        return [
            Timed(operation, began_s, ended_s)
            for (operation, _, _), began_s, ended_s in zip(self._marks, read_s[::2], read_s[1::2], strict=True)
        ]

    def _run(
        self, now: Operation, held: dict[tuple[int, int], _Held], sequences: Sequences, num_tokens: int
    ) -> Tensor | None:
        """Run one operation and send its result. Returns the loss if it is the forward of the last chunk."""
        came = self._messages.receive(*self._key(now)) if self._waits(now) else None
        began, began_s = self._clock.mark(), time.time()
        if now.backward:
            outgoing = self._backward(now, held.pop((now.chunk, now.micro_batch)), came)
        else:
            held[now.chunk, now.micro_batch], outgoing = self._forward(now, sequences, num_tokens, came)
        if self._pace is not None:
            pace_until(began_s, self._pace.operation_s(now.backward, now.chunk))
        self._marks.append((now, began, self._clock.mark()))
        if now.backward and self._pace is not None and self._is_last_of(now):
            self._sync.ended(self._names[now.chunk])
        chunk = self._chunks[now.chunk].chunk
        if not (chunk.first if now.backward else chunk.last):
            assert outgoing is not None
            self._messages.send(chunk.number, now.backward, now.micro_batch, outgoing)
            return None
        return None if now.backward else outgoing

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
