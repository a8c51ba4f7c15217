"""Columns of the master program: chains of whole machines, with the rate, the fill and the sync of their pipelines."""

from dataclasses import dataclass

from solvers.columns.sync import ChainSync


@dataclass(frozen=True, slots=True, order=True)
class ChainRecipe:
    """`width` pipelines side by side through whole machines.

    `order`: (kind, number of machines) from the first stage to the last. `degrees`: the TP degree in the machines of
    each kind, or, if empty, the `rank`-th way of the chain builder's dynamic program.
    """

    order: tuple[tuple[int, int], ...]
    width: int
    micro_batch_size: int
    degrees: tuple[int, ...] = ()
    rank: int = 0

    def counts(self, num_kinds: int) -> tuple[int, ...]:
        """Machines of each kind."""
        found = [0] * num_kinds
        for kind, count in self.order:
            found[kind] += count
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class ChainColumn:
    """A chain, and what its pipelines do on a network of their own.

    In T seconds before gradient sync they process (T − `fill_s`) · `rate` sequences.
    """

    recipe: ChainRecipe
    counts: tuple[int, ...]  # machines by kind
    rate: float  # sequences/s of all its pipelines
    fill_s: float
    sync: ChainSync

    @property
    def samples(self) -> int:
        """Sequences of a micro-batch in each of its pipelines."""
        return self.recipe.width * self.recipe.micro_batch_size
