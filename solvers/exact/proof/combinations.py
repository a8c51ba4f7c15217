"""The last level of a proof: pipelines that may form a plan together are combined, and the plans are priced."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.memo import Memo
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.space import Recompute, recompute_chains, sharding_stages
from hexiopt.schedules.in_flight import holding
from solvers.core.search import Search
from solvers.exact.proof.kernels import Chosen, most_together
from solvers.exact.proof.pipelines import FoundPipeline
from solvers.exact.proof.tables import ProofTables

Floats = NDArray[np.float64]


class Combinations:
    """Makes plans of chosen pipelines and offers them to a search; `priced` counts the plans."""

    def __init__(self, tables: ProofTables, run: Search) -> None:
        self._tables, self._run, self.priced = tables, run, 0
        self._stacked = Memo(self._stack, 16)
        self._ordered = Memo(self._order_policies, 50_000)
        self._zero_stages = [zero for zero in sharding_stages(tables.problem.workload) if zero < 2]

    def shardings(self, holders: int) -> Iterator[Sharding]:
        """The shardings that plans of so many pipelines may have."""
        for zero in self._zero_stages:
            yield Sharding(zero, "all")
            if zero and holders > 1 and self._tables.problem.space.machine_sharding:
                yield Sharding(zero, "machine")

    def each(self, lists: Sequence[tuple[list[FoundPipeline], int]]) -> Iterator[list[FoundPipeline]]:
        """All choices, with repetition, of the stated number of pipelines from each list."""
        picks = [list(itertools.combinations_with_replacement(own, count)) for own, count in lists]
        for picked in itertools.product(*picks):
            yield [one for own in picked for one in own]

    def together(self, chosen: list[FoundPipeline], machine: bool, limit_s: float) -> list[FoundPipeline] | None:
        """The same pipelines, each with the sequences that it can process next to the others; None where their sum is
        less than the batch."""
        tables = self._tables
        k, batch = len(chosen), tables.batch
        if sum(one.sequences for one in chosen) < batch:
            return None
        most = max(len(one.stages) for one in chosen)
        groups, layers = np.zeros((k, most), np.int64), np.zeros((k, most), np.int64)
        for i, one in enumerate(chosen):
            for s, (g, n) in enumerate(one.stages):
                groups[i, s], layers[i, s] = g, n
        counts = np.array([one.num_micro_batches for one in chosen])
        forward_s, both_s, inside_s, num_bytes = self._stacked[k]
        row = Chosen(
            np.array([len(one.stages) for one in chosen]),
            np.array([tables.sizes.index(one.size) for one in chosen]),
            counts,
            groups,
            layers,
        )
        total = most_together(
            row, np.array(tables.sizes), tables.groups, tables.all_forward_first, forward_s, both_s,
            tables.after_s_kept[k], self._half_ring_s, inside_s, num_bytes, tables.latency_s, tables.nic,
            float(tables.units[1]), float(tables.units[2]), tables.layer_bytes, machine, tables.num_layers, batch,
            limit_s,
        )  # fmt: skip
        if total < batch:
            return None
        return [replace(one, num_micro_batches=int(m)) for one, m in zip(chosen, counts, strict=True)]

    @cached_property
    def _half_ring_s(self) -> Floats:
        return self._tables.ring_s(0.5)

    def _stack(self, holders: int) -> tuple[Floats, Floats, Floats, Floats]:
        tables = self._tables
        # Under GPipe memory grows with the number of micro-batches; that of one is a lower bound.
        each = [tables.seconds(holders, size, 1) for size in tables.sizes]
        messages = [tables.messages(size, np.zeros(len(tables.nic))) for size in tables.sizes]
        return (
            np.stack([own.forward_s for own in each]),
            np.stack([own.both_s for own in each]),
            np.stack([own.inside_s for own in messages]),
            np.array([own.num_bytes for own in messages]),
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

    def offer(self, chosen: Sequence[FoundPipeline], sharding: Sharding, limit_s: float) -> float:
        """The step time of the plan of the given pipelines if it is at most `limit_s`; infinite where no plan fits.

        Stages recompute as little as their memory allows, and more where a sharding has fewer holders than possible.
        """
        plan = self._plan(chosen, sharding)
        while plan is not None and not check(self._tables.problem, plan):
            self.priced += 1
            cost = self._run.pricer.price(plan)
            if cost.fits or cost.step_time_s > limit_s:
                if cost.fits:
                    self._run.offer(plan, cost)
                return cost.step_time_s
            plan = self._recomputing_more(plan)
        return float("inf")

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
                policies = self._fastest(devices, n, s == 0, s == p - 1, one.size, flight, len(chosen))
                if policies is None:
                    return None
                stages.append(Stage(TensorParallel(devices), ((at, at + n),), policies))
                at += n
            pipelines.append(Pipeline(tuple(stages), one.num_micro_batches, one.size))
        return Plan(tuple(pipelines), tables.schedule, sharding)

    def _fastest(
        self, devices: tuple[int, ...], n: int, first: bool, last: bool, size: int, flight: int, holders: int
    ) -> Recompute | None:
        """The fastest policies that fit in memory with states sharded over all holders."""
        tables, pricer = self._tables, self._tables.pricer
        group = pricer.tp_group(devices)
        memory, sharding = pricer.stages.memory_model(group, size), StateSharding(tables.zero_stage, holders)
        for _, policies in self._ordered[group, n, first, last, size]:
            each = policies * n if len(policies) == 1 else policies
            used = memory.layered(each, first, last, holding(flight), sharding).total
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
