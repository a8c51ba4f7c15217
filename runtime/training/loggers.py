"""The numbers of a training run, for the tools that draw them: TensorBoard, Weights & Biases, MLflow."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hexiopt.errors import InputError

_PROJECT = "hexiopt"  # of Weights & Biases, and MLflow's experiment, where their own variables name none


class Logger(Protocol):
    """Where the numbers of a run go. It is made of a folder for its files, the name of the run, under which a resumed
    one goes on, and what to know of it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note numbers of a step, by their names."""

    def close(self) -> None:
        """The run has ended."""


class Loggers:
    """The named loggers of a run. One that fails later is left out, which `tell` hears in a line.

    Raises InputError where one cannot start.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, run: str, about: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        self._tell = tell
        self._open: dict[str, Logger] = {}
        check_loggers(names)
        for name in names:
            try:
                self._open[name] = LOGGERS[name](folder, run, about)
            except Exception as error:  # of whatever a tool raises
                self.close()
                why = f"{name} cannot start ({_line(error)})"
                raise InputError(f"train.loggers: {why}; mend that or leave it out") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note numbers of a step."""
        for name, logger in list(self._open.items()):
            self._try(name, partial(logger.log, step, values))

    def close(self) -> None:
        """The run has ended."""
        for name, logger in list(self._open.items()):
            self._try(name, logger.close)
        self._open.clear()

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # training goes on without
            del self._open[name]
            self._tell(f"{name}: {_line(error)}; it logs no more")


def check_loggers(names: Sequence[str]) -> None:
    """Raise InputError where the package of a logger is missing."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"train.loggers: {name} needs the package {name}; install hexiopt[{name}]")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _TensorBoard:
    """Writes event files into the folder `tensorboard`."""

    def __init__(self, folder: Path, run: str, about: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here and below only there, as few have them all

        self._writer = SummaryWriter(folder / "tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of Weights & Biases, as its variables say (WANDB_MODE=offline writes into the folder alone)."""

    def __init__(self, folder: Path, run: str, about: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self._run = wandb.init(project=project, id=run, dir=str(folder), config=dict(about), resume="allow")
        # By a number of our own: after a restart steps come again, and its own counter never goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, in the store that its variables say, or else in the folder."""

    def __init__(self, folder: Path, run: str, about: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow, tag = mlflow, "hexiopt.run"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        runs = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{run}'", output_format="list")
        mlflow.start_run(runs[0].info.run_id if runs else None, run_name=run, tags={tag: run})
        if not runs:
            mlflow.log_params(dict(about))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


LOGGERS: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
"""By the names of their packages."""
