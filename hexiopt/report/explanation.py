"""The source of every value in a plan's price, and what binds its time and its memory, as rows of tables."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from inspect import getsource
from typing import Any

from rich.table import Table
from rich.text import Text

from hexiopt.cost.breakdown import busy_time
from hexiopt.cost.cost import Cost, StageCost
from hexiopt.cost.executors.executor import ExecutorCost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers import coefficients
from hexiopt.numbers.constants import constants
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import Gpu, catalogue, fitted_efficiency
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, DEFAULT_INTRA_LATENCY_US, Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.step_parts import step_parts
from hexiopt.report.style import MEMORY_LABELS, gib, milliseconds, percent, place, rate, seconds
from hexiopt.simulation.network import simulated_s
from hexiopt.units import GIB, MICROSECOND, TFLOP

_MAX_STAGES = 40

Row = tuple[str, str, str]


def explanation_tables(problem: Problem, plan: Plan, cost: Cost, source: str) -> Iterator[tuple[str, Table]]:
    """The title and table of each part; `source` names the origin of the cluster."""
    values = ("value", "is", "from")
    yield "Step", _table(("part", "value", "what binds"), step_rows(problem, plan, cost))
    stage_header = ("stage", "what binds its time", "what binds its memory")
    yield "Stages, per micro-batch", _table(stage_header, stage_rows(problem, plan, cost))
    yield "GPU types", _table(values, gpu_rows(problem))
    if problem.cluster.profile.entries:
        yield "Layers", _table(("where", "take", "from"), measured_rows(problem, plan))
    yield "Links", _table(values, link_rows(problem, source))
    yield "Workload", _table(values, workload_rows(problem, plan))
    yield "Coefficients", _table(("name", "is", "from"), coefficient_rows())
    yield "Runtime", _table(("name", "is", "from"), framework_rows(problem))


def _table(header: tuple[str, str, str], rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, ratio in zip(header, (3, 4, 5), strict=True):
        table.add_column(name, ratio=ratio, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def step_rows(problem: Problem, plan: Plan, cost: Cost) -> Iterator[Row]:
    """The parts of the step time, and which pipeline, boundary and device bind."""
    longest = max(range(len(plan.pipelines)), key=lambda p: cost.pipelines[p].end_s)
    pipeline, priced_pipeline = plan.pipelines[longest], cost.pipelines[longest]
    busy = [stage.forward_s + stage.backward_s for stage in priced_pipeline.stages]
    sends = [a + b for a, b in zip(priced_pipeline.send_forward_s, priced_pipeline.send_backward_s, strict=True)]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    binds = f"stage {slowest} takes longest, {milliseconds(busy[slowest])} ms per micro-batch"
    if sends and max(sends) > busy[slowest]:
        k = sends.index(max(sends))
        binds = f"the messages between stages {k} and {k + 1} take longest, {milliseconds(sends[k])} ms each time"
    filled = pipeline.num_micro_batches * busy[slowest] / priced_pipeline.end_s
    rest = f"stage {slowest} computes {percent(filled)} of the time, the rest is filling, draining and waiting"
    yield "pipeline", seconds(cost.pipeline_s), f"pipeline {longest} ends last; in it {binds}; {rest}"
    hidden = "overlapped with the backward" if cost.gradient_sync_s == 0 else "what the backward does not hide"
    if plan.sharding.stage >= 2:
        between = ", then all-reduced between sharding groups" if cost.gradient_sync_s > 0 else ""
        hidden = f"scattered layer by layer within the stages' times{between}"
    yield "gradient sync", seconds(cost.gradient_sync_s), hidden
    gathers = ", and the all-gather of sharded weights" if plan.sharding.gathers_weights else ""
    yield (
        "optimizer",
        seconds(cost.optimizer_s),
        f"memory traffic of Adam on the last device to start{gathers}",
    )
    spent = step_parts(problem, plan, cost)
    yield (
        "step",
        seconds(cost.step_time_s),
        f"on {spent.executor}, which ends last: "
        + ", ".join(f"{part.name} {part.duration} ({part.percent})" for part in spent.parts),
    )
    simulated = simulated_s(PlanPricer(problem), plan)
    if simulated is not None:
        yield (
            "simulated",
            seconds(simulated),
            f"the step ({simulated / cost.step_time_s - 1:+.1%}) if messages share the network only while in transit "
            "together; in the price, all messages of a step share it throughout",
        )
    p, s = cost.binding_stage()
    tight = cost.pipelines[p].stages[s]
    room = -tight.excess_bytes
    yield (
        "memory",
        f"{gib(tight.memory.total)} of {gib(tight.limit_bytes)} GiB",
        f"stage {s} of pipeline {p} has the least free memory, {gib(room)} GiB"
        if room >= 0
        else f"stage {s} of pipeline {p} lacks {gib(-room)} GiB",
    )


def stage_rows(problem: Problem, plan: Plan, cost: Cost) -> Iterator[Row]:
    """The largest parts of each stage's time and memory; equal stages have one row."""
    model = PlanPricer(problem)
    seen: dict[tuple[Any, ...], int] = {}
    rows: list[Row] = []
    for p, (pipeline, priced_pipeline) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True)):
        for s, (stage, stage_cost) in enumerate(zip(pipeline.stages, priced_pipeline.stages, strict=True)):
            given = stage.parallelism.samples(pipeline.micro_batch_size)
            if isinstance(stage.parallelism, SequenceParallel):
                parts = _time_parts(model, plan, cost, p, s)
                rows.append(_stage_row(f"{p}·{s} {place(problem.cluster, stage.devices)}", stage_cost, parts))
                continue
            for r, (replica, samples, one) in enumerate(
                zip(stage.parallelism.replicas, given, stage_cost.executors, strict=True)
            ):
                tp_group = model.tp_group(replica.devices)
                key = (tp_group, stage.num_layers, stage.recompute, one, samples)
                if key in seen:
                    continue
                seen[key] = len(rows)
                parts = _time_parts(model, plan, cost, p, s, r)
                name = f"{p}·{s}" + (f".{r}" if len(given) > 1 else "")
                rows.append(_stage_row(f"{name} {place(problem.cluster, replica.devices)}", one, parts))
    yield from rows[:_MAX_STAGES]
    if len(rows) > _MAX_STAGES:
        yield "", f"and {len(rows) - _MAX_STAGES:,} stages of other kinds", ""


