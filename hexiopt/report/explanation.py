"""The source of every value in a plan's price, and what binds its time and its memory, as rows of tables."""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from inspect import getsource
from typing import Any

from rich.table import Table
from rich.text import Text

from hexiopt.cost.breakdown import busy_time
from hexiopt.numbers import coefficients
from hexiopt.numbers.constants import constants
from hexiopt.numbers.frameworks import Framework, default_framework
from hexiopt.numbers.gpus import Gpu, catalogue, fitted_efficiency
from hexiopt.plan.parallelism import Replicated, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, DEFAULT_INTRA_LATENCY_US, Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts, largest_parts, memory_of_limit
from hexiopt.report.style import gib, milliseconds, percent, place, rate, seconds
from hexiopt.units import GIB, MICROSECOND, TFLOP

_MAX_STAGES = 40

Row = tuple[str, str, str]


def explanation_tables(facts: PlanFacts, source: str) -> Iterator[tuple[str, Table]]:
    """The title and table of each part; `source` names the origin of the cluster."""
    problem, values, names = facts.problem, ("value", "is", "from"), ("name", "is", "from")
    yield "Step", _table(("part", "value", "what binds"), step_rows(facts))
    stage_header = ("stage", "what binds its time", "what binds its memory")
    yield "Stages, per micro-batch", _table(stage_header, stage_rows(facts))
    yield "GPU types", _table(values, gpu_rows(problem))
    if problem.cluster.profile.entries:
        yield "Layers", _table(("where", "take", "from"), layer_rows(facts))
    yield "Links", _table(values, link_rows(problem, source))
    yield "Workload", _table(values, workload_rows(problem, facts.plan))
    yield "Coefficients", _table(names, coefficient_rows())
    yield "Runtime", _table(names, framework_rows(facts.model.framework))


