"""What each rank of a pipeline computes, as the lists that torch.distributed.pipelining (2.13) reads from CSV.

torch splits the backward of a stage, not of a layer. Its gradients of weights are one action, until which it holds all
activations of the micro-batch; in this action the first stage, which sends no gradients back, computes the whole
backward (`torch/distributed/pipelining/stage.py`, `_backward.py`). Under these conditions the clock orders the actions
by its rule (`hexiopt/schedules/split.py`). torch adds the messages, each at both ends where it is sent (`schedules.py`,
`_add_send_recv`), so that no rank waits for ever if no action does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, starmap
from typing import NamedTuple

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.sharing import FairShares, StageOrders, links_of, stage_times
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.schedules.graph import pipeline_graph
from hexiopt.schedules.in_flight import largest, stages_in_flight
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.split import ROOM, Footprint, LateWeights
from hexiopt.simulation.engine import Step

FORWARD, OF_INPUT, OF_WEIGHTS = "F", "I", "W"
LETTERS = {OperationKind.FORWARD: FORWARD, OperationKind.BACKWARD: OF_INPUT, OperationKind.WEIGHTS: OF_WEIGHTS}
"""torch's letters of actions."""


class TorchAction(NamedTuple):
    """An action of a virtual stage for a micro-batch."""

    stage: int
    letter: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.micro_batch}"


Lists = tuple[tuple[TorchAction, ...], ...]  # of each rank


@dataclass(frozen=True)
class TorchLists:
    """The lists of a plan's ranks along the pipeline, and when its last pipeline then ends, in seconds by the clock,
    and when in the order of the plan."""

    ranks: Lists
    end_s: float
    planned_s: float

    @property
    def csv(self) -> str:
        """A row of actions for each rank."""
        return "".join([",".join(map(str, actions)) + "\n" for actions in self.ranks])


def torch_lists(plan: Plan, placed: Sequence[PlacedPipeline]) -> TorchLists:
    """The lists of a plan of split backwards whose pipelines are alike, but for their devices; `placed` [pipelines].

    All run the order of the pipeline that ends last, which counts on no more memory than the same stage of another has.
    """
    shares = _shares(placed)
    lines = [_as_torch(pipeline, line, shares) for pipeline, line in zip(plan.pipelines, placed, strict=True)]
    clock = Clock()
    planned_s, ends_s = ([max(times.executor_end_s) for times in clock.times(timed)] for timed in (placed, lines))
    orders = FairShares().orders(lines)[ends_s.index(max(ends_s))]
    ranks = _actions(orders)
    check_lists(ranks, lines[0].num_micro_batches)
    most = max(map(_peak_memory, ranks, _micro_batch_memory(lines[0], shares)))
    assert most <= ROOM, f"ranks hold {most:.3f} of the memory that they have for activations"
    running = {p: stage_times(line) for p, line in enumerate(lines)}
    links = [link for p, line in enumerate(lines) for link in links_of(p, line)]
    spans = Step(running, plan.schedule, links, dict.fromkeys(running, orders)).spans()
    return TorchLists(ranks, max([span.end_s for span in spans]), max(planned_s))


def _shares(placed: Sequence[PlacedPipeline]) -> list[Footprint]:
    """What operations of each stage take of the room of its fullest executor, where a whole stage is put off."""
    of_stage: list[list[Footprint]] = [[] for _ in placed[0].stages]
    for line in placed:
        for stage, late in zip(line.graph.stages, line.graph.split, strict=True):
            of_stage[stage].append(late.shares)
    shares = []
    for executors in of_stage:
        stored = tuple(map(max, zip(*[footprint.stored for footprint in executors], strict=True)))
        working = max([footprint.working for footprint in executors])
        shares.append(Footprint(stored, max(stored), working, max([footprint.extra for footprint in executors])))
    return shares


