"""Processes that die or hang: training goes on from the last checkpoint, to the same end."""

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch.head import AfterFaults, NoPlanLeftError, training_events
from runtime.launch.meeting import TrainingFailedError
from runtime.settings import AdamW, Settings
from runtime.state.checkpoint import Checkpoint, finished_checkpoints
from runtime.training.settings import TrainingRun
from tests.conftest import STRESS
from tests.solvers import problems

BATCH, SEQ_LEN, STEPS = 4, 16, 9


def problem() -> Problem:
    """Eight devices in three machines; a Llama of four layers."""
    easy = problems.easy()
    model = replace(
        easy.model, num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=24, vocab_size=256
    )
    workload = Workload(BATCH, SEQ_LEN, precision="fp32", optimizer_sharding="1")
    return replace(easy, model=model, workload=workload)


def wide() -> Plan:
    """Four processes: a pipeline of two stages, one of them on two devices, beside a process with all layers."""
    long = Pipeline((Stage.of((0, 1), 0, 3), Stage.of((2,), 3, 4)), 3)
    return Plan((long, Pipeline((Stage.of((3,), 0, 4),), 1)), ONE_F_ONE_B, Sharding(1))


def narrow() -> Plan:
    """Two processes."""
    return Plan((Pipeline((Stage.of((2,), 0, 2), Stage.of((3,), 2, 4)), 4),), ONE_F_ONE_B, Sharding(1))


def save_plan(folder: Path, name: str, plan: Plan) -> Path:
    task = problem()
    write_plan(folder / name, task, plan, PlanPricer(task).price(plan), {})
    return folder / name


def a_run(folder: Path, **more: Any) -> TrainingRun:
    tokens = folder / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8))
    settings = Settings(steps=STEPS, adam=AdamW(lr=1e-2), checkpoint_every=2, timeout_s=20.0)
    plan = save_plan(folder, "plan.json", wide())
    return TrainingRun("own", plan, tokens, folder / "checkpoints", replace(settings, **more), float64=True)


def train(
    folder: Path,
    kills: Sequence[tuple[str, int, int, signal.Signals]],
    on_failure: str = "restart",
    *,
    has_plan: bool = True,
    **more: Any,
) -> dict[int, float]:
    """Losses by step. `kills`: after the first event of a kind with at least this step, a signal to a rank. `has_plan`:
    whether there is a plan without a lost device."""
    losses: dict[int, float] = {}
    pids: dict[int, int] = {}
    left = list(kills)

    def replan(lost: Sequence[str], before: Path, checkpoint: Path | None) -> Path:
        assert len(lost) == 1
        if not has_plan:
            raise NoPlanLeftError("two stages need two devices")
        return save_plan(folder, "replanned.json", narrow())

    for event in training_events(a_run(folder, **more), folder, AfterFaults(on_failure, replan, 3)):
        if event["event"] == "ready":
            pids[event["rank"]] = event["pid"]
        elif event["event"] == "step":
            losses[event["step"]] = event["loss"]
        elif event["event"] == "restart":
            pids.clear()
        if left and event["event"] == left[0][0] and event.get("step", 0) >= left[0][1] and left[0][2] in pids:
            os.kill(pids[left[0][2]], left[0][3])
            left.pop(0)
    assert not left
    return losses


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = train(folder, [])
    assert sorted(losses) == list(range(1, STEPS + 1))
    last = finished_checkpoints(folder / "checkpoints")[-1]
    Checkpoint(last).check()
    assert last.name == f"step-{STEPS:08d}"
    return losses


@pytest.mark.slow
def test_killed_processes_do_not_change_the_end(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    """At the first step, while a checkpoint is being written or just was, and later; three different ranks."""
    kills = [("step", 1, 2, signal.SIGKILL), ("step", 4, 0, signal.SIGKILL), ("checkpoint", 6, 3, signal.SIGKILL)]
    losses = train(tmp_path, kills)
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)


@pytest.mark.skipif(not STRESS, reason="make stress")
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_do_not_change_the_end(undisturbed_losses: dict[int, float], tmp_path: Path, seed: int) -> None:
    """Any rank, after any event; every other time without the lost device from then on."""
    rng = random.Random(seed)
    kind, step = rng.choice((("ready", 0), ("step", rng.randrange(1, STEPS)), ("checkpoint", rng.randrange(2, 8, 2))))
    kill = (kind, step, rng.randrange(4), signal.SIGKILL)
    losses = train(tmp_path, [kill], ("restart", "replan")[seed % 2])
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)


@pytest.mark.slow
def test_training_goes_on_without_a_lost_device(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    losses = train(tmp_path, [("step", 5, 1, signal.SIGKILL)], "replan")
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)


@pytest.mark.slow
def test_training_goes_on_as_after_a_restart_where_there_is_no_plan(
    undisturbed_losses: dict[int, float], tmp_path: Path
) -> None:
    losses = train(tmp_path, [("step", 5, 1, signal.SIGKILL)], "replan", has_plan=False)
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)


@pytest.mark.slow
def test_training_goes_on_without_a_stopped_process(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    losses = train(tmp_path, [("step", 3, 1, signal.SIGSTOP)], silence_s=4.0)
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "ended with exit code -9"),
        pytest.param(signal.SIGSTOP, r"has given no sign of life for \d+ s", marks=pytest.mark.slow),
    ],
)
def test_stop_says_who_was_lost(tmp_path: Path, sent: signal.Signals, message: str) -> None:
    with pytest.raises(TrainingFailedError, match=rf"rank 2 \(.*:\d\) {message}"):
        train(tmp_path, [("step", 2, 2, sent)], "stop", silence_s=4.0)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_with_step_and_rank(tmp_path: Path) -> None:
    """Norms keep the loss finite for long: gradients of too large weights are no numbers first."""
    with pytest.raises(TrainingFailedError, match=r"step 2: the norm of the gradients is (nan|inf) on rank \d \("):
        train(tmp_path, [], adam=AdamW(lr=1e200, max_norm=None))