def _table(header: tuple[str, str, str], rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, ratio in zip(header, (3, 4, 5), strict=True):
        table.add_column(name, ratio=ratio, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def step_rows(facts: PlanFacts) -> Iterator[Row]:
    """The parts of the step time, and the pipeline, boundary and device that bind."""
    cost, sharding, slowest, message = facts.cost, facts.plan.sharding, facts.slowest, facts.slowest_message
    p, s = slowest.pipeline, slowest.number
    binds = f"stage {s} takes longest, {milliseconds(slowest.compute_s)} ms per micro-batch"
    if message is not None and message.send_s is not None:
        ends = f"{message.number} and {message.number + 1}"
        binds = f"the messages between stages {ends} take longest, {milliseconds(message.send_s)} ms each time"
    filled = facts.plan.pipelines[p].num_micro_batches * slowest.compute_s / cost.pipelines[p].end_s
    rest = f"stage {s} computes {percent(filled)} of the time, the rest is filling, draining and waiting"
    yield "pipeline", seconds(cost.pipeline_s), f"pipeline {p} ends last; in it {binds}; {rest}"
    hidden = "overlapped with the backward" if cost.gradient_sync_s == 0 else "what the backward does not hide"
    if sharding.stage >= 2:
        between = ", then all-reduced between sharding groups" if cost.gradient_sync_s > 0 else ""
        hidden = f"scattered layer by layer within the stages' times{between}"
    yield "gradient sync", seconds(cost.gradient_sync_s), hidden
    gathers = ", and what next forwards do not hide of the all-gather of weights" if sharding.gathers_weights else ""
    traffic = f"memory traffic of Adam on the last device to start{gathers}"
    yield "optimizer", seconds(cost.optimizer_s), traffic
    parts = ", ".join(f"{part.name} {part.duration} ({part.percent})" for part in facts.step.parts)
    yield "step", seconds(cost.step_time_s), f"on {facts.step.executor}, which ends last: {parts}"
    tight, excess_bytes = facts.tightest, facts.tightest.cost.excess_bytes
    has = "lacks" if excess_bytes > 0 else "has the least free memory,"
    where = f"stage {tight.number} of pipeline {tight.pipeline} {has} {gib(abs(excess_bytes))} GiB"
    yield "memory", memory_of_limit(tight.cost), where


def stage_rows(facts: PlanFacts) -> Iterator[Row]:
    """The largest parts of each stage's time and memory; equal stages have one row."""
    cluster, plan, seen = facts.problem.cluster, facts.plan, set[Hashable]()
    rows, others = list[Row](), set(plan.other_depths())
    for p, (pipeline, priced_pipeline) in enumerate(zip(plan.pipelines, facts.cost.pipelines, strict=True)):
        for s, (stage, priced) in enumerate(zip(pipeline.stages, priced_pipeline.stages, strict=True)):
            samples = stage.parallelism.samples(pipeline.micro_batch_size)
            for e, (devices, cost) in enumerate(zip(stage.parallelism.executors, priced.executors, strict=True)):
                key: Hashable = (e, p, s)
                if isinstance(stage.parallelism, TensorParallel | Replicated):
                    shape = stage.num_layers, stage.recompute, (p, s) in others and stage.in_flight
                    key = facts.model.tp_group(devices), shape, cost, samples[e]
                if key in seen:
                    continue
                seen.add(key)
                number = f".{e}" if len(stage.parallelism.executors) > 1 else ""
                name = f"{p}·{s}{number} {place(cluster, devices)}"
                total_s, parts = cost.forward_s + cost.backward_s, _time_parts(facts, p, s, e)
                time = ", ".join(f"{part} {percent(part_s / total_s)}" for part, part_s in parts)
                memory = f"{memory_of_limit(cost)}: {largest_parts(cost, 3)}"
                memory += f"; {stage.in_flight} micro-batches in flight" if (p, s) in others else ""
                rows.append((name, f"{milliseconds(total_s)} ms: {time}", memory))
    yield from rows[:_MAX_STAGES]
    if len(rows) > _MAX_STAGES:
        yield "", f"and {len(rows) - _MAX_STAGES:,} stages of other kinds", ""


def _time_parts(facts: PlanFacts, p: int, s: int, e: int) -> list[tuple[str, float]]:
    """The parts of an executor's forward and backward in seconds, largest first."""
    stage, busy = facts.plan.pipelines[p].stages[s], busy_time(facts.model, facts.plan, facts.cost, p, s, e)
    policies = ", ".join(sorted(set(stage.recompute)))
    sequence, devices = isinstance(stage.parallelism, SequenceParallel), stage.parallelism.executors[e]
    plain = isinstance(stage.parallelism, TensorParallel | Replicated)
    speed = f" at {rate(facts.model.tp_group(devices).bandwidth)} GB/s" if plain else ""
    parts = [
        ("outside attention" if sequence else "compute of its layers", busy.layers_s),
        ("attention", busy.attention_s),
        (f"recompute ({policies})", busy.recompute_s),
        (f"TP collectives{speed}", busy.tensor_parallel_s),
        ("all-to-all", busy.all_to_all_s),
        ("all-to-alls of experts", busy.expert_exchange_s),
        ("embedding", busy.embedding_s),
        ("LM head and loss", busy.head_s),
        ("waiting for keys and other devices", busy.sequence_waiting_s),
        ("gathers, scatters and slower holders", busy.lockstep_s),
        ("quantisation of messages", busy.quantization_s),
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
        yield f"{gpu.name}: usable memory", usable, f"usable by a process: gpus.yaml, or the cluster file{free}"
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
        products = {"FP8": efficiency.quantized_max, "FP32": efficiency.fp32_max, "NVFP4": efficiency.nvfp4_max}
        values |= {
            f"{name} products": f"{share:g} of the peak" for name, share in products.items() if share is not None
        }
        assert len(values) == sum(getattr(efficiency, field.name) is not None for field in fields(efficiency))
        shares = ", ".join(f"{name} {value}" for name, value in values.items())
        yield f"{gpu.name}: efficiency", shares, _efficiency_source(gpu)


def _efficiency_source(gpu: Gpu) -> str:
    shipped = catalogue().get(gpu.type_name)
    gpu = gpu.full_speed or gpu
    if shipped is None or shipped.efficiency != gpu.efficiency:
        return gpu.source
    fitted = [
        f"{field} fitted on {constants()[name].fitted_on}"
        for field, name in sorted(fitted_efficiency(gpu.name).items())
    ]
    return ", ".join(["the type's family in gpus.yaml", *fitted])


def layer_rows(facts: PlanFacts) -> Iterator[Row]:
    """The TP groups of the plan, with layer times from the cluster's profile where it has them."""
    model, seen = facts.model, set()
    for pipeline in facts.plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.parallelism.replicas:
                number = replica.samples or pipeline.micro_batch_size
                tp_group = model.tp_group(replica.devices)
                if (tp_group, number) in seen:
                    continue
                seen.add((tp_group, number))
                measured = model.stages.measurement(tp_group, number)
                name = f"{tp_group.gpu.name}, TP {tp_group.tp}, {number} sequences"
                if measured is None:
                    yield name, "calculated", "the cluster's profile has no such layers"
                else:
                    forward, backward = map(milliseconds, measured.layer)
                    yield name, f"{forward} ms forward, {backward} ms backward", "measured: the cluster's profile"


def link_rows(problem: Problem, source: str) -> Iterator[Row]:
    """Every stated link; machines of one kind share rows. `source` names the origin of the cluster."""
    cluster = problem.cluster
    kinds: dict[Any, list[Machine]] = {}
    for machine in cluster.machines:
        kinds.setdefault((machine.spec_name, machine.kind), []).append(machine)
    for machines in kinds.values():
        machine = machines[0]
        name = machine.spec_name + (f" ×{len(machines)}" if len(machines) > 1 else "")
        if machine.num_gpus > 1:
            speed = _speed(machine.intra_bandwidth_bytes_per_s, machine.intra_latency_s)
            yield f"{name}: inside", speed, source + _or_default(machine.intra_latency_s, DEFAULT_INTRA_LATENCY_US)
            for inner in machine.intra_links:
                yield f"{name}: {inner.a} to {inner.b}", _speed(inner.bandwidth_bytes_per_s, inner.latency_s), source
        if len(cluster.machines) > 1:
            speed = _speed(machine.nic_bandwidth_bytes_per_s, machine.nic_latency_s, "GB/s each way")
            origin = source + _or_default(machine.nic_latency_s, DEFAULT_INTER_LATENCY_US)
            yield f"{name}: {machine.num_interfaces} network interface(s)", speed, origin
    for group in cluster.groups:
        yield f"{group.name}: uplink", f"{_speed(group.uplink_bytes_per_s, group.latency_s)} more", source
        if group.shared_bytes_per_s < math.inf:
            yield f"{group.name}: inside", f"{_speed(group.shared_bytes_per_s, None)}, shared by its members", source
    for name, factor in cluster.calibrated:
        what = "links inside machines" if name == "inside" else "links between machines"
        if name.startswith("compute."):
            what = f"operators of {name.partition('.')[2]}"
        yield f"calibrated: {name}", f"× {factor:g}", f"{what}, in the figures above; fitted to {cluster.calibrated_by}"
    for link in cluster.links:
        ends = f"{link.source} {'and' if link.both else 'to'} {link.target}"
        yield ends, _speed(link.bandwidth_bytes_per_s, link.latency_s), source


def _speed(bytes_per_s: float, latency_s: float | None, unit: str = "GB/s") -> str:
    return f"{rate(bytes_per_s)} {unit}" + ("" if latency_s is None else f", {latency_s / MICROSECOND:g} µs")


def _or_default(latency_s: float, default_us: float) -> str:
    return "; default latency" if abs(latency_s / MICROSECOND - default_us) < 1e-9 else ""


def workload_rows(problem: Problem, plan: Plan) -> Iterator[Row]:
    """The workload, the plan's choices for `auto`, and the resulting bytes per parameter."""
    workload = problem.workload
    yield "batch", f"{workload.global_batch:,} sequences of {workload.seq_len:,} tokens", "workload"
    yield "precision", f"{workload.precision}, {workload.element_bytes} B per element", "workload"
    message_bytes = workload.message_bytes(problem.model.hidden_size)
    yield "message_precision", f"{workload.message_precision}, {message_bytes:,} B per token", "workload"
    sums = f"{workload.gradient_precision}, {workload.sum_bytes:.4g} B per parameter on its way to a sum"
    yield "gradient_precision", sums, "workload"
    states, parameters = workload.states, problem.parameters
    if (training := parameters.in_words) is not None:
        yield "training", training, "workload"
    state_bytes = f"{states.weight:g} + {states.gradient:g} + {states.master:g} + {states.moment:g} B"
    of = "trained parameter" if parameters.frozen_groups else "parameter"
    yield f"per {of}", state_bytes, f"weight, gradient, master, {states.moments}: mixed precision"
    if (lora := workload.adapters) is not None:
        stored = parameters.frozen_groups[0].matrix_bytes
        yield "per frozen parameter", f"{stored:.4g} B", f"matrices of layers in {lora.storage}, all else as precision"
    for name, choice in (("schedule", plan.schedule.name), ("optimizer_sharding", str(plan.sharding.stage))):
        yield name, choice, "chosen by the search (auto)" if getattr(workload, name) == "auto" else "workload"


def coefficient_rows() -> Iterator[Row]:
    """The cost model's coefficients; the comments at their definitions state their sources."""
    comment: list[str] = []
    source: list[str] = []
    for line in getsource(coefficients).splitlines():
        name = re.match(r"([A-Z][A-Z0-9_]+) *=", line)
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
            continue
        if name and name[1] in coefficients.COEFFICIENTS:
            source = comment or source
            yield name[1].lower(), f"{coefficients.COEFFICIENTS[name[1]]:,g}", " ".join(source)
        comment = []


def _assumption(value: bool | float | str) -> str:
    return f"{value:g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value).lower()


def framework_rows(framework: Framework) -> Iterator[Row]:
    """The cost model's assumptions on our own runtime, and the fitted constants with the data of their fit."""
    for field in fields(framework):
        if field.name != "name":
            value = getattr(framework, field.name)
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            texts = (f"{name} {_assumption(part)}" for name, part in parts)
            is_default = value == getattr(default_framework(), field.name)
            yield field.name, ", ".join(texts).strip(), "frameworks.yaml: hexiopt" if is_default else "workload"
    for fit in constants().values():
        yield fit.name, f"{fit.value:g} ({fit.unit})", f"{fit.meaning}: fitted on {fit.fitted_on}"
