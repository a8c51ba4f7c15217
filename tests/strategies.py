"""Hypothesis strategies: small random clusters, models, problems, and valid asymmetric plans of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.parallelism import (
    ORDERS,
    Replica,
    Replicated,
    SequenceGroup,
    SequenceParallel,
    StageParallelism,
    TensorParallel,
)
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, layer_ranges, ranges_of, recompute_policies, schedules, sharding_stages
from hexiopt.problem.workload import AUTO, RECOMPUTE_POLICIES, Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B, SCHEDULES
from hexiopt.schedules.schedule import Schedule

GPUS = ("rtx_3090", "rtx_4090", "a100_80gb_sxm", "h100_80gb_sxm", "v100_32gb_sxm", "t4")
BANDWIDTHS_GB_PER_S = (0.01, 0.125, 1.25, 12.5, 50.0, 400.0)
LATENCIES_US = (0.0, 5.0, 50.0, 20_000.0)
# A fixed small cluster: devices a:0 to a:3, v-0:0, v-0:1, v-1:0, v-1:1.
LAB = cluster_from_section(
    Section(
        {
            "name": "lab",
            "inter_machine": {"bandwidth_gb_per_s": 1.25},
            "machines": [
                {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
                {
                    "name": "v",
                    "gpu": "v100_32gb_sxm",
                    "num_gpus": 2,
                    "intra_bandwidth_gb_per_s": 12,
                    "count": 2,
                },
            ],
        },
        "test",
    )
)
# Any data of JSON, some of it in words that hexiopt's files use.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("auto", "all", "a:0", "a", "1f1b", "none")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def rates() -> st.SearchStrategy[float]:
    """GB/s, from a slow office network to NVLink."""
    return st.sampled_from(BANDWIDTHS_GB_PER_S)


def latencies() -> st.SearchStrategy[float]:
    """µs, from none to a link across the sea."""
    return st.sampled_from(LATENCIES_US)


@st.composite
def clusters(draw: st.DrawFn, max_specs: int = 3, max_gpus: int = 5) -> Cluster:
    """One to three machine kinds: bridges, several interfaces, counts, racks, exceptional links."""
    machines: list[dict[str, Any]] = []
    for k in range(draw(st.integers(1, max_specs))):
        num_gpus = draw(st.integers(1, max_gpus))
        machine: dict[str, Any] = {
            "name": "abc"[k % 3] * (k // 3 + 1),
            "gpu": draw(st.sampled_from(GPUS)),
            "num_gpus": num_gpus,
            "intra_bandwidth_gb_per_s": draw(rates()),
            "intra_latency_us": draw(latencies()),
            "network_interfaces": draw(st.integers(1, 2)),
            "count": draw(st.integers(1, 2)),
        }
        if num_gpus > 1 and draw(st.booleans()):
            machine["intra_links"] = [{"between": [0, 1], "bandwidth_gb_per_s": draw(rates())}]
        if draw(st.booleans()):
            machine["nic_bandwidth_gb_per_s"] = draw(rates())
        machines.append(machine)
    data: dict[str, Any] = {
        "name": "random",
        "inter_machine": {"bandwidth_gb_per_s": draw(rates()), "latency_us": draw(latencies())},
        "machines": machines,
    }
    if draw(st.booleans()):
        data["groups"] = [{"name": "rack", "members": [machines[0]["name"]], "latency_us": draw(latencies())}]
        if draw(st.booleans()):
            data["groups"][0]["uplink_gb_per_s"] = draw(rates())
        if draw(st.booleans()):
            data["groups"][0]["shared_gb_per_s"] = draw(rates())
    if len(machines) > 1 and draw(st.booleans()):
        ends = [machines[0]["name"], machines[1]["name"]]
        way = {"between": ends} if draw(st.booleans()) else {"from": ends[0], "to": ends[1]}
        data["links"] = [{**way, "bandwidth_gb_per_s": draw(rates())}]
    return cluster_from_section(Section(data, "random"))


@st.composite
def models(draw: st.DrawFn, max_layers: int = 9) -> ModelSpec:
    """A small Llama (grouped queries, tied or not) or GPT-2 (biases, learned positions)."""
    head_dim, num_kv_heads = 2 * draw(st.integers(1, 16)), draw(st.integers(1, 4))
    sizes: dict[str, Any] = {
        "name": "small",
        "num_layers": draw(st.integers(1, max_layers)),
        "head_dim": head_dim,
        "ffn_size": draw(st.integers(1, 300)),
        "vocab_size": draw(st.integers(1, 2000)),
        "max_positions": 4096,
        "tied_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return ModelSpec(
            architecture="llama",
            hidden_size=draw(st.integers(1, 256)),
            num_heads=num_kv_heads * draw(st.integers(1, 4)),
            num_kv_heads=num_kv_heads,
            attention_bias=draw(st.booleans()),
            mlp_bias=draw(st.booleans()),
            **sizes,
        )
    return ModelSpec(
        architecture="gpt2",
        hidden_size=num_kv_heads * head_dim,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        attention_bias=True,
        mlp_bias=True,
        activation="gelu_new",
        **sizes,
    )


def workloads(max_batch: int = 60) -> st.SearchStrategy[Workload]:
    """A workload in an arithmetic that every GPU has."""
    return st.builds(
        _workload,
        global_batch=st.integers(1, max_batch),
        seq_len=st.sampled_from((1, 16, 100, 512, 4096)),
        precision=st.sampled_from(("fp16", "fp32")),
        recompute=st.sampled_from((AUTO, AUTO, *RECOMPUTE_POLICIES)),
        schedule=st.sampled_from((AUTO, AUTO, "gpipe", "1f1b", "interleaved")),
        optimizer_sharding=st.sampled_from((AUTO, AUTO, AUTO, "0", "1", "2", "3")),
        gradient_bytes=st.sampled_from((2, 4)),
        loss_chunk_tokens=st.sampled_from((None, None, 1, 300)),
        sequence_parallel=st.sampled_from((True, True, False)),
        message_precision=st.sampled_from(("training", "training", "fp8")),
        gradient_precision=st.sampled_from(("training", "training", "fp8")),
    )


def _workload(**choices: Any) -> Workload:
    if choices["optimizer_sharding"] in ("2", "3") and choices["schedule"] == "interleaved":
        choices["schedule"] = "1f1b"
    if choices["optimizer_sharding"] in ("2", "3"):
        choices["gradient_precision"] = "training"
    return Workload(**choices)


@st.composite
def problems(draw: st.DrawFn, max_batch: int = 60) -> Problem:
    """A problem with a free plan space; sometimes one device is excluded."""
    cluster = draw(clusters())
    last = cluster.device_name(cluster.num_devices - 1)
    space = Space(
        tp_degrees=draw(st.sampled_from(("powers_of_two", "all"))),
        max_micro_batch_size=draw(st.sampled_from((1, 3, 16))),
        max_tp=draw(st.sampled_from((None, None, 2))),
        exclude=(last,) if cluster.num_devices > 1 and draw(st.booleans()) else (),
    )
    return Problem(cluster, draw(models()), draw(workloads(max_batch)), space)


@st.composite
def roomy_problems(draw: st.DrawFn) -> Problem:
    """A problem whose plans may well have replicas and several layer ranges: many devices, layers and sequences."""
    cluster = draw(clusters().filter(lambda c: c.num_devices >= 6))
    model = replace(draw(models()), num_layers=draw(st.integers(6, 16)))
    workload = replace(draw(workloads()), global_batch=12 * draw(st.integers(1, 12)))
    return Problem(cluster, model, workload, Space(max_tp=2, uneven_chunks=draw(st.booleans())))


def compositions(total: int, parts: int) -> st.SearchStrategy[list[int]]:
    """`parts` whole numbers from 1 that sum to `total`."""
    cuts = st.lists(st.integers(1, max(1, total - 1)), min_size=parts - 1, max_size=parts - 1, unique=True).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, total], strict=True)])


@st.composite
def plans(draw: st.DrawFn, problem: Problem, *, plain: bool = False) -> Plan:
    """A valid plan of a problem without freedoms taken away: unequal TP, stages, layers, batches, policies.

    Unless `plain`, stages may have replicas, several layer ranges and a policy per layer. It may leave devices
    unused, and it may need more memory than there is.
    """
    cluster, model, workload, space = problem.cluster, problem.model, problem.workload, problem.space
    zeros = sharding_stages(workload)
    if min(zeros) >= 2 or (max(zeros) >= 2 and not plain and draw(st.integers(0, 3)) == 0):
        return draw(aligned_plans(problem, plain=plain))
    groups: list[tuple[int, ...]] = []
    for m, machine in enumerate(cluster.machines):
        left = [d for d in problem.usable_devices if cluster.machine_of[d] == m]
        if draw(st.booleans()):
            left = draw(st.permutations(left))
        while left:
            allowed = [t for t in space.allowed_tp(machine.num_gpus) if t <= len(left)]
            degree = draw(st.sampled_from(allowed))
            groups.append(tuple(left[:degree]))
            left = left[degree:]
    groups = draw(st.permutations(groups))
    used = draw(st.integers(max(1, len(groups) - 1), len(groups)))
    groups = groups[:used]
    count = draw(st.integers(1, min(3, len(groups), workload.global_batch)))
    num_sequences = draw(compositions(workload.global_batch, count))
    schedule = draw(st.sampled_from(schedules(workload)))
    pipelines, at = [], 0
    for sequences, num_groups in zip(num_sequences, draw(compositions(len(groups), count)), strict=True):
        mine = groups[at : at + num_groups]
        at += num_groups
        sizes = [b for b in space.micro_batch_sizes(workload.global_batch) if sequences % b == 0]
        size = draw(st.sampled_from(sizes))
        slots = [[group] for group in mine[: model.num_layers]]
        if not plain and draw(st.integers(0, 2)):
            counts = [*range(1, min(len(mine), model.num_layers) + 1)]
            if schedule.chunked:  # numbers of stages that may have several ranges
                counts = [n for n in counts if n > 1 and sequences // size % n == 0] or counts
            widths = draw(compositions(len(mine), draw(st.sampled_from(counts))))
            slots = [[mine.pop(0) for _ in range(width)][:size] for width in widths]
        stages = draw(stages_of(problem, slots, size, schedule, sequences // size, plain=plain))
        pipelines.append(Pipeline(stages, sequences // size, size))
    plan = Plan(tuple(pipelines), schedule)
    zero = draw(st.sampled_from([stage for stage in zeros if stage < 2]))
    return replace(plan, sharding=Sharding(zero, "all" if plain else draw(sharding_groups(plan))))


def sharding_groups(plan: Plan) -> st.SearchStrategy[str | tuple[tuple[int, ...], ...]]:
    """Sharding groups of any form that divide the devices of `plan`."""
    devices = plan.devices()
    marks = st.lists(st.integers(0, 2), min_size=len(devices), max_size=len(devices))
    lists = marks.map(
        lambda chosen: tuple(
            tuple(d for d, mark in zip(devices, chosen, strict=True) if mark == group) for group in sorted(set(chosen))
        )
    )
    return st.sampled_from(("all", "all", "machine")) | lists


@st.composite
def aligned_plans(draw: st.DrawFn, problem: Problem, *, plain: bool = False) -> Plan:
    """A valid ZeRO-2 or 3 plan: equal layers and TP degrees in all pipelines, unequal micro-batch sizes and policies.

    Unless `plain`, stages may have replicas, layers policies of their own, and sharding groups any form.
    """
    cluster, model, workload, space = problem.cluster, problem.model, problem.workload, problem.space
    degree = draw(st.sampled_from(sorted({t for m in cluster.machines for t in space.allowed_tp(m.num_gpus)})))
    groups = []
    for devices in problem.usable_by_machine.values():
        if degree in space.allowed_tp(cluster.machines[cluster.machine_of[devices[0]]].num_gpus):
            groups += [devices[k : k + degree] for k in range(0, len(devices) - degree + 1, degree)]
    if not groups:
        degree, groups = 1, [(device,) for device in problem.usable_devices]
    groups = draw(st.permutations(groups))
    count = draw(st.integers(1, min(len(groups), model.num_layers)))
    sizes = [1]
    if len(groups) // count > 1:
        any_size = st.sampled_from(space.micro_batch_sizes(workload.global_batch))
        sizes = draw(st.lists(any_size, min_size=1, max_size=min(4, len(groups) // count)))
        if workload.global_batch % sum(sizes):
            sizes = [1]
    layers = draw(compositions(model.num_layers, count))
    ends = [sum(layers[:k]) for k in range(count + 1)]
    spare = groups[count * len(sizes) :]
    pipelines = []
    for k, size in enumerate(sizes):
        stages = []
        for s in range(count):
            replicas: tuple[Replica, ...] = (Replica(groups[k * count + s]),)
            if not plain and size > 1 and spare and draw(st.booleans()):
                first = draw(st.integers(1, size - 1))
                replicas = (Replica(groups[k * count + s], first), Replica(spare.pop(), size - first))
            few = 1 if plain or draw(st.booleans()) else layers[s]
            policy = st.sampled_from(recompute_policies(workload))
            recompute = tuple(draw(st.lists(policy, min_size=few, max_size=few)))
            stages.append(Stage.of_replicas(replicas, ((ends[s], ends[s + 1]),), recompute))
        pipelines.append(Pipeline(tuple(stages), workload.global_batch // sum(sizes), size))
    schedule = draw(st.sampled_from([s for s in schedules(workload) if s.lockstep]))
    plan = Plan(tuple(pipelines), schedule)
    zero = draw(st.sampled_from([stage for stage in sharding_stages(workload) if stage >= 2]))
    return replace(plan, sharding=Sharding(zero, "all" if plain else draw(sharding_groups(plan))))


@st.composite
def depths_of(draw: st.DrawFn, num_stages: int, num_micro_batches: int) -> tuple[int | None, ...]:
    """Micro-batches in flight that the stages of a pipeline may state under 1F1B: never more than the stage before has;
    some state nothing."""
    depths: list[int | None] = []
    most = num_micro_batches
    for s in range(num_stages):
        usual = min(num_micro_batches, num_stages - s)
        if usual <= most and draw(st.integers(0, 3)) == 0:
            depths.append(None)
            most = usual
        else:
            most = draw(st.integers(1, most))
            depths.append(most)
    return tuple(depths)


@st.composite
def with_depths(draw: st.DrawFn, plan: Plan, schedule: Schedule = ONE_F_ONE_B) -> Plan:
    """`plan` under a schedule that takes depths, with such of all stages; its stages hold one layer range each."""
    pipelines = []
    for pipeline in plan.pipelines:
        depths = draw(depths_of(len(pipeline.stages), pipeline.num_micro_batches))
        stages = [replace(stage, in_flight=n) for stage, n in zip(pipeline.stages, depths, strict=True)]
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines), schedule=schedule)


@st.composite
def problems_with_depths(draw: st.DrawFn, schedule: Schedule = ONE_F_ONE_B) -> tuple[Problem, Plan]:
    """A problem that allows depths and names the schedule, and a valid plan of it with depths."""
    pairs = problems_with_plans(max_batch=20) | roomy_problems_with_plans()
    single = pairs.filter(
        lambda pair: pair[1].sharding.stage < 2 and all(pipeline.num_chunks == 1 for pipeline in pair[1].pipelines)
    )
    problem, plan = draw(single)
    workload = replace(problem.workload, schedule=schedule.name)
    problem = replace(problem, workload=workload, space=replace(problem.space, depth=True))
    return problem, draw(with_depths(plan, schedule))


@st.composite
def layer_policies(draw: st.DrawFn, choices: Sequence[str], lengths: Sequence[int]) -> tuple[str, ...]:
    """A policy for each layer of ranges of `lengths` layers, of `choices`, or joined to a layer with full recompute."""
    policies: list[str] = []
    for length in lengths:
        for k in range(length):
            joined = ("joined",) if k and policies[-1] in ("full", "joined") else ()
            policies.append(draw(st.sampled_from((*choices, *joined))))
    return tuple(policies)


@st.composite
def stages_of(
    draw: st.DrawFn,
    problem: Problem,
    slots: list[list[tuple[int, ...]]],
    size: int,
    schedule: Schedule,
    num_micro_batches: int,
    *,
    plain: bool,
) -> tuple[Stage, ...]:
    """Stages of a pipeline whose stage s has the TP groups `slots[s]` as replicas, with all layers of the model."""
    num_layers, count = problem.model.num_layers, len(slots)
    chunks = 1
    if schedule.chunked and not plain and count > 1 and num_micro_batches % count == 0:
        chunks = draw(st.sampled_from(range(1, min(3, num_layers // count) + 1)[::-1]))
    if problem.space.uneven_chunks:
        layers = list(ranges_of(draw(compositions(num_layers, chunks * count)), count))
    else:
        more = draw(compositions(num_layers - (chunks - 1) * count, count))
        layers = layer_ranges([chunks - 1 + n for n in more], chunks)
    policy = st.sampled_from(recompute_policies(problem.workload))
    stages = []
    for s, groups in enumerate(slots):
        samples: list[int | None] = [None]
        if len(groups) > 1 or (not plain and draw(st.booleans())):
            samples = [*draw(compositions(size, len(groups)))]
        ranges = layers[s]
        policies: tuple[str, ...] = (draw(policy),)
        if not plain and draw(st.booleans()):
            policies = draw(layer_policies(recompute_policies(problem.workload), [b - a for a, b in ranges]))
        replicas = tuple(Replica(devices, share) for devices, share in zip(groups, samples, strict=True))
        stages.append(Stage.of_replicas(replicas, ranges, policies))
    return tuple(stages)


@st.composite
def problems_with_plans(draw: st.DrawFn, max_batch: int = 60, *, plain: bool = False) -> tuple[Problem, Plan]:
    """A problem and a valid plan of it."""
    problem = draw(problems(max_batch))
    return problem, draw(plans(problem, plain=plain))


@st.composite
def roomy_problems_with_plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A problem and a plan of it that is likely to have replicas or several layer ranges."""
    problem = draw(roomy_problems())
    return problem, draw(plans(problem))


