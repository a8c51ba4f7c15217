"""The Slurm scripts: their components, and what stub `srun` and `sbatch` environments make of them."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from hexiopt.exports.formats import LaunchOptions, Program
from hexiopt.exports.launchers.slurm import ARBITRARY, FILE, HOSTS, LAUNCHER, components
from hexiopt.exports.rank_table import rank_rows
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.reading import Section

MIXED: Cluster = cluster_from_section(
    Section(
        {
            "name": "mixed",
            "inter_machine": {"bandwidth_gb_per_s": 12.5},
            "machines": [
                {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
                {"name": "d", "gpu": "a800_80gb_sxm", "num_gpus": 8, "intra_bandwidth_gb_per_s": 200, "count": 2},
            ],
        },
        "test",
    )
)
PLAN = Plan(
    (
        Pipeline(
            (
                Stage.of((0, 1, 2, 3), 0, 4),
                Stage.of(tuple(range(4, 12)), 4, 20),
                Stage.of(tuple(range(12, 20)), 20, 32),
            ),
            4,
        ),
    )
)
ORDER = tuple(range(20))
ROWS = rank_rows(MIXED, PLAN, ORDER)

# Runs every task of a step: those of a component on each of its nodes, or one for each line of the hostfile.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
rank=0
if [[ -n $SLURM_HOSTFILE ]]; then hosts=$(cat "$SLURM_HOSTFILE"); else hosts=$NODES; fi
for host in $hosts; do SLURM_PROCID=$rank SLURMD_NODENAME=$host "$@" || exit $?; rank=$((rank + 1)); done
"""
TOOL = """#!/bin/bash
echo "$(basename "$0") $CUDA_VISIBLE_DEVICES rank=$RANK local=$LOCAL_RANK $*" >> "$LOG"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = Program(ORDER, "train.py --x", setup='test -d "$HERE"', environment={"A": "b c"})
    options = LaunchOptions(folder=str(tmp_path), gpu_names={"rtx_3090": "gtx"})
    launch = LAUNCHER.write(MIXED, ROWS, program, options)
    for name, text in launch.files.items():
        (tmp_path / name).write_text(text)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("torchrun", TOOL), ("python", TOOL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755 | stat.S_IXUSR)
    return tmp_path


def run_script(folder: Path, script: str, nodes: str = "") -> list[str]:
    """The lines that the stubs wrote while a batch script ran."""
    log = folder / "log"
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(log), "NODES": nodes}
    subprocess.run(["bash", str(folder / script), "more=1"], env=env, check=True, timeout=60)
    return log.read_text().splitlines()


def test_a_component_for_each_run_of_like_machines(folder: Path) -> None:
    text = (folder / FILE).read_text()
    blocks = text.split("#SBATCH hetjob")
    asked = [dict(re.findall(r"--([\w-]+)=(\S+)", block)) for block in blocks]
    assert [(options["nodes"], options["nodelist"], options["gpus-per-node"]) for options in asked] == [
        ("1", "a", "gtx:4"),
        ("2", "d-0,d-1", "a800_80gb_sxm:8"),
    ]
    assert sum(int(options["nodes"]) for options in asked) == len({row.machine for row in ROWS})
    assert components(MIXED, ROWS)[1] == ("a800_80gb_sxm", 8, ["d-0", "d-1"])


def test_every_node_starts_its_ranks(folder: Path) -> None:
    step, *lines = run_script(folder, FILE, "d-1 a d-0")
    assert step.startswith("srun --het-group=0,1 ")
    launches = sorted(
        re.match(r"torchrun (\S+) .*--node-rank=(\d) --nproc-per-node=(\d) .* (\S+)$", x).groups() for x in lines
    )  # type: ignore[union-attr]
    assert launches == [
        ("0,1,2,3", "0", "4", "more=1"),
        ("0,1,2,3,4,5,6,7", "1", "8", "more=1"),
        ("0,1,2,3,4,5,6,7", "2", "8", "more=1"),
    ]


def test_a_hostfile_pins_every_rank(folder: Path) -> None:
    assert (folder / HOSTS).read_text().split() == [row.machine for row in ROWS]
    step, *lines = run_script(folder, ARBITRARY)
    assert step.startswith("srun --distribution=arbitrary --ntasks=20 ")
    assert lines == [f"python {row.cuda_index} rank={row.rank} local=0 train.py --x more=1" for row in ROWS]


def test_like_machines_are_one_plain_job() -> None:
    rows = rank_rows(MIXED, Plan((Pipeline((Stage.of((4, 5), 0, 16), Stage.of((12, 13), 16, 32)), 4),)), (4, 5, 12, 13))
    text = LAUNCHER.write(MIXED, rows, Program((4, 5, 12, 13), "x"), LaunchOptions(folder="/x")).files[FILE]
    assert "hetjob" not in text
    assert "--het-group" not in text
    assert "--gpus-per-node=a800_80gb_sxm:2" in text
