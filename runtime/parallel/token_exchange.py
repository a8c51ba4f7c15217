"""Copies of tokens to the experts that they choose, and back: a ragged all-to-all among the ranks of a cell.

Rows stand in the order (expert, source rank, token), whoever holds what; sums over a token's experts are read by
position and never added into place, so that they are the same in every run. Without a capacity every copy is computed:
ranks first tell each other how many come, which their hosts must know. With one, each rank sends each expert equally
many rows per own token, filled up with zeros, and drops what is beyond: sizes are known without asking.

Shapes: N tokens of the rank, k experts of each, L values; R rows that come to the rank's experts, S that leave it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.plan.token_layout import Range
from runtime.device import counts_now
from runtime.model.experts_part import ExpertRows
from runtime.model.functions import apply


@dataclass(frozen=True, slots=True)
class _Copies:
    """How a rank's copies leave it: the number of each of S rows among all N · k copies, and the row of each copy. If
    it `drops` some, the number N · k stands for rows that are zeros, and the row S for copies that are dropped."""

    source: Tensor
    row: Tensor
    drops: bool
    sent: list[int]  # rows to each rank
    came: list[int]  # rows from each


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The order by expert of R rows that came by rank, and back; where the rows of each expert end."""

    order: Tensor
    back: Tensor
    rows: ExpertRows


