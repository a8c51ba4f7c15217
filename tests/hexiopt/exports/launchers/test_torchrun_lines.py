"""The torchrun lines start any rank table: run with gloo, and with hexiopt's own trainer."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hexiopt.exports.formats import LaunchOptions, Program
from hexiopt.exports.launchers.torchrun import FILE, LAUNCHER
from hexiopt.exports.rank_table import agents, rank_rows
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster

CLUSTER = Cluster.of({"rtx_3090": 3, "rtx_4090": 5}, inter_gb_per_s=1.25, gpus_per_machine=4, name="lab")
SAYS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1])
dist.all_reduce(total)
shown = [os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])], str(total.item()), *sys.argv[2:]]
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(" ".join(shown))
dist.barrier()
dist.destroy_process_group()
"""


def stages(*groups: Sequence[int]) -> Plan:
    """A chain of stages of one layer each."""
    chain = tuple(Stage.of(tuple(group), s, s + 1) for s, group in enumerate(groups))
    return Plan((Pipeline(chain, 4),))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def machines_of(folder: Path) -> list[str]:
    text = (folder / FILE).read_text()
    return [line.partition(")")[0] for line in text.splitlines() if line.endswith(";;") and not line.startswith("*")]


def start_all(folder: Path, machines: Sequence[str], *more: str, env: dict[str, str] | None = None) -> list[str]:
    """Run launch.sh as every machine of the plan; the output of each."""
    tools = str(Path(sys.executable).parent)
    path = f"{tools}:{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path} | (env or {})
    processes = [
        subprocess.Popen(
            ["sh", str(folder / FILE), machine, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in machines
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "order"),
    [
        (stages((0, 1), (2,), (4, 6, 3)), (0, 1, 2, 3, 4, 6)),  # 3 + 3 of machines of 3, 4 and 1: one unused
        (stages((0,), (5,), (1,), (3,)), (0, 5, 1, 3)),  # ranks come back to a machine
    ],
    ids=["unequal machines", "several agents"],
)
def test_every_rank_runs_where_the_table_says(plan: Plan, order: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = rank_rows(CLUSTER, plan, order)
    (tmp_path / "says.py").write_text(SAYS)
    program = Program(order, '"$HERE/says.py" "$HERE"', environment={"SOME": "a b"})
    options = LaunchOptions(folder=str(tmp_path), master=f"127.0.0.1:{free_port()}")
    launch = LAUNCHER.write(CLUSTER, rows, program, options)
    (tmp_path / FILE).write_text(launch.files[FILE])
    start_all(tmp_path, machines_of(tmp_path), "one more")
    texts = {int(path.name): path.read_text() for path in tmp_path.iterdir() if path.name.isdecimal()}
    assert texts == {row.rank: f"{row.cuda_index} {len(rows)} one more" for row in rows}


def test_agents_are_runs_of_ranks_on_a_machine() -> None:
    rows = rank_rows(CLUSTER, stages((0, 1), (5,), (2,)), (0, 1, 5, 2))
    first, second = rows[0].machine, rows[2].machine
    assert [(agent.machine, agent.first_rank, agent.cuda_indices) for agent in agents(rows)] == [
        (first, 0, (0, 1)),
        (second, 2, (rows[2].cuda_index,)),
        (first, 3, (2,)),
    ]


def test_an_unknown_machine_is_refused(tmp_path: Path) -> None:
    plan = stages((0, 1))
    program = replace(Program((0, 1), "train.py"), setup="true")
    launch = LAUNCHER.write(CLUSTER, rank_rows(CLUSTER, plan, (0, 1)), program, LaunchOptions(folder="/x"))
    (tmp_path / FILE).write_text(launch.files[FILE])
    ran = subprocess.run(["sh", str(tmp_path / FILE), "elsewhere"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "no machine 'elsewhere'; name one of" in ran.stderr


@pytest.mark.parametrize("seed", range(3))
def test_the_script_is_shell(seed: int, tmp_path: Path) -> None:
    order = tuple(random.Random(seed).sample(range(8), 6))
    plan = stages(*((device,) for device in order))
    launch = LAUNCHER.write(CLUSTER, rank_rows(CLUSTER, plan, order), Program(order, "x"), LaunchOptions(folder="/x"))
    path = tmp_path / FILE
    path.write_text(launch.files[FILE])
    assert subprocess.run(["sh", "-n", str(path)], check=False).returncode == 0
