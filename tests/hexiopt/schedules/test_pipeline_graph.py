"""The recurrence of replicas and layer ranges: against rational arithmetic, the event simulation, published bubbles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.executor import ExecutorCost, ParameterCopy
from hexiopt.cost.executors.memory import MEMORY_PARTS, Memory
from hexiopt.errors import InputError
from hexiopt.plan.messages import Message
from hexiopt.plan.parallelism import Replica, TensorParallel
from hexiopt.plan.plan import Pipeline, Stage
from hexiopt.schedules.gpipe import GPipe
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from hexiopt.schedules.schedule import Programme, Schedule, StagePosition, operations, positions, stage_orders
from hexiopt.simulation.engine import Step, link_of
from tests.hexiopt.schedules.test_chain_graph import COUNTS, HOPS, SECONDS, Times, step_times
from tests.stated_pipelines import Executor, ExecutorLink, chain_ends_s, executor_ends_s
from tests.strategies import compositions

NOTHING = Memory(*[0.0] * len(MEMORY_PARTS))


def exact_ends(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    executors: Sequence[Executor],
    links: Sequence[ExecutorLink],
) -> list[Fraction]:
    """When each executor ends, operation by operation in rational arithmetic, nothing skipped."""
    chunks = len(executors[0].chunk_s)
    last = num_stages * chunks - 1
    left = [operations(schedule, StagePosition(e.stage, num_stages, num_micro_batches, chunks)) for e in executors]
    for order in left:
        order.reverse()
    busy, free = [Fraction(0)] * len(executors), [Fraction(0)] * len(links)
    came: dict[tuple[int, int, int], Fraction] = {}  # by link, receiving virtual stage and micro-batch
    while any(left):
        before = sum(map(len, left))
        for e, executor in enumerate(executors):
            while left[e]:
                operation = left[e][-1]
                backward, virtual = operation.backward, operation.chunk * num_stages + executor.stage
                comes = [
                    (k, virtual, operation.micro_batch)
                    for k, link in enumerate(links)
                    if (link.receiver, link.backward) == (e, backward) and virtual != (last if backward else 0)
                ]
                if not all(message in came for message in comes):
                    break
                seconds = Fraction(executor.chunk_s[operation.chunk][backward])
                busy[e] = max([busy[e], *(came[message] for message in comes)]) + seconds
                for k, link in enumerate(links):
                    if (link.sender, link.backward) == (e, backward) and virtual != (0 if backward else last):
                        free[k] = max(busy[e], free[k]) + Fraction(link.seconds)
                        came[k, virtual + (-1 if backward else 1), operation.micro_batch] = free[k]
                left[e].pop()
        assert sum(map(len, left)) < before
    return busy


class LinkCost(NamedTuple):
    """Seconds of the messages from one executor to another, as of `Message`."""

    backward: bool
    stage: int
    sender: int
    receiver: int
    seconds: float


def executor_cost(*chunk_s: tuple[float, float]) -> ExecutorCost:
    return ExecutorCost(chunk_s, (ParameterCopy(NOTHING, 0.0, 0.0),))


@dataclass(frozen=True)
class Case:
    """A pipeline of any replicas and ranges, the times of its replicas, and of its messages."""

    schedule: Schedule
    pipeline: Pipeline
    stages: tuple[StageCost, ...]
    links: tuple[LinkCost, ...]

    def ends(self) -> list[float]:
        """When each replica ends, stage by stage."""
        return list(executor_ends_s(*self.graph()))

    def graph(self) -> tuple[Schedule, int, int, tuple[Executor, ...], tuple[ExecutorLink, ...]]:
        """What the recurrence takes."""
        first = [0, *accumulate(len(stage.executors) for stage in self.stages)]
        count = len(self.stages)
        links = [
            ExecutorLink(
                link.backward,
                first[link.stage] + link.sender,
                first[(link.stage - 1 if link.backward else link.stage + 1) % count] + link.receiver,
                link.seconds,
            )
            for link in self.links
        ]
        executors = tuple(
            Executor(s, executor.chunk_s) for s, stage in enumerate(self.stages) for executor in stage.executors
        )
        return self.schedule, count, self.pipeline.num_micro_batches, executors, tuple(links)

    def simulate(self) -> list[float]:
        """The same in the event simulation."""
        ends = {
            (s, r): 0.0 for s, stage in enumerate(self.pipeline.stages) for r in range(len(stage.parallelism.replicas))
        }
        messages = tuple(Message(*link[:4], samples=1) for link in self.links)
        links = [
            link_of(0, message, link.seconds, len(self.stages))
            for message, link in zip(messages, self.links, strict=True)
        ]
        running = {0: [tuple([executor.chunk_s for executor in stage.executors]) for stage in self.stages]}
        places = positions(len(self.stages), self.pipeline.num_micro_batches, self.pipeline.num_chunks)
        for span in Step(running, self.schedule, links, {0: stage_orders(self.schedule, places)}).spans():
            if not span.is_message:
                ends[span.stage, span.executor] = span.end_s
        return list(ends.values())


@st.composite
def cases(draw: st.DrawFn, routes: st.SearchStrategy[float] = HOPS, *, round_times: bool = False) -> Case:
    """Any schedule; up to five stages of three replicas; up to three ranges where the schedule is interleaved."""
    schedule = draw(st.sampled_from((GPIPE, ONE_F_ONE_B, INTERLEAVED, INTERLEAVED)))
    count = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3)) if schedule == INTERLEAVED and count > 1 else 1
    batches = draw(COUNTS)
    if chunks > 1:
        batches = count * -(-batches // count)
    size = draw(st.integers(1, 4))
    samples = [draw(compositions(size, draw(st.integers(1, min(3, size))))) for _ in range(count)]
    seconds = st.sampled_from((0.5, 1.0, 3.0))
    if not round_times and draw(st.booleans()):
        seconds = SECONDS

    def draw_executor() -> ExecutorCost:
        return executor_cost(*((draw(seconds), draw(seconds)) for _ in range(chunks)))

    stages, links = [], []
    for s, stage_samples in enumerate(samples):
        stages.append(StageCost(tuple(draw_executor() for _ in stage_samples)))
        t = (s + 1) % count
        if count == 1 or (t == 0 and chunks == 1):
            continue
        mine, theirs = ([set(range(*ends)) for ends in pairwise(accumulate(samples[k], initial=0))] for k in (s, t))
        for a, some in enumerate(mine):
            for b, others in enumerate(theirs):
                if some & others:
                    links += [LinkCost(False, s, a, b, draw(routes)), LinkCost(True, t, b, a, draw(routes))]
    pipeline = Pipeline(
        tuple(
            Stage.of_replicas(
                tuple(Replica((s,), n) for n in counts),
                tuple((c * count + s, c * count + s + 1) for c in range(chunks)),
            )
            for s, counts in enumerate(samples)
        ),
        batches,
        size,
    )
    return Case(schedule, pipeline, tuple(stages), tuple(links))


@given(case=cases())
def test_every_replica_ends_when_the_event_simulation_says(case: Case) -> None:
    assert case.ends() == pytest.approx(case.simulate(), rel=1e-9, abs=1e-300)


DRIFTING = st.sampled_from((1.0, 1.001, 0.999, 0.25))  # executors that fall behind each other, slowly


@settings(max_examples=60)
@given(case=cases(DRIFTING, round_times=True) | cases(DRIFTING), turns=st.integers(1, 60))
def test_every_replica_ends_when_rational_arithmetic_says(case: Case, turns: int) -> None:
    """Of many micro-batches: rounding grows by one unit in the last place for each operation, at most."""
    pipeline = replace(case.pipeline, num_micro_batches=turns * len(case.stages))
    graph = replace(case, pipeline=pipeline).graph()
    exact = exact_ends(*graph)
    assert max(abs(Fraction(a) - b) for a, b in zip(executor_ends_s(*graph), exact, strict=True)) <= 1e-12 * max(exact)


def test_an_order_that_waits_for_itself_is_refused() -> None:
    """The first stage wants its backwards first; they come when its forwards have been through the second."""

    @dataclass(frozen=True)
    class Backwards(GPipe):
        name: ClassVar[str] = "backwards"

        def programme(self, at: StagePosition) -> Programme:
            return super().programme(at)[:: -1 if at.first else 1]

    with pytest.raises(InputError, match="schedule backwards: operations wait for each other"):
        chain_ends_s(Backwards(), [1.0, 1.0], [1.0, 1.0], [0.0], [0.0], 4)


def chain(times: Times) -> tuple[tuple[Executor, ...], tuple[ExecutorLink, ...]]:
    """The graph of a plain pipeline."""
    forward, backward, ahead, back = times
    executors = [Executor(s, (pair,)) for s, pair in enumerate(zip(forward, backward, strict=True))]
    links = [ExecutorLink(False, s, s + 1, seconds) for s, seconds in enumerate(ahead)]
    links += [ExecutorLink(True, s + 1, s, seconds) for s, seconds in enumerate(back)]
    return tuple(executors), tuple(links)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@given(times=step_times(), num_micro_batches=COUNTS)
@example(times=([1.0] * 10, [2.0] * 10, [0.0] * 9, [0.0] * 9), num_micro_batches=400)
def test_a_chain_is_a_graph(schedule: Schedule, times: Times, num_micro_batches: int) -> None:
    executors, links = chain(times)
    ends = executor_ends_s(schedule, len(executors), num_micro_batches, executors, links)
    assert ends == chain_ends_s(schedule, *times, num_micro_batches)


def test_a_time_too_small_to_count_is_none() -> None:
    executors, links = chain(([1.0, 1.0], [2.0, 2.0], [5e-324], [0.0]))
    assert executor_ends_s(ONE_F_ONE_B, 2, 8, executors, links) == (27.0, 25.0)


def ring(num_stages: int, num_chunks: int, forward_s: float, backward_s: float, message_s: float = 0.0) -> Case:
    """Equal interleaved stages whose micro-batches take `forward_s` and `backward_s` in all ranges together."""
    times = ((forward_s / num_chunks, backward_s / num_chunks),) * num_chunks
    stage = StageCost((executor_cost(*times),))
    links = []
    for s in range(num_stages):
        t = (s + 1) % num_stages
        links += [LinkCost(False, s, 0, 0, message_s), LinkCost(True, t, 0, 0, message_s)]
    ranges = [tuple((c * num_stages + s, c * num_stages + s + 1) for c in range(num_chunks)) for s in range(num_stages)]
    pipeline = Pipeline(tuple(Stage(TensorParallel((s,)), ranges[s]) for s in range(num_stages)), num_stages)
    return Case(INTERLEAVED, pipeline, (stage,) * num_stages, tuple(links))


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 2), (2, 3), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_interleaving_divides_the_bubble(num_stages: int, num_chunks: int, turns: int) -> None:
    """Narayanan et al. (arXiv 2104.04473, section 2.2.2): m·(f+b) and a bubble of (p−1)·(f+b)/v."""
    case, batches = ring(num_stages, num_chunks, 2.0, 4.0), turns * num_stages
    executors = [Executor(s, stage.chunk_s) for s, stage in enumerate(case.stages)]
    links = [
        ExecutorLink(link.backward, link.stage, (link.stage + (-1 if link.backward else 1)) % num_stages, 0.0)
        for link in case.links
    ]
    ends = executor_ends_s(INTERLEAVED, num_stages, batches, tuple(executors), tuple(links))
    assert max(ends) == pytest.approx(6.0 * (batches + (num_stages - 1) / num_chunks))


# ------------------------------------------------------------------ many micro-batches


@given(case=cases(st.sampled_from((0.0, 0.25, 2.0)), round_times=True))
def test_many_micro_batches_repeat(case: Case) -> None:
    """From some number of micro-batches on, a whole period more takes the same time more (round times: soon)."""
    if case.schedule == GPIPE:
        return
    period = 840 * len(case.stages)  # whole cycles of up to eight executors

    def ends(periods: int, more: int) -> list[float]:
        batches = periods * period + more * len(case.stages)
        pipeline = Pipeline(case.pipeline.stages, batches, case.pipeline.micro_batch_size)
        return Case(case.schedule, pipeline, case.stages, case.links).ends()

    near, middle, far = ends(1, 100), ends(2, 100), ends(5, 100)
    expected = [a + 4 * (b - a) for a, b in zip(near, middle, strict=True)]
    assert far == pytest.approx(expected, rel=1e-9)
