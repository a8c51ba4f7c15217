"""Pieces of shell that launchers share."""

import shlex
from collections.abc import Sequence

from hexiopt.exports.formats import Program
from hexiopt.exports.rank_table import Agent

PORT = 29500


def meeting_point(master: str | None, first_machine: str) -> tuple[str, str]:
    """The host and the port where ranks meet."""
    host, _, port = (master or first_machine).partition(":")
    return host, port or str(PORT)


def exports_of(program: Program) -> list[str]:
    """Lines that set a program's environment."""
    return [f"export {name}={shlex.quote(value)}" for name, value in program.environment.items()]


def torchrun_line(num_nodes: int, node_rank: str, processes: str, host: str, port: str, command: str) -> str:
    """torchrun with a static rendezvous, which gives ranks in the order of node ranks."""
    return (
        f"torchrun --nnodes={num_nodes} --node-rank={node_rank} --nproc-per-node={processes} "
        f"--master-addr={host} --master-port={port} {command}"
    )


def cuda_list(agent: Agent) -> str:
    """The GPUs of an agent, as CUDA_VISIBLE_DEVICES has them."""
    return ",".join(map(str, agent.cuda_indices))


def by_machine(all_agents: Sequence[Agent]) -> dict[str, list[tuple[int, Agent]]]:
    """The agents of each machine with their node ranks, machines in the order of ranks."""
    found: dict[str, list[tuple[int, Agent]]] = {}
    for node_rank, agent in enumerate(all_agents):
        found.setdefault(agent.machine, []).append((node_rank, agent))
    return found
