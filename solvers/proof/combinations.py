"""The last level of a proof: pipelines that may form a plan together are combined, and the plans are priced."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from hexiopt.memo import Memo
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import Ints
from hexiopt.problem.space import Recompute, recompute_chains, sharding_stages
from hexiopt.schedules.in_flight import holding
from solvers.core.search import Search
from solvers.proof.joint import (
    Families,
    JointSeconds,
    Lines,
    machines_of_layers,
    most_next_to,
    ring_seconds,
    surviving_families,
)
from solvers.proof.kernels import LIMIT
from solvers.proof.names import Names
from solvers.proof.pipelines import FoundPipeline, stages_of_line
from solvers.proof.tables import ProofTables

Answer = Literal["none", "found", "open"]  # whether there is a plan in time
_NAMED = 600  # most namings of a plan's equal devices
COMBINE = 200_000_000  # operations of combining families: about a second


class Combinations:
    """Makes plans of chosen pipelines and offers them to a search; `priced` counts the plans."""

    def __init__(self, tables: ProofTables, run: Search) -> None:
        self._tables, self._run, self.priced = tables, run, 0
        self._names = Names(tables.pricer)
        self._seconds = Memo(self._joint_seconds, 16)
        self._ordered = Memo(self._order_policies, 50_000)
        self._zero_stages = [zero for zero in sharding_stages(tables.problem.workload) if zero < 2]

    def shardings(self, holders: int) -> Iterator[Sharding]:
        """The shardings that plans of so many pipelines may have."""
        for zero in self._zero_stages:
            yield Sharding(zero, "all")
            if zero and holders > 1 and self._tables.problem.space.machine_sharding:
                yield Sharding(zero, "machine")

    def together(
        self, lists: Sequence[tuple[Lines, int]], machine: bool, limit_s: float, most_work: int, most: int
    ) -> Iterator[list[FoundPipeline]] | None:
        """All choices, with repetition, of the stated number of pipelines from each list that may process the batch
        next to each other, each with the most that it can process there; None where that is too much work, or where
        more than `most` combinations of families are left."""
        tables, usages = self._tables, np.repeat(np.arange(len(lists)), [count for _, count in lists])
        families, lines = self._families([own for own, _ in lists])
        found = np.zeros((most, len(usages)), np.int64)
        answer, count = surviving_families(
            usages, families, lines, tables.groups, self._seconds[len(usages), machine], tables.batch, limit_s,
            most_work, found,
        )  # fmt: skip
        return None if answer == LIMIT else self._members(found[:count], families, lines, machine, limit_s)

    def _families(self, lists: Sequence[Lines]) -> tuple[Families, Lines]:
        tables, parts, found = self._tables, list[Lines](), list[tuple[Ints, Ints, Ints]]()
        for lines in lists:
            count = len(lines.num_stages)
            machines = np.zeros((count, tables.num_layers), np.int64)
            machines_of_layers(lines, tables.groups, machines)
            _, first, family = np.unique(machines, axis=0, return_index=True, return_inverse=True)
            family = family.reshape(-1)
            sequences = lines.num_micro_batches * np.array(tables.sizes)[lines.size]
            most = np.zeros(len(first), np.int64)
            np.maximum.at(most, family, sequences)
            rank = np.argsort(np.argsort(-most, kind="stable"), kind="stable")  # of each family
            order = np.lexsort((-sequences, rank[family]))
            parts.append(Lines(*(own[order] for own in lines)))
            at = np.argsort(rank, kind="stable")
            found.append((np.bincount(family, minlength=len(first))[at], most[at], machines[first[at]]))
        sizes, most, machines = (np.concatenate(own) for own in zip(*found, strict=True))
        of_usage = np.cumsum([0, *(len(own[0]) for own in found)])
        return (
            Families(of_usage, np.concatenate(([0], np.cumsum(sizes))).astype(np.int64), most, machines),
            Lines(*(np.concatenate(own) for own in zip(*parts, strict=True))),
        )

    def _members(
        self, found: Ints, families: Families, lines: Lines, machine: bool, limit_s: float
    ) -> Iterator[list[FoundPipeline]]:
        """The members of chosen families that process the batch together."""
        tables, seconds = self._tables, self._seconds[found.shape[1], machine]
        ring_s, inside = np.zeros(tables.num_layers + 1), np.zeros((tables.num_layers + 1, len(tables.nic)))
        for chosen in found.tolist():
            ring_seconds(families.machines[chosen], 0, seconds, ring_s, inside)
            able = dict[int, list[tuple[int, FoundPipeline]]]()
            for f in set(chosen):
                able[f] = []
                for i in range(families.members[f], families.members[f + 1]):
                    count = most_next_to(lines, i, tables.groups, seconds, ring_s, inside, 1, limit_s)
                    if count:
                        size = tables.sizes[lines.size[i]]
                        able[f].append((i, FoundPipeline(size, stages_of_line(lines, i), int(count))))
            most = {f: max((one.sequences for _, one in own), default=0) for f, own in able.items()}
            spare = sum(most[f] for f in chosen) - tables.batch
            choices = [[(i, one) for i, one in able[f] if one.sequences >= most[f] - spare] for f in chosen]
            for picked in itertools.product(*choices):
                numbers = [(f, i) for f, (i, _) in zip(chosen, picked, strict=True)]
                ascending = all(i <= j for (f, i), (g, j) in itertools.pairwise(numbers) if f == g)
                if ascending and sum(one.sequences for _, one in picked) >= tables.batch:
                    yield [one for _, one in picked]

    def _joint_seconds(self, key: tuple[int, bool]) -> JointSeconds:
        (holders, machine), tables = key, self._tables
        # Under GPipe memory grows with the number of micro-batches; that of one is a lower bound.
        each = [tables.seconds(holders, size, 1) for size in tables.sizes]
        return JointSeconds(
            np.array(tables.sizes),
            tables.all_forward_first,
            np.stack([own.forward_s for own in each]),
            np.stack([own.both_s for own in each]),
            tables.after_s_kept[holders],
            tables.ring_s(0.5 if machine else (holders - 1) / holders),
            np.stack([tables.messages[size].alone_s for size in tables.sizes]),
            tables.nic,
            tables.first_units,
            tables.last_units,
            tables.tied_units,
            tables.across_bytes("machine" if machine else "all"),
            tables.port_s,
            machine,
            tables.shown,
        )

    def splits(self, chosen: list[FoundPipeline]) -> Iterator[list[FoundPipeline]]:
        """All exact splits of the batch in which no pipeline processes more than it can. Processing less is never
        slower, so only these splits count."""
        spare = sum(one.sequences for one in chosen) - self._tables.batch
        for less in itertools.product(*(range(spare // one.size + 1) for one in chosen)):
            if sum(x * one.size for x, one in zip(less, chosen, strict=True)) != spare:
                continue
            if all(one.num_micro_batches > x for x, one in zip(less, chosen, strict=True)):
                yield [
                    replace(one, num_micro_batches=one.num_micro_batches - x)
                    for x, one in zip(less, chosen, strict=True)
                ]

    def offer(self, chosen: Sequence[FoundPipeline], sharding: Sharding, limit_s: float) -> Answer:
        """Whether the plan of the given pipelines takes at most `limit_s`, whichever of equal devices is which; open
        where there are too many namings.

        Stages recompute as little as their memory allows, and more where a sharding has fewer holders than possible.
        """
        plan = self._plan(chosen, sharding)
        while plan is not None and not check(self._tables.problem, plan):
            self.priced += 1
            cost = self._run.pricer.price(plan)
            if cost.step_time_s > limit_s and self._names.least_s(plan, cost) <= limit_s:
                named = self._names.every(plan, _NAMED)
                if named is None:
                    return "open"
                priced = [(other, self._tables.pricer.price(other, cost.pipelines)) for other in named]
                plan, cost = min(priced, key=lambda one: one[1].step_time_s)
            if cost.fits:
                self._run.offer(plan, cost)
            if cost.fits or cost.step_time_s > limit_s:
                return "found" if cost.step_time_s <= limit_s else "none"
            plan = self._recomputing_more(plan)
        return "none"

    def _plan(self, chosen: Sequence[FoundPipeline], sharding: Sharding) -> Plan | None:
        tables = self._tables
        free = [list(own) for own in tables.devices]
        pipelines = []
        for one in chosen:
            at, stages, p = 0, list[Stage](), len(one.stages)
            for s, (g, n) in enumerate(one.stages):
                m, tp = tables.group_list[g]
                devices, free[m] = tuple(free[m][:tp]), free[m][tp:]
                flight = one.num_micro_batches if tables.all_forward_first else min(one.num_micro_batches, p - s)
                policies = self._fastest(g, n, s == 0, s == p - 1, one.size, flight, len(chosen))
                if policies is None:
                    return None
                degree = tables.tp_groups[g].degree if tables.problem.model.shares_experts else None
                stages.append(Stage(TensorParallel(devices, None, degree), ((at, at + n),), policies))
                at += n
            pipelines.append(Pipeline(tuple(stages), one.num_micro_batches, one.size))
        return Plan(tuple(pipelines), tables.schedule, sharding)

    def _fastest(
        self, g: int, n: int, first: bool, last: bool, size: int, flight: int, holders: int
    ) -> Recompute | None:
        """The fastest policies that fit in memory with states sharded over all holders."""
        tables, pricer = self._tables, self._tables.pricer
        group = tables.tp_groups[g]
        memory, sharding = pricer.stages.memory_model(group, size), tables.sharding_of(group, holders)
        for _, policies in self._ordered[group, n, first, last, size]:
            each = policies * n if len(policies) == 1 else policies
            used = memory.stage_of_layers(each, first, last, holding(flight), sharding).total
            if used <= group.gpu.usable_memory_bytes:
                return policies
        return None

    def _order_policies(self, key: tuple[object, int, bool, bool, int]) -> list[tuple[float, Recompute]]:
        """All policies of a stage, the fastest first."""
        group, n, first, last, size = key
        pricer, space = self._tables.pricer, self._tables.problem.space
        each = {p for chain in recompute_chains(pricer.policies(), n, space.recompute_per_layer) for p in chain}
        return sorted((sum(pricer.stages.stage_s(group, n, first, last, size, p)), p) for p in each)  # type: ignore[arg-type]

    def _recomputing_more(self, plan: Plan) -> Plan | None:
        """The plan with the next slower policies in the first stage that does not fit; None where there are none."""
        pricer = self._tables.pricer
        for i, (pipeline, priced) in enumerate(zip(plan.pipelines, pricer.pipelines(plan), strict=True)):
            for s, (stage, cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
                if cost.excess_bytes <= 0:
                    continue
                group, last = pricer.tp_group(stage.devices), s == len(pipeline.stages) - 1
                group = pricer.stages.tp_groups.with_degree(group, len(stage.parallelism.parameter_copies[0]))
                each = [
                    policies
                    for _, policies in self._ordered[group, stage.num_layers, s == 0, last, pipeline.micro_batch_size]
                ]
                after = each[each.index(stage.recompute) + 1 :]
                if not after:
                    return None
                stages = (*pipeline.stages[:s], replace(stage, recompute=after[0]), *pipeline.stages[s + 1 :])
                pipelines = (*plan.pipelines[:i], replace(pipeline, stages=stages), *plan.pipelines[i + 1 :])
                return replace(plan, pipelines=pipelines)
        return None
