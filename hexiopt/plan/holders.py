"""Who holds which parameters together: devices of pipelines whose stages and TP degrees differ.

Every device of a sequence layout holds all that a TP group does. A layer's sharded dimension is cut at the union of all
TP boundaries; each slice has one holder per pipeline and replica, and slices with the same holders share one buffer.
With tied embeddings, first and last stages hold the matrix together. The holders of a parameter are divided into
sharding groups: all of them, those of a machine, or stated ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
from numpy.typing import NDArray

from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterHolders:
    """Groups of devices that hold the same parameters.

    `holders[k]` has shape [groups, devices in a group], devices ascending; `params[k]` shape [groups], and of these
    `last[k]` are those whose gradients the last part of a backward makes (not stated: all).
    """

    holders: tuple[Ints, ...]
    params: tuple[Floats, ...]
    last: tuple[Floats, ...] = ()

    @property
    def count(self) -> int:
        """Groups in all, each one all-reduce."""
        return sum(len(params) for params in self.params)

    @property
    def last_shares(self) -> list[Floats]:
        """`last` as shares of `params`."""
        return [last / params for last, params in zip(self.last or self.params, self.params, strict=True)]


@lru_cache(maxsize=4096)
def slices(degrees: tuple[int, ...]) -> tuple[list[float], Ints]:
    """Widths of the slices between all TP boundaries, and per slice the rank that holds it in each degree."""
    unit = lcm(*degrees)
    cuts = sorted({k * (unit // t) for t in set(degrees) for k in range(t + 1)})
    widths = [(end - start) / unit for start, end in pairwise(cuts)]
    ranks = np.array([[start * t // unit for t in degrees] for start in cuts[:-1]])
    return widths, ranks


# Per pipeline: the end of each range of layers, in order, and the numbers of the copies that hold it.
_Holds = list[list[tuple[int, range]]]


def _copies(pipelines: Sequence[Pipeline]) -> tuple[list[tuple[int, ...]], _Holds]:
    """The devices of every copy of a stage's parameters, and which copies hold which layers."""
    table_rows: list[tuple[int, ...]] = []
    holds = []
    for pipeline in pipelines:
        rows_of = []
        for stage in pipeline.stages:
            start = len(table_rows)
            table_rows += stage.parallelism.parameter_copies
            rows_of.append(range(start, len(table_rows)))
        holds.append(
            [
                (stage.layers[chunk][1], own)
                for chunk in range(pipeline.num_chunks)
                for stage, own in zip(pipeline.stages, rows_of, strict=True)
            ]
        )
    return table_rows, holds


def _layer_copies(holds: _Holds) -> Iterator[tuple[int, list[int]]]:
    """(layers, copies that hold them), of all ranges of layers that no pipeline cuts."""
    cuts = sorted({0} | {end for ranges in holds for end, _ in ranges})
    at = [0] * len(holds)
    for first, end in pairwise(cuts):
        members: list[int] = []
        for k, ranges in enumerate(holds):
            if ranges[at[k]][0] <= first:
                at[k] += 1
            members += ranges[at[k]][1]
        yield end - first, members


def vector_holders(pipelines: Sequence[Pipeline]) -> set[tuple[int, ...]]:
    """Devices that hold norms and biases together, where TP groups cut the matrices between some of them: each set of
    several copies once."""
    table_rows, holds = _copies(pipelines)
    found = set()
    for _, members in _layer_copies(holds):
        devices = [device for m in members for device in table_rows[m]]
        if 1 < len(members) < len(devices):
            found.add(tuple(sorted(devices)))
    return found


def parameter_holders(pipelines: Sequence[Pipeline], model: ModelSpec) -> ParameterHolders:
    """Who holds what together. All pipelines hold the same layers, as those of a plan do."""
    table_rows, holds = _copies(pipelines)
    degree = [len(devices) for devices in table_rows]
    table = np.zeros((len(degree), max(degree)), np.int64)
    for row, devices in enumerate(table_rows):
        table[row, : len(devices)] = devices
    rows: dict[int, dict[bytes, list[float]]] = {}

    def add(members: list[int], params: float, last: float) -> None:
        """Slices of a tensor of `params` parameters that the replicas `members` hold; a backward may end with `last` of
        them."""
        if len(members) == 1 or not params:
            return
        widths, ranks = slices(tuple([degree[m] for m in members]))
        holders = np.sort(table[np.array(members), ranks], axis=1)
        family = rows.setdefault(len(members), {})
        for row, width in zip(holders, widths, strict=True):
            value = family.setdefault(row.tobytes(), [0.0, 0.0])
            value[0] += width * params
            value[1] = max(value[1], width * last)

    layer = float(model.layer_params)
    for num_layers, members in _layer_copies(holds):
        add(members, layer * num_layers, layer)
    heads = [m for ranges in holds for m in ranges[0][1]]
    tails = [m for ranges in holds for m in ranges[-1][1]]
    embedding, shared = float(model.embedding_params), float(model.vocabulary_params)
    if model.tied_embeddings:
        add(sorted({*heads, *tails}), shared, shared)
        embedding -= shared
    add(heads, embedding, embedding)
    add(tails, float(model.head_params), 0.0)  # a backward begins with the head
    for family in rows.values():
        for value in family.values():
            value[1] = value[1] or value[0]
    return ParameterHolders(
        tuple(np.frombuffer(b"".join(family), np.int64).reshape(-1, size) for size, family in rows.items()),
        *(tuple(np.array([value[k] for value in family.values()]) for family in rows.values()) for k in (0, 1)),
    )


def sharding_groups(plan: Plan, cluster: Cluster) -> list[int] | None:
    """Per device of the cluster, the number of its sharding group; None where all holders of a parameter share it.

    From ZeRO-2 on every stage has its own: first and last stage both hold a tied matrix, and each spreads its own.
    """
    stage, groups = plan.sharding.stage, plan.sharding.groups
    if stage == 0 or (stage == 1 and groups == "all"):
        return None
    of = [0] * cluster.num_devices
    if groups == "machine":
        of = cluster.machine_of.tolist()
    elif not isinstance(groups, str):
        for number, devices in enumerate(groups):
            for device in devices:
                of[device] = number
    if stage >= 2:
        count = len(plan.pipelines[0].stages)
        for pipeline in plan.pipelines:
            for s, one in enumerate(pipeline.stages):
                for device in one.devices:
                    of[device] = of[device] * count + s
    return of
