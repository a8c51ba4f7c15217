"""Causal attention of a sequence layout: queries stay, keys and values travel round (Liu et al., arXiv 2310.01889).

The groups of a layout may cut the heads at different places, so that each *sub-ring* (HexiSeq, arXiv 2605.07569;
`hexiopt/plan/token_layout.py`) is a ring of its own; a rank takes part in those of its heads. At turn j of G it
computes its group's queries on the keys and values of group (g - j) mod G, while those of the next turn are on their
way. Backward, keys and values travel again, and the gradients of each block with it, one turn later: they come home
after G turns. They are summed in max(float32, type of the inputs), and travel in the type of the inputs. Shapes: T
tokens of the group, B samples, n own heads (m key-value heads), D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.token_layout import Range, group_ranges, head_ranges, kv_range, sub_rings, token_ranges
from hexiopt.problem.kinds import Attention
from runtime.model.block_attention import (
    PLAIN,
    Block,
    Scores,
    attend,
    attend_backward,
    blocks,
    merge,
    sink_gradient,
)
from runtime.model.functions import apply, exact_dtype
from runtime.network import ProcessGroups
from runtime.parallel.all_to_all import AllToAll


class SequenceAttention:
    """Attention of a rank that has its own tokens of all heads before and after; groups of `layout` name ranks."""

    def __init__(
        self,
        layout: SequenceParallel,
        rank: int,
        groups: ProcessGroups,
        device: torch.device,
        part: Attention,
        scores: Scores = PLAIN,
    ) -> None:
        (g,) = (g for g, group in enumerate(layout.groups) if rank in group.devices)
        own_group, tokens = layout.groups[g], token_ranges(layout)[g]
        order = sorted(range(len(own_group.devices)), key=lambda place: own_group.devices[place])
        heads = [head_ranges(own_group.heads)[place] for place in order]
        kv_heads = [kv_range(head_range, part.heads, part.kv_heads) for head_range in heads]
        ranks = tuple(own_group.devices[place] for place in order)
        self._heads, self._kv_heads = heads, kv_heads
        self._all_to_all = AllToAll([tokens[place] for place in order], ranks.index(rank), groups.of(ranks), device)
        everyone = tuple(sorted(r for group in layout.groups for r in group.devices))
        self._ring = RankSubRing(part, scores, layout, g, own_group.devices.index(rank), groups.of(everyone))

    def documents(self, borders: Tensor, num_samples: int) -> Tensor:
        """A ring knows no parts of sequences: `untrainable` says so before a run."""
        raise NotImplementedError

    def __call__(
        self,
        q_tbnd: Tensor,
        k_tbnd: Tensor,
        v_tbnd: Tensor,
        sinks: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Own tokens of all heads, from those of queries, keys and values."""
        assert documents is None
        if sinks is not None:
            sinks = sinks[self._ring.heads]
        by_tensor = [self._heads, self._kv_heads, self._kv_heads]
        of_heads = self._all_to_all.to_heads(by_tensor, q_tbnd, k_tbnd, v_tbnd)
        values = apply(_RingAttention, self._ring, sinks, *of_heads)
        return self._all_to_all.to_tokens(self._heads, values).flatten(2)


@dataclass(frozen=True, slots=True)
class _SubRing:
    """A rank's part of a sub-ring: which of its heads, which key-value head each of them meets, and its neighbours."""

    heads: slice
    kv_heads: slice
    meets: list[int]
    after: int
    before: int


