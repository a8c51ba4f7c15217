"""SkyPilot: a task, or for several kinds of machines a job group of tasks that run at once and see each other.

Hosts of a group resolve as TASK-NODE.GROUP; connected groups need Kubernetes (`sky/optimizer.py`).
"""

from collections.abc import Sequence
from typing import Any

import yaml

from hexiopt.errors import InputError
from hexiopt.exports.formats import Launch, Launcher, LaunchOptions, Program
from hexiopt.exports.launchers.pods import PodGroup, note_of_gpus, pod_groups
from hexiopt.exports.launchers.products import skypilot_accelerator
from hexiopt.exports.launchers.torchrun import torchrun_line
from hexiopt.exports.rank_table import RankRow
from hexiopt.problem.cluster import Cluster

TARGET = "SkyPilot 0.14"
FILE = "skypilot.yaml"


def _task(
    group: PodGroup, name: str, num_nodes: int, meeting_point: tuple[str, str], program: Program, options: LaunchOptions
) -> dict[str, Any]:
    accelerator = skypilot_accelerator(group.gpu, options.gpu_names)
    if accelerator is None:
        raise InputError(
            f"export.format: skypilot has no name for {group.gpu}; state export.gpu_names={{{group.gpu}: NAME}}"
        )
    node_rank = f"$(({group.first_node} + SKYPILOT_NODE_RANK))"
    run = torchrun_line(num_nodes, node_rank, str(group.num_gpus), meeting_point, program.command)
    return {
        "name": name,
        "num_nodes": group.num_nodes,
        "resources": {"accelerators": f"{accelerator}:{group.num_gpus}"},
        "envs": {"HERE": options.folder, **program.environment},
        "run": f"{program.setup}\n{run}\n".lstrip("\n"),
    }


class SkyPilot(Launcher):
    """Tasks."""

    name = "skypilot"
    target = TARGET
    expresses = "plans whose machines each hold consecutive ranks; SkyPilot chooses machines and GPUs"

    def write(self, cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> Launch:
        groups = pod_groups(cluster, rows)
        pinned = next((group for group in groups if group.machine is not None), None)
        if pinned is not None:
            raise InputError(
                f"export.format: skypilot cannot put several agents on machine {pinned.machine}, which the trainer's "
                "order of ranks asks for; take export.format=torchrun, slurm or jobset, or export.trainer=hexiopt"
            )
        single = len(groups) == 1
        first = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)' if single else f"{groups[0].name}-0.{options.job}"
        meeting_point = options.meeting_point(first)
        num_nodes = sum(group.num_nodes for group in groups)
        tasks = [
            _task(group, options.job if single else group.name, num_nodes, meeting_point, program, options)
            for group in groups
        ]
        header = {"name": options.job, "execution": "parallel", "inter_connection": True}
        documents = tasks if single else [header, *tasks]
        notes = (
            f"# For {TARGET}. Every node must hold the files of this export in {options.folder}.",
            *(f"# Note: {note}." for note in program.notes),
        )
        text = "\n".join(notes) + "\n" + yaml.safe_dump_all(documents, sort_keys=False, width=1000)
        return Launch({FILE: text}, f"sky jobs launch {FILE}", note_of_gpus(cluster, rows))


LAUNCHER = SkyPilot()
