"""Split backwards: the clock's orders are those of another event simulation with the same rule; memory follows them."""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.cost.cost import PipelineCost, violations
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares, StageOrders, links_of, stage_times
from hexiopt.errors import InputError
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules
from hexiopt.problem.workload import Workload
from hexiopt.schedules.graph import pipeline_graph
from hexiopt.schedules.in_flight import stages_in_flight
from hexiopt.schedules.operation import Operation, OperationKind
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule, stage_orders
from hexiopt.schedules.split import ROOM, SAME, Footprint, LateWeights
from hexiopt.simulation.engine import ExecutorId, Span, Step
from hexiopt.solving import Budget
from solvers.proof.gaps import is_provable, not_covered
from solvers.registry import make_solver
from tests.hexiopt.cost.test_sequence_plans import PROBLEM as SEQUENCES
from tests.solvers import problems
from tests.strategies import problems_with_plans, roomy_problems_with_plans

ZB, ZB_INTERLEAVED = SPLIT_SCHEDULES
UNSPLIT: dict[Schedule, Schedule] = {ZB: ONE_F_ONE_B, ZB_INTERLEAVED: INTERLEAVED}
Ends = dict[ExecutorId, float]


class Chosen(Step):
    """The event simulation, whose executors choose by the rule; it knows nothing of the clock."""

    def __init__(self, placed: Sequence[PlacedPipeline]) -> None:
        running = {p: stage_times(line) for p, line in enumerate(placed)}
        links = [link for p, line in enumerate(placed) for link in links_of(p, line)]
        whole = {p: stage_orders(line.schedule, line.graph.positions()) for p, line in enumerate(placed)}
        super().__init__(running, placed[0].schedule, links, whole)
        self._split = {
            place: split
            for p, line in enumerate(placed)
            for place, split in zip([at for at in self._todo if at[0] == p], line.graph.split, strict=True)
        }
        self._due = dict.fromkeys(self._todo)
        self._put_off = {place: deque[Operation]() for place in self._todo}
        self._in_flight = {place: Counter[int]() for place in self._todo}

    def spans(self) -> Iterator[Span]:
        """As of `Step`: decisions are taken when all else at a time is over."""
        while True:
            first = min(self._moving, key=lambda link: link.arrival_s, default=None)
            arrival_s = inf if first is None else first.arrival_s
            event_s = self._events[0][0] if self._events else inf
            if self._due and min(arrival_s, event_s) > self._now * (1 + SAME):
                due, self._due = sorted(self._due), {}
                for place in due:
                    self._choose(place)
            elif first is not None and arrival_s <= event_s:
                self._now = arrival_s
                self._leave(first)
                yield self._arrive(first)
            elif self._events:
                time_s, _, what = heapq.heappop(self._events)
                self._now = time_s
                if isinstance(what, Span):
                    yield what
                    if what.kind == "backward":
                        place, operation = (what.pipeline, what.stage, what.executor), OperationKind.WEIGHTS
                        late = Operation(operation, what.chunk, what.micro_batch)
                        self._put_off[place].extend([late] * self._split[place].layers[what.chunk])
                    self._end(what)
                elif what.needs:
                    self._join(what)
                else:
                    yield self._arrive(what)
            else:
                return

    def _begin(self, place: ExecutorId) -> None:
        self._due[place] = None

    def _choose(self, place: ExecutorId) -> None:
        if place in self._running:
            return
        late, todo, held, split = self._put_off[place], self._todo[place], self._in_flight[place], self._split[place]
        if todo:
            kind, chunk, _ = todo[-1]
            then, room = held + Counter(), split.shares
            now = sum(n * room.stored[c] for c, n in held.items()) + len(late) * room.layer
            if kind is OperationKind.FORWARD:
                then[chunk] += 1
                taken = now + room.stored[chunk]
            else:
                then[chunk] -= 1
                ended = now - room.stored[chunk] + split.layers[chunk] * room.layer
                taken = max(now + room.working, ended + (room.extra if split.layers[chunk] else room.working))
            if taken <= ROOM or not late:
                super()._begin(place)
                if place in self._running:
                    self._in_flight[place] = then
        if late and place not in self._running:
            todo.append(late.popleft())
            super()._begin(place)


