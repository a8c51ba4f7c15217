"""One training step of one rank: its list of actions, walked."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from hexiopt.schedules.operation import Operation, OperationKind
from runtime.device import DeviceClock
from runtime.mapping.actions import RankActions, units_of
from runtime.mapping.buckets import BucketCollective, CollectiveKind
from runtime.mapping.layout import PipelineLayout, RankExecutor
from runtime.mapping.lowering import Action, ActionKind
from runtime.mapping.parts import Range
from runtime.model.decoder import DecoderChunk
from runtime.parallel.gradient_sync import GradientSync
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.parallel.messages import StageMessages
from runtime.parallel.weight_store import WeightStore

_KIND_OF = {
    ActionKind.FORWARD: OperationKind.FORWARD,
    ActionKind.BACKWARD: OperationKind.BACKWARD,
    ActionKind.INPUT: OperationKind.BACKWARD,
    ActionKind.WEIGHTS: OperationKind.WEIGHTS,
}
Sequences = Callable[[int, int], Tensor]  # samples [first, end) of the global batch, [samples, seq_len + 1]
Borders = Callable[[int, int], Tensor]  # of the documents in these samples, as `runtime.model.attention` has them


class Batch(NamedTuple):
    """A global batch, of which a rank reads its own samples: over `num_tokens` the loss is a mean. With `borders`,
    attention keeps to documents."""

    sequences: Sequences
    num_tokens: int
    borders: Borders | None = None


@dataclass(slots=True)
class _Held:
    """What a forward leaves for its backward: of each part in order, what had entered, and where its backward begins;
    and the gradient with which the next backward begins. Hidden states that left are not among it: once sent, nobody
    needs their values."""

    parts: list[tuple[Tensor, GradientEdge]]
    gradient: Tensor | None = None


@dataclass(slots=True)
class _Forward:
    """A forward on its way: what it has yet to run, and what it has made so far."""

    todo: list[Callable[[Tensor], Tensor]]
    x: Tensor


def _one_after_another(parts: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    return lambda x: reduce(lambda value, part: part(value), parts, x)


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation, and when its computation began and ended: seconds since 1970."""

    operation: Operation
    began_s: float
    ended_s: float


