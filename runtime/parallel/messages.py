"""Hidden states and their gradients between the stages of a pipeline, from rank to rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.plan.token_layout import common, joined
from runtime.mapping.layout import Lane, MessageRoute, PipelineLayout, RankExecutor
from runtime.mapping.parts import Range
from runtime.parallel.outbox import Outbox

_TAGS = 2**20  # micro-batches that tags tell apart


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message: with which rank, and where in the rank's own [t, B, H]."""

    peer: int
    tokens: slice | Tensor  # rows: one run of them, or their numbers
    samples: slice


@dataclass(slots=True)
class _Coming:
    whole: Tensor
    parts: list[tuple[_Piece, Tensor, dist.Work]]  # and where it comes in: in the whole itself, or aside


class StageMessages:
    """What one rank sends and receives. `hidden` is the width of a hidden state.

    Messages are told apart by tags, or, where the backend ignores tags (NCCL), by a process group for each lane. With
    `latency_s`, they leave that much later, by the rank to which they go.
    """

    def __init__(
        self,
        line: PipelineLayout,
        executor: RankExecutor,
        rank: int,
        seq_len: int,
        hidden: int,
        like: Tensor,
        lanes: Mapping[Lane, dist.ProcessGroup] | None = None,
        latency_s: Sequence[float] | None = None,
    ) -> None:
        own_tokens = executor.tokens(seq_len)[executor.ranks.index(rank)]
        num_tokens = sum(end - first for first, end in own_tokens)
        self._shape = (num_tokens, executor.num_samples, hidden)
        self.like = like
        self._rank, self._lanes, self._latency_s = rank, lanes, latency_s
        self._late: list[Timer] = []
        self._outbox = Outbox(like.device)
        self._coming: dict[tuple[int, bool, int], _Coming] = {}
        self.most_bytes = 0
        """The most that messages on their way here and from here have held at once."""
        # By virtual stage whose input or output it is, and whether it comes in.
        self._pieces: dict[tuple[int, bool], list[_Piece]] = {}

        def piece(route: MessageRoute, peer: int) -> _Piece:
            return _Piece(
                peer,
                _rows(own_tokens, route.tokens, like.device),
                slice(route.samples[0] - executor.samples[0], route.samples[1] - executor.samples[0]),
            )

        for chunk in executor.chunks:
            if not chunk.last:
                routes = line.routes(chunk.number, seq_len)
                self._pieces[chunk.number, False] = [piece(r, r.receiver) for r in routes if r.sender == rank]
            if not chunk.first:
                routes = line.routes(chunk.number - 1, seq_len)
                self._pieces[chunk.number, True] = [piece(r, r.sender) for r in routes if r.receiver == rank]

    def send(self, chunk: int, backward: bool, micro_batch: int, whole_tbh: Tensor) -> None:
        """Send a chunk's hidden states to the next one, or the gradient of its input to the one before."""
        boundary = chunk if not backward else chunk - 1
        for piece in self._pieces[chunk, backward]:
            part = whole_tbh[piece.tokens, piece.samples].contiguous()
            lane = Lane(boundary, backward, self._rank, piece.peer)
            if self._latency_s is None:
                self._post(part, lane, micro_batch)
            else:
                self._late.append(Timer(self._latency_s[piece.peer], self._post, (part, lane, micro_batch)))
                self._late[-1].start()
        self._count()

    def _post(self, part: Tensor, lane: Lane, micro_batch: int) -> None:
        work = dist.isend(part, lane.receiver, **self._way(lane, micro_batch))
        assert work is not None
        self._outbox.put(work, part)

    def expect(self, chunk: int, backward: bool, micro_batch: int) -> None:
        """Post the receives of a chunk's input, or of the gradient of its hidden states."""
        if (chunk, backward, micro_batch) in self._coming:
            return
        boundary = chunk - 1 if not backward else chunk
        whole, parts = self.like.new_empty(self._shape), []
        for piece in self._pieces[chunk, not backward]:
            part = whole[piece.tokens, piece.samples]  # a copy where rows do not follow each other
            if not part.is_contiguous():
                part = torch.empty_like(part, memory_format=torch.contiguous_format)
            lane = Lane(boundary, backward, piece.peer, self._rank)
            work = dist.irecv(part, piece.peer, **self._way(lane, micro_batch))
            assert work is not None
            parts.append((piece, part, work))
        self._coming[chunk, backward, micro_batch] = _Coming(whole, parts)
        self._count()

    def receive(self, chunk: int, backward: bool, micro_batch: int) -> Tensor:
        """Wait for what `expect` has announced: [t, B, H]."""
        coming = self._coming.pop((chunk, backward, micro_batch))
        for piece, part, work in coming.parts:
            work.wait()
            if part.untyped_storage().data_ptr() != coming.whole.untyped_storage().data_ptr():
                coming.whole[piece.tokens, piece.samples] = part
        return coming.whole

    def _count(self) -> None:
        """What messages hold now, each storage once."""
        held = self._outbox.tensors()
        for coming in self._coming.values():
            held += [coming.whole, *(part for _, part, _ in coming.parts)]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
        self.most_bytes = max(self.most_bytes, sum(storages.values()))

    def finish(self) -> None:
        """Wait until all messages are with their receivers."""
        while self._late:
            self._late.pop().join()
        self._outbox.finish()

    def _way(self, lane: Lane, micro_batch: int) -> dict[str, Any]:
        """How torch is told which message this is."""
        if self._lanes is not None:
            return {"group": self._lanes[lane]}
        return {"tag": (2 * lane.boundary + lane.backward) * _TAGS % 2**30 + micro_batch}


def _rows(own: Sequence[Range], some: Sequence[Range], device: torch.device) -> slice | Tensor:
    """The rows of the tokens `some` among the rank's own tokens, which are contiguous in memory."""
    found, at = [], 0
    for first, end in own:
        found += [(at + low - first, at + high - first) for low, high in common([(first, end)], some)]
        at += end - first
    runs = joined(found)
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.cat([torch.arange(*run, device=device) for run in runs])


def like(dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor that says type and device."""
    return torch.empty(0, dtype=dtype, device=device)
