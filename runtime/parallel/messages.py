"""Hidden states and their gradients between the stages of a pipeline, from rank to rank, in 8 bits where wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.numbers.messages import TRAINING, quantized_bytes
from hexiopt.plan.token_layout import common, merge_runs
from runtime.mapping.actions import boundary_of
from runtime.mapping.layout import MessageRoute, PipelineLayout, RankExecutor
from runtime.mapping.lowering import Action
from runtime.mapping.parts import Range
from runtime.network import Outbox, ProcessGroups
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.parallel.quantization import dequantize, quantize


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message: with which rank, and where in the rank's own [t, B, H]."""

    peer: int
    tokens: slice | Tensor  # rows: one run of them, or their numbers
    samples: slice
    num_bytes: int  # where it is quantised


@dataclass(slots=True)
class _Coming:
    whole: Tensor | None  # not before the parts have come where they are quantised
    parts: list[tuple[_Piece, Tensor, dist.Work]]  # and where it comes in: in the whole itself, or aside


class StageMessages:
    """What one rank sends and receives, action by action. `hidden` is the width of a hidden state, `precision` one of
    `hexiopt/numbers/messages.py`."""

    def __init__(
        self,
        line: PipelineLayout,
        executor: RankExecutor,
        rank: int,
        seq_len: int,
        hidden: int,
        like: Tensor,
        groups: ProcessGroups,
        precision: str = TRAINING,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        own_tokens = executor.tokens(seq_len)[executor.ranks.index(rank)]
        num_tokens = sum(end - first for first, end in own_tokens)
        self._shape = (num_tokens, executor.num_samples, hidden)
        self.like = like
        self._is_quantized = precision != TRAINING
        self._groups, self._outbox = groups, Outbox()
        self._hooks = hooks
        self._coming: dict[Action, _Coming] = {}
        self.most_bytes = 0
        """The most that messages on their way here and from here have held at once."""
        self._pieces: dict[int, list[_Piece]] = {}  # by the virtual stage before the boundary

        def piece(route: MessageRoute) -> _Piece:
            first, end = route.samples
            rows = (end - first) * sum(end - first for first, end in route.tokens)
            return _Piece(
                route.receiver if route.sender == rank else route.sender,
                _rows(own_tokens, route.tokens, like.device),
                slice(first - executor.samples[0], end - executor.samples[0]),
                rows * quantized_bytes(hidden),
            )

        for chunk in executor.chunks:
            for boundary in ([] if chunk.first else [chunk.number - 1]) + ([] if chunk.last else [chunk.number]):
                routes = line.routes(boundary, seq_len)
                self._pieces[boundary] = [piece(route) for route in routes if rank in (route.sender, route.receiver)]

    def send(self, action: Action, whole_tbh: Tensor) -> None:
        """Send a layer range's hidden states to the next one, or the gradient of its input to the one before."""
        boundary, _ = boundary_of(action)
        for piece in self._pieces[boundary]:
            part = whole_tbh[piece.tokens, piece.samples]
            part = quantize(part) if self._is_quantized else part.contiguous()
            self._hooks.send(piece.peer, partial(self._post, part, piece.peer))
        self._count()

    def _post(self, part: Tensor, peer: int) -> None:
        self._outbox.put(self._groups.send(part, peer), part)

    def expect(self, action: Action) -> None:
        """Post the receives of a layer range's input, or of the gradient of its hidden states."""
        boundary, _ = boundary_of(action)
        whole, parts = None if self._is_quantized else self.like.new_empty(self._shape), []
        for piece in self._pieces[boundary]:
            if whole is None:
                part = self.like.new_empty(piece.num_bytes, dtype=torch.uint8)
            else:
                part = whole[piece.tokens, piece.samples]  # a copy where rows do not follow each other
                if not part.is_contiguous():
                    part = torch.empty_like(part, memory_format=torch.contiguous_format)
            parts.append((piece, part, self._groups.receive(part, piece.peer)))
        self._coming[action] = _Coming(whole, parts)
        self._count()

    def receive(self, action: Action) -> Tensor:
        """Wait for what `expect` has announced: [t, B, H]."""
        coming = self._coming.pop(action)
        whole = self.like.new_empty(self._shape) if coming.whole is None else coming.whole
        for piece, part, work in coming.parts:
            work.wait()
            if self._is_quantized:
                sent, part = part, whole[piece.tokens, piece.samples]
                dequantize(sent, part)
            if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                whole[piece.tokens, piece.samples] = part
        return whole

    def _count(self) -> None:
        """What messages hold now, each storage once."""
        held = self._outbox.tensors()
        for coming in self._coming.values():
            held += [part for _, part, _ in coming.parts]
            held += [] if coming.whole is None else [coming.whole]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
        self.most_bytes = max(self.most_bytes, sum(storages.values()))

    def finish(self) -> None:
        """Wait until all messages are with their receivers."""
        self._hooks.finish()
        self._outbox.finish()


def _rows(tokens: Sequence[Range], some: Sequence[Range], device: torch.device) -> slice | Tensor:
    """The rows of the tokens `some` among the rank's own tokens, which are contiguous in memory."""
    rows, at = [], 0
    for first, end in tokens:
        rows += [(at + low - first, at + high - first) for low, high in common([(first, end)], some)]
        at += end - first
    runs = merge_runs(rows)
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.cat([torch.arange(*run, device=device) for run in runs])
