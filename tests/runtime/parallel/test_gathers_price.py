"""Weights gathered beside the next forwards: no step takes longer than its price, by an event simulation of the step
in which they come bucket by bucket, in the order in which ranks gather, for each unit of each first forward."""

import random
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from experiments.lab.emulate.stand_in import paces
from hexiopt.cost import step
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import links_of, stage_times
from hexiopt.plan.parallelism import Replicated
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.simulation.engine import ExecutorId, SimulatedLink, Span, Step
from runtime.mapping.actions import unit_buckets
from runtime.mapping.buckets import bucket_parts, forward_turn
from runtime.mapping.layout import layout_of
from tests.runtime.parallel.test_split_backwards import SPLIT
from tests.runtime.ranks import random_plan, random_sequence
from tests.slow import slow_but
from tests.solvers.problems import cluster

SEQ_LEN = 1024


def random_case(seed: int) -> tuple[Problem, Plan]:
    """ZeRO-1 over all or lists of devices of one machine, where messages share nothing; replicas, TP degrees and
    sequence layouts, any schedule, depth and recomputing."""
    rng = random.Random(seed)
    while True:
        plan, small, batch = random_plan(rng, 8, 12)
        stages = [stage for line in plan.pipelines for stage in line.stages]
        degrees = {len(devices) for stage in stages for devices in stage.parallelism.executors}
        if plan.sharding.stage and plan.sharding.groups != "machine" and 4 not in degrees:
            break
    model = replace(
        small,
        hidden_size=768,
        num_kv_heads=6,
        head_dim=128,
        ffn_size=rng.choice((576, 3072)),
        vocab_size=rng.choice((6_000, 60_000)),
        max_positions=SEQ_LEN,
        attention_window=None,
    )
    layouts = rng.random() < 0.3

    def change(stage: Stage) -> Stage:
        layout = stage.parallelism
        if layouts and len(stage.layers) == 1 and len(stage.devices) in (2, 3):
            return replace(stage, parallelism=random_sequence(rng, stage.devices, SEQ_LEN, model.num_heads))
        even = tuple(replace(replica, heads=None) for replica in layout.replicas)
        return replace(
            stage, parallelism=Replicated(even) if isinstance(layout, Replicated) else replace(layout, heads=None)
        )

    lines = tuple(replace(line, stages=tuple(map(change, line.stages))) for line in plan.pipelines)
    schedule = plan.schedule
    if not layouts and rng.random() < 0.4:
        schedule = SPLIT.get(schedule, schedule)
    if schedule.takes_depths and rng.random() < 0.5:
        more = rng.randint(0, 2)
        lines = tuple(
            replace(
                line,
                stages=tuple(
                    replace(stage, in_flight=min(line.num_micro_batches, len(line.stages) - s + more))
                    for s, stage in enumerate(line.stages)
                ),
            )
            for line in lines
        )
    network = cluster(("a", "fast", 8), network_gb_per_s=1.0)
    machine = replace(network.machines[0], intra_bandwidth_bytes_per_s=rng.choice((0.3e9, 1e9, 3e9, 10e9)))
    problem = Problem(replace(network, machines=(machine,)), model, Workload(batch, SEQ_LEN))
    return problem, replace(plan, pipelines=lines, schedule=schedule)


class NextStep(Step):
    """A step whose executors are free at `free_s`, and whose first forwards run unit by unit, of `unit_s` [executors]
    [ranges][units] seconds, each when its weights have come, at `came_s` of its place."""

    def __init__(self, *arguments: Any, free_s: Any, unit_s: Any, came_s: Any) -> None:
        super().__init__(*arguments)
        self._free_s, self._unit_s, self._came_s = free_s, unit_s, came_s

    def _plan_event(self, time_s: float, what: Span | SimulatedLink) -> None:
        if isinstance(what, Span) and what.kind == OperationKind.FORWARD.value and what.micro_batch == 0:
            place = what.pipeline, what.stage, what.executor
            time_s = max(what.start_s, self._free_s[place])
            for unit, seconds in enumerate(self._unit_s[place][what.chunk]):
                time_s = max(time_s, self._came_s.get((place, what.chunk, unit), 0.0)) + seconds
            what = replace(what, end_s=time_s)
        super()._plan_event(time_s, what)


