"""Who holds which parameters: devices of pipelines whose stages and TP degrees differ. Memory, gradient rings,
changes of plans and checkpoints all ask here.

Every device of a sequence layout holds all that a TP group does. A layer's sharded dimension is cut at the union of all
TP boundaries; each slice has one holder per pipeline and replica, and slices with the same holders share one buffer.
With tied embeddings, first and last stages hold the matrix together. The holders of a parameter are divided into
sharding groups: all of them, those of a machine, or stated ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.plan.parallelism import ExpertParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.operators import ParameterGroup

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterHolders:
    """Groups of devices that hold the same parameters.

    `holders[k]` has shape [groups, devices in a group], devices ascending; `params[k]` shape [groups], and of these
    `last[k]` are those whose gradients the last part of a backward makes (not stated: all), `layer[k]` those of a
    layer, and `embedding[k]` those that a forward needs before its first layer.
    """

    holders: tuple[Ints, ...]
    params: tuple[Floats, ...]
    last: tuple[Floats, ...] = ()
    layer: tuple[Floats, ...] = ()
    embedding: tuple[Floats, ...] = ()

    @property
    def count(self) -> int:
        """The number of groups; each takes one all-reduce."""
        return sum(len(params) for params in self.params)

    @property
    def last_shares(self) -> list[Floats]:
        """`last` as shares of `params`."""
        return [last / params for last, params in zip(self.last or self.params, self.params, strict=True)]


Cut = int | tuple[int, ...]
"""How devices divide what a copy holds: in so many equal parts, or in parts of so many experts each."""


@lru_cache(maxsize=4096)
def slices(cuts: tuple[Cut, ...]) -> tuple[list[float], Ints]:
    """Widths of the slices between all boundaries of `cuts` [slices], as shares of the divided dimension, and the rank
    that holds each slice under each cut [slices, cuts]."""
    unit = lcm(*[cut if isinstance(cut, int) else sum(cut) for cut in cuts])
    ends_of = {cut: _ends(cut, unit) for cut in set(cuts)}
    ends = sorted({0}.union(*ends_of.values()))
    widths = [(end - start) / unit for start, end in pairwise(ends)]
    return widths, np.stack([np.searchsorted(ends_of[cut], ends[:-1], side="right") for cut in cuts], axis=1)


def _ends(cut: Cut, unit: int) -> list[int]:
    """Where the part of each rank ends, of `unit` in all."""
    if isinstance(cut, int):
        return [k * (unit // cut) for k in range(1, cut + 1)]
    return [end * (unit // sum(cut)) for end in accumulate(cut)]


_ONE = range(1)


class GroupCopies(NamedTuple):
    """A group of parameters and the copies that hold it, of all `units`: layers, or one unit that is no layer."""

    group: ParameterGroup
    units: Sequence[int]
    copies: Sequence[int]


class Holdings(NamedTuple):
    """Who holds what of pipelines that all hold the same layers, as those of a plan do.

    `copies`: the devices of every copy of a stage's parameters, in the order of the plan; a copy's number is its place
    here. `cells`: the devices of every copy of experts that several of `copies` share, numbered after these, and their
    `expert_cuts`; `cell_of` has the numbers of their cells. `stages` [pipelines][stages]: the copies of each stage.
    `layers`: ranges of layers that no pipeline cuts, and the copies that hold each, without those of experts alone.
    """

    copies: Sequence[tuple[int, ...]]
    cells: Sequence[tuple[int, ...]]
    expert_cuts: Sequence[Cut]
    cell_of: Mapping[int, int]
    stages: Sequence[Sequence[range]]
    layers: Sequence[tuple[range, Sequence[int]]]

    @classmethod
    def of(cls, pipelines: Sequence[Pipeline]) -> "Holdings":
        """Who holds what of `pipelines`."""
        copies: list[tuple[int, ...]] = []
        sharing: list[tuple[tuple[int, ...], Cut, range]] = []  # devices that share experts; the copies that they hold
        stages, ranges = [], []  # of each pipeline; its ranges of layers in order: the end, and the copies that hold it
        for pipeline in pipelines:
            numbers, whole = [], list[Sequence[int]]()
            for stage in pipeline.stages:
                start, group = len(copies), stage.parallelism
                copies += group.parameter_copies
                numbers.append(range(start, len(copies)))
                whole.append(numbers[-1])
                if isinstance(group, TensorParallel) and group.num_replicas > 1:
                    sharing.append((group.devices, len(group.devices), numbers[-1]))
                elif isinstance(group, ExpertParallel):
                    sharing.append((group.devices, group.experts, numbers[-1]))
                    whole[-1] = [start + k for k, samples in enumerate(group.samples_of_copies) if samples]
            stages.append(numbers)
            ranges.append(
                [
                    (stage.layers[chunk][1], same)
                    for chunk in range(pipeline.num_chunks)
                    for stage, same in zip(pipeline.stages, whole, strict=True)
                ]
            )
        layers, at = [], [0] * len(ranges)
        for first, end in pairwise(sorted({0} | {end for pipeline_ranges in ranges for end, _ in pipeline_ranges})):
            members: list[int] = []
            for k, pipeline_ranges in enumerate(ranges):
                if pipeline_ranges[at[k]][0] <= first:
                    at[k] += 1
                members += pipeline_ranges[at[k]][1]
            layers.append((range(first, end), members))
        cell_of = {copy: len(copies) + cell for cell, (_, _, members) in enumerate(sharing) for copy in members}
        cells, expert_cuts = [devices for devices, _, _ in sharing], [cut for _, cut, _ in sharing]
        return cls(copies, cells, expert_cuts, cell_of, stages, layers)

    @property
    def devices(self) -> Sequence[tuple[int, ...]]:
        """The devices of every copy, cells included, by number."""
        return (*self.copies, *self.cells)

    @property
    def cuts(self) -> Sequence[Cut]:
        """How the devices of every copy divide it, cells included, by number."""
        return (*map(len, self.copies), *self.expert_cuts)

    def groups(self, groups: Iterable[ParameterGroup]) -> Iterator[GroupCopies]:
        """Who holds each of `groups`, those without parameters left out."""
        for group in groups:
            if group.holder == "layer":
                of_kind = None if group.layers is None else set(group.layers)
                for units, members in self.layers:
                    same = units if of_kind is None else [n for n in units if n in of_kind]
                    if same:
                        yield GroupCopies(group, same, self._sharing(members) if group.experts else members)
            elif group.params:
                ends = {"first": (0,), "last": (-1,), "ends": (0, -1)}[group.holder]
                yield GroupCopies(group, _ONE, sorted({m for end in ends for m in self.layers[end][1]}))

    def _sharing(self, members: Sequence[int]) -> Sequence[int]:
        """The numbers of the cells of `members`, and of those that share no experts."""
        return list(dict.fromkeys(self.cell_of.get(m, m) for m in members)) if self.cell_of else members

    def shared_groups(self, groups: Iterable[ParameterGroup]) -> list[GroupCopies]:
        """Those of trained `groups` that several copies hold; these copies sum the gradients."""
        return [group for group in self.groups(groups) if len(group.copies) > 1]


Interval = tuple[int, float, float]  # device; the part of a parameter that it holds, [start, end) within [0, 1)


def intervals(devices: Sequence[int]) -> list[Interval]:
    """What the devices of a copy hold of each parameter: rank r of a TP group of t has [r/t, (r+1)/t)."""
    return [(device, rank / len(devices), (rank + 1) / len(devices)) for rank, device in enumerate(devices)]


def vector_holders(pipelines: Sequence[Pipeline]) -> set[tuple[int, ...]]:
    """Devices that hold norms and biases together, where TP groups cut the matrices between some of them: each set of
    several copies once."""
    held = Holdings.of(pipelines)
    several = [[held.copies[m] for m in members] for _, members in held.layers if len(members) > 1]
    holders = [(len(copies), tuple(sorted(chain.from_iterable(copies)))) for copies in several]
    return {devices for count, devices in holders if count < len(devices)}


def parameter_holders(held: Holdings, trained: Iterable[ParameterGroup]) -> ParameterHolders:
    """Who sums the gradients of which of the `trained` groups together."""
    groups = held.shared_groups(trained)
    if not groups:
        return ParameterHolders((), ())
    cuts = held.cuts
    table = np.zeros((len(cuts), max(map(len, held.devices))), np.int64)
    for row, devices in enumerate(held.devices):
        table[row, : len(devices)] = devices
    rows: dict[int, dict[bytes, list[float]]] = {}
    for group, units, members in groups:
        params = float(group.params)
        last = 0.0 if group.holder == "last" else params  # a backward begins with the head
        widths, ranks = slices(tuple([cuts[m] for m in members]))
        holders = np.sort(table[np.array(members), ranks], axis=1)
        family = rows.setdefault(len(members), {})
        for row, width in zip(holders, widths, strict=True):
            value = family.setdefault(row.tobytes(), [0.0, 0.0, 0.0, 0.0])
            value[0] += width * (params * len(units))
            value[1] = max(value[1], width * last)
            if group.holder == "layer":
                value[2] = max(value[2], width * params)
            elif group.holder != "last":
                value[3] += width * params
    for family in rows.values():
        for value in family.values():
            value[1] = value[1] or value[0]
    return ParameterHolders(
        tuple(np.frombuffer(b"".join(family), np.int64).reshape(-1, size) for size, family in rows.items()),
        *(tuple(np.array([value[k] for value in family.values()]) for family in rows.values()) for k in range(4)),
    )


def sharding_groups(plan: Plan, cluster: Cluster) -> list[int] | None:
    """Per device of the cluster, the number of its sharding group; None where all holders of a parameter share it.

    From ZeRO-2 on every stage has groups of its own: where embeddings are tied, the first and the last stage both hold
    the matrix, and each shards its copy.
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
            for s, pipeline_stage in enumerate(pipeline.stages):
                for device in pipeline_stage.devices:
                    of[device] = of[device] * count + s
    return of
