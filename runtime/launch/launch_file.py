"""The shell script by which each machine of a cluster starts its part of a run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hexiopt.readers.plan_file import PlanFile

_OF_A_MACHINE = ("train.machine=", "train.master=")


def machines_of(plan_file: PlanFile) -> list[str]:
    """The names of the machines that a plan uses, the one with rank 0 first."""
    cluster = plan_file.problem.cluster
    machines = sorted({int(cluster.machine_of[device]) for device in plan_file.plan.devices()})
    return [cluster.machines[machine].name for machine in machines]


def launch_commands(
    plan_file: PlanFile, plan: Path, overrides: Sequence[str], master: str | None, folder: Path
) -> dict[str, list[str]]:
    """The command of each machine of the plan file `plan`, in words, by which it takes its part in a run in `folder`.

    Of the `overrides` of the command that asks for them, those of `train` and the seed are repeated. The machines meet
    at `master`, by default at port 29500 of the machine with rank 0.
    """
    names = machines_of(plan_file)
    kept = [one for one in overrides if one.startswith(("train.", "seed=")) and not one.startswith(_OF_A_MACHINE)]
    first = ["hexiopt", "train", f"plan={plan}", *kept]
    last = [f"train.master={master or f'{names[0]}:29500'}", f"hydra.run.dir={folder}"]
    return {name: [*first, f"train.machine={name}", *last] for name in names}


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
