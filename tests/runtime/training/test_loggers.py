"""Numbers of a run reach each tool, under one name also after a resume; a missing package is one line at the start."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments.app.verb_config import CHOICES
from hexiopt.errors import InputError
from runtime.training.loggers import LOGGERS, Loggers, check_loggers

STEPS = [(1, {"loss": 3.5, "norm": 2.0}), (2, {"loss": 3.25, "norm": 1.0}), (2, {"validation_loss": 3.375})]


def write(name: str, folder: Path, run: str = "a1b2", steps: Any = STEPS) -> list[str]:
    """What is said while these steps are logged."""
    messages: list[str] = []
    loggers = Loggers([name], folder, run, {"steps": 2, "lr": 0.003}, messages.append)
    for step, values in steps:
        loggers.log(step, values)
    loggers.close()
    return messages


def needs(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed; it is no part of the tests' requirements")


def test_those_that_may_be_named() -> None:
    assert set(CHOICES["train.loggers"]) == set(LOGGERS)


def test_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    assert write("tensorboard", tmp_path) == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(1, 3.5), (2, 3.25)]
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("validation_loss")] == [(2, 3.375)]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert write("wandb", tmp_path) == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*-a1b2/*.wandb")
    assert b"validation_loss" in file.read_bytes()


def test_mlflow_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    import mlflow

    for more in ([], [(3, {"loss": 3.0})]):  # the second goes on with the first
        assert write("mlflow", tmp_path, steps=more or STEPS) == []
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("hexiopt").experiment_id])
    assert run.data.params == {"steps": "2", "lr": "0.003"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.5), (2, 3.25), (3, 3.0)]
    assert run.data.metrics["validation_loss"] == 3.375


class Noted(ModuleType):
    """A module, and what it gives, that notes its calls."""

    def __init__(self, name: str, calls: list[Any], results: dict[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = object()  # type: ignore[assignment]
        self._calls, self._results = calls, results

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            self._calls.append((name, given, more))
            result = self._results.get(name)
            if isinstance(result, Exception):
                raise result
            return result

        return call


def test_calls_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by a number of our own, which may go back."""
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", Noted("wandb", calls, {"init": Noted("run", calls, {})}))
    write("wandb", tmp_path, steps=[STEPS[1], STEPS[0]])
    (init, (), how), (_, (every,), metric), *logged, (finish, *_) = calls
    assert (init, how.pop("dir"), how.pop("config")["lr"]) == ("init", str(tmp_path), 0.003)
    assert how == {"project": "ours", "id": "a1b2", "resume": "allow"}
    assert (every, metric) == ("*", {"step_metric": "step"})
    assert [given[0]["step"] for _, given, _ in logged] == [2, 1]
    assert finish == "finish"


@pytest.mark.parametrize("runs", [[], ["there"]])
def test_calls_of_mlflow(runs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run goes on in the one that has its tag; its server is the one that the user's variable says."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere")
    calls: list[Any] = []
    there = [type("Run", (), {"info": type("Info", (), {"run_id": "77"})()})() for _ in runs]
    monkeypatch.setitem(sys.modules, "mlflow", Noted("mlflow", calls, {"search_runs": there}))
    write("mlflow", tmp_path)
    names = [name for name, *_ in calls]
    assert "set_tracking_uri" not in names
    assert names.count("log_metrics") == 3
    assert ("log_params" in names) == (not runs)
    (begun,) = (given for name, given, _ in calls if name == "start_run")
    assert begun == ("77" if runs else None,)
    assert names[-1] == "end_run"


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.training.loggers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"train.loggers: {name} needs the package {name}; install hexiopt\[{name}\]"):
        check_loggers([name])


def test_one_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Noted("wandb", [], {"init": RuntimeError("no key\nlog in")}))
    with pytest.raises(InputError, match=r"^train.loggers: wandb cannot start \(no key\); mend that or leave it out$"):
        write("wandb", tmp_path)


def test_training_goes_on_without_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = Noted("mlflow", calls, {"search_runs": [], "log_metrics": ConnectionError("gone\nfor good")})
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    assert write("mlflow", tmp_path) == ["mlflow: gone; it logs no more"]
    assert [name for name, *_ in calls].count("log_metrics") == 1
