"""Placements of TP groups as columns of the CP-SAT model: the most sequences of a pipeline on each within a step time.

What a placement can process is first bounded (`placement_bounds.py`), since the devices that it leaves must process the
rest. When it is first chosen, the bound is tightened to what it can process, witnessed by a candidate
(`candidates.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.space import recompute_policies, schedules, sharding_stages
from solvers.exact.assignments import DeviceAssignment, DeviceClasses, PipelinePlacement, exchanged
from solvers.exact.candidates import Candidates
from solvers.exact.packing import ColumnChoice, PackingLimits, PipelineColumn, most_together
from solvers.exact.placement_bounds import PlacementBound, SyncContext, SyncScope
from solvers.exact.sample_allocation import GlobalChoices


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """Plans that are searched together: `alone` with one pipeline or several, in `lockstep` (from ZeRO-2 on) or not."""

    alone: bool
    lockstep: bool


class PlacementColumns:
    """The placements of a problem."""

    def __init__(
        self, model: PlanPricer, device_classes: DeviceClasses, candidates: Candidates, lower_bound: PlacementBound
    ) -> None:
        problem = model.problem
        self._problem, self._device_classes, self._candidates, self._lower_bound = (
            problem,
            device_classes,
            candidates,
            lower_bound,
        )
        single = DeviceClasses.of(replace(problem, space=replace(problem.space, num_pipelines=1)))
        self.placements: list[PipelinePlacement] = [found[0] for found in single.assignments()]
        self._groups = [device_classes.labeled((placement,))[0] for placement in self.placements]
        self._usages = [
            tuple(dict.fromkeys(map(self._usage, self._images(placement)))) for placement in self.placements
        ]
        self._shown: dict[tuple[int, float], int] = {}

    @cached_property
    def _global_choices(self) -> list[GlobalChoices]:
        """The choices common to all pipelines, with the widest sharding."""
        problem, workload = self._problem, self._problem.workload
        policies = recompute_policies(workload)
        sets = [policies] if problem.space.recompute_per_stage else [(policy,) for policy in policies]
        stages, devices = sharding_stages(workload), len(problem.usable_devices)
        found = []
        for schedule, chosen in product(schedules(workload), sets):
            # Lockstep is for schedules of one layer range.
            allowed = [stage for stage in stages if stage < 2 or schedule.lockstep]
            if allowed:
                found.append(GlobalChoices(schedule, chosen, allowed[-1], devices if allowed[-1] else 1))
        return found

    def families(self) -> list[PlanFamily]:
        """All families of plans that the problem allows."""
        stages, asked = sharding_stages(self._problem.workload), self._problem.space.num_pipelines
        several = asked != 1 and min(len(self._problem.usable_devices), self._problem.workload.global_batch) > 1
        return [
            PlanFamily(alone, lockstep)
            for lockstep in (False, True)
            if any((stage >= 2) == lockstep for stage in stages)
            for alone in (True, False)
            if (asked in (None, 1) if alone else several)
        ]

    def limits(self, family: PlanFamily) -> PackingLimits:
        """The limits of a plan of a family, devices by device class."""
        problem, asked = self._problem, self._problem.space.num_pipelines
        most = 1 if family.alone else min(len(problem.usable_devices), problem.workload.global_batch)
        least = 1 if family.alone else 2
        return PackingLimits(
            tuple(map(len, self._device_classes.devices)), problem.workload.global_batch, asked or most, asked or least
        )

    def columns(
        self, family: PlanFamily, limit_s: float, should_continue: Callable[[], bool]
    ) -> list[PipelineColumn] | None:
        """One column for each placement, in order, for plans that take less than `limit_s`.

        None once `should_continue` returns False.
        """
        batch = self._problem.workload.global_batch
        capacity = np.array(
            [sum(len(self._problem.usable_by_machine[m]) for m in run) for run in self._device_classes.runs]
        )
        box = np.full(tuple(capacity + 1), batch)  # what is known of one pipeline, by devices of each run of machines
        box[(0,) * box.ndim] = 0
        most = [0] * len(self.placements)
        total_of = [self._total(placement) for placement in self.placements]
        order = sorted(range(len(self.placements)), key=lambda k: (sum(total_of[k]), total_of[k]))
        for total, own in groupby(order, key=total_of.__getitem__):
            others = 0 if family.alone else int(most_together(box)[tuple(capacity - total)])
            least, best = max(1, batch - others), 0
            for k in own:
                if not should_continue():
                    return None
                if not family.lockstep or self._even(k):
                    most[k] = self._lower_bound.most_sequences(
                        self._groups[k], self._context(family, k), least, batch, limit_s
                    )
                    best = max(best, most[k])
            # A pipeline that processes fewer is in no plan.
            box[total] = max(best, least - 1)
        return [PipelineColumn(usages, n) for usages, n in zip(self._usages, most, strict=True)]

    def _context(self, family: PlanFamily, k: int) -> SyncContext:
        """The given facts about plans of a family that contain placement k."""
        stages = [stage for stage in sharding_stages(self._problem.workload) if (stage >= 2) == family.lockstep]
        holders = max(map(len, self.placements[k])) if family.alone else len(self._problem.usable_devices)
        sync = SyncScope.REPLICATED if family.alone else SyncScope.ALL
        return SyncContext(sync, StateSharding(stages[-1], holders), family.lockstep)

    def _even(self, k: int) -> bool:
        """Whether the replicas of each stage have equal TP degrees."""
        return all(len({len(group) for group in stage}) == 1 for stage in self.placements[k])

    def programs(self, family: PlanFamily, columns: Sequence[PipelineColumn]) -> Iterator[list[PipelineColumn]]:
        """Columns that can be combined, all others empty: in lockstep, those with equal TP degrees stage by stage."""
        if not family.lockstep or family.alone:
            yield list(columns)
            return
        degrees = [tuple(len(stage[0]) for stage in placement) for placement in self.placements]
        for own in sorted({degrees[k] for k, column in enumerate(columns) if column.most_sequences}):
            yield [
                replace(column, most_sequences=column.most_sequences if degrees[k] == own else 0)
                for k, column in enumerate(columns)
            ]

    def tighten(self, k: int, least: int, most: int, limit_s: float) -> int:
        """The most sequences up to `most` for which placement k has a candidate below `limit_s`; `least` − 1 if there
        is none.
        """
        quoted = self._shown.get((k, limit_s), 0)  # there is a candidate for so many
        for n in range(most, max(least, quoted + 1, 1) - 1, -1):
            if any(
                self._candidates.of(self._groups[k], n, global_choices, limit_s)
                for global_choices in self._global_choices
            ):
                self._shown[k, limit_s] = n
                return n
        return max(quoted, least - 1)

    def _usage(self, placement: PipelinePlacement) -> tuple[int, ...]:
        count = Counter(k for stage in placement for group in stage for k in group)
        return tuple(count[k] for k in range(len(self._device_classes.devices)))

    def _total(self, placement: PipelinePlacement) -> tuple[int, ...]:
        """Devices by run of equal machines."""
        used = Counter(self._device_classes.machine_of[k] for stage in placement for group in stage for k in group)
        return tuple(sum(used[m] for m in run) for run in self._device_classes.runs)

    def _images(self, placement: PipelinePlacement) -> list[PipelinePlacement]:
        """The placement on all combinations of equal machines."""
        return list(dict.fromkeys(exchanged(placement, to) for to in self._device_classes.exchanges))

    def assignments(self, choice: ColumnChoice) -> Iterator[DeviceAssignment]:
        """All assignments of the chosen placements to machines, one representative for equal machines."""
        capacity = tuple(map(len, self._device_classes.devices))
        found: list[DeviceAssignment] = [()]
        for k in (k for k, count in choice for _ in range(count)):
            images = [(image, self._usage(image)) for image in self._images(self.placements[k])]
            grown: dict[DeviceAssignment, DeviceAssignment] = {}
            for partial in found:
                taken = [self._usage(placement) for placement in partial]
                for image, usage in images:
                    total = [sum(column) for column in zip(usage, *taken, strict=True)]
                    if all(have <= most for have, most in zip(total, capacity, strict=True)):
                        more = (*partial, image)
                        grown.setdefault(self._device_classes.canonical(more), more)
            found = list(grown.values())
        return iter(found)