def _stage_row(name: str, cost: StageCost | ExecutorCost, parts: list[tuple[str, float]]) -> Row:
    """A row of `stage_rows`: `parts` of the time, and the largest of the memory on the fullest device."""
    total, memory = cost.forward_s + cost.backward_s, cost.memory
    largest = sorted(MEMORY_PARTS, key=lambda part: -getattr(memory, part))[:3]
    return (
        name,
        f"{milliseconds(total)} ms: " + ", ".join(f"{part} {percent(value / total)}" for part, value in parts),
        f"{gib(memory.total)} of {gib(cost.limit_bytes)} GiB: "
        + ", ".join(f"{MEMORY_LABELS[part]} {gib(getattr(memory, part))}" for part in largest),
    )


def _time_parts(model: PlanPricer, plan: Plan, cost: Cost, p: int, s: int, r: int = 0) -> list[tuple[str, float]]:
    """The parts of an executor's forward and backward in seconds, largest first."""
    stage, busy = plan.pipelines[p].stages[s], busy_time(model, plan, cost, p, s, r)
    policies = ", ".join(sorted(set(stage.recompute)))
    sequence, devices = isinstance(stage.parallelism, SequenceParallel), stage.parallelism.executors[r]
    speed = "" if sequence else f" at {rate(model.tp_group(devices).bandwidth)} GB/s"
    parts = [
        ("outside attention" if sequence else "compute of its layers", busy.layers_s),
        ("attention", busy.attention_s),
        (f"recompute ({policies})", busy.recompute_s),
        (f"TP collectives{speed}", busy.tensor_parallel_s),
        ("all-to-all", busy.all_to_all_s),
        ("embedding", busy.embedding_s),
        ("LM head and loss", busy.head_s),
        ("waiting for keys and other devices", busy.sequence_waiting_s),
        ("gathers, scatters and slower holders", busy.lockstep_s),
    ]
    return sorted((part for part in parts if part[1] > 1e-9 * busy.total_s), key=lambda part: -part[1])


