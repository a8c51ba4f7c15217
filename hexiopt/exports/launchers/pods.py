"""Groups of equal nodes, as Kubernetes JobSets and SkyPilot job groups ask for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hexiopt.exports.rank_table import Agent, RankRow, agents
from hexiopt.problem.cluster import Cluster

_MOST_LETTERS = 20  # of a group's name; the names of pods have indices and a suffix, 63 in all


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Agents of consecutive node ranks from `first_node` on that ask for equally many GPUs of one type.

    `machine` is set if the agents must run on that machine, because it runs several of them.
    """

    name: str
    gpu: str
    num_gpus: int
    first_node: int
    num_nodes: int
    machine: str | None


def pod_groups(cluster: Cluster, rows: Sequence[RankRow]) -> list[PodGroup]:
    """The groups of all agents, in the order of ranks."""
    all_agents = agents(rows)
    spec_of = {machine.name: machine for machine in cluster.machines}
    several = {agent.machine for agent in all_agents if sum(a.machine == agent.machine for a in all_agents) > 1}

    def kind(item: tuple[int, Agent]) -> tuple[str, int, str | None, str]:
        agent = item[1]
        machine = spec_of[agent.machine]
        pinned = agent.machine if agent.machine in several else None
        return machine.gpu.type_name, agent.num_processes, pinned, machine.spec_name

    groups: list[PodGroup] = []
    names: dict[str, int] = {}
    for (gpu, num_gpus, pinned, spec), run in groupby(enumerate(all_agents), key=kind):
        members = list(run)
        name = _name(spec)
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name}-x{names[name]}"
        groups.append(PodGroup(unique, gpu, num_gpus, members[0][0], len(members), pinned))
    return groups


def _name(spec: str) -> str:
    """A DNS label of a machine's name (RFC 1035)."""
    text = re.sub(r"[^a-z0-9-]+", "-", spec.lower()).strip("-")[:_MOST_LETTERS].strip("-")
    return text if text[:1].isalpha() else f"m-{text}".strip("-")


def note_of_gpus(cluster: Cluster, rows: Sequence[RankRow]) -> tuple[str, ...]:
    """Notes on machines whose GPUs the scheduler chooses, although their links differ."""
    linked = [m.name for m in cluster.machines if m.intra_links and any(row.machine == m.name for row in rows)]
    notes = [f"the scheduler chooses which GPUs of {name} a pod gets, and their links differ" for name in linked]
    return tuple(notes)
