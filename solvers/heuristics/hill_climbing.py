"""Hill climbing on a completed plan: single layers, micro-batches, recompute policies, samples of replicas, sharding.

The completer balances every pipeline separately. Moving a layer so that stages of several pipelines in one machine hold
the same layers keeps gradients off the network, which only the full price shows.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.space import sharding_stages
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import PricedPlan, price_plan
from solvers.core.operators import Lottery, OperatorTally
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.core.zero import sharding_groups
from solvers.heuristics.operators.plans import PLAN_OPERATORS, PlanNeighbourhood

_TWICE = 0.1  # share of the steps that make two changes at once


class HillClimber:
    """Improves one plan step by step."""

    def __init__(self, search: Search, completer: PlanCompleter, rng: random.Random) -> None:
        self.search, self.completer, self.rng = search, completer, rng
        self._lottery = Lottery(PLAN_OPERATORS, PlanNeighbourhood(completer), search.problem, search.operators)
        self._climbed: set[float] = set()

    def begin(self, starts: Iterable[Partition], allowance: Allowance) -> None:
        """Hill-climb the best starts before annealing: a few layer shifts can reverse their ranking, and a start that
        leaves the pool is not revisited.
        """
        for partition in starts:
            if not allowance:
                return
            self._improve(partition, allowance)

    def finish(self, ranked: Iterable[Partition], allowance: Allowance) -> None:
        """Hill-climb the best plan in its best ZeRO stage, and with micro-batches of twice and of half the size.

        With few micro-batches another size may win, but only with other layers. While budget is left, the plans of the
        partitions in `ranked` are climbed too: with other layers a worse one may become the best.
        """
        if self.search.plan is None:
            return
        plan = self._reshard(self.search.plan)
        for start in (plan, self._resize(plan, 2.0), self._resize(plan, 0.5)):
            if start is not None:
                self._climb(start, allowance)
        for partition in ranked:
            if not allowance:
                return
            self._improve(partition, allowance)

    def _reshard(self, plan: Plan) -> Plan:
        """The plan in the best ZeRO stage, and with the best sharding groups: a draw may miss what all of them show."""
        search, problem = self.search, self.search.problem
        best_s, best = search.best_s, plan
        for stage in sharding_stages(problem.workload):
            for sharding in (Sharding(stage, groups) for groups in sharding_groups(problem, stage)):
                if sharding == plan.sharding or sharding.broken_rule(plan.pipelines, plan.schedule):
                    continue
                if not search.step():
                    return best
                priced = price_plan(search.pricer, replace(plan, sharding=sharding), best_s)
                if priced is not None and search.offer(priced.plan, priced.cost).fits:
                    best_s, best = min((best_s, best), (priced.cost.step_time_s, priced.plan), key=lambda own: own[0])
        return best

    def _improve(self, partition: Partition, allowance: Allowance) -> None:
        self.search.step()
        completed = self.completer.allowed(partition) and self.completer.complete(partition)
        if completed:
            self._climb(completed.plan, allowance)

    def _climb(self, plan: Plan, allowance: Allowance) -> None:
        """Accept improving changes until too many in a row fail: ten for every stage of the plan, within limits."""
        search, idle = self.search, 0
        max_without_improvement = 30 + 10 * min(30, sum(len(pipeline.stages) for pipeline in plan.pipelines))
        now = PricedPlan(plan, search.offer(plan))
        if now.cost.objective in self._climbed:  # most likely the same plan with equal devices in another order
            return
        self._climbed.add(now.cost.objective)
        while idle < max_without_improvement and allowance and search.step():
            idle += 1
            began_s = search.runtime_s
            proposed = self.neighbour(now)
            if proposed is None:
                continue
            tally, trial = proposed
            priced, best_s = price_plan(search.pricer, trial, now.cost.objective), search.best_s
            if priced is not None:
                tally.priced += 1
                search.offer(priced.plan, priced.cost)
                if priced.cost.objective < now.cost.objective * (1 - 1e-9):
                    tally.accepted += 1
                    now, idle = priced, 0
            tally.improved += search.best_s < best_s
            tally.seconds += search.runtime_s - began_s

    def neighbour(self, priced: PricedPlan) -> tuple[OperatorTally, Plan] | None:
        """The plan with one change, or two: another ZeRO stage, for instance, may pay only together with other
        layers.
        """
        found = self._lottery.draw(priced, self.rng)
        if found is None or self.rng.random() >= _TWICE:
            return found
        return self._lottery.draw(PricedPlan(found[1], priced.cost), self.rng)

    def _resize(self, plan: Plan, factor: float) -> Plan | None:
        """The plan with micro-batches `factor` times as large; None where sizes or counts do not allow it."""
        sizes = self.search.problem.space.micro_batch_sizes(self.search.problem.workload.global_batch)
        pipelines = []
        for pipeline in plan.pipelines:
            size, count = int(pipeline.micro_batch_size * factor), pipeline.num_micro_batches / factor
            multiple = plan.schedule.micro_batch_multiple(len(pipeline.stages), pipeline.num_chunks)
            if size not in sizes or count != int(count) or count % multiple:
                return None
            if (resized := pipeline.resize(size)) is None:
                return None
            pipelines.append(resized.with_micro_batches(int(count)))
        sequences = [pipeline.num_sequences for pipeline in pipelines]
        # An even batch may differ by one micro-batch, which may now be smaller.
        apart = max(sequences) - min(sequences) > max(pipeline.micro_batch_size for pipeline in pipelines)
        if apart and not self.search.problem.space.uneven_batch:
            return None
        return replace(plan, pipelines=tuple(pipelines))