def _as_torch(pipeline: Pipeline, placed: PlacedPipeline, shares: Sequence[Footprint]) -> PlacedPipeline:
    """The pipeline whose executors put whole layer ranges off; where these are unlike, all take their mean time."""
    graph = placed.graph
    chunk_s, split = [], []
    for s, ranges_s, late in zip(graph.stages, graph.chunk_s, graph.split, strict=True):
        weights_s = [(end - first) * late.weights_s for first, end in pipeline.stages[s].layers]
        if not s:  # the first virtual stage
            weights_s[0] = sum(ranges_s[0][1:])
        chunk_s.append(
            tuple([(f, b + w - late_s, late_s) for (f, b, w), late_s in zip(ranges_s, weights_s, strict=True)])
        )
        split.append(LateWeights((1,) * len(weights_s), sum(weights_s) / len(weights_s), shares[s]))
    fields = graph.schedule, graph.num_stages, graph.num_micro_batches, graph.stages, tuple(chunk_s), graph.links
    return replace(placed, graph=pipeline_graph(*fields, tuple(split)))


def _actions(orders: StageOrders) -> Lists:
    """The actions of each rank, in the order of the operations of its stage."""
    ranks = []
    for stage, order in enumerate(orders):
        actions = [TorchAction(chunk * len(orders) + stage, LETTERS[kind], batch) for kind, chunk, batch in order]
        ranks.append(tuple(actions))
    return tuple(ranks)


def check_lists(ranks: Sequence[Sequence[TorchAction]], num_micro_batches: int) -> None:
    """Assert what torch's own check, which looks at ranks one by one, does not: every virtual stage computes each
    micro-batch once, and ranks that run their lists in order never wait for each other for ever.

    A forward follows that of the stage before, gradients of an input follow the forward and those of the stage behind,
    and gradients of weights these.
    """
    actions = Counter(chain.from_iterable(ranks))
    num_stages = 1 + max(action.stage for action in actions)
    wanted = Counter(starmap(TorchAction, product(range(num_stages), LETTERS.values(), range(num_micro_batches))))
    assert actions == wanted, f"not once each: {', '.join(map(str, (actions - wanted) + (wanted - actions)))}"
    ended, todo = set[TorchAction](), [[*reversed(rank)] for rank in ranks]

    def can_begin(action: TorchAction) -> bool:
        """Whether all has ended that an action takes."""
        stage, letter, batch = action
        if letter == FORWARD:
            return not stage or TorchAction(stage - 1, FORWARD, batch) in ended
        if letter == OF_WEIGHTS:
            return TorchAction(stage, OF_INPUT, batch) in ended
        is_last = stage + 1 == num_stages
        return TorchAction(stage, FORWARD, batch) in ended and (
            is_last or TorchAction(stage + 1, OF_INPUT, batch) in ended
        )

    while any(todo):
        count = len(ended)
        for rank in todo:
            while rank and can_begin(rank[-1]):
                ended.add(rank.pop())
        waiting = [str(rank[-1]) for rank in todo if rank]
        assert len(ended) > count, f"ranks wait for each other for ever: at {', '.join(waiting)}"


def _micro_batch_memory(placed: PlacedPipeline, shares: Sequence[Footprint]) -> list[dict[int, float]]:
    """Of each rank, what a micro-batch takes in each virtual stage, as a share of the memory for activations: its room,
    or what is in flight without split backwards, whichever is more."""
    num_stages, memory = len(shares), []
    in_flight = stages_in_flight(placed.schedule, num_stages, placed.num_micro_batches, len(shares[0].stored))
    for s, (footprint, counts) in enumerate(zip(shares, in_flight, strict=True)):
        stored = footprint.stored
        most = max(1.0, sum([n * share for n, share in zip(largest(counts, stored), stored, strict=True)]))
        memory.append({chunk * num_stages + s: share / most for chunk, share in enumerate(stored)})
    return memory


def _peak_memory(actions: Sequence[TorchAction], stored: dict[int, float]) -> float:
    """The most that a rank holds: of a micro-batch, from its forward to its gradients of weights."""
    held = most = 0.0
    for stage, letter, _ in actions:
        if letter == FORWARD:
            held += stored[stage]
            most = max(most, held)
        elif letter == OF_WEIGHTS:
            held -= stored[stage]
    return most
