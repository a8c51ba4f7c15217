"""The master's programs over the values of the sync and over what chains share in it, and the best of their answers."""

import random
from collections.abc import Callable, Mapping, Sequence

from hexiopt.memo import Memo
from hexiopt.problem.problem import Problem
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.machine_kinds import Floats, MachineKinds
from solvers.columns.master import Chosen, ColumnMaster, Relaxed, Syncs, rank, sync_of
from solvers.columns.sync import SharedSync

PROGRAM, ROUNDING = 3, 10  # units of work, of which `column_maker.py` makes steps
_SYNCS = 20  # values of S in a sweep in which each chain syncs as among copies of its own
_FEW_SYNCS = 5  # values of S in a sweep in one context
_CONTEXTS = 6  # remembered
_HOPES = 3  # programs in which each chain syncs as among copies of its own, that are rounded for their contexts
LONGER = 1.02  # times T, in which programs are rounded once
_BEST = 5  # answers that count as the best
_SHIFTS = (0.93, 1.07)  # times S of the best two, for values between
_HOPEFUL = 1.15  # of the best answer: answers in other contexts that more columns may yet make the best
_NEAR_BEST = 1.05  # of the best program's answer: answers in other contexts that count too


class ContextPrograms:
    """The programs over `columns`, which may become more, in the contexts met so far.

    `answers` are those in such a context, the best first. `correction` has the factors by which pipelines of recipes
    take longer than their columns say; `work` counts units of work.
    """

    def __init__(
        self,
        problem: Problem,
        kinds: MachineKinds,
        columns: Sequence[ChainColumn],
        correction: Mapping[ChainRecipe, float],
        work: Callable[[int], None],
    ) -> None:
        self._problem, self._kinds, self._columns = problem, kinds, columns
        self._correction, self._work = correction, work
        self.answers: list[Relaxed] = []
        # Where each chain syncs as among copies of its own, which is too little: what they choose shows contexts.
        self._hopes: list[Relaxed] = []
        self._hoped: SharedSync | None = None  # the context of the chains that look best there
        self._syncs_s: Syncs = Memo(sync_of)
        num_layers = problem.model.num_layers
        worst, every = SharedSync.worst(num_layers, len(kinds.uplinks)), (1 << num_layers) - 1
        # The layers behind each uplink, and elsewhere, of chains that stay in one place.
        self._places = [
            (tuple(every * behind for behind in place), tuple(every * (not behind) for behind in place))
            for place in kinds.places
        ]
        # First the worst, then the latest met. `_fresh` are not in `answers` yet.
        self._contexts = list(dict.fromkeys([worst, *map(worst.with_sides, self._places)]))
        self._fresh: list[SharedSync] = []

    def master(self, columns: Sequence[ChainColumn] | None = None, supply: Floats | None = None) -> ColumnMaster:
        """The program over all columns and machines, or over some."""
        return ColumnMaster(
            self._columns if columns is None else columns,
            self._kinds.supply if supply is None else supply,
            self._problem.workload.global_batch,
            self._problem.space.num_pipelines,
            self._correction,
            self._syncs_s,
        )

    def sweep(self) -> None:
        """All values of S, in the contexts known, and in those of the chains that look best where each syncs as among
        copies of its own."""
        self._work(_SYNCS * PROGRAM)
        master = self.master()
        self._hopes = master.sweep(None, _SYNCS)
        self._learn_from_hopes(master)
        self._fresh.clear()
        self.answers = []
        for context in self._contexts:
            self.answers = sorted([*self.answers, *self._swept(master, context)], key=rank)

    def refine(self) -> None:
        """The best values of S again, with the columns that came since, values between, and new contexts."""
        master = self.master()
        starts = {(answer.sync_s, answer.context): answer.pipelines_s for answer in self.wanted()}
        for answer in self.answers[:2]:
            for factor in _SHIFTS:
                starts.setdefault((answer.sync_s * factor, answer.context), answer.pipelines_s)
        self._work(len(starts) * PROGRAM)
        found = [one for near, start_s in starts.items() if (one := master.relaxed(*near, start_s))]
        again = (master.relaxed(hope.sync_s, None, hope.pipelines_s) for hope in self._hopes[:_HOPES])
        self._hopes = sorted([*filter(None, again), *self._hopes[_HOPES:]], key=rank)
        self._learn_from_hopes(master)
        for context in self._fresh:
            found += self._swept(master, context)
        self._fresh.clear()
        self.answers = sorted(found, key=rank) or self.answers

    @property
    def hope(self) -> tuple[Relaxed, SharedSync] | None:
        """The best answer where each chain syncs as among copies of its own, and the context of what it chooses."""
        return (self._hopes[0], self._hoped) if self._hopes and self._hoped is not None else None

    @property
    def has_news(self) -> bool:
        """Whether contexts were met that no answer is for yet."""
        return bool(self._fresh)

    def wanted(self) -> list[Relaxed]:
        """The best answers, and the best in every context that is near."""
        best = {answer.context: answer for answer in reversed(self.answers)}
        near = (answer for answer in best.values() if answer.total_s <= _NEAR_BEST * self.answers[0].total_s)
        return list(dict.fromkeys([*self.answers[:_BEST], *near]))

    def without(self, kind: int) -> tuple[ColumnMaster, Relaxed] | None:
        """The program that leaves a kind of machines out, and its best answer; None where there is none."""
        supply = self._kinds.supply.copy()
        supply[kind] = 0.0
        kept = [column for column in self._columns if not column.counts[kind]]
        if not kept:
            return None
        master = self.master(kept, supply)
        self._work(_BEST * PROGRAM)
        near = ((one.sync_s, one.context, one.pipelines_s) for one in self.answers[:_BEST])
        found = [one for own in near if (one := master.relaxed(*own))]
        return (master, min(found, key=rank)) if found else None

    def rounded_anywhere(self, rng: random.Random) -> Chosen:
        """A rounding of one of the best programs, for a somewhat longer T."""
        self._work(PROGRAM)
        answer = rng.choice([*self.answers[:_BEST], *self._hopes[:_BEST]])
        return self.master().rounded(answer.sync_s, answer.context, answer.pipelines_s * rng.uniform(1.0, 1.03))

    def _swept(self, master: ColumnMaster, context: SharedSync) -> list[Relaxed]:
        self._work(_FEW_SYNCS * PROGRAM)
        if not self.answers:
            return master.sweep(context, _FEW_SYNCS)
        best = self.answers[0]
        return master.sweep(context, _FEW_SYNCS, best.pipelines_s, _HOPEFUL * best.total_s)

    def _learn_from_hopes(self, master: ColumnMaster) -> None:
        for hope in self._hopes[:_HOPES]:
            self._work(PROGRAM)
            chosen = master.rounded(hope.sync_s, None, LONGER * hope.pipelines_s)
            if chosen and hope is self._hopes[0]:
                self._hoped = SharedSync.of(column.sync.alone for column, _ in chosen)
            self.learn(chosen)

    def learn(self, chosen: Chosen) -> None:
        """Remember the context of chains that look good together, and those of one of them that crosses an uplink,
        beside chains that stay in one place; the latest are kept."""
        if not chosen:
            return
        found = [SharedSync.of(column.sync.alone for column, _ in chosen)]
        worst = self._contexts[0]
        for column, _ in sorted(chosen, key=lambda item: -item[1]):
            own = column.sync.alone.inside, column.sync.alone.outside
            if own not in self._places:
                found += [worst.with_sides(own), *(worst.with_sides(own, place) for place in self._places)]
                break
        for context in found:
            self.expect(context)

    def expect(self, context: SharedSync) -> None:
        """Remember a context for the next programs."""
        if context not in self._contexts:
            self._contexts[1:] = [context, *self._contexts[1:_CONTEXTS]]
            self._fresh.append(context)