class CellExchange:
    """What one rank, the one at `place`, exchanges in a cell whose ranks, ascending, hold these ranges of `experts`.

    With a `capacity`, an expert takes of each rank so many times the mean of what its tokens send to an expert;
    `num_tokens` has those of each rank. Without a `group` the only rank has all experts.
    """

    def __init__(
        self,
        experts: Sequence[Range],
        place: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        capacity: float | None = None,
        num_tokens: Sequence[int] = (),
        top_k: int = 1,
    ) -> None:
        self._place, self._group, self._device = place, group, device
        self._held = [end - first for first, end in experts]
        order = torch.cat([torch.arange(*run) for run in experts])
        self._turn = order.argsort().to(device)  # of each expert: how many experts are held before it
        count, ranks = self._held[place], len(experts)
        # Of a block of rows from a rank to an expert, as they come: how many blocks are before it, by expert.
        self._blocks = torch.arange(count * ranks, device=device).view(count, ranks).t().flatten()
        self._slots: list[int] | None = None
        if capacity is not None:
            self._slots = [ceil(capacity * tokens * top_k / len(order)) for tokens in num_tokens]
            incoming = torch.tensor(self._slots).repeat_interleave(count).to(device)
            self._fixed = self._arrivals(incoming, [sum(self._slots)] * count)

    def __call__(
        self,
        x_nl: Tensor,
        experts_nk: Tensor,
        weights_nk: Tensor,
        run: Callable[[Tensor, ExpertRows], Tensor],
        meanwhile: Callable[[], Tensor] | None = None,
        *,
        scales_input: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of `runtime.model.experts_part.TokenExchange`."""
        turn = self._turn[experts_nk].flatten()
        if self._slots is not None:
            extra = None if meanwhile is None else meanwhile()
            copies, arrivals = self._capped_copies(turn), self._fixed
        else:
            copies, arrivals, extra = self._all_copies(turn, meanwhile)
        of_copies = copies.source, copies.row, copies.drops
        if scales_input:
            sent = apply(_Scaled, x_nl, weights_nk, *of_copies)
        else:
            sent = apply(_Spread, x_nl, copies.source, copies.row, experts_nk.shape[1], copies.drops)
        came = self._exchange(sent, copies.sent, copies.came)
        # A rank without experts keeps the graph: its backward joins the exchanges of the others.
        if arrivals.rows.counts:
            by_expert = apply(_Spread, came, arrivals.order, arrivals.back, 1, False)
            came = apply(_Spread, run(by_expert, arrivals.rows), arrivals.back, arrivals.order, 1, False)
        home = self._exchange(came, copies.came, copies.sent)
        if scales_input:
            rows = apply(_Spread, home, copies.row, copies.source, 1, copies.drops)
            return rows.view(*experts_nk.shape, rows.shape[1]).sum(1), extra
        return apply(_WeightedSum, home, weights_nk, *of_copies), extra

    def _all_copies(
        self, turn: Tensor, meanwhile: Callable[[], Tensor] | None
    ) -> tuple[_Copies, _Arrivals, Tensor | None]:
        """All copies; what is computed `meanwhile` runs while the ranks tell each other how many come."""
        outgoing = turn.new_zeros(len(self._turn)).scatter_add_(0, turn, torch.ones_like(turn))
        work, incoming = None, outgoing
        if self._group is not None:
            count = self._held[self._place]
            incoming = outgoing.new_empty(count * len(self._held))
            sizes = [count] * len(self._held)
            work = dist.all_to_all_single(incoming, outgoing, sizes, self._held, group=self._group, async_op=True)
        extra = None if meanwhile is None else meanwhile()
        if work is not None:
            work.wait()
        by_rank = incoming.view(len(self._held), self._held[self._place])
        sent = torch.stack([some.sum() for some in outgoing.split_with_sizes(self._held)])
        ranks, numbers = len(self._held), counts_now(torch.cat([sent, by_rank.sum(1), by_rank.sum(0)]))
        source = turn.argsort(stable=True)
        copies = _Copies(source, _inverse(source), False, numbers[:ranks], numbers[ranks : 2 * ranks])
        return copies, self._arrivals(incoming, numbers[2 * ranks :]), extra

    def _capped_copies(self, turn: Tensor) -> _Copies:
        """The first copies of each expert, as many as it takes, in the order of tokens."""
        assert self._slots is not None
        slots, num_rows = self._slots[self._place], self._slots[self._place] * len(self._turn)
        order = turn.argsort(stable=True)
        outgoing = turn.new_zeros(len(self._turn)).scatter_add_(0, turn, torch.ones_like(turn))
        before = outgoing.cumsum(0) - outgoing
        number = torch.arange(len(turn), device=turn.device) - before[turn[order]]  # among those of its expert
        row = torch.where(number < slots, turn[order] * slots + number, num_rows)
        rows = torch.empty_like(turn).scatter_(0, order, row)
        source = turn.new_full((num_rows + 1,), len(turn)).scatter_(
            0, rows, torch.arange(len(turn), device=turn.device)
        )
        came = [n * self._held[self._place] for n in self._slots]
        return _Copies(source[:-1], rows, True, [slots * held for held in self._held], came)

    def _arrivals(self, incoming: Tensor, counts: list[int]) -> _Arrivals:
        """The order of rows of which there are so many from each rank to each expert here [ranks · experts], to each in
        all `counts`."""
        order = self._blocks.repeat_interleave(incoming, output_size=sum(counts)).argsort(stable=True)
        ends = incoming.view(len(self._held), len(counts)).sum(0).cumsum(0).to(torch.int32)
        return _Arrivals(order, _inverse(order), ExpertRows(counts, ends))

    def _exchange(self, x: Tensor, sent: list[int], came: list[int]) -> Tensor:
        return x if self._group is None else apply(_Exchange, x, self._group, sent, came)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _pick(x: Tensor, rows: Tensor, drops: bool) -> Tensor:
    """The rows of x [n, H] with these numbers; if it `drops` some, zeros for the number n."""
    if not drops:
        return x[rows]
    if not len(x):
        return x.new_zeros(len(rows), x.shape[1])
    return x[rows.clamp(max=len(x) - 1)].masked_fill_((rows == len(x)).unsqueeze(-1), 0)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; its backward is the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int], came: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.came = group, sent, came
        return _swap(x, group, sent, came)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grads[0], ctx.group, ctx.came, ctx.sent), None, None, None


def _swap(x: Tensor, group: dist.ProcessGroup, sent: list[int], came: list[int]) -> Tensor:
    rows = x.new_empty(sum(came), x.shape[1])
    dist.all_to_all_single(rows, x.contiguous(), came, sent, group=group)
    return rows


class _Spread(torch.autograd.Function):
    """Rows of k copies of each of x's, by the numbers of the copies; its backward sums each one's copies, whose rows
    are sent too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, row: Tensor, k: int, drops: bool) -> Tensor:
        ctx.save_for_backward(row)
        ctx.k, ctx.drops = k, drops
        return _pick(x, source if k == 1 else source // k, drops)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (row,) = ctx.saved_tensors
        copies = _pick(grads[0], row, ctx.drops)
        summed = copies if ctx.k == 1 else copies.view(-1, ctx.k, copies.shape[1]).sum(1)
        return summed, None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """Σ over each token's k copies of weight · row; copies that are dropped count 0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, source: Tensor, row: Tensor, drops: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, source, row)
        ctx.drops = drops
        return _weighted_sums(rows, weights, row, drops)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, source, row = ctx.saved_tensors
        of_rows = _scaled_rows(grads[0], weights, source, ctx.drops)
        return of_rows, _products(rows, grads[0], weights, row, ctx.drops), None, None, None


class _Scaled(torch.autograd.Function):
    """Rows of each token's k copies, times their weights: the transpose of `_WeightedSum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, source: Tensor, row: Tensor, drops: bool) -> Tensor:
        ctx.save_for_backward(x, weights, row)
        ctx.drops = drops
        return _scaled_rows(x, weights, source, drops)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weights, row = ctx.saved_tensors
        of_x = _weighted_sums(grads[0], weights, row, ctx.drops)
        return of_x, _products(grads[0], x, weights, row, ctx.drops), None, None, None


def _scaled_rows(x: Tensor, weights: Tensor, source: Tensor, drops: bool) -> Tensor:
    """[S, H]: of each copy weight · x."""
    rows = _pick(x, source // weights.shape[1], drops)
    return rows.mul_(_pick(weights.flatten().unsqueeze(-1), source, drops))


def _weighted_sums(rows: Tensor, weights: Tensor, row: Tensor, drops: bool) -> Tensor:
    """[N, H]: over each token's copies Σ weight · row."""
    copies = _pick(rows, row, drops).view(*weights.shape, rows.shape[1])
    return (weights.unsqueeze(1) @ copies).squeeze(1)


def _products(rows: Tensor, x: Tensor, weights: Tensor, row: Tensor, drops: bool) -> Tensor:
    """[N, k]: of each copy row · x."""
    copies = _pick(rows, row, drops).view(*weights.shape, rows.shape[1])
    return (copies @ x.unsqueeze(-1)).squeeze(-1)
