"""What is known of each step, for TensorBoard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hexiopt.errors import InputError


class Board:
    """Writes event files into `folder`. Raises InputError where the package tensorboard is missing."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise InputError("train.tensorboard: needs tensorboard; install hexiopt[tensorboard]")
        from torch.utils.tensorboard import SummaryWriter  # only here, as few have it

        self._writer = SummaryWriter(folder)

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Add what a step has shown, by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
