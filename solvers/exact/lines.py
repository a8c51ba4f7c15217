"""Lines of TP groups as columns of the CP-SAT model: the most sequences of a pipeline on each within a step time.

What a line may process is bounded at once (`line_bounds.py`), for the devices that it leaves must process the rest. It
is tightened to what it can process, with a candidate to show for it (`solvers/exact/candidates.py`), when
it is first chosen.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.space import recompute_policies, schedules, sharding_stages
from solvers.exact.assignments import DeviceAssignment, DeviceClasses, Line, exchanged
from solvers.exact.candidates import Candidates
from solvers.exact.line_bounds import Context, LineFloor, Sync
from solvers.exact.packing import Choice, Column, Limits, most_together
from solvers.exact.sample_allocation import Frame

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """Plans that are looked for together: how many pipelines at most, whether in lockstep (from ZeRO-2 on)."""

    alone: bool
    lockstep: bool


class Lines:
    """The lines of a problem."""

    def __init__(self, model: PlanPricer, seats: DeviceClasses, candidates: Candidates, floor: LineFloor) -> None:
        problem = model.problem
        self._problem, self._seats, self._candidates, self._floor = problem, seats, candidates, floor
        single = DeviceClasses.of(replace(problem, space=replace(problem.space, num_pipelines=1)))
        self.lines: list[Line] = [found[0] for found in single.arrangements()]
        self._groups = [seats.name((line,))[0] for line in self.lines]
        self._usages = [tuple(dict.fromkeys(map(self._usage, self._images(line)))) for line in self.lines]
        self._shown: dict[tuple[int, float], int] = {}

    @cached_property
    def _frames(self) -> list[Frame]:
        """What may be chosen for all pipelines, memory as lean as it gets."""
        problem, workload = self._problem, self._problem.workload
        policies = recompute_policies(workload)
        sets = [policies] if problem.space.recompute_per_stage else [(policy,) for policy in policies]
        stages, devices = sharding_stages(workload), len(problem.usable_devices)
        found = []
        for schedule, chosen in product(schedules(workload), sets):
            # Lockstep is for schedules of one layer range.
            allowed = [stage for stage in stages if stage < 2 or schedule.lockstep]
            if allowed:
                found.append(Frame(schedule, chosen, allowed[-1], devices if allowed[-1] else 1))
        return found

    def kinds(self) -> list[Kind]:
        """All kinds of plans that the problem allows."""
        stages, asked = sharding_stages(self._problem.workload), self._problem.space.num_pipelines
        several = asked != 1 and min(len(self._problem.usable_devices), self._problem.workload.global_batch) > 1
        return [
            Kind(alone, lockstep)
            for lockstep in (False, True)
            if any((stage >= 2) == lockstep for stage in stages)
            for alone in (True, False)
            if (asked in (None, 1) if alone else several)
        ]

    def limits(self, kind: Kind) -> Limits:
        """What a plan of a kind must keep, devices by seat."""
        problem, asked = self._problem, self._problem.space.num_pipelines
        most = 1 if kind.alone else min(len(problem.usable_devices), problem.workload.global_batch)
        least = 1 if kind.alone else 2
        return Limits(
            tuple(map(len, self._seats.devices)), problem.workload.global_batch, asked or most, asked or least
        )

    def columns(self, kind: Kind, limit_s: float, go_on: Callable[[], bool]) -> list[Column] | None:
        """A column for each line, in their order, of plans of less than `limit_s`; None where `go_on` says to stop."""
        batch = self._problem.workload.global_batch
        capacity = np.array([sum(len(self._problem.usable_by_machine[m]) for m in run) for run in self._seats.runs])
        box = np.full(tuple(capacity + 1), batch)  # what is known of one pipeline, by devices of each run of machines
        box[(0,) * box.ndim] = 0
        most = [0] * len(self.lines)
        total_of = [self._total(line) for line in self.lines]
        order = sorted(range(len(self.lines)), key=lambda k: (sum(total_of[k]), total_of[k]))
        for total, own in groupby(order, key=total_of.__getitem__):
            others = 0 if kind.alone else int(most_together(box)[tuple(capacity - total)])
            least, best = max(1, batch - others), 0
            for k in own:
                if not go_on():
                    return None
                if not kind.lockstep or self._even(k):
                    most[k] = self._floor.most_sequences(self._groups[k], self._context(kind, k), least, batch, limit_s)
                    best = max(best, most[k])
            # Whoever processes fewer has no part in a plan.
            box[total] = max(best, least - 1)
        return [Column(usages, n) for usages, n in zip(self._usages, most, strict=True)]

    def _context(self, kind: Kind, k: int) -> Context:
        """What is known of plans of a kind with line k."""
        stages = [stage for stage in sharding_stages(self._problem.workload) if (stage >= 2) == kind.lockstep]
        holders = max(map(len, self.lines[k])) if kind.alone else len(self._problem.usable_devices)
        sync = Sync.REPLICATED if kind.alone else Sync.ALL
        return Context(sync, StateSharding(stages[-1], holders), kind.lockstep)

    def _even(self, k: int) -> bool:
        """Whether the replicas of each stage have one TP degree."""
        return all(len({len(slot) for slot in stage}) == 1 for stage in self.lines[k])

    def programs(self, kind: Kind, columns: Sequence[Column]) -> Iterator[list[Column]]:
        """Columns that can go together, the others empty: in lockstep, those of equal TP degrees stage by stage."""
        if not kind.lockstep or kind.alone:
            yield list(columns)
            return
        degrees = [tuple(len(stage[0]) for stage in line) for line in self.lines]
        for own in sorted({degrees[k] for k, column in enumerate(columns) if column.most_sequences}):
            yield [
                replace(column, most_sequences=column.most_sequences if degrees[k] == own else 0)
                for k, column in enumerate(columns)
            ]

    def tighten(self, k: int, least: int, most: int, limit_s: float) -> int:
        """The most sequences up to `most` for which line k has a candidate of less than `limit_s`, or `least` − 1."""
        quoted = self._shown.get((k, limit_s), 0)  # there is a candidate for so many
        for n in range(most, max(least, quoted + 1, 1) - 1, -1):
            if any(self._candidates.of(self._groups[k], n, frame, limit_s) for frame in self._frames):
                self._shown[k, limit_s] = n
                return n
        return max(quoted, least - 1)

    def _usage(self, line: Line) -> tuple[int, ...]:
        count = Counter(k for stage in line for slot in stage for k in slot)
        return tuple(count[k] for k in range(len(self._seats.devices)))

    def _total(self, line: Line) -> tuple[int, ...]:
        """Devices by run of equal machines."""
        used = Counter(self._seats.machine_of[k] for stage in line for slot in stage for k in slot)
        return tuple(sum(used[m] for m in run) for run in self._seats.runs)

    def _images(self, line: Line) -> list[Line]:
        """The line on all equal machines."""
        return list(dict.fromkeys(exchanged(line, to) for to in self._seats.exchanges))

    def arrangements(self, choice: Choice) -> Iterator[DeviceAssignment]:
        """All ways to lay the chosen lines on machines, once for all names of equal ones."""
        capacity = tuple(map(len, self._seats.devices))
        found: list[DeviceAssignment] = [()]
        for k in (k for k, count in choice for _ in range(count)):
            images = [(image, self._usage(image)) for image in self._images(self.lines[k])]
            grown: dict[DeviceAssignment, DeviceAssignment] = {}
            for partial in found:
                taken = [self._usage(line) for line in partial]
                for image, usage in images:
                    total = [sum(column) for column in zip(usage, *taken, strict=True)]
                    if all(have <= most for have, most in zip(total, capacity, strict=True)):
                        more = (*partial, image)
                        grown.setdefault(self._seats.canonical(more), more)
            found = list(grown.values())
        return iter(found)