@st.composite
def format_plans(draw: st.DrawFn, cluster: Cluster, max_layers: int = 12) -> Plan:
    """A plan with any feature of the file format, priced or not; it need not be valid for any problem."""
    devices = draw(st.permutations(range(cluster.num_devices)))
    schedule = draw(st.sampled_from(SCHEDULES))
    num_layers = draw(st.integers(6, max_layers))
    pipelines = []
    for part in _deal(draw, devices, draw(st.integers(1, 2))):
        slots = _deal(draw, part, draw(st.integers(1, min(3, len(part)))))
        chunks = draw(st.integers(1, 2)) if schedule.chunked and len(slots) > 1 else 1
        size, count = draw(st.integers(4, 10**7)), draw(st.integers(1, 10**6)) * len(slots)
        lengths = draw(compositions(num_layers, len(slots) * chunks))
        ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
        stages = []
        for s, group in enumerate(slots):
            ranges = tuple((ends[k] - lengths[k], ends[k]) for k in range(s, len(ends), len(slots)))
            lengths_in = draw(st.sampled_from(([1], [end - first for first, end in ranges])))
            policies = draw(layer_policies(RECOMPUTE_POLICIES, lengths_in))
            stages.append(Stage(draw(_parallelisms(group, size, sequence=chunks == 1)), ranges, policies))
        pipelines.append(Pipeline(tuple(stages), count, size))
    plan = Plan(tuple(pipelines), schedule)
    if schedule.takes_depths and draw(st.booleans()):
        plan = draw(with_depths(plan))
    sharding = Sharding(draw(st.integers(0, 3)), draw(sharding_groups(plan)))
    return plan if sharding.broken_rule(plan.pipelines, schedule) else replace(plan, sharding=sharding)


