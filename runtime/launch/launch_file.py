"""The shell script by which each machine of a cluster starts its part of a run."""

import shlex
from collections.abc import Mapping, Sequence

from hexiopt.readers.plan_file import PlanFile


def machines_of(plan_file: PlanFile) -> list[str]:
    """The names of the machines that a plan uses, the one with rank 0 first."""
    cluster = plan_file.problem.cluster
    machines = sorted({int(cluster.machine_of[device]) for device in plan_file.plan.devices()})
    return [cluster.machines[machine].name for machine in machines]


def launch_script(command_of: Mapping[str, Sequence[str]]) -> str:
    """`launch.sh MACHINE`, which runs the command of the machine named."""
    cases = [f"{shlex.quote(name)}) exec {shlex.join(words)} ;;" for name, words in command_of.items()]
    lines = [
        "#!/bin/sh",
        "# launch.sh MACHINE: what each machine of the plan runs; the folder is shared.",
        'case "$1" in',
        *cases,
        f"*) echo \"launch.sh: no machine '$1'; name one of {', '.join(command_of)}\" >&2; exit 2 ;;",
        "esac",
    ]
    return "\n".join(lines) + "\n"
