"""JobSets and SkyPilot job groups: who gets which node rank, names, pins and refusals."""

import random
from typing import Any

import pytest
import yaml

from hexiopt.errors import InputError
from hexiopt.exports.formats import LaunchOptions, Program
from hexiopt.exports.launchers import jobset, skypilot
from hexiopt.exports.launchers.pods import pod_groups
from hexiopt.exports.rank_table import agents, rank_rows
from hexiopt.plan.plan import Pipeline, Plan, Stage
from tests.hexiopt.exports.launchers.test_slurm import MIXED, ORDER, ROWS

PROGRAM = Program(ORDER, "train.py", setup='. "$HERE/x.sh"', environment={"A": "1"}, notes=("something",))
OPTIONS = LaunchOptions(folder="/plan", image="example/train:1")


def jobs(text: str) -> list[dict[str, Any]]:
    job_list: list[dict[str, Any]] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    return job_list


def test_each_group_of_machines_is_a_replicated_job() -> None:
    text = jobset.LAUNCHER.write(MIXED, ROWS, PROGRAM, OPTIONS).files[jobset.FILE]
    first, second = jobs(text)
    assert (first["name"], second["name"]) == ("a", "d")
    job = second["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A800-SXM4-80GB"}
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "BASE", "value": "1"} in container["env"]
    command = container["command"][-1]
    assert "--nnodes=3 --node-rank=$((BASE + JOB_COMPLETION_INDEX)) --nproc-per-node=8" in command
    assert "--master-addr=plan-a-0-0.plan " in command
    assert text.startswith("# For Kubernetes")
    assert "# Note: something." in text


@pytest.mark.parametrize("gpus", [{}, {"a800_80gb_sxm": "A800"}])
def test_a_type_without_a_name_is_asked_for(gpus: dict[str, str]) -> None:
    options = LaunchOptions(folder="/plan", gpu_names=gpus)
    if not gpus:
        with pytest.raises(InputError, match=r"export\.gpu_names="):
            skypilot.LAUNCHER.write(MIXED, ROWS, PROGRAM, options)
        return
    header, *tasks = yaml.safe_load_all(skypilot.LAUNCHER.write(MIXED, ROWS, PROGRAM, options).files[skypilot.FILE])
    assert header == {"name": "plan", "execution": "parallel", "inter_connection": True}
    assert [task["resources"]["accelerators"] for task in tasks] == ["RTX3090:4", "A800:8"]
    assert "--node-rank=$((1 + SKYPILOT_NODE_RANK))" in tasks[1]["run"]


def test_agents_on_one_machine_are_pinned_to_it() -> None:
    order = (0, 4, 1, 5)
    plan = Plan((Pipeline(tuple(Stage.of((d,), 8 * s, 8 * s + 8) for s, d in enumerate(order)), 4),))
    rows = rank_rows(MIXED, plan, order)
    text = jobset.LAUNCHER.write(MIXED, rows, PROGRAM, OPTIONS).files[jobset.FILE]
    pins = [job["template"]["spec"]["template"]["spec"]["nodeSelector"] for job in jobs(text)]
    assert pins == [{"kubernetes.io/hostname": name} for name in ("a", "d-0", "a", "d-0")]
    names = [job["name"] for job in jobs(text)]
    assert len(set(names)) == 4
    with pytest.raises(InputError, match="several agents on machine a"):
        skypilot.LAUNCHER.write(MIXED, rows, PROGRAM, OPTIONS)


def test_groups_cover_all_agents_once() -> None:
    rng = random.Random(3)
    for _ in range(50):
        order = tuple(rng.sample(range(20), rng.randint(1, 20)))
        stages = tuple(Stage.of((d,), s, s + 1) for s, d in enumerate(order))
        rows = rank_rows(MIXED, Plan((Pipeline(stages, 4),)), order)
        groups, all_agents = pod_groups(MIXED, rows), agents(rows)
        nodes = [group.first_node + k for group in groups for k in range(group.num_nodes)]
        assert nodes == list(range(len(all_agents)))
        sizes = [group.num_gpus for group in groups for _ in range(group.num_nodes)]
        assert sizes == [agent.num_processes for agent in all_agents]
