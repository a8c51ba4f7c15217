"""Parts of a cluster that a planner may be told to stay in: zones, machines of a kind, one machine."""

from itertools import combinations

from hexiopt.problem.problem import Problem
from solvers.baselines.grid import machine_classes

_RATES, _MOST = 8, 16  # rates of links that areas are formed by, the slowest; areas

Area = frozenset[int]  # machines


def linked_areas(problem: Problem) -> list[Area]:
    """All machines, and where links differ, those that links of at least some rate join; the larger areas first."""
    machines = list(problem.usable_by_machine)
    found = {frozenset(machines)}
    if problem.cluster.groups or problem.cluster.links:
        bandwidth = problem.cluster.network.bandwidth
        rates = sorted({float(bandwidth[a, b]) for a, b in combinations(machines, 2)})
        for rate in rates[:_RATES]:
            left = set(machines)
            while left:
                area, edge = set[int](), {min(left)}
                while edge:
                    area |= edge
                    edge = {b for b in left - area if any(min(bandwidth[a, b], bandwidth[b, a]) >= rate for a in edge)}
                left -= area
                found.add(frozenset(area))
    return sorted(found, key=lambda area: (-len(area), sorted(area)))[:_MOST]


def areas(problem: Problem) -> list[Area]:
    """Linked areas, each class of machines, and one machine of each class; the smaller areas first."""
    found = set(linked_areas(problem))
    for members in machine_classes(problem):
        found |= {frozenset(members), frozenset(members[:1])}
    return sorted(found, key=lambda area: (len(area), sorted(area)))
