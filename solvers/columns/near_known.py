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
from solvers.columns.arrangement_search import ArrangementSearch, PricedArrangement, Run
from solvers.columns.chain_column import ChainRecipe
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Allowance, Search


class NearKnown(ArrangementSearch):
    """Arrangements that begin at the chains of a known plan, with as many pipelines, half and twice as many; and at
    chains through all kinds of machines of about as many. Micro-batches have the smallest size of the plan.
    """

    def __init__(self, run: Search, completer: PlanCompleter, zero_stage: int, rng: random.Random, known: Plan) -> None:
        super().__init__(run, completer, zero_stage, rng)
        size = min(pipeline.micro_batch_size for pipeline in known.pipelines)
        self.sizes = (size if size in self.sizes else self.sizes[0],)  # each takes tables of its own
        number = len(known.pipelines)
        self._widths = [width for width in self.kinds.widths if width in (number // 2, number, 2 * number)]
        self.chains = self._chains_of(known)

    def _starts(self, shapes: Sequence[tuple[int, int]], allowance: Allowance) -> Iterator[PricedArrangement]:
        for factor in (1.0, 0.5, 2.0):
            recipes = (ChainRecipe(runs, self._width(factor * width), self.sizes[0]) for runs, width in self.chains)
            arrangement = tuple(sorted(recipes))
            if arrangement not in self._known and (found := self._start(arrangement, allowance)) is not None:
                yield found
        yield from super()._starts([shape for shape in shapes if shape[0] in self._widths], allowance)

    def _width(self, number: float) -> int:
        """The width nearest to a number of pipelines."""
        return min(self.kinds.widths, key=lambda width: abs(math.log(width / number)))

    def _chains_of(self, known: Plan) -> list[tuple[tuple[Run, ...], int]]:
        """The machines that pipelines of `known` share, by the mean place of their stages, and how many pipelines they
        are; idle machines are last in the last.
        """
        machine_of, found = self.problem.cluster.machine_of, list[tuple[dict[int, list[float]], int]]()
        for pipeline in known.pipelines:
            places: dict[int, list[float]] = defaultdict(list)
            for s, stage in enumerate(pipeline.stages):
                for device in stage.devices:
                    places[int(machine_of[device])].append(s / len(pipeline.stages))
            number = 1
            for one in [one for one in found if one[0].keys() & places]:
                found.remove(one)
                number += one[1]
                for machine, own in one[0].items():
                    places[machine] += own
            found.append((places, number))
        idle = set(self.problem.usable_by_machine).difference(*(places for places, _ in found))
        found[-1][0].update({machine: [math.inf] for machine in idle})
        chains = []
        for places, number in found:
            ordered = sorted(places, key=lambda m: (fmean(places[m]), m))
            kinds = groupby(map(self.kinds.kind_of.__getitem__, ordered))
            chains.append((tuple((kind, len(list(own))) for kind, own in kinds), number))
        return chains