class StageRunner:
    """Runs one rank's `actions` of a step, or the `forwards` among them. `reads` are the runs of tokens that it embeds
    or has the labels after."""

    def __init__(
        self,
        actions: RankActions,
        forwards: RankActions,
        line: PipelineLayout,
        executor: RankExecutor,
        reads: Sequence[Range],
        chunks: list[DecoderChunk],
        messages: StageMessages,
        sync: GradientSync,
        store: WeightStore,
        clock: DeviceClock,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self.actions, self._forwards = actions, forwards
        self._line, self._executor, self._reads = line, executor, reads
        self._chunks = {chunk.chunk.number: chunk for chunk in chunks}
        self._messages, self._sync, self._clock, self._hooks = messages, sync, clock, hooks
        self._store = store
        # Virtual stages and micro-batches whose backward is cut in parts; what is held of any.
        listed = [action for action in actions if isinstance(action, Action)]
        late = Counter((a.stage, a.micro_batch) for a in listed if a.kind is ActionKind.WEIGHTS)
        self._num_late = {stage: count for (stage, _), count in late.items()}  # layers that a backward puts off
        self._cut = {
            (a.stage, a.micro_batch) for a in listed if a.part is not None and a.kind is not ActionKind.WEIGHTS
        }
        self._running: dict[tuple[int, int], _Forward] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._leaving: dict[tuple[bool, int, int], Tensor] = {}  # made, but not yet sent: and whether it goes back
        self._marks: list[tuple[Operation, Any, Any]] = []  # of the last step: when each began and ended
        self.names_actions = False
        """Whether a trace has the actions as spans, by their names."""

    def step(self, batch: Batch) -> Tensor:
        """Gradients of the mean loss, in the buckets of `sync`; `timeline` has when what was done.

        Returns the loss that this rank's tokens add to the mean, a float64 scalar: zero but at the end of a pipeline.
        The host never waits for the device in here, but for the numbers of tokens that come to experts, where no
        capacity fixes them.
        """
        self._marks = []
        self._sync.begin()
        total = self._walk(self.actions, batch)
        self._sync.finish()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        """What `step` returns, by forwards alone: gradients and `timeline` stay as they are."""
        marks, self._marks = self._marks, []
        with torch.no_grad():
            total = self._walk(self._forwards, batch)
        self._marks = marks
        return total

    def _walk(self, actions: RankActions, batch: Batch) -> Tensor:
        total = self._messages.like.new_zeros((), dtype=torch.float64)
        for action in actions:
            with record_function(str(action)) if self.names_actions else nullcontext():
                if isinstance(action, BucketCollective):
                    if action.kind is CollectiveKind.GATHER:
                        self._store.gather(action)
                    else:
                        self._sync.start(action)
                    continue
                match action.kind:
                    case ActionKind.RECEIVE_FORWARD | ActionKind.RECEIVE_BACKWARD:
                        self._messages.expect(action)
                    case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                        tensor = self._leaving.pop((action.backward, action.stage, action.micro_batch))
                        self._messages.send(action, tensor)
                    case ActionKind.FORWARD:
                        total += self._forward(action, batch)
                    case ActionKind.BACKWARD:
                        self._backward(action)
                    case ActionKind.INPUT:
                        late = self._num_late[action.stage]
                        with self._chunks[action.stage].puts_off(action.micro_batch, late):
                            self._backward(action)
                    case ActionKind.WEIGHTS:
                        self._weights(action)
        self._messages.finish()
        return total

    def timeline(self) -> list[Timed]:
        """The operations of the last step, with their times. Call it between steps only: it waits for the device."""
        read_s = self._clock.read([mark for _, *marks in self._marks for mark in marks])
        return [
            Timed(operation, began_s, ended_s)
            for (operation, _, _), began_s, ended_s in zip(self._marks, read_s[::2], read_s[1::2], strict=True)
        ]

    def _forward(self, action: Action, batch: Batch) -> Tensor | float:
        """Returns the loss, if it ends with one."""
        at, chunk = (action.stage, action.micro_batch), self._chunks[action.stage].chunk
        came = None if chunk.first or action.part else self._messages.receive(action.input)
        began, units = self._clock.mark(), units_of(action, self._executor)
        self._store.use(units)
        began_s = self._hooks.now_s()
        if not action.part:
            self._running[at] = self._begin_forward(action, came, batch)
        running = self._running[at]
        count = len(running.todo) if action.part is None else 1
        for part in running.todo[:count]:
            entered = running.x.detach().requires_grad_(running.x.is_floating_point())
            running.x = part(entered)
            if torch.is_grad_enabled():
                self._held[at].parts.append((entered, get_gradient_edge(running.x)))
        running.x = running.x.detach()
        self._store.release(units)
        del running.todo[:count]
        self._note_end(action, began, began_s)
        if running.todo:
            return 0.0
        del self._running[at]
        if chunk.last:
            return running.x
        self._leaving[False, *at] = running.x
        return 0.0

    def _begin_forward(self, action: Action, came: Tensor | None, batch: Batch) -> _Forward:
        at, decoder = (action.stage, action.micro_batch), self._chunks[action.stage]
        chunk, samples = decoder.chunk, self._samples(action.micro_batch)
        tokens_tb = batch.sequences(*samples).T if chunk.first or chunk.last else None
        labels_tb = self._read(tokens_tb[1:]) if tokens_tb is not None and chunk.last else None
        x = came if tokens_tb is None or came is not None else self._read(tokens_tb[:-1])
        assert x is not None
        borders = batch.borders(*samples) if batch.borders is not None and self._executor.num_samples else None
        parts = decoder.parts(labels_tb, batch.num_tokens, borders, self._executor.num_samples)
        if self._store.are_under_way:
            c = action.stage // len(self._line.stages)
            parts = [
                self._store.after((action.stage, unit), self._hooks.first_part(c, unit, part))
                for unit, part in enumerate(parts)
            ]
        if torch.is_grad_enabled():
            self._held[at] = _Held([])
        # A graph for each part, if the backward stops between them.
        return _Forward(parts if at in self._cut else [_one_after_another(parts)], x)

    def _samples(self, micro_batch: int) -> Range:
        samples, start = self._executor.samples, self._line.first_sample + micro_batch * self._line.micro_batch_size
        return start + samples[0], start + samples[1]

    def _read(self, x_tb: Tensor) -> Tensor:
        runs = [x_tb[first:end] for first, end in self._reads]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _backward(self, action: Action) -> None:
        at, chunk = (action.stage, action.micro_batch), self._chunks[action.stage].chunk
        held = self._held[at]
        if not action.part and not chunk.last:
            held.gradient = self._messages.receive(action.input)
        began, units = self._clock.mark(), units_of(action, self._executor)
        self._sync.begin_part(not action.part)
        self._store.use(units)
        began_s = self._hooks.now_s()
        entered, left = held.parts.pop()
        torch.autograd.backward([left], None if held.gradient is None else [held.gradient])
        held.gradient = entered.grad
        self._store.release(units)
        self._note_end(action, began, began_s)
        if not held.parts:
            gradient = self._held.pop(at).gradient
            if not chunk.first:
                assert gradient is not None
                self._leaving[True, *at] = gradient

    def _weights(self, action: Action) -> None:
        """Gradients of the weights of a layer that a backward has put off."""
        assert action.part is not None
        began, began_s = self._clock.mark(), self._hooks.now_s()
        self._chunks[action.stage].add_late_gradients(action.micro_batch, action.part)
        self._sync.collect()
        self._note_end(action, began, began_s)

    def _note_end(self, action: Action, began: Any, began_s: float) -> None:
        """Note when an operation was computed: a forward or backward with all its parts together."""
        kind, chunk = _KIND_OF[action.kind], action.stage // len(self._line.stages)
        self._hooks.on_operation(began_s, kind, chunk, action.part, self._num_late.get(action.stage, 1))
        if action.part and kind is not OperationKind.WEIGHTS:
            _, began, _ = self._marks.pop()
        self._marks.append((Operation(kind, chunk, action.micro_batch), began, self._clock.mark()))
