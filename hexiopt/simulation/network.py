"""A finer simulation of one training step: messages share the network while they are under way.

The cost model lets all messages of a step share an interface all the time, each taking as long as if all others of its
interface came along. Here a message shares it with those only that are under way at once, by max-min fairness
(`fair_shares.py`). Nothing searches with it, as it takes longer than a price; beside a price it says how much of it is
waiting for messages that never meet.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf

from hexiopt.cost.boundary import pipeline_messages
from hexiopt.cost.cost import Cost
from hexiopt.cost.model import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.simulation.engine import Place, Step, Way

_MOST_MEETINGS = 1_000_000  # of messages; so many take about a second


def simulated_s(model: PlanPricer, plan: Plan) -> float | None:
    """The simulated step of `plan` in seconds; None for sequence layouts, and where it would take long."""
    return simulate_network(model, plan).step_time_s if not _has_layouts(plan) and takes_seconds(plan) else None


def simulate_network(model: PlanPricer, plan: Plan) -> Cost:
    """The cost of `plan`, its pipelines ending as simulated; `send_*_s` and `links` stay those of static shares.

    Gradient sync and optimiser follow as in `model`. Raises InputError as `model.price`, and for sequence layouts.
    """
    if _has_layouts(plan):
        raise InputError("messages of sequence layouts are not simulated; price the plan instead")
    priced = model.pipelines(plan)
    ways = [way for p, pipeline in enumerate(plan.pipelines) for way in _ways(model, p, pipeline)]
    ended: dict[Place, float] = {}
    for event in Step(dict(enumerate(zip(plan.pipelines, priced, strict=True))), plan.schedule, ways).events():
        if not event.kind.startswith("send"):
            ended[event.pipeline, event.stage, event.replica] = event.end_s  # later ones come later
    found = []
    for p, (pipeline, cost) in enumerate(zip(plan.pipelines, priced, strict=True)):
        ends = tuple(
            tuple(ended[p, s, r] for r in range(len(stage.replicas))) for s, stage in enumerate(pipeline.stages)
        )
        stage_end_s = tuple(map(max, ends))
        kept = ends if cost.replica_end_s else ()
        found.append(replace(cost, stage_end_s=stage_end_s, end_s=max(stage_end_s), replica_end_s=kept))
    return model.price(plan, found)


def takes_seconds(plan: Plan) -> bool:
    """Whether the simulation takes no longer: each message may meet one of every way."""
    ways = messages = 0
    for pipeline in plan.pipelines:
        replicas = [len(stage.replicas) for stage in pipeline.stages]
        own = 2 * sum(a + b - 1 for a, b in pairwise([*replicas, replicas[0]] if pipeline.num_chunks > 1 else replicas))
        ways, messages = ways + own, messages + own * pipeline.num_chunks * pipeline.num_micro_batches
    return messages * ways <= _MOST_MEETINGS


def _has_layouts(plan: Plan) -> bool:
    return any(stage.sequence for pipeline in plan.pipelines for stage in pipeline.stages)


def _ways(model: PlanPricer, p: int, pipeline: Pipeline) -> Iterator[Way]:
    """Latency first; inside machines nothing is shared."""
    count = len(pipeline.stages)
    for way in pipeline_messages(pipeline, model.route, model.message_bytes(1)):
        kind, step = ("backward", -1) if way.backward else ("forward", 1)
        receiver = p, (way.stage + step) % count, way.receiver
        needs = {resource: each * way.num_bytes for resource, each in way.route.shared}
        port_s = way.route.port_s_per_byte * way.num_bytes
        fixed_s = way.route.latency_s + (0.0 if needs else port_s)
        yield Way((p, way.stage, way.sender), kind, receiver, fixed_s, needs, 1.0 / port_s if port_s else inf)