def _deal(draw: st.DrawFn, devices: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Devices cut into so many parts, in order; some of the last may be left out."""
    widths = draw(compositions(draw(st.integers(parts, len(devices))), parts))
    return [tuple(devices[sum(widths[:k]) : sum(widths[: k + 1])]) for k in range(parts)]


@st.composite
def _parallelisms(draw: st.DrawFn, devices: tuple[int, ...], size: int, *, sequence: bool) -> StageParallelism:
    """Any parallelism of a stage on some of the devices that takes `size` sequences of a micro-batch."""
    numbers = st.integers(1, 5000)
    kind = draw(st.sampled_from(("tensor", "replicas", "sequence") if sequence else ("tensor", "replicas")))
    groups = _deal(draw, devices, draw(st.integers(1, min(3, len(devices)))))

    def each(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(draw(st.lists(numbers, min_size=len(group), max_size=len(group))))

    if kind == "sequence":
        parts = tuple(SequenceGroup(group, each(group), each(group)) for group in groups)
        return SequenceParallel(parts, draw(st.sampled_from(ORDERS)))
    heads = [each(group) if draw(st.booleans()) else None for group in groups]
    if kind == "tensor":
        return TensorParallel(groups[0], heads[0])
    return Replicated(tuple(map(Replica, groups, draw(compositions(size, len(groups))), heads)))
