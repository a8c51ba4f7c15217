"""Arrangements of chains near a known plan, of which the cluster may have changed.

What is best after a change often has the order of machines of the plan before it, in half or twice as many pipelines:
many moves on partitions away, most of them to worse ones. Here each such chain is one step.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

from hexiopt.plan.plan import Plan
from solvers.columns.arrangement_search import ArrangementSearch, Run, _PricedArrangement
from solvers.columns.chain_column import ChainRecipe
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Allowance, Search


class NearKnown(ArrangementSearch):
    """Arrangements that begin at chains of as many pipelines as a known plan has, or the next smaller or greater width,
    through all machines in its order or that of kinds; with micro-batches of its smallest size.
    """

    def __init__(self, run: Search, completer: PlanCompleter, zero_stage: int, rng: random.Random, known: Plan) -> None:
        super().__init__(run, completer, zero_stage, rng)
        size = min(pipeline.micro_batch_size for pipeline in known.pipelines)
        self.sizes = (size if size in self.sizes else self.sizes[0],)  # each takes tables of its own
        widths, number = self.kinds.widths, len(known.pipelines)
        at = min(range(len(widths)), key=lambda k: abs(math.log(widths[k] / number)))
        self._widths, self._order = widths[max(0, at - 1) : at + 2], self._order_of(known)

    def _starts(self, shapes: Sequence[tuple[int, int]], allowance: Allowance) -> Iterator[_PricedArrangement]:
        for width, size in shapes:
            if width in self._widths:
                found = [*self._in_order(width, size, allowance), *super()._starts([(width, size)], allowance)]
                yield from sorted(found, key=lambda one: one.energy)[:1]

    def _in_order(self, width: int, size: int, allowance: Allowance) -> Iterator[_PricedArrangement]:
        if allowance and self.run.step():
            with self.run.tallied("arrange_chains") as tally:
                tally.proposed += 1
                tally.valid += 1
                found = self._priced((ChainRecipe(self._order, width, size),), math.inf, tally)
            if found is not None:
                yield found

    def _order_of(self, known: Plan) -> tuple[Run, ...]:
        """All machines by the mean place of their stages in pipelines of `known`; those without any are last."""
        places: dict[int, list[float]] = defaultdict(list)
        for pipeline in known.pipelines:
            for s, stage in enumerate(pipeline.stages):
                for device in stage.all_devices():
                    places[int(self.problem.cluster.machine_of[device])].append(s / len(pipeline.stages))
        ordered = sorted(self.problem.usable_by_machine, key=lambda m: (fmean(places[m] or [math.inf]), m))
        return tuple((kind, len(list(own))) for kind, own in groupby(map(self.kinds.kind_of.__getitem__, ordered)))