def choose_orders(placed: Sequence[PlacedPipeline]) -> tuple[Ends, dict[int, StageOrders]]:
    """When executors end, and what the stages run, replicas as the first one does."""
    ends, orders = run_step(Chosen(placed))
    agreed = {p: tuple(tuple(orders[p, s, 0]) for s in range(len(line.stages))) for p, line in enumerate(placed)}
    if all(tuple(order) == agreed[p][s] for (p, s, _), order in orders.items()):
        return ends, agreed
    running = {p: stage_times(line) for p, line in enumerate(placed)}
    links = [link for p, line in enumerate(placed) for link in links_of(p, line)]
    return run_step(Step(running, placed[0].schedule, links, agreed))[0], agreed


def run_step(step: Step) -> tuple[Ends, dict[ExecutorId, list[Operation]]]:
    """When executors end, and what each has run."""
    ends: Ends = {}
    orders: dict[ExecutorId, list[Operation]] = {}
    for span in step.spans():
        if not span.is_message:
            place = span.pipeline, span.stage, span.executor
            ends[place] = span.end_s
            operation = Operation(OperationKind(span.kind), span.chunk, span.micro_batch)  # type: ignore[call-arg]
            orders.setdefault(place, []).append(operation)
    return ends, orders


def ends_of(pipelines: Sequence[PipelineCost]) -> Ends:
    return {
        (p, s, r): end_s
        for p, pipeline in enumerate(pipelines)
        for s, ends in enumerate(pipeline.replica_end_s)
        for r, end_s in enumerate(ends)
    }


def split_plan(plan: Plan) -> Plan:
    """`plan` under a schedule whose backwards are split."""
    assume(plan.sharding.stage < 2)
    chunked = any(pipeline.num_chunks > 1 for pipeline in plan.pipelines)
    return replace(plan, schedule=ZB_INTERLEAVED if chunked else ZB)


def tight(placed: PlacedPipeline, most: float, late: float, working: float) -> PlacedPipeline:
    """The pipeline whose micro-batches in flight take at most so much of the room, and so much each layer that is put
    off, and one that is recomputed."""
    graph, counts = placed.graph, stages_in_flight(placed.schedule, len(placed.stages), placed.num_micro_batches, 1)
    if len(graph.chunk_s[0]) > 1:
        return placed
    split = tuple(
        stage_split._replace(shares=Footprint((most / counts[stage][0][0],), late, working, 0.5 * working))
        for stage, stage_split in zip(graph.stages, graph.split, strict=True)
    )
    fields = graph.schedule, graph.num_stages, graph.num_micro_batches, graph.stages, graph.chunk_s, graph.links
    return replace(placed, graph=pipeline_graph(*fields, split))


@given(
    pair=problems_with_plans(max_batch=20) | roomy_problems_with_plans(),
    shares=st.none() | st.tuples(st.floats(0.3, 1.1), st.floats(0.01, 0.5), st.floats(0.0, 0.5)),
)
def test_the_clock_chooses_as_the_event_simulation(
    pair: tuple[Problem, Plan], shares: tuple[float, float, float] | None
) -> None:
    """Also where room is short: what is put off must then make room for what comes."""
    problem, plan = pair
    placed, network = PlanPricer(problem).place_pipelines(split_plan(plan)), FairShares()
    if shares is not None:
        placed = [tight(line, *shares) for line in placed]
    ends, orders = choose_orders(placed)
    assert dict(enumerate(network.orders(placed))) == orders
    assert ends_of(network(placed)) == pytest.approx(ends, rel=1e-9)
    for p, priced in enumerate(network(placed)):
        drawn = {(p, s.stage, s.executor): s.end_s for s in network.spans(p, placed, ()) if not s.is_message}
        assert [drawn[at] for at in sorted(drawn)] == pytest.approx(list(priced.executor_end_s), rel=1e-9)


