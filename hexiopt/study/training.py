"""A training run read back from its folder: losses, and a measured step next to the predicted one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hexiopt.files.training_files import read_operations, read_steps
from hexiopt.frame import Frame
from hexiopt.report.style import seconds
from hexiopt.value import Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class TrainedRun(Value):
    """What `hexiopt train` left in its folder.

    `steps` has one row per step: loss in nats per token, gradient norm, seconds, tokens/s, MFU. `operations` has one
    row per forward and backward of one step, both predicted for the plan's GPUs and measured on the devices of the run.
    """

    steps: Frame
    operations: Frame

    def plot(self) -> "Figure":
        """A matplotlib figure: the predicted step above the measured one, one lane per stage, each on its own clock."""
        from hexiopt.report.trained import training_figure

        return training_figure(self.operations)

    def __repr__(self) -> str:
        losses = self.steps["loss"]
        if not losses:
            return "TrainedRun(no step)"
        median_s = sorted(self.steps["seconds"])[len(losses) // 2]
        return f"TrainedRun({len(losses)} steps, loss {losses[0]:.4f} → {losses[-1]:.4f}, {seconds(median_s)} a step)"


def read_training(folder: str | Path) -> TrainedRun:
    """The training run in the folder of `hexiopt train`: its steps, and a measured step next to the predicted one.

    Raises InputError for a folder without the files of a run.
    """
    return TrainedRun(read_steps(Path(folder)), read_operations(Path(folder)))
