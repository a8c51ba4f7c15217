"""Notes of one line each on what a user may have overlooked in a valid problem and its plan."""

from collections.abc import Mapping
from typing import Any

from hexiopt.exports.trainable import untrainable
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.products import is_amd
from hexiopt.plan.parallelism import Replicated, TensorParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from hexiopt.report.style import clip, join_names, milliseconds, percent, rate
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

_MAX_DEPTHS = 8  # stages named in a note
_MAX_RECORDED, _MAX_RECORDED_LENGTH = 50, 500  # of the notes of a plan file


def notes(problem: Problem, plan: Plan | None = None) -> list[str]:
    """Notes on a problem: how its model was read, implausible network rates, cards of two makers, sequences beyond the
    model's positions, sequence layouts, and why none of its plans is trained here, or this one is not."""
    return [*_of_problem(problem), *training_notes(problem, plan)]


def plan_notes(facts: PlanFacts) -> list[str]:
    """Notes on a plan: those on its problem, depths other than the schedule's, memory almost full, steps that the host
    may bind, why it is not trained here, and what its file records."""
    of_plan = *_depths(facts), *_memory(facts), *_host(facts), *training_notes(facts.problem, facts.plan)
    return [*_of_problem(facts.problem), *of_plan, *solver_notes(facts.solver)]


def training_notes(problem: Problem, plan: Plan | None = None) -> list[str]:
    """A note on what `hexiopt train` does not train: none of a problem's plans, or not this one."""
    why = untrainable(problem.model, problem.workload, plan)
    return [] if why is None else [f"hexiopt train does not train this: {why.partition(';')[0]}"]


def _of_problem(problem: Problem) -> list[str]:
    return [*problem.model.notes, *_network(problem), *_makers(problem), *_positions(problem), *_long_context(problem)]


def solver_notes(solver: Mapping[str, Any]) -> list[str]:
    """The notes, written by importers, in a plan file's object `solver`; values other than text are ignored."""
    recorded = solver.get("notes")
    texts = [note for note in recorded if isinstance(note, str)] if isinstance(recorded, list | tuple) else []
    return [clip(note, _MAX_RECORDED_LENGTH) for note in texts[:_MAX_RECORDED]]


def _depths(facts: PlanFacts) -> list[str]:
    """A note on stages that have other numbers of micro-batches in flight than the schedule has."""
    plan = facts.plan
    depths = [f"{plan.pipelines[p].stages[s].in_flight} in {p}·{s}" for p, s in plan.other_depths()]
    named = join_names(depths, _MAX_DEPTHS)
    return [f"micro-batches in flight, where the {plan.schedule} schedule has others: {named}"] if depths else []


def _memory(facts: PlanFacts) -> list[str]:
    """A note on the fullest device of a plan that fits, if all measured runs exceeded their prediction by more than the
    memory that is left."""
    use = facts.tightest.cost
    share = use.memory.total / use.limit_bytes * (1.0 - facts.problem.space.memory_headroom)
    if not facts.cost.fits or share * (1.0 + LEAST_BEYOND_PREDICTED) <= 1.0:
        return []
    return [
        f"{share:.1%} of the memory of {facts.tightest.where(2)} is predicted to be taken, and in 31 published runs "
        f"the allocator held {percent(LEAST_BEYOND_PREDICTED)} to {percent(MOST_BEYOND_PREDICTED)} more than "
        f"predicted; constraints.memory_headroom={USUALLY_BEYOND_PREDICTED:g} leaves the median of that free"
    ]


def _network(problem: Problem) -> list[str]:
    fast: dict[float, dict[str, None]] = {}
    cluster = problem.cluster
    for machine in cluster.machines if len(cluster.machines) > 1 and not cluster.is_linked else ():
        if machine.nic_bandwidth_bytes_per_s > FASTEST_NIC_GB_PER_S * GB:
            fast.setdefault(machine.nic_bandwidth_bytes_per_s, {})[machine.spec_name] = None
    return [
        f"{rate(value)} GB/s per network interface ({join_names(list(names), 3)}) is more than any on the market has "
        f"({FASTEST_NIC_GB_PER_S:g}); if it is in Gbit/s, state {rate(value / 8)}"
        for value, names in fast.items()
    ]


def _makers(problem: Problem) -> list[str]:
    """A note on cards of two makers, which the trainers' libraries do not join."""
    cards = [gpu for gpu in problem.cluster.types if gpu.name in catalogue() and gpu.link != "memory"]
    amd, nvidia = ([gpu.name for gpu in cards if is_amd(gpu) is maker] for maker in (True, False))
    if not (amd and nvidia):
        return []
    return [
        f"{join_names(amd, 3)} and {join_names(nvidia, 3)} are priced as if one library joined them; RCCL (AMD) and "
        "NCCL (NVIDIA) do not: to train them together takes Gloo, which copies through CPUs, or a library of both"
    ]


def _positions(problem: Problem) -> list[str]:
    length, positions = problem.workload.seq_len, problem.model.max_positions
    if length <= positions:
        return []
    return [
        f"seq_len {length:,} is beyond the {positions:,} positions of {clip(problem.model.name, 60)} "
        "(max_position_embeddings); the plan holds, but the model must be trained for such positions"
    ]


def _long_context(problem: Problem) -> list[str]:
    length = problem.workload.seq_len
    if length < LONG_CONTEXT or problem.space.sequence or len(problem.usable_devices) == 1:
        return []
    return [f"with seq_len {length:,}, space.sequence=true may find a faster plan: GPUs then share a sequence"]


def _host(facts: PlanFacts) -> list[str]:
    """A note on the slowest stage of the pipeline that ends last, if its layers are so short that the host may bind."""
    stage, stages = facts.slowest.stage, facts.model.stages
    if not isinstance(stage.parallelism, TensorParallel | Replicated):
        return []
    samples = stage.parallelism.samples(facts.plan.pipelines[facts.longest].micro_batch_size)
    loads = [(stages.tp_group(devices), n) for devices, n in zip(stage.parallelism.executors, samples, strict=True)]
    forward_s = max(stages.layer_s(*load, "none")[0] for load in loads)
    if forward_s >= SHORTEST_MEASURED_LAYER_S or any(stages.measurement(*load) is not None for load in loads):
        return []
    return [
        f"layers take {milliseconds(forward_s)} ms forward, less than in any run that prices were compared with "
        f"({milliseconds(SHORTEST_MEASURED_LAYER_S)} ms); the host may bind"
    ]
