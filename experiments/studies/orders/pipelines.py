"""Small pipelines with a GPU a stage, whose operations and messages take whole ticks, and their steps by the clock."""

import random
from dataclasses import dataclass

from hexiopt.cost.clock.clock import Clock
from hexiopt.cost.clock.folding import PipelineLanes
from hexiopt.cost.place import PlacedPipeline
from hexiopt.cost.sharing import FairShares
from hexiopt.plan.messages import executor_links, messages_of
from hexiopt.schedules.graph import pipeline_graph
from hexiopt.schedules.registry import ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.split import Footprint, LateWeights
from hexiopt.simulation.engine import Span, Step, link_of

Ticks = tuple[int, ...]


@dataclass(frozen=True)
class SmallPipeline:
    """`num_micro_batches` through stages that take `forward`, `backward` (of inputs alone) and `weights` (the gradients
    of weights) ticks each [stages]; a message to the next stage takes `ahead`, one to the stage before `back` ticks
    [stages - 1].

    Of its `capacity` a stage takes `activations` for a micro-batch in flight, and `late` for one whose gradients of
    weights are put off [stages]: `late` is at most `activations`, and the micro-batches in flight of 1F1B fit.
    """

    num_micro_batches: int
    forward: Ticks
    backward: Ticks
    weights: Ticks
    ahead: Ticks
    back: Ticks
    capacity: Ticks
    activations: Ticks
    late: Ticks

    def __post_init__(self) -> None:
        assert all(late <= stored for late, stored in zip(self.late, self.activations, strict=True))
        assert all(depth <= self.most_depth(s) for s, depth in enumerate(self.usual_depths)), "1F1B fits"

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def by_stage(self) -> tuple[Ticks, ...]:
        """The fields that have a number for each stage, in their order."""
        return self.forward, self.backward, self.weights, self.capacity, self.activations, self.late

    @property
    def usual_depths(self) -> Ticks:
        """The micro-batches in flight of 1F1B [stages]."""
        return tuple([min(self.num_micro_batches, self.num_stages - s) for s in range(self.num_stages)])

    def most_depth(self, stage: int) -> int:
        """How many micro-batches fit in flight."""
        return min(self.num_micro_batches, self.capacity[stage] // self.activations[stage])


def random_pipeline(rng: random.Random) -> SmallPipeline:
    """2 to 5 stages and 3 to 8 micro-batches. Stages differ up to four times, messages take none of a forward's time or
    as much as the slowest one; room for up to three micro-batches more than 1F1B has in flight."""
    p, m = rng.randint(2, 5), rng.randint(3, 8)
    forward = [rng.randint(10, 40) for _ in range(p)]
    slowest = rng.choice([0, 15, 40])
    activations = [rng.randint(4, 8) for _ in range(p)]
    return SmallPipeline(
        m,
        tuple(forward),
        tuple([round(f * rng.uniform(0.9, 1.4)) for f in forward]),
        tuple([round(f * rng.uniform(0.6, 1.0)) for f in forward]),
        tuple([rng.randint(0, slowest) for _ in range(p - 1)]),
        tuple([rng.randint(0, slowest) for _ in range(p - 1)]),
        tuple([min(m, p - s + rng.randint(0, 3)) * a for s, a in enumerate(activations)]),
        tuple(activations),
        tuple([rng.randint(1, a) for a in activations]),
    )


def sample(count: int, seed: int = 0) -> list[SmallPipeline]:
    """So many random pipelines: of a longer sample, the first ones."""
    rng = random.Random(seed)
    return [random_pipeline(rng) for _ in range(count)]


def _place(pipeline: SmallPipeline, split: bool, depths: Ticks | None) -> PlacedPipeline:
    """The pipeline in our order: 1F1B with `depths` micro-batches in flight, by default its own."""
    depths, p = depths or pipeline.usual_depths, pipeline.num_stages
    assert all(1 <= depth <= pipeline.most_depth(s) for s, depth in enumerate(depths)), f"depths {depths} do not fit"
    assert list(depths) == sorted(depths, reverse=True), f"depths {depths} rise, so that stages wait for ever"
    schedule = SPLIT_SCHEDULES[0] if split else ONE_F_ONE_B
    chunk_s, late = [], []
    for f, b, w, capacity, a, q in zip(*pipeline.by_stage, strict=True):
        chunk_s.append(((float(f), float(b), float(w)) if split else (float(f), float(b + w)),))
        late.append(LateWeights((1,), float(w), Footprint((a / capacity,), q / capacity, 0.0, 0.0)))
    samples = ((1,),) * p
    links = executor_links(samples, wraps=False)
    message_s = [
        float(pipeline.back[receiver] if backward else pipeline.ahead[sender]) for backward, sender, receiver in links
    ]
    shape = schedule, p, pipeline.num_micro_batches, tuple(range(p))
    graph = pipeline_graph(*shape, tuple(chunk_s), links, tuple(late) if split else (), depths)
    lanes = PipelineLanes.constant(message_s)
    return PlacedPipeline(schedule, pipeline.num_micro_batches, (), (), messages_of(samples, wraps=False), lanes, graph)


def clock_ticks(pipeline: SmallPipeline, split: bool, depths: Ticks | None = None) -> float:
    """When the last operation of a step in our order ends, by the clock.

    1F1B with `depths` micro-batches in flight [stages], by default its own; where backwards are `split`, gradients of
    weights, all of a micro-batch at once, are placed by the clock's rule.
    """
    (times,) = Clock().times([_place(pipeline, split, depths)])
    return max(times.executor_end_s)


def clock_spans(pipeline: SmallPipeline, split: bool, depths: Ticks | None = None) -> list[Span]:
    """The operations and messages of the same step, in ticks."""
    placed = _place(pipeline, split, depths)
    lanes = zip(placed.plain_messages, placed.lanes.by_message(), strict=True)
    links = [link_of(0, message, lane.fixed_s, pipeline.num_stages) for message, lane in lanes]
    running = {0: [(times,) for times in placed.graph.operation_s()]}
    return list(Step(running, placed.schedule, links, dict(enumerate(FairShares().orders([placed])))).spans())
