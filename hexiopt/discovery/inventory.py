"""What a scheduler's text states of each node: its GPUs, its features, and whether it is in service."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuGroup:
    """`count` GPUs of a node that are called `product`; None marks what the text does not state."""

    product: str | None
    count: int | None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Node:
    """A node: its GPUs, () if it has none, and its `features` as its scheduler states them.

    `outage` is the state that keeps jobs off the node, None in service; `notes` are for the user.
    """

    gpus: tuple[GpuGroup, ...] = ()
    features: str | None = None
    outage: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int | None:
        """The number of GPUs; None if not stated."""
        counts = [group.count for group in self.gpus]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True)
class Inventory:
    """The nodes of a text, in its order, and notes on what was not read."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