def gpu_rows(problem: Problem) -> Iterator[Row]:
    """Every value of the GPU types in the cluster, with its source."""
    precision = problem.workload.precision
    for gpu in problem.cluster.types:
        peak = gpu.peak_flops(precision)
        assert peak is not None
        yield f"{gpu.name}: {precision} peak", f"{peak / TFLOP:g} TFLOPS, dense", gpu.source
        yield f"{gpu.name}: memory bandwidth", f"{gpu.hbm_bytes_per_s / 1e9:g} GB/s", gpu.source
        usable = f"{gpu.usable_memory_bytes / GIB:g} of {gpu.memory_bytes / GIB:g} GiB"
        free = f"; constraints.memory_headroom={gpu.memory_headroom:g} left free" if gpu.memory_headroom else ""
        yield (
            f"{gpu.name}: usable memory",
            usable,
            f"usable by a process: gpus.yaml, or the cluster file{free}",
        )
        attention = "fused" if gpu.flash_attention else "scores are stored"
        yield f"{gpu.name}: attention", attention, "compute capability"
        efficiency = gpu.efficiency
        values = {
            "largest GEMM": f"{efficiency.gemm_max:g} of the peak",
            "GEMM of half that": f"{efficiency.gemm_half_flops / 1e9:g} GFLOP",
            "attention": f"{efficiency.attention_max:g} of the peak",
            "memory-bound work": f"{efficiency.memory_max:g} of the bandwidth",
            "least operator": f"{efficiency.launch_s / MICROSECOND:g} µs",
        }
        stated = {
            "FP8 products": efficiency.quantized_max,
            "FP32 products": efficiency.fp32_max,
            "NVFP4 products": efficiency.nvfp4_max,
        }
        values |= {name: f"{share:g} of the peak" for name, share in stated.items() if share is not None}
        assert len(values) == sum(getattr(efficiency, one.name) is not None for one in fields(efficiency))
        said = ", ".join(f"{name} {value}" for name, value in values.items())
        yield f"{gpu.name}: efficiency", said, _efficiency_source(gpu)


def _efficiency_source(gpu: Gpu) -> str:
    known = catalogue().get(gpu.type_name)
    gpu = gpu.full_speed or gpu
    if known is None or known.efficiency != gpu.efficiency:
        return gpu.source
    fitted = [f"{field} fitted on {constants()[name].fitted_on}" for field, name in fitted_efficiency(gpu.name).items()]
    return ", ".join(["the type's family in gpus.yaml", *fitted])


def measured_rows(problem: Problem, plan: Plan) -> Iterator[Row]:
    """The TP groups of the plan, with layer times from the cluster's profile where it has them."""
    model, seen = PlanPricer(problem), set()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            given = stage.parallelism.samples(pipeline.micro_batch_size) if stage.parallelism.replicas else ()
            for replica, samples in zip(stage.parallelism.replicas, given, strict=True):
                tp_group = model.tp_group(replica.devices)
                if (tp_group, samples) in seen:
                    continue
                seen.add((tp_group, samples))
                found = model.stages.measured(tp_group, samples)
                name = f"{tp_group.gpu.name}, TP {tp_group.tp}, {samples} sequences"
                if found is None:
                    yield name, "calculated", "the cluster's profile has no such layers"
                else:
                    forward_s, backward_s = found.layer
                    said = f"{milliseconds(forward_s)} ms forward, {milliseconds(backward_s)} ms backward"
                    yield name, said, "measured: the cluster's profile"


