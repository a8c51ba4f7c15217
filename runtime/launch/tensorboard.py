"""What is known of each step, for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path


class Board:
    """Writes event files into `folder`. Needs the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only here, as few have it

        self._writer = SummaryWriter(folder)

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Add what a step has shown, by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