@given(pair=problems_with_plans(max_batch=20) | roomy_problems_with_plans())
def test_a_plan_that_fits_whole_fits_split_and_takes_no_more_work(pair: tuple[Problem, Plan]) -> None:
    """Memory is what the order holds at most, operation by operation; seconds of backwards are only divided."""
    problem, plan = pair
    plan, model = split_plan(plan), PlanPricer(problem)
    cost, usual = model.price(plan), model.price(replace(plan, schedule=UNSPLIT[plan.schedule]))
    assert cost.fits or not usual.fits
    for placed, priced, before, orders in zip(
        model.place_pipelines(plan), cost.pipelines, usual.pipelines, model.orders(plan), strict=True
    ):
        splits = iter(placed.graph.split)
        for stage, was, order in zip(priced.stages, before.stages, orders, strict=True):
            for executor, whole in zip(stage.executors, was.executors, strict=True):
                assert sum(map(sum, executor.chunk_s)) == pytest.approx(sum(map(sum, whole.chunk_s)))
                assert min(map(min, executor.chunk_s)) >= 0.0
                more = executor.memory.activations - whole.memory.activations
                assert more == pytest.approx(late_bytes(executor, next(splits), order), abs=1e-6 * whole.memory.total)


def late_bytes(executor: ExecutorCost, split: LateWeights, order: Sequence[Operation]) -> float:
    """By how much more an executor holds at most than it would if nothing were put off."""
    held = executor.footprint
    stored = late = most = most_stored = 0.0
    for kind, chunk, _ in order:
        match kind:
            case OperationKind.FORWARD:
                stored += held.stored[chunk]
                most, most_stored = max(most, stored + late), max(most_stored, stored)
            case OperationKind.BACKWARD:
                most = max(most, stored + late + held.working)
                most_stored = max(most_stored, stored + held.working)
                stored -= held.stored[chunk]
                late += split.layers[chunk] * held.layer
                most_stored = max(most_stored, stored + held.working)
                most = max(most, stored + late + (held.extra if split.layers[chunk] else held.working))
            case _:
                late -= held.layer
    assert late == pytest.approx(0.0, abs=1e-6 * most)
    return most - most_stored


