"""What a user may have overlooked in a valid problem and its plan: notes of one line each."""

from collections.abc import Mapping
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.style import clipped, device_ranges, listed, milliseconds, percent, rate
from hexiopt.units import GB

FASTEST_NIC_GB_PER_S = 100.0
"""The fastest network interface on the market, per direction: 800 Gbit/s (ConnectX-8)."""

LONG_CONTEXT = 32_768
"""The sequence length in tokens from which sequence layouts are worth a try."""

LEAST_BEYOND_PREDICTED, USUALLY_BEYOND_PREDICTED, MOST_BEYOND_PREDICTED = 0.015, 0.06, 0.16
"""By how much torch's allocator held more than predicted, as a share of the prediction: the least, the median and the
most of 31 published runs whose peaks are stated (docs/results/validation.md, SimuMax)."""

SHORTEST_MEASURED_LAYER_S = 1.3e-3
"""The least seconds of a forward through a layer, as priced, of runs that step times were compared with (docs/results,
gpu and validation; Megatron's small models, all host, apart)."""

_MAX_RECORDED, _MAX_RECORDED_LENGTH = 50, 500  # of the notes of a plan file


def notes(problem: Problem, plan: Plan | None = None, cost: Cost | None = None) -> list[str]:
    """Notes on a problem: what its model's file says beside the shape, implausible network rates, sequences beyond the
    model's positions, sequence layouts. With a plan for it and its price, on these too: memory filled to the last, and
    steps that the host may bind."""
    of_problem = [*problem.model.notes, *_network(problem), *_positions(problem), *_long_context(problem)]
    if plan is None or cost is None:
        return of_problem
    return [*of_problem, *_memory(problem, plan, cost), *_host(problem, plan, cost)]


def recorded_notes(solver: Mapping[str, Any] | None) -> list[str]:
    """The notes that a plan file's object `solver` records, as importers write them; whatever else stands there is not
    one."""
    recorded = (solver or {}).get("notes")
    texts = [note for note in recorded if isinstance(note, str)] if isinstance(recorded, list | tuple) else []
    return [clipped(note, _MAX_RECORDED_LENGTH) for note in texts[:_MAX_RECORDED]]


def _memory(problem: Problem, plan: Plan, cost: Cost) -> list[str]:
    """Of the fullest device of a plan that fits: the share of a process's memory that is predicted to be taken, where
    all measured runs took more than what is left."""
    p, s = cost.binding_stage()
    priced = cost.pipelines[p].stages[s]
    share = priced.memory.total / priced.limit_bytes * (1.0 - problem.space.memory_headroom)
    if not cost.fits or share * (1.0 + LEAST_BEYOND_PREDICTED) <= 1.0:
        return []
    where = listed(device_ranges(problem.cluster, plan.pipelines[p].stages[s].devices), 2)
    return [
        f"{share:.1%} of the memory of {where} is predicted to be taken, and in 31 published runs the allocator "
        f"held {percent(LEAST_BEYOND_PREDICTED)} to {percent(MOST_BEYOND_PREDICTED)} more than predicted; "
        f"constraints.memory_headroom={USUALLY_BEYOND_PREDICTED:g} leaves the median of that free"
    ]


def _network(problem: Problem) -> list[str]:
    fast: dict[float, dict[str, None]] = {}
    cluster = problem.cluster
    for machine in cluster.machines if len(cluster.machines) > 1 and not cluster.is_linked else ():
        if machine.nic_bandwidth_bytes_per_s > FASTEST_NIC_GB_PER_S * GB:
            fast.setdefault(machine.nic_bandwidth_bytes_per_s, {})[machine.spec_name] = None
    return [
        f"{rate(value)} GB/s per network interface ({listed(list(names), 3)}) is more than any on the market has "
        f"({FASTEST_NIC_GB_PER_S:g}); if it is in Gbit/s, state {rate(value / 8)}"
        for value, names in fast.items()
    ]


def _positions(problem: Problem) -> list[str]:
    length, positions = problem.workload.seq_len, problem.model.max_positions
    if length <= positions:
        return []
    return [
        f"seq_len {length:,} is beyond the {positions:,} positions of {clipped(problem.model.name, 60)} "
        "(max_position_embeddings); the plan holds, but the model must be trained for such positions"
    ]


def _long_context(problem: Problem) -> list[str]:
    length = problem.workload.seq_len
    if length < LONG_CONTEXT or problem.space.sequence or len(problem.usable_devices) == 1:
        return []
    return [f"with seq_len {length:,}, space.sequence=true may find a faster plan: GPUs then share a sequence"]


def _host(problem: Problem, plan: Plan, cost: Cost) -> list[str]:
    """Of the slowest stage of the pipeline that ends last: layers so short that the host may not keep up."""
    pipeline, priced = max(zip(plan.pipelines, cost.pipelines, strict=True), key=lambda pair: pair[1].end_s)
    pass_s = [stage_cost.forward_s + stage_cost.backward_s for stage_cost in priced.stages]
    stage = pipeline.stages[pass_s.index(max(pass_s))]
    if isinstance(stage.parallelism, SequenceParallel):
        return []
    model, samples = PlanPricer(problem), stage.parallelism.samples(pipeline.micro_batch_size)
    each = [
        (model.tp_group(replica.devices), n) for replica, n in zip(stage.parallelism.replicas, samples, strict=True)
    ]
    forward_s = max(model.stages.layer_s(tp_group, n, "none")[0] for tp_group, n in each)
    if forward_s >= SHORTEST_MEASURED_LAYER_S or any(model.stages.measured(*one) is not None for one in each):
        return []
    return [
        f"layers take {milliseconds(forward_s)} ms forward, less than in any run that prices were compared with "
        f"({milliseconds(SHORTEST_MEASURED_LAYER_S)} ms); the host may bind"
    ]
