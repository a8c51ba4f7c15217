"""Sketches of all chains at once: what every multiset of machines would do, roughly, at every width.

Within a beat of τ seconds a machine of kind k, cut for w pipelines, holds cap_k(τ) = max over TP degrees t of
⌊g_k / (w t)⌋ · max{n : t_k,t(n) ≤ τ} layers; a multiset c of machines holds Σ c_k cap_k(τ), and its beat is the least
τ of a grid at which that is the whole model. One matrix product answers for all multisets and all τ.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.schedules.in_flight import holding
from solvers.columns.machine_kinds import Floats, MachineKinds
from solvers.columns.sync import SharedSync
from solvers.completion.completer import PlanCompleter
from solvers.core.zero import passed_bytes

_BEATS = 160  # of the grid, geometric
_HELD = 4  # micro-batches in flight in a stage, about
_LONGEST = (32, 12, 7, 5, 5)  # machines of a chain of one kind, two, three, four, five
_MOST = 20_000  # multisets, the shortest first
_DRAWN = 4_000  # further ones, of any length
_USED = (2, 2, 3, 3, 4, 5)  # kinds of machines in these
_ROOMIER = 2.0  # most room for layers in these, in models for each pipeline


@dataclass(frozen=True, slots=True)
class ChainSketches:
    """Rows of chains: machines by kind [n, kinds], width [n], sequences/s [n], fill in seconds [n], seconds of sync by
    the machines' own links [n], layers behind each uplink [n, uplinks], and the best TP degree in each kind [n, kinds].

    `done` marks those that were made exactly. `layer_s` [uplinks]: seconds of sync of a layer that crosses an uplink.
    """

    counts: Floats
    widths: NDArray[np.int64]
    rate: Floats
    fill_s: Floats
    inner_s: Floats
    behind: Floats
    degrees: NDArray[np.int64]
    done: NDArray[np.bool_]
    layer_s: Floats
    num_layers: int

    def gains(self, pipelines_s: float, duals: Floats) -> Floats:
        """What each chain processes in `pipelines_s` seconds over what its machines are worth [n], less 1."""
        worth = self.rate * np.maximum(0.0, pipelines_s - self.fill_s)
        result: Floats = worth / np.maximum(self.counts @ duals, 1e-9) - 1.0
        return result

    def within(self, sync_s: float, context: SharedSync | None) -> NDArray[np.bool_]:
        """Which chains sync within `sync_s` [n], in `context` or, where so many layers cross uplinks in it that none
        does, if all layers behind an uplink cross it."""
        own: NDArray[np.bool_] = self.inner_s <= sync_s
        if context is not None and (np.array(context.crossing) * self.layer_s <= sync_s).all():
            inside, outside = ([layers.bit_count() for layers in sets] for sets in (context.inside, context.outside))
            return own & (self.behind <= inside).all(axis=1) & (self.num_layers - self.behind <= outside).all(axis=1)
        return own & (self.behind * self.layer_s <= sync_s).all(axis=1)


def multisets(supply: Floats) -> Iterator[tuple[int, ...]]:
    """Numbers of machines by kind, of up to five kinds, as far as there are; the shortest first."""
    num_kinds = len(supply)
    for total in range(1, max(_LONGEST) + 1):
        for used in range(1, min(num_kinds, total, len(_LONGEST)) + 1):
            if total > _LONGEST[used - 1]:
                continue
            for chosen in combinations(range(num_kinds), used):
                for cuts in combinations(range(1, total), used - 1):
                    counts = [0] * num_kinds
                    for k, begin, end in zip(chosen, (0, *cuts), (*cuts, total), strict=True):
                        counts[k] = end - begin
                    if all(c <= most for c, most in zip(counts, supply, strict=True)):
                        yield tuple(counts)


def drawn_multisets(
    supply: Floats, room: Floats, num_layers: int, widths: Sequence[int], rng: random.Random
) -> Iterator[tuple[int, ...]]:
    """Random numbers of machines by kind that together have room for the model in each of some pipelines.

    `room[k]` layers fit a machine of kind k. Small machines form long chains, of which there are too many to list.
    """
    able = [k for k, layers in enumerate(room) if layers > 0]
    for _ in range(_DRAWN if able else 0):
        left = {k: int(supply[k]) for k in rng.sample(able, min(len(able), rng.choice(_USED)))}
        wanted = num_layers * rng.choice(widths) * rng.uniform(1.0, _ROOMIER)
        counts = [0] * len(supply)
        while wanted > 0.0 and left:
            kind = rng.choice(list(left))
            counts[kind] += 1
            wanted -= float(room[kind])
            left[kind] -= 1
            if not left[kind]:
                del left[kind]
        if wanted <= 0.0:
            yield tuple(counts)


def sketched(completer: PlanCompleter, kinds: MachineKinds, shards: StateSharding) -> ChainSketches | None:
    """The sketches of all chains whose states are spread as `shards` says; None where no chain holds the model."""
    problem, num_kinds = completer.problem, len(kinds)
    num_layers, size = problem.model.num_layers, problem.space.micro_batch_sizes(problem.workload.global_batch)[0]
    layer_bytes = problem.model.layer_params * passed_bytes(problem, shards.stage)
    tables: dict[tuple[int, int], Floats] = {}
    for k, own in enumerate(kinds.machines):
        for tp in problem.space.allowed_tp(kinds.num_gpus[k]):
            group = completer.pricer.tp_group(kinds.devices[own[0]][:tp])
            each = (
                splitter.options(frozenset([group]), False, False, size, holding(_HELD), shards).times
                for splitter in completer.splitters
            )
            tables[k, tp] = np.array(max(each, key=len))
    filled = [times for times in tables.values() if times.size]
    if not filled:
        return None
    room: Floats = np.zeros(num_kinds)
    for (k, tp), times in tables.items():
        room[k] = max(room[k], kinds.num_gpus[k] // tp * times.size)
    drawn = drawn_multisets(kinds.supply, room, num_layers, kinds.widths, random.Random(0))
    counts: Floats = np.array(list(dict.fromkeys([*islice(multisets(kinds.supply), _MOST), *drawn])), float)
    beats = np.geomspace(min(times[0] for times in filled), max(times[-1] for times in filled), _BEATS)
    inside = np.array([[own[0] in uplink.machines for uplink in kinds.uplinks] for own in kinds.machines], float)
    parts = []
    for width in kinds.widths:
        cap, stages, hold, slices = (np.zeros((num_kinds, _BEATS)) for _ in range(4))
        degree = np.ones((num_kinds, _BEATS), np.int64)
        for (k, tp), times in tables.items():
            gpus = kinds.num_gpus[k]
            if times.size and (width * tp <= gpus or (tp == 1 and width % gpus == 0)):
                per_machine = gpus // (width * tp) or gpus / width  # of a stage: several machines make one together
                most = np.searchsorted(times, beats * (1 + 1e-9), side="right")
                better = per_machine * most > cap[k]
                cap[k] = np.where(better, per_machine * most, cap[k])
                degree[k] = np.where(better, tp, degree[k])
                stages[k] = np.where(better, per_machine, stages[k])
                hold[k] = np.where(better, max(1.0, per_machine) * most, hold[k])
                slices[k] = np.where(
                    better, most / tp * (1 < width <= gpus), slices[k]
                )  # that a device passes on inside
        held = counts @ cap
        enough = held >= num_layers
        usable = ~((counts > 0) & ~(cap[:, -1] > 0)).any(axis=1)
        together = np.array([max(1, width // gpus) if width % gpus == 0 else 1 for gpus in kinds.num_gpus])
        usable &= (counts % together == 0).all(axis=1)
        fits = np.flatnonzero(enough.any(axis=1) & usable)
        at = np.argmax(enough, axis=1)[fits]
        share = num_layers / held[fits, at]  # of the layers that they could hold
        each_layers = hold[:, at].T * share[:, None]
        inner_s = slices[:, at].T * share[:, None] / kinds.inside_bytes_per_s
        kinds_s = np.maximum(each_layers / kinds.nic_bytes_per_s, inner_s) * layer_bytes
        sent_s = (kinds_s * (counts[fits] > 0)).max(axis=1, initial=0.0)
        behind = ((each_layers * counts[fits]) @ inside).clip(max=num_layers)
        depth = (counts[fits] * stages[:, at].T).sum(axis=1)
        fill_s = np.maximum(0.0, depth - 1.0) * beats[at]
        rows = (
            counts[fits],
            np.full(len(fits), width),
            width * size / beats[at],
            fill_s,
            sent_s,
            behind,
            degree[:, at].T,
        )
        parts.append([column[depth <= num_layers] for column in rows])
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    layer_s = layer_bytes / np.array([uplink.bytes_per_s for uplink in kinds.uplinks])
    columns += [np.zeros(len(columns[0]), bool), layer_s, num_layers]
    return ChainSketches(*columns) if len(columns[0]) else None
