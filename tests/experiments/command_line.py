"""Commands of tests, in this process and in others, and what a refusal looks like."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import open_dict

from experiments.app import solver_config
from experiments.app.common import Job
from experiments.app.config import READS, register
from experiments.app.config_errors import config_of
from tests.conftest import ROOT, Ran, Run

SEARCHED = ("cluster=small_mixed", "model=tiny", "solver=random")
STEPS = (*SEARCHED, "solver.max_steps=40")
TINY = (*STEPS, "bound.time_limit_s=0.1")
QUICK = (*TINY, "report=false", "hydra.run.dir=out")

V100 = "{name: v, gpu: v100_16gb_sxm, num_gpus: 2, intra_bandwidth_gb_per_s: 100}"
RTX = "{name: a, gpu: rtx_3090, num_gpus: 2, intra_bandwidth_gb_per_s: 12}"


def in_process(*args: str, env: dict[str, str] | None = None, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.app.cli", *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Ctrl-C when the first plan is found, also where this runs in the background, where shells let Ctrl-C be ignored.
_PRESSES_CTRL_C = """
import os, signal, sys
from experiments.app.cli import main
from solvers.core.search import Search
signal.signal(signal.SIGINT, signal.default_int_handler)
offer = Search.offer
def pressing(self, *args):
    Search.offer = offer
    cost = offer(self, *args)
    os.kill(os.getpid(), signal.SIGINT)
    return cost
Search.offer = pressing
sys.exit(main(sys.argv[1:]))
"""


def interrupt_search(*args: str, cwd: Path) -> Ran:
    """A search in a process of its own that gets Ctrl-C long before its time limit."""
    command = [sys.executable, "-c", _PRESSES_CTRL_C, *args, *SEARCHED, "solver.time_limit_s=36000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


_FOUND: list[str] = []  # the plan file of `QUICK`, which is searched once


def planned(hexiopt: Run, tmp_path: Path, *overrides: str) -> Path:
    path = tmp_path / "out" / "plan.json"
    if _FOUND and not overrides:
        path.parent.mkdir()
        path.write_text(_FOUND[0])
        return path
    ran = hexiopt("plan", *QUICK, *overrides)
    assert ran.code == 0, ran.err
    if not overrides:
        _FOUND.append(path.read_text())
    return path


def edit(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data)
    del data["problem_sha256"]
    path.write_text(json.dumps(data))
    return path


def job_of(verb: str, overrides: Sequence[str], folder: Path = Path()) -> Job:
    """A job as the command line makes it, without running it."""
    register(verb)
    if "solver" in READS[verb]:
        solver_config.register()
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(verb, list(overrides), return_hydra_config=True)
        choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return Job(config_of(cfg, verb), folder, choices, overrides, in_sweep=True)


def refusal(ran: Ran) -> str:
    """The one line of a refusal."""
    assert ran.code == 2, (ran.out, ran.err)
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("hexiopt: ")
    assert "Traceback" not in ran.out + ran.err
    assert len(ran.err) < 1200
    return ran.err
