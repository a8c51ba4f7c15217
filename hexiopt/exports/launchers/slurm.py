"""Slurm: a heterogeneous job with a component for each run of like machines, whose one step runs `launch.sh` on every
node; and for one allocation, a hostfile by which `srun --distribution=arbitrary` pins every rank.

Written from Slurm's heterogeneous_jobs and srun pages (24.05). A component cannot mix GPU types. The step is one
`srun --het-group=0,1,...`; sites that set `SchedulerParameters=disable_hetjob_steps` need the other script.
"""

import shlex
from collections.abc import Sequence
from itertools import groupby

from hexiopt.exports.formats import Launch, Launcher, LaunchOptions, Program
from hexiopt.exports.launchers import torchrun
from hexiopt.exports.rank_table import RankRow
from hexiopt.problem.cluster import Cluster

TARGET = "Slurm 20.11 and later"
FILE, ARBITRARY, HOSTS = "job.sbatch", "job_arbitrary.sbatch", "hosts"


def components(cluster: Cluster, rows: Sequence[RankRow]) -> list[tuple[str, int, list[str]]]:
    """Runs of equal machines in the order of ranks: the GPU type, the GPUs to ask for, and the machines."""
    order = dict.fromkeys(row.machine for row in rows)
    gpu_of = {machine.name: machine.gpu.type_name for machine in cluster.machines}
    # As many GPUs as reach the highest index in use, so that the indices in use are among those that a node gives.
    needed = {name: 1 + max(row.cuda_index for row in rows if row.machine == name) for name in order}
    runs = groupby(order, key=lambda name: (gpu_of[name], needed[name]))
    return [(gpu, count, list(names)) for (gpu, count), names in runs]


def _first_line(options: LaunchOptions) -> str:
    limit = "" if options.minutes is None else f" --time={options.minutes}"
    return f"#SBATCH --job-name={options.job}{limit} --output={options.job}-%j.log"


def _batch(cluster: Cluster, rows: Sequence[RankRow], options: LaunchOptions) -> str:
    parts = components(cluster, rows)
    lines = [
        "#!/bin/bash",
        f"# For {TARGET}: a heterogeneous job, one component for each run of like machines.",
        _first_line(options),
    ]
    for number, (gpu, count, machines) in enumerate(parts):
        lines += ["#SBATCH hetjob"] if number else []
        gpus = f"--gpus-per-node={options.gpu_names.get(gpu, gpu)}:{count}"
        where = f"--nodes={len(machines)} --nodelist={','.join(machines)}"
        lines.append(f"#SBATCH {where} --ntasks-per-node=1 {gpus}")
    groups = f"--het-group={','.join(map(str, range(len(parts))))} " if len(parts) > 1 else ""
    lines += [
        "# One task on every node, which starts the ranks of its machine; arguments of this script are handed on.",
        f"HERE={shlex.quote(options.folder)}",
        f'srun {groups}bash -c \'exec sh "$0/{torchrun.FILE}" "$SLURMD_NODENAME" "$@"\' "$HERE" "$@"',
    ]
    return "\n".join(lines) + "\n"


def _arbitrary(cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> str:
    machines = list(dict.fromkeys(row.machine for row in rows))
    host, port = options.meeting_point(machines[0])
    gpus = " ".join(str(row.cuda_index) for row in rows)
    lines = [
        "#!/bin/bash",
        f"# For {TARGET}: one allocation of whole nodes; every rank is pinned to its host by line of {HOSTS}.",
        _first_line(options),
        f"#SBATCH --nodes={len(machines)} --nodelist={','.join(machines)} --exclusive --ntasks={len(rows)}",
        f"export HERE={shlex.quote(options.folder)}",
        f'export SLURM_HOSTFILE="$HERE/{HOSTS}"',
        f"export MASTER_ADDR={shlex.quote(host)} MASTER_PORT={port} WORLD_SIZE={len(rows)}",
        "export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1",
        f'export GPUS="{gpus}"  # of each rank',
        *program.exports(),
        "run() {",
        '  export RANK=$SLURM_PROCID; set -- "$@"; gpus=($GPUS)',
        "  export CUDA_VISIBLE_DEVICES=${gpus[$RANK]}",
        *([f"  {program.setup}"] if program.setup else []),
        f'  exec python {program.command} "$@"',
        "}",
        "export -f run",
        f'srun --distribution=arbitrary --ntasks={len(rows)} bash -c \'run "$@"\' run "$@"',
    ]
    return "\n".join(lines) + "\n"


class Slurm(Launcher):
    """Batch scripts."""

    name = "slurm"
    target = TARGET
    expresses = "every rank table; a component of a heterogeneous job for each run of like machines"

    def write(self, cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> Launch:
        files = {
            torchrun.FILE: torchrun.script(rows, program, options),
            FILE: _batch(cluster, rows, options),
            ARBITRARY: _arbitrary(cluster, rows, program, options),
            HOSTS: "".join(f"{row.machine}\n" for row in rows),
        }
        notes = ("machines must be the names of Slurm's nodes",)
        return Launch(files, f"sbatch {FILE}    (or {ARBITRARY}: one partition with all types)", notes)


LAUNCHER = Slurm()
