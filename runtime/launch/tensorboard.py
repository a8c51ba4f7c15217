"""The steps of a training run, written for TensorBoard."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from hexiopt.errors import InputError
from runtime.launch.session import TrainedStep


class Board:
    """Writes event files into `folder`. Raises InputError where the package tensorboard is missing."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise InputError("train.tensorboard: needs tensorboard; install hexiopt[tensorboard]")
        from torch.utils.tensorboard import SummaryWriter  # only here, as few have it

        self._writer = SummaryWriter(folder)

    def __call__(self, step: TrainedStep) -> None:
        """Add the loss, norm, seconds, tokens/s and MFU of a step."""
        values = asdict(step)
        number = values.pop("step")
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
