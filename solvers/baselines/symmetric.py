"""The published symmetric layouts, each tuned over its full space (`uniform.py`).

`ring`: Ring Attention (Liu et al., arXiv 2310.01889), also in zigzag order (Brandon et al., Striped Attention, arXiv
2311.09431, and others): groups of one device. `ulysses`: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): one
group, whose size divides the heads. `usp`: Unified Sequence Parallelism (Fang and Zhao, arXiv 2405.07719): every
product of both, all-to-alls between neighbours and rings across.
"""

from collections.abc import Iterator

from solvers.baselines.uniform import UniformLayouts


class Ring(UniformLayouts):
    """Context parallelism alone."""

    name = "ring"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """Every device a group."""
        yield most, 1

    def foreign(self, cp: int, hp: int) -> str | None:
        """Groups of several."""
        return "an all-to-all" if hp > 1 else None


class Ulysses(UniformLayouts):
    """Head parallelism alone."""

    name = "ulysses"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """One group, as large as divides the heads or smaller."""
        return ((1, hp) for hp in range(min(most, num_heads), 0, -1) if num_heads % hp == 0)

    def foreign(self, cp: int, hp: int) -> str | None:
        """Several groups."""
        return "a ring" if cp > 1 else None


class Usp(UniformLayouts):
    """Both."""

    name = "usp"

    def degrees(self, num_heads: int, most: int) -> Iterator[tuple[int, int]]:
        """Groups of every size that divides the heads, as many as there are devices for."""
        return ((most // hp, hp) for hp in range(min(most, num_heads), 0, -1) if num_heads % hp == 0)

    def foreign(self, cp: int, hp: int) -> str | None:
        """Nothing."""
        return None
