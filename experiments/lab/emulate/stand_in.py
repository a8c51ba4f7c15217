"""A plan for a mixed cluster at its own relative speeds on one machine: compute is paced, messages wait for latencies.

A *stand-in* of the model, narrower by one divisor in every width and in the length of sequences, is really trained,
by the plan's own layers, heads, micro-batches and messages. Its hidden states and its gradients are both smaller by the
square of the divisor, so that one factor for all links (`fabric.py`) keeps their proportion to each other (messages in
8 bits have a scale a token at least, and are 3 % larger at a width of 64). Computing is paced: an operation ends when
the time that the cost model predicts for it, multiplied by the *dilation*, is over. So what is compared with the
prediction is schedule, overlap, communication and sharing, not the compute times themselves. A stage's first forward
and last backward are paced part by part, a layer a part; weights are really gathered beside the one, gradients summed
beside the other, as when training; under ZeRO-2 and 3 all units are paced one by one, and really gathered and
scattered.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from experiments.lab.emulate.pace import Pace
from hexiopt.cost.cost import Cost, copy_costs
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.mapping.layout import RankExecutor, layout_of
from runtime.mapping.times import StepTimes

_LEAST_HEAD = 2  # RoPE turns pairs


def paces(problem: Problem, plan: Plan, cost: Cost, dilation: float) -> list[Pace]:
    """The pace of every rank of a priced plan, all times multiplied by `dilation`; without a namespace."""
    layout, network = layout_of(plan, problem.model), problem.cluster.network
    model = PlanPricer(problem)
    times = StepTimes.of_plan(problem, plan)
    assert times is not None, "it has a price"
    optimizer_s = {device: copy.optimizer_s for _, _, devices, copy in copy_costs(plan, cost) for device in devices}
    rank_paces = []
    for rank, executor in enumerate(layout.executor_of):
        priced = cost.pipelines[executor.pipeline].stages[executor.stage].executors[executor.replica]
        device = layout.devices[rank]
        rank_paces.append(
            Pace(
                tuple(tuple(dilation * s for s in chunk_s) for chunk_s in priced.chunk_s),
                dilation * optimizer_s[device],
                tuple(dilation * network.pair_latency(device, other) for other in layout.devices),
                units=tuple(
                    (dilation * unit.forward_s, dilation * unit.backward_s)
                    for unit in priced.units
                    for _ in range(unit.repeats)
                ),
                last_parts=_parts(model, plan, executor, priced, dilation, backward=True),
                first_parts=_parts(model, plan, executor, priced, dilation, backward=False),
                times=times,
            )
        )
    return rank_paces


def _parts(
    model: PlanPricer, plan: Plan, executor: RankExecutor, priced: ExecutorCost, dilation: float, *, backward: bool
) -> tuple[tuple[float, ...], ...]:
    """Seconds of the parts of a forward through each layer range of an executor: embedding, layers, head; or of a
    backward, from the head to the embedding. They add up to those of the whole."""
    pipeline = plan.pipelines[executor.pipeline]
    stage = pipeline.stages[executor.stage]
    match stage.parallelism:
        case SequenceParallel() as layout:
            sequence = model.stages.sequence_stage(layout, pipeline.micro_batch_size)
            (embedding, head), layer_s = sequence.ends_s, sequence.layer_s
        case _:
            tp_group = model.tp_group(stage.parallelism.executors[executor.replica])
            samples = stage.parallelism.samples(pipeline.micro_batch_size)[executor.replica]
            embedding, head = model.stages.ends_s(tp_group, samples)
            layer_s = partial(model.stages.layer_s, tp_group, samples)
    parts_by_chunk = []
    for chunk, chunk_s in zip(executor.chunks, priced.chunk_s, strict=True):
        each_s = [layer_s(policy)[backward] for policy in chunk.recompute]
        parts_s = [
            *([(embedding.forward_s, embedding.backward_s)[backward]] if chunk.first else []),
            *(sum(each_s[first - chunk.layers[0] : end - chunk.layers[0]]) for first, end in chunk.groups),
            *([(head.forward_s, head.backward_s)[backward]] if chunk.last else []),
        ]
        in_order = parts_s[::-1] if backward else parts_s
        parts_by_chunk.append(tuple(dilation * chunk_s[backward] * part_s / sum(parts_s) for part_s in in_order))
    return tuple(parts_by_chunk)


# ------------------------------------------------------------------ the stand-in


def divisors(problem: Problem) -> Iterator[int]:
    """The divisors that narrow a problem evenly, from 1."""
    model, workload = problem.model, problem.workload
    common = math.gcd(model.hidden_size, model.ffn_size, workload.seq_len)
    for divisor in range(1, model.head_dim // _LEAST_HEAD + 1):
        if model.head_dim % (_LEAST_HEAD * divisor) == 0 and common % divisor == 0:
            yield divisor


def narrow(problem: Problem, divisor: int) -> Problem:
    """The problem with a model and sequences narrower by `divisor`. Raises InputError where widths do not divide."""
    possible = list(divisors(problem))
    if divisor not in possible:
        raise InputError(
            f"emulate.divisor: {divisor} does not divide the widths of {problem.model.name} and its sequences of "
            f"{problem.workload.seq_len} tokens; choose one of {', '.join(map(str, possible))}"
        )
    model: ModelSpec = replace(
        problem.model,
        name=f"{problem.model.name}_{divisor}",
        hidden_size=problem.model.hidden_size // divisor,
        head_dim=problem.model.head_dim // divisor,
        ffn_size=problem.model.ffn_size // divisor,
        vocab_size=-(-problem.model.vocab_size // divisor),
    )
    workload: Workload = replace(problem.workload, seq_len=problem.workload.seq_len // divisor)
    return replace(problem, model=model, workload=workload)
