"""The best sequence stage on given devices: skeletons by their lower bounds, each solved by CP-SAT, priced and cut.

A solution of the CP-SAT model is priced by the cost model. Where its heads are free and the price exceeds the model's
time, these heads are solved on their own, in all alignments, with their actual rings. Then they are cut off and the
model is solved again, until nothing is below the best price.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hexiopt.cost.executors.memory import MemoryModel, StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import SequenceParallel
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton, alignments, group_orders
from solvers.sequence.exact.quanta_grid import QuantaGrid
from solvers.sequence.exact.quick_shares import QuantaShares, by_speed, climb
from solvers.sequence.exact.skeleton_bounds import SkeletonBounds
from solvers.sequence.exact.skeleton_memory import SkeletonNeeds
from solvers.sequence.exact.skeleton_program import SkeletonProgram
from solvers.sequence.grouping import Signatures

AGREEMENT = 1e-6  # of a price, by which the program's time may fall behind it
_EFFORT_S = 20.0  # most deterministic seconds of one program
_SLOWEST = 1e3  # times shares by speed: slower stages are not looked for
_PLAIN = 100  # skeletons with shares by speed before the proof,
_CLIMBED = 4  # of which so many are improved


@dataclass(frozen=True)
class StageWork:
    """The task of a stage: micro-batches of `size` sequences, `held` of them in flight; the ZeRO stage, and over how
    many holders each device spreads its states; the policies allowed; and by how many pipelines resources are shared.
    """

    size: int
    held: int
    zero: int
    holders: tuple[int, ...]
    policies: tuple[str, ...]
    sharers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class BestStage:
    """A lower bound on the seconds of any stage on the devices and, where known, a stage and its seconds."""

    bound_s: float
    layout: SequenceParallel | None = None
    policy: str = "none"
    seconds: float = float("inf")

    @property
    def is_exact(self) -> bool:
        """Whether the known stage is optimal."""
        return self.layout is not None and self.seconds <= self.bound_s * (1 + 2 * AGREEMENT)


class StageSolver:
    """Solves the stages of one problem at one resolution; `step` counts models solved, `left_s` returns the time
    left.
    """

    def __init__(
        self,
        model: PlanPricer,
        resolution: int,
        should_continue: Callable[[], bool],
        step: Callable[[], bool],
        left_s: Callable[[], float],
    ) -> None:
        self._model, self._problem, self._resolution = model, model.problem, resolution
        self._signatures = Signatures(model.problem)
        self._go_on, self._step, self._left_s = should_continue, step, left_s
        self._tables = Memo(self._make_tables)
        self._skeletons: dict[tuple[object, ...], list[tuple[float, LayoutSkeleton]]] = {}

    def lower_bound_s(self, devices: Sequence[int], size: int) -> float:
        """A quick lower bound on the seconds of every stage on `devices`."""
        return self._tables[size][1].of_devices(devices)

    def good(self, devices: tuple[int, ...], work: StageWork) -> BestStage:
        """A good stage on all of `devices`, if a simple one fits; without a bound."""
        return self._plain(self._rank_skeletons(devices, work), work, float("inf"))[0]

    def best(self, devices: tuple[int, ...], work: StageWork, limit_s: float) -> BestStage:
        """The best stage on all of `devices` that takes less than `limit_s` (infinite: any).

        Where there is none, or time runs out, a lower bound.
        """
        skeletons = self._rank_skeletons(devices, work)
        if not skeletons:
            return BestStage(float("inf"))
        limited = limit_s < float("inf")
        found, plain_s = self._plain(skeletons, work, limit_s)
        limit_s = min(limit_s, found.seconds)
        if limit_s == float("inf"):
            limit_s = _SLOWEST * plain_s
        for lower_bound_s, skeleton in skeletons:
            if lower_bound_s >= limit_s:
                break
            better, done = self._under_all_policies(skeleton, work, limit_s)
            if better is not None:
                found, limit_s = better, better.seconds
            if not done:
                return replace(found, bound_s=min(lower_bound_s, limit_s))
        if found.layout is None and not limited:
            return BestStage(float("inf"))
        return replace(found, bound_s=limit_s * (1 - AGREEMENT))

    # ---------------------------------------------------------------- skeletons

    def _make_tables(self, size: int) -> tuple[QuantaGrid, SkeletonBounds]:
        grid = QuantaGrid(self._problem, self._model.framework, self._resolution, size)
        return grid, SkeletonBounds(grid)

    def _rank_skeletons(self, devices: tuple[int, ...], work: StageWork) -> list[tuple[float, LayoutSkeleton]]:
        """All skeletons by their lower bounds under the first policy, which recomputes least."""
        key = (devices, work.size, work.policies[0])
        found = self._skeletons.get(key)
        if found is None:
            grid, lower_bounds = self._tables[work.size]
            rows = []
            for groups in group_orders(self._signatures, devices, self._problem.model.num_heads):
                # With a single group the order does not matter; zigzag needs quanta of an even number of tokens.
                orders = ("contiguous",) if len(groups) == 1 or grid.quantum % 2 else ("contiguous", "zigzag")
                for order in orders:
                    skeleton = LayoutSkeleton(groups, order, work.policies[0])
                    rows.append((lower_bounds.of_skeleton(skeleton), skeleton))
            found = self._skeletons[key] = sorted(rows, key=lambda row: row[0])
        return found

    def _plain(
        self, skeletons: Sequence[tuple[float, LayoutSkeleton]], work: StageWork, limit_s: float
    ) -> tuple[BestStage, float]:
        """A good stage below `limit_s`, and the least seconds of a simple one, whether or not it fits."""
        rows: list[tuple[float, LayoutSkeleton, QuantaShares]] = []
        found, least_s = BestStage(0.0), float("inf")
        for lower_bound_s, plain in skeletons[:_PLAIN]:
            if lower_bound_s >= min(limit_s, found.seconds) or not self._go_on():
                break
            speeds = [1.0 / self.lower_bound_s((d,), work.size) for d in plain.devices]
            shares = by_speed(plain, speeds, self._resolution, self._problem.model.num_heads)
            for policy in work.policies:
                skeleton = replace(plain, policy=policy)
                seconds, fits = self._price_and_fit(skeleton, shares, work)
                least_s = min(least_s, seconds)
                if fits:
                    rows.append((seconds, skeleton, shares))
                    found = min(found, self._met(skeleton, shares, work), key=lambda best: best.seconds)
                    break
        for _, skeleton, shares in sorted(rows, key=lambda row: row[0])[:_CLIMBED]:
            if not self._go_on():
                break
            price = partial(self._price, skeleton, work)
            better = climb(skeleton, shares, price, self._go_on)
            found = min(found, self._met(skeleton, better, work), key=lambda best: best.seconds)
        return found if found.seconds < limit_s else BestStage(0.0), least_s

    # ---------------------------------------------------------------- one skeleton

    def _under_all_policies(
        self, plain: LayoutSkeleton, work: StageWork, limit_s: float
    ) -> tuple[BestStage | None, bool]:
        """The best stage of a skeleton under any policy that takes less than `limit_s`; and whether all were searched.

        The first policy is the fastest: if it is too slow even with unlimited memory, no other policy helps.
        """
        if not self._go_on():
            return None, False
        if len(work.policies) > 1:
            self._step()
            program = self._program(plain, work, limit_s, memory=False)
            choice, proven = program.least(self._left_s(), _EFFORT_S)
            if choice is None and proven:
                return None, True
        best: BestStage | None = None
        for policy in work.policies:
            skeleton = replace(plain, policy=policy)
            if self._tables[work.size][1].of_skeleton(skeleton) < limit_s:
                better, done = self._solve(skeleton, work, limit_s)
                if better is not None:
                    best, limit_s = better, better.seconds
                if not done:
                    return best, False
        return best, True

    def _solve(
        self, skeleton: LayoutSkeleton, work: StageWork, limit_s: float, heads: tuple[int, ...] | None = None
    ) -> tuple[BestStage | None, bool]:
        """The best stage of a skeleton, with `heads` fixed where given, that takes less than `limit_s`; and whether the
        skeleton was searched completely.
        """
        program, best = self._program(skeleton, work, limit_s, heads), None
        while self._go_on():
            self._step()
            choice, proven = program.least(self._left_s(), _EFFORT_S)
            if choice is None:
                return best, proven
            shares = choice.quanta, choice.heads
            if heads is None:
                met = self._met(skeleton, shares, work)
            else:
                seconds = self._price(skeleton, work, shares)
                met = BestStage(0.0, self._layout(skeleton, shares), skeleton.policy, seconds)
            if met.seconds < limit_s:
                best, limit_s = met, met.seconds
                if proven and met.seconds <= choice.seconds * (1 + AGREEMENT):
                    return best, True
                program.below(limit_s)
            if heads is not None:
                program.refute_quanta(choice.quanta)
                continue
            for groups, fixed in alignments(self._problem.model, self._signatures, skeleton.groups, choice.heads):
                aligned, done = self._solve(replace(skeleton, groups=groups), work, limit_s, fixed)
                if aligned is not None:
                    best, limit_s = aligned, aligned.seconds
                    program.below(limit_s)
                if not done:
                    return best, False
            program.refute_heads(choice.heads)
        return best, False

    def _met(self, skeleton: LayoutSkeleton, shares: QuantaShares, work: StageWork) -> BestStage:
        """The given quanta and heads in the fastest alignment that fits."""
        best = BestStage(0.0)
        quanta = dict(zip(skeleton.devices, shares[0], strict=True))
        for groups, heads in alignments(self._problem.model, self._signatures, skeleton.groups, shares[1]):
            turned = replace(skeleton, groups=groups)
            own = tuple(quanta[d] for d in turned.devices), heads
            seconds = self._price(turned, work, own)
            if seconds < best.seconds:
                best = BestStage(0.0, self._layout(turned, own), skeleton.policy, seconds)
        return best

    def _program(
        self,
        skeleton: LayoutSkeleton,
        work: StageWork,
        limit_s: float,
        heads: tuple[int, ...] | None = None,
        *,
        memory: bool = True,
    ) -> SkeletonProgram:
        return SkeletonProgram(
            self._tables[work.size][0], skeleton, self._need(skeleton, work), limit_s, heads, memory=memory
        )

    # ---------------------------------------------------------------- prices

    def _layout(self, skeleton: LayoutSkeleton, shares: QuantaShares) -> SequenceParallel:
        quantum = self._problem.workload.seq_len // self._resolution
        return skeleton.layout([quantum * n for n in shares[0]], shares[1])

    def _need(self, skeleton: LayoutSkeleton, work: StageWork) -> SkeletonNeeds:
        problem = self._problem
        alone = MemoryModel(problem.model, problem.workload, problem.cluster.gpu_of(skeleton.devices[0]), 1, work.size)
        holders = dict(zip(sorted(skeleton.devices), work.holders, strict=True))
        layers = problem.model.num_layers
        states = tuple(
            (d, sum(alone.states(layers, True, True, StateSharding(work.zero, n)))) for d, n in holders.items()
        )
        return SkeletonNeeds(work.held, states, work.sharers)

    def _price(self, skeleton: LayoutSkeleton, work: StageWork, shares: QuantaShares) -> float:
        """Forward and backward seconds; infinite where a device has not enough memory."""
        seconds, fits = self._price_and_fit(skeleton, shares, work)
        return seconds if fits else float("inf")

    def _price_and_fit(self, skeleton: LayoutSkeleton, shares: QuantaShares, work: StageWork) -> tuple[float, bool]:
        """Forward and backward seconds, and whether it fits on every device."""
        layout, policies = self._layout(skeleton, shares), (skeleton.policy,) * self._problem.model.num_layers
        stage = self._model.stages.sequence_stage(layout, work.size, work.sharers)
        return sum(stage.stage_s(policies, True, True)), self.fits(layout, skeleton.policy, work)

    def fits(self, layout: SequenceParallel, policy: str, work: StageWork) -> bool:
        """Whether a layout fits on every device."""
        stage = self._model.stages.sequence_stage(layout, work.size, work.sharers)
        policies = (policy,) * self._problem.model.num_layers
        holders = dict(zip(sorted(layout.devices), work.holders, strict=True))
        for n in set(work.holders):
            totals = stage.memory.stage((policies,), True, True, (work.held,), StateSharding(work.zero, n)).sum(axis=0)
            for d, room in zip(layout.devices, (stage.limit_bytes - totals).tolist(), strict=True):
                if holders[d] == n and room < 0.0:
                    return False
        return True
