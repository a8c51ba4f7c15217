"""Parts of parameters, and the share of whatever a TP group cuts that one of its ranks holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec

Range = tuple[int, int]  # [start, end)
Initial = float | Literal["log_of_number", "uniform"]  # of an element its number from 1; between ± 1 / √inputs


def layer_of(name: str) -> int | None:
    """The number of the layer of a parameter, if it is of one."""
    words = name.split(".")
    return int(words[2]) if "layers" in words else None


def split(total: int, count: int) -> list[Range]:
    """Split `total` items over `count` ranks in order, as evenly as possible; the first ranks take one more."""
    low, extra = divmod(total, count)
    return list(pairwise([0, *accumulate(low + (k < extra) for k in range(count))]))


@dataclass(frozen=True, slots=True)
class ExpertCell:
    """The `ranks`, ascending, that share the experts of a stage's layers, and the turn of each: the one whose turn is
    first has the first experts. `counts` are the whole experts of each turn, if the plan states them."""

    ranks: tuple[int, ...]
    turns: tuple[int, ...]
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], counts: Sequence[int] = ()) -> "ExpertCell":
        """That of ranks in the order of their turns."""
        order = sorted(range(len(ranks)), key=lambda turn: ranks[turn])
        return cls(tuple(ranks[turn] for turn in order), tuple(order), tuple(counts))

    def experts(self, total: int) -> tuple[Range, ...]:
        """Of so many experts of a layer those of each rank: as stated, or as even as whole ones allow."""
        by_turn = list(pairwise([0, *accumulate(self.counts)])) if self.counts else split(total, len(self.ranks))
        return tuple(by_turn[turn] for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RankShard:
    """The share of rank number `rank` of a TP group of `count` ranks; `heads` are the query heads of each of them, if
    the plan states them. Of experts it is the share of the rank at a `place` in a `cell` (None: all); one that `hosts`
    them alone has nothing else."""

    rank: int = 0
    count: int = 1
    heads: tuple[int, ...] = ()
    cell: ExpertCell | None = None
    place: int = 0
    hosts: bool = False

    def share(self, total: int) -> Range:
        """Of the heads or columns of a layer: in proportion to stated heads, else as even as whole ones allow."""
        if not self.heads:
            return self.even(total)
        first, whole = sum(self.heads[: self.rank]), sum(self.heads)
        return round(first * total / whole), round((first + self.heads[self.rank]) * total / whole)

    def groups(self, heads: int, groups: int) -> Range:
        """Of `groups`, each of which equally many heads meet, those that the rank's heads meet; other ranks may hold
        them too."""
        (first, end), size = self.share(heads), heads // groups
        return (first // size, -(-end // size)) if end > first else (0, 0)

    def meets(self, heads: int, groups: int) -> list[int]:
        """Which of these `groups`, counted from the first of them, each of the rank's heads meets."""
        first, _ = self.groups(heads, groups)
        return [head * groups // heads - first for head in range(*self.share(heads))]

    def cuts(self, heads: int, groups: int) -> bool:
        """Whether some rank of the TP group has heads of one of these `groups`, and not all of them."""
        ends = [replace(self, rank=rank).share(heads)[1] for rank in range(self.count)]
        return any(end % (heads // groups) for end in ends)

    def first_with(self, heads: int, groups: int) -> int:
        """How many of the first of its `groups` ranks before it hold too."""
        first, end = self.groups(heads, groups)
        before = [replace(self, rank=rank).groups(heads, groups)[1] for rank in range(self.rank)]
        return max(0, min(end, max(before, default=0)) - first)

    def experts(self, total: int) -> Range:
        """Of the experts of a layer, whole ones."""
        return (0, total) if self.cell is None else self.cell.experts(total)[self.place]

    def even(self, total: int) -> Range:
        """Of what is cut as evenly as possible, whatever heads are stated: rows of the vocabulary."""
        return split(total, self.count)[self.rank]


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The part [start, end) along `dim` of the parameter `name`, which is `shape` as a whole; trained, or frozen."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    end: int
    initial: Initial | None = None
    """The value of all its elements at first, or how they are drawn; None: as a run draws matrices, and zero of
    biases."""
    trained: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.end - self.start, *self.shape[self.dim + 1 :])

    @property
    def cut(self) -> tuple[slice, ...]:
        """Where the part is in the parameter."""
        return (*[slice(None)] * self.dim, slice(self.start, self.end))

    @property
    def decays(self) -> bool:
        """Whether an optimizer decays it: matrices, but neither norms nor biases, of which each expert has one."""
        return len(self.shape) > 1 and not self.name.endswith("bias")


def shards(model: ModelSpec, tp: int, heads: Sequence[int] | None = None) -> tuple[RankShard, ...]:
    """The shard of each of `tp` ranks; with `heads` query heads each, if stated, and all else in proportion.

    Raises InputError where the heads are not those of the model.
    """
    if heads is not None and (len(heads) != tp or sum(heads) != model.num_heads or min(heads) < 0):
        raise InputError(
            f"heads: {list(heads)} over {tp} devices; give each its share of the model's {model.num_heads} heads"
        )
    return tuple(RankShard(rank, tp, tuple(heads or ())) for rank in range(tp))