def two_stages(num_micro_batches: int, memory_gib: float = 64.0) -> tuple[PlanPricer, Plan]:
    """A pipeline over two machines, whose first stage waits in every step."""
    base = problems.easy()
    problem = replace(
        base,
        cluster=problems.cluster(("a", "fast", 1), ("b", "fast", 1), fast_gib=memory_gib),
        workload=replace(base.workload, global_batch=num_micro_batches),
    )
    count = base.model.num_layers
    stages = Stage.of((0,), 0, count // 2), Stage.of((1,), count // 2, count)
    return PlanPricer(problem), Plan((Pipeline(stages, num_micro_batches),), ZB)


def test_weights_fill_what_would_be_idle() -> None:
    """The first stage of two waits for its first backward and puts nothing off yet; at the end it has no choice; in
    between, the gradients of weights stand where it waited, and the step is shorter by what was idle."""
    model, plan = two_stages(4)
    cost, usual = model.price(plan), model.price(replace(plan, schedule=ONE_F_ONE_B))
    ((first, last),) = model.orders(plan)
    letters = ["".join(operation.kind.letter for operation in order) for order in (first, last)]
    layers = model.problem.model.num_layers // 2
    assert letters[0].replace("W" * layers, "W")[:3] == "FFB"
    assert letters[1].startswith("FBFB"), "the last stage sends gradients back before it computes those of weights"
    assert letters[0].endswith("B" + "W" * layers)
    assert all(stage_letters.count("W") == 4 * layers for stage_letters in letters)
    assert cost.step_time_s < usual.step_time_s


def test_stages_with_sequence_layouts_stay_whole() -> None:
    """So that a plan of nothing else takes as long as under 1F1B, and holds as much."""
    layout = SequenceParallel((SequenceGroup((0, 1), (20, 12), (6, 2)), SequenceGroup((4,), (32,), (8,))), "zigzag")
    plan = Plan((Pipeline((Stage(layout, ((0, 3),), ("selective",)),), 4),))
    for network in (None, FairShares()):
        model = PlanPricer(SEQUENCES, network=network)
        usual, split = model.price(plan), model.price(replace(plan, schedule=ZB))
        assert split.step_time_s == pytest.approx(usual.step_time_s)
        assert split.tensor_bytes == usual.tensor_bytes


def test_what_is_not_split_is_refused_in_one_line() -> None:
    """ZeRO-2 and 3 scatter gradients with every backward; several ranges a stage take the other schedule."""
    _, plan = two_stages(4)
    with pytest.raises(InputError, match="ZeRO-2 under the zb schedule"):
        replace(plan, sharding=Sharding(2))
    stages = tuple(
        replace(stage, layers=((s, s + 1), (s + 2, s + 3))) for s, stage in enumerate(plan.pipelines[0].stages)
    )
    with pytest.raises(InputError, match="several layer ranges a stage under zb"):
        Plan((Pipeline(stages, 4),), ZB)


def test_no_oracle_proves_split_backwards() -> None:
    """Where they are named; where they are one choice of several, what is proved leaves them out in words."""
    model, _ = two_stages(4)
    problem = replace(model.problem, workload=replace(model.problem.workload, schedule="zb"))
    assert not is_provable(PlanPricer(problem))
    either = replace(problem, workload=Workload(4), space=replace(problem.space, split_backward=True))
    assert "the zb schedule (workload.schedule=1f1b)" in not_covered(either)
    with pytest.raises(InputError, match="proves nothing about the zb schedule"):
        make_solver("exact").solve(problem, Budget(1.0))


@pytest.mark.parametrize("name", sorted(set(TRAINERS) - {"hexiopt", "torchtitan"}))
def test_no_other_trainer_is_given_such_plans(name: str) -> None:
    """Only torchtitan takes lists of operations: the others refuse, in a line."""
    _, plan = two_stages(4)
    problem = Problem(hx.Cluster.of({"rtx_4090": 2}), hx.model("llama2_7b"), Workload(4, schedule="zb"))
    half = problem.model.num_layers // 2
    stages = Stage.of((0,), 0, half), Stage.of((1,), half, 2 * half)
    with pytest.raises(InputError, match=f"^export.format: {name} cannot express the plan: [^\n]*$"):
        TRAINERS[name].write(problem, replace(plan, pipelines=(Pipeline(stages, 4),)))


def test_only_problems_that_name_one_have_such_plans() -> None:
    """Bounds and proofs speak of all plans of a problem that leaves the schedule open."""
    model, plan = two_stages(4)
    assert not set(SPLIT_SCHEDULES) & set(schedules(model.problem.workload))
    assert [violation.rule for violation in violations(model.problem, plan, model.price(plan))] == ["schedule"]
    named = replace(model.problem, workload=replace(model.problem.workload, schedule="zb"))
    assert violations(named, plan, model.price(plan)) == []


def test_a_search_finds_plans_of_a_schedule_that_is_named() -> None:
    problem = problems.easy()
    problem = replace(problem, workload=replace(problem.workload, schedule="zb"))
    result = make_solver("portfolio").solve(problem, Budget(60.0, 60), seed=0)
    assert result.plan is not None
    assert result.cost is not None
    assert result.plan.schedule == ZB
    assert violations(problem, result.plan, result.cost) == []
