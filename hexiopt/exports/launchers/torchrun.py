"""torchrun lines: `launch.sh MACHINE` starts the ranks of that machine, unequal numbers of GPUs included.

A static rendezvous counts ranks through the agents in the order of their node ranks, each agent with its own number of
processes (`torch/distributed/elastic/agent/server/api.py`); the c10d rendezvous orders agents by address, so it is not
used. One agent starts one run of consecutive ranks, and CUDA_VISIBLE_DEVICES says on which GPUs. Hence any rank table
can be started.
"""

import shlex
from collections.abc import Sequence

from hexiopt.exports.formats import Launch, Launcher, LaunchOptions, Program
from hexiopt.exports.rank_table import RankRow, agents
from hexiopt.problem.cluster import Cluster

TARGET = "torchrun of PyTorch 2.0 and later"
FILE = "launch.sh"


def torchrun_line(num_nodes: int, node_rank: str, processes: str, meeting_point: tuple[str, str], command: str) -> str:
    """torchrun with a static rendezvous, which gives ranks in the order of node ranks."""
    host, port = meeting_point
    return (
        f"torchrun --nnodes={num_nodes} --node-rank={node_rank} --nproc-per-node={processes} "
        f"--master-addr={host} --master-port={port} {command}"
    )


def script(rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> str:
    """The text of `launch.sh`."""
    all_agents = agents(rows)
    host, port = options.meeting_point(all_agents[0].machine)
    line = torchrun_line(len(all_agents), '"$node_rank"', '"$processes"', (shlex.quote(host), port), program.command)
    machines: dict[str, list[str]] = {}
    for rank, agent in enumerate(all_agents):
        call = f'agent {agent.cuda_list} {rank} {agent.num_processes} "$@"'
        machines.setdefault(agent.machine, []).append(call)
    arms = [f"{shlex.quote(machine)}) {'; '.join(calls)} ;;" for machine, calls in machines.items()]
    lines = [
        "#!/bin/sh",
        f"# For {TARGET}. launch.sh MACHINE [ARGUMENTS]: run it on every machine; arguments are added to the command.",
        'HERE=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)',
        "export HERE",
        "unset TORCH_ELASTIC_WORKER_IDENTICAL  # with it, all agents would count as equal",
        *program.exports(),
        *([program.setup] if program.setup else []),
        "pids=",
        "agent() {  # GPUs, node rank, number of processes, arguments",
        "  gpus=$1 node_rank=$2 processes=$3; shift 3",
        f'  CUDA_VISIBLE_DEVICES=$gpus {line} "$@" &',
        '  pids="$pids $!"',
        "}",
        "machine=${1-}",
        '[ "$#" -eq 0 ] || shift',
        "trap 'kill $pids 2>/dev/null' INT TERM",
        'case "$machine" in',
        *arms,
        f"*) echo \"launch.sh: no machine '$machine'; name one of {', '.join(machines)}\" >&2; exit 2 ;;",
        "esac",
        "status=0",
        'for pid in $pids; do wait "$pid" || status=$?; done',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


class TorchRun(Launcher):
    """A shell script that runs torchrun on each machine."""

    name = "torchrun"
    target = TARGET
    expresses = "every rank table; GPUs exactly as planned, unused ones left out"

    def write(self, cluster: Cluster, rows: Sequence[RankRow], program: Program, options: LaunchOptions) -> Launch:
        first = rows[0].machine
        return Launch({FILE: script(rows, program, options)}, f"sh {FILE} {first}    (and so on every machine)")


LAUNCHER = TorchRun()