def period_s(problem: Problem, plan: Plan, bucket_elements: int, *, waits: bool = False) -> tuple[float, float]:
    """The price of a step, and the seconds from the norm of all gradients to that of the next step, simulated: there,
    optimisers step, weights come, and all operations follow. With `waits`, no forward begins before all weights."""
    with patch("hexiopt.cost.gathers.BUCKET_PARAMS", bucket_elements):
        pricer = PlanPricer(problem)
        cost = pricer.price(plan)
    with patch("runtime.mapping.buckets.BUCKET_ELEMENTS", bucket_elements):
        layout = layout_of(plan, problem.model, problem.cluster)
        shared = bucket_parts(layout.held, 1)
    rings = pricer.rings(plan)
    within, width = rings.within_group, problem.workload.element_bytes
    ring_s = {
        tuple(row): seconds
        for rows, each in zip(within.groups.holders, within.ring_pass_s(width), strict=True)
        for row, seconds in zip(rows.tolist(), each.tolist(), strict=True)
    }
    copies = [copy for line in cost.pipelines for stage in line.stages for copy in stage.copies]
    optimizer_s = {rank: copies[rings.copy_of[d]].optimizer_s for rank, d in enumerate(layout.devices)}
    of_ring: dict[tuple[int, ...], list[int]] = {}
    for number, bucket in enumerate(shared):
        for group in bucket.groups() if bucket.decays else ():
            of_ring.setdefault(group, []).append(number)
    arrival_s: dict[tuple[tuple[int, ...], int], float] = {}
    for group, numbers in of_ring.items():
        if len(group) == 1:
            continue
        numbers.sort(key=lambda n: (forward_turn(shared[n].parts), n))
        sizes = np.cumsum([sum(prod(part.local_shape) for part in shared[n].parts) for n in numbers])
        seconds = ring_s[tuple(sorted(layout.devices[rank] for rank in group))]
        start_s = max(optimizer_s[rank] for rank in group)
        for n, size in zip(numbers, sizes, strict=True):
            arrival_s[group, n] = start_s + seconds * size / sizes[-1]
    last_s = max(arrival_s.values(), default=0.0)
    each = paces(problem, plan, cost, 1.0)
    free_s, unit_s = dict[ExecutorId, float](), dict[ExecutorId, Any]()
    weights_s: dict[tuple[ExecutorId, int, int], float] = {}
    for rank, executor in enumerate(layout.executor_of):
        place = executor.pipeline, executor.stage, executor.replica
        free_s[place] = max(free_s.get(place, 0.0), optimizer_s[rank], last_s if waits else 0.0)
        unit_s[place] = each[rank].first_parts
        for (number, unit), held in unit_buckets(executor, rank, shared, problem.model).items():
            key = place, number // len(plan.pipelines[place[0]].stages), unit
            for n in held:
                for group in shared[n].groups():
                    came_s = arrival_s.get((group, n), 0.0) if rank in group else 0.0
                    weights_s[key] = max(weights_s.get(key, 0.0), came_s)
    placed = pricer.place_pipelines(plan)
    next_step = NextStep(
        {p: stage_times(line) for p, line in enumerate(placed)},
        plan.schedule,
        list(chain.from_iterable(links_of(p, line) for p, line in enumerate(placed))),
        dict(enumerate(pricer.orders(plan))),
        free_s=free_s,
        unit_s=unit_s,
        came_s=weights_s,
    )
    ended_s = dict[ExecutorId, float]()
    for span in next_step.spans():
        if not span.is_message:
            ended_s[span.pipeline, span.stage, span.executor] = span.end_s
    executors = [
        (executor, ended_s[p, s, r])
        for p, line in enumerate(cost.pipelines)
        for s, stage in enumerate(line.stages)
        for r, executor in enumerate(stage.executors)
    ]
    ended = np.array([end for executor, end in executors for _ in executor.copies])
    last = np.array([executor.last_backward_s for executor, _ in executors for _ in executor.copies])
    gradient_bytes = problem.workload.states.gradient
    synced = step.after_sums_by_part(within, rings.copy_of, ended - last, ended, gradient_bytes, 1)
    synced, _ = step.after_all_reduce(rings.between_groups, rings.copy_of, synced, gradient_bytes, 2)
    return cost.step_time_s, float(synced.max())


def bucket_of(seed: int) -> int:
    """Elements of a bucket: less than a matrix, some layers, or all."""
    return random.Random(-seed).choice((100_000, 3_000_000, 8_000_000, 30_000_000))


@pytest.mark.parametrize("seeds", slow_but([range(0, 300, 4)], [range(0, 300, 4), range(300)]), ids=len)
def test_the_price_is_the_simulated_step_or_little_more(seeds: range) -> None:
    """Never less, exact in two fifths of all plans, 1 % above on average; it hides over half of what the simulation
    hides."""
    times_s = []
    for seed in seeds:
        problem, plan = random_case(seed)
        waiting_s = period_s(problem, plan, bucket_of(seed), waits=True)[1]
        times_s.append((*period_s(problem, plan, bucket_of(seed)), waiting_s))
    prices_s, simulated_s, waiting_s = np.array(times_s).T
    excess = prices_s / simulated_s - 1
    assert excess.min() >= -1e-9
    assert (excess <= 1e-9).mean() > 0.4
    assert excess.mean() < 0.01
    assert (1 - prices_s / waiting_s).sum() > 0.5 * (1 - simulated_s / waiting_s).sum() > 0


@pytest.mark.parametrize("joined", [False, True])
def test_layers_recomputed_together_wait_for_all_their_weights(joined: bool) -> None:
    """Two devices, slow links: of eight layers the last four run together."""
    policies = (*["full"] * 5, *["joined" if joined else "full"] * 3)
    lines = tuple(Pipeline((replace(Stage.of((d,), 0, 8), recompute=policies),), 1) for d in range(2))
    problem, _ = random_case(0)
    model = replace(problem.model, num_layers=8, vocab_size=600, tied_embeddings=False)
    problem = replace(problem, model=model, workload=Workload(2, SEQ_LEN))
    price_s, simulated_s = period_s(problem, Plan(lines, ONE_F_ONE_B, Sharding(1)), 100_000)
    assert simulated_s <= price_s * (1 + 1e-9)
    assert price_s <= simulated_s * (1 + 0.02)
