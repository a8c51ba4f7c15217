"""Kubernetes JobSet: a replicated job for each group of equal machines, torchrun in every pod.

The node rank of a pod is the group's first one plus JOB_COMPLETION_INDEX, as Kubernetes sets it for indexed jobs.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from hexiopt.errors import InputError
from hexiopt.exports.formats import Launch, Launcher, LaunchOptions, Program
from hexiopt.exports.launchers.pods import PodGroup, note_of_gpus, pod_groups
from hexiopt.exports.launchers.products import kubernetes_product
from hexiopt.exports.launchers.torchrun import torchrun_line
from hexiopt.exports.rank_table import RankRow
from hexiopt.problem.cluster import Cluster

TARGET = "Kubernetes 1.28 and later with JobSet v1alpha2"
FILE = "jobset.yaml"
_PRODUCT, _HOST = "nvidia.com/gpu.product", "kubernetes.io/hostname"


def _job(
    group: PodGroup, num_nodes: int, meeting_point: tuple[str, str], program: Program, options: LaunchOptions
) -> dict[str, Any]:
    run = torchrun_line(
        num_nodes, "$((BASE + JOB_COMPLETION_INDEX))", str(group.num_gpus), meeting_point, program.command
    )
    env = {"BASE": str(group.first_node), "HERE": options.folder, **program.environment}
    container = {
        "name": "train",
        "image": options.image,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "command": ["sh", "-c", f"{program.setup}{' && ' * bool(program.setup)}exec {run}"],
        "resources": {"limits": {"nvidia.com/gpu": group.num_gpus}},
    }
    pod = {"restartPolicy": "Never", "nodeSelector": _selector(group, options), "containers": [container]}
    job = {
        "completionMode": "Indexed",
        "parallelism": group.num_nodes,
        "completions": group.num_nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": group.name, "replicas": 1, "template": {"spec": job}}


def _selector(group: PodGroup, options: LaunchOptions) -> dict[str, str]:
    if group.machine is not None:
        return {_HOST: group.machine}
    product = kubernetes_product(group.gpu, options.gpu_names)
    if product is None:
        raise InputError(
            f"export.format: jobset has no label {_PRODUCT} for {group.gpu}; "
            f"state export.gpu_names={{{group.gpu}: NAME}}"
        )
    return {_PRODUCT: product}


class JobSet(Launcher):
    """A JobSet."""

    name = "jobset"
    target = TARGET
    expresses = "every rank table; the device plugin chooses which GPUs of a machine"

    def write(self, cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> Launch:
        groups = pod_groups(cluster, rows)
        num_nodes = sum(group.num_nodes for group in groups)
        meeting_point = options.meeting_point(f"{options.job}-{groups[0].name}-0-0.{options.job}")
        document = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": options.job},
            "spec": {
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [_job(group, num_nodes, meeting_point, program, options) for group in groups],
            },
        }
        header = [
            f"# For {TARGET}. The image must hold the files of this export in {options.folder}, the trainer and torch.",
            *(f"# Note: {note}." for note in program.notes),
        ]
        text = "\n".join(header) + "\n" + yaml.safe_dump(document, sort_keys=False, width=1000)
        return Launch({FILE: text}, f"kubectl apply -f {FILE}", note_of_gpus(cluster, rows))


LAUNCHER = JobSet()