class RankSubRing:
    """The sub-rings of the rank at `place` in group `g` of a layout, all of whose ranks are in `group`."""

    def __init__(
        self,
        part: Attention,
        scores: Scores,
        layout: SequenceParallel,
        g: int,
        place: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.count, self._g, self._group = len(layout.groups), g, group
        runs = group_ranges(layout)
        self._lengths = [sum(end - first for first, end in tokens) for tokens in runs]
        window, chunk = (None, part.window) if part.chunked else (part.window, None)
        self._blocks = [blocks(runs[g], other, window, scores, chunk) for other in runs]
        heads = head_ranges(layout.groups[g].heads)[place]
        self.heads = slice(*heads)
        kv_heads = kv_range(heads, part.heads, part.kv_heads)
        self.sub_rings: list[_SubRing] = []
        for ring in sub_rings(layout, part.heads, part.kv_heads):
            if ring.places[g] == place:
                at = [(g + step) % self.count for step in (1, -1)]
                after, before = (layout.groups[other].devices[ring.places[other]] for other in at)
                meets = [head * part.kv_heads // part.heads - ring.kv_heads[0] for head in range(*ring.heads)]
                self.sub_rings.append(
                    _SubRing(_from(ring.heads, heads), _from(ring.kv_heads, kv_heads), meets, after, before)
                )

    def source(self, turn: int) -> int:
        """Whose keys and values a turn works on."""
        return (self._g - turn) % self.count

    def blocks(self, turn: int) -> list[Block]:
        """What of them the group's queries see."""
        return self._blocks[self.source(turn)]

    def begin(self, turn: int, tensors: Sequence[Tensor]) -> "Passing":
        """Pass tensors [2, B, m, T, D] of a turn on, one for each sub-ring; those of the next turn come."""
        length = self._lengths[self.source(turn + 1)]
        coming = [x.new_empty(*x.shape[:3], length, x.shape[4]) for x in tensors]
        receives = [
            dist.P2POp(dist.irecv, x, ring.before, group=self._group)
            for x, ring in zip(coming, self.sub_rings, strict=True)
        ]
        sends = [
            dist.P2POp(dist.isend, x, ring.after, group=self._group)
            for x, ring in zip(tensors, self.sub_rings, strict=True)
        ]
        return Passing(tensors, coming, dist.batch_isend_irecv(receives + sends))


@dataclass(frozen=True, eq=False, slots=True)
class Passing:
    """Tensors on their way."""

    sent: Sequence[Tensor]
    coming: Sequence[Tensor]
    works: Sequence[dist.Work]

    def end(self) -> Sequence[Tensor]:
        """Wait for what comes, and until all that goes has gone."""
        for work in self.works:
            work.wait()
        return self.coming


def _from(part: Range, whole: Range) -> slice:
    return slice(part[0] - whole[0], part[1] - whole[0])


class _RingAttention(torch.autograd.Function):
    """[T, B, n, D] of queries [T, B, n, D], keys and values [T, B, m, D]. Sinks [n] stand before the first block."""

    @staticmethod
    def forward(ctx: Any, ring: RankSubRing, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.permute(1, 2, 0, 3)
        # As the queries lie in memory: the projection that follows saves the same storage, not a copy.
        out = torch.zeros_like(q, dtype=exact_dtype(q.dtype)).permute(1, 2, 0, 3)
        lse = out.new_full(queries.shape[:-1], -torch.inf)
        if sinks is not None:
            lse[:] = sinks[:, None]
        held: Sequence[Tensor] = _by_ring(ring, k, v)
        for turn in range(ring.count):
            passing = ring.begin(turn, held) if turn + 1 < ring.count else None
            for sub_ring, kv in zip(ring.sub_rings, held, strict=True):
                keys, values = kv[:, :, sub_ring.meets]
                for block in ring.blocks(turn):
                    at, seen = slice(*block.queries), slice(*block.keys)
                    of_block = attend(block, queries[:, sub_ring.heads, at], keys[:, :, seen], values[:, :, seen])
                    merge(out[:, sub_ring.heads, at], lse[:, sub_ring.heads, at], *of_block)
            if passing is not None:
                held = passing.end()
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        ring: RankSubRing = ctx.ring
        queries, grad = q.permute(1, 2, 0, 3), grads[0].permute(1, 2, 0, 3).contiguous()
        of_queries = torch.zeros_like(out, dtype=exact_dtype(q.dtype))
        held: Sequence[Tensor] = _by_ring(ring, k, v)
        returning: Passing | None = None
        for turn in range(ring.count):
            passing = ring.begin(turn, held) if turn + 1 < ring.count else None
            gradients = [torch.zeros_like(kv, dtype=of_queries.dtype) for kv in held]
            for sub_ring, kv, of_kv in zip(ring.sub_rings, held, gradients, strict=True):
                keys, values = kv[:, :, sub_ring.meets]
                for block in ring.blocks(turn):
                    at, seen = slice(*block.queries), slice(*block.keys)
                    rows = (slice(None), sub_ring.heads, at)
                    of_q, *of_both = attend_backward(
                        block, grad[rows], queries[rows], keys[:, :, seen], values[:, :, seen], out[rows], lse[rows]
                    )
                    of_queries[rows] += of_q
                    for of_turn, of_block in zip(of_kv, of_both, strict=True):
                        for head, kv_head in enumerate(sub_ring.meets):
                            of_turn[:, kv_head, seen] += of_block[:, head]
            if returning is not None:
                gradients = [mine + other for mine, other in zip(gradients, returning.end(), strict=True)]
            if ring.count > 1:
                returning = ring.begin(turn, [mine.to(q.dtype) for mine in gradients])
            if passing is not None:
                held = passing.end()
        home = gradients if returning is None else returning.end()
        of_k, of_v = (torch.zeros(x.permute(1, 2, 0, 3).shape, dtype=of_queries.dtype, device=x.device) for x in (k, v))
        for sub_ring, (of_keys, of_values) in zip(ring.sub_rings, home, strict=True):
            of_k[:, sub_ring.kv_heads] += of_keys
            of_v[:, sub_ring.kv_heads] += of_values
        of_sinks = None if sinks is None else sink_gradient(sinks, grad, out, lse)
        return None, of_sinks, *(x.to(q.dtype).permute(2, 0, 1, 3) for x in (of_queries, of_k, of_v))


def _by_ring(ring: RankSubRing, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values [2, B, m, T, D] of each sub-ring."""
    both = torch.stack([k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)])
    return [both[:, :, sub_ring.kv_heads].contiguous() for sub_ring in ring.sub_rings]