def link_rows(problem: Problem, source: str) -> Iterator[Row]:
    """Every stated link; machines of one kind share a row. `source` names the origin of the cluster."""
    cluster = problem.cluster
    kinds: dict[Any, list[Machine]] = {}
    for machine in cluster.machines:
        kinds.setdefault((machine.spec_name, machine.kind), []).append(machine)
    for machines in kinds.values():
        machine = machines[0]
        name = machine.spec_name + (f" ×{len(machines)}" if len(machines) > 1 else "")
        if machine.num_gpus > 1:
            latency_us = machine.intra_latency_s / MICROSECOND
            yield (
                f"{name}: inside",
                f"{rate(machine.intra_bandwidth_bytes_per_s)} GB/s, {latency_us:g} µs",
                source + _or_default(latency_us, DEFAULT_INTRA_LATENCY_US),
            )
            for inner in machine.intra_links:
                latency_us = inner.latency_s / MICROSECOND
                said = f"{rate(inner.bandwidth_bytes_per_s)} GB/s, {latency_us:g} µs"
                yield f"{name}: {inner.a} to {inner.b}", said, source
        if len(cluster.machines) > 1:
            latency_us = machine.nic_latency_s / MICROSECOND
            yield (
                f"{name}: {machine.num_interfaces} network interface(s)",
                f"{rate(machine.nic_bandwidth_bytes_per_s)} GB/s each way, {latency_us:g} µs",
                source + _or_default(latency_us, DEFAULT_INTER_LATENCY_US),
            )
    for group in cluster.groups:
        said = f"{rate(group.uplink_bytes_per_s)} GB/s, {group.latency_s / MICROSECOND:g} µs more"
        yield f"{group.name}: uplink", said, source
    for name, factor in cluster.calibrated:
        what = "links inside machines" if name == "inside" else "links between machines"
        if name.startswith("compute."):
            what = f"operators of {name.partition('.')[2]}"
        yield f"calibrated: {name}", f"× {factor:g}", f"{what}, in the figures above; fitted to {cluster.calibrated_by}"
    for link in cluster.links:
        latency = "" if link.latency_s is None else f", {link.latency_s / MICROSECOND:g} µs"
        arrow = "and" if link.both else "to"
        yield (
            f"{link.source} {arrow} {link.target}",
            f"{rate(link.bandwidth_bytes_per_s)} GB/s{latency}",
            source,
        )


def _or_default(value: float, default: float) -> str:
    return "; default latency" if abs(value - default) < 1e-9 else ""


def workload_rows(problem: Problem, plan: Plan) -> Iterator[Row]:
    """The workload, the plan's choices for `auto`, and the resulting bytes per parameter."""
    workload = problem.workload
    yield "batch", f"{workload.global_batch:,} sequences of {workload.seq_len:,} tokens", "workload"
    yield "precision", f"{workload.precision}, {workload.element_bytes} B per element", "workload"
    states = workload.states
    each = f"{states.weight} + {states.gradient} + {states.master} + {states.moment} B"
    yield "per parameter", each, f"weight, gradient, master, {states.moments}: mixed precision"
    for name, chosen in (("schedule", plan.schedule.name), ("optimizer_sharding", str(plan.sharding.stage))):
        stated = getattr(workload, name)
        yield name, chosen, "chosen by the search (auto)" if stated == "auto" else "workload"


def coefficient_rows() -> Iterator[Row]:
    """The cost model's coefficients; the comments at their definitions state their sources."""
    said: list[str] = []
    comment: list[str] = []
    for line in getsource(coefficients).splitlines():
        name = re.match(r"([A-Z][A-Z0-9_]+) *=", line)
        if line.startswith("#"):
            comment = [line.lstrip("# ")] if not comment else [*comment, line.lstrip("# ")]
        elif name and name[1] in coefficients.COEFFICIENTS:
            said = comment or said
            comment = []
            yield name[1].lower(), f"{coefficients.COEFFICIENTS[name[1]]:,g}", " ".join(said)
        else:
            comment = []


def _assumption(value: bool | float | str) -> str:
    return f"{value:g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value).lower()


def framework_rows(problem: Problem) -> Iterator[Row]:
    """The cost model's assumptions on our own runtime, and the fitted constants with the data of their fit."""
    own, default = PlanPricer(problem).framework, default_framework()
    for field in fields(own):
        if field.name != "name":
            value = getattr(own, field.name)
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            texts = (f"{name} {_assumption(part)}" for name, part in parts)
            source = "frameworks.yaml: hexiopt" if value == getattr(default, field.name) else "workload"
            yield field.name, ", ".join(texts).strip(), source
    for constant in constants().values():
        yield (
            constant.name,
            f"{constant.value:g} ({constant.unit})",
            f"{constant.meaning}: fitted on {constant.fitted_on}",
        )
