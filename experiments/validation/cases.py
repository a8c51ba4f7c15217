"""What a measured run was: the problem and the plan that say the same, and its step time.

Ranks stand as Megatron and DeepSpeed put them: tensor parallelism innermost, then data parallelism, then stages.
Layers are cut as evenly as they go, earlier stages first, where the notes do not state another cut.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from experiments.validation.clusters import links_of, machines_of
from experiments.validation.rows import Row
from experiments.validation.shapes import InexpressibleError, model_of, seq_len_of
from hexiopt.cluster import Cluster
from hexiopt.cluster_file import cluster_from_section
from hexiopt.cost.model import CostModel
from hexiopt.frameworks import Framework, frameworks
from hexiopt.model import ModelSpec
from hexiopt.plan import Pipeline, Plan, Replica, Sharding, Stage, irregular, misaligned
from hexiopt.problem import Problem
from hexiopt.reading import Section
from hexiopt.space import layer_ranges
from hexiopt.workload import RECOMPUTE_POLICIES, Workload

_LARGEST = 64  # micro-batch tried
_MOST_CHUNKS = 8
_UNFUSED = ("megatron_2021", "megatron_2022", "deepspeed")


@dataclass(frozen=True)
class Case:
    """A run that the cost model can express."""

    row: Row
    problem: Problem
    plan: Plan
    framework: Framework


def case_of(row: Row) -> Case:
    """The case of a row. Raises InexpressibleError with the reason, for rows that no plan expresses.

    A blank micro-batch size or recompute policy is the one that the cost model finds fastest of those that fit in
    memory (of all, where none does): published runs are tuned ones.
    """
    if (row.cp or 1) > 1:
        raise InexpressibleError("context parallelism")
    cases = [
        _case(row, size, policy, vpp) for size in _sizes(row) for policy in _policies(row) for vpp in _chunks(row, size)
    ]
    if len(cases) == 1:
        return cases[0]
    priced = [CostModel(case.problem, case.framework).price(case.plan) for case in cases]
    fits = any(cost.fits for cost in priced)
    return cases[min(range(len(cases)), key=lambda k: priced[k].objective if fits else priced[k].step_time_s)]


def _case(row: Row, size: int, policy: str, vpp: int) -> Case:
    model = model_of(row)
    degrees = _degrees(row)
    batch = row.global_batch or size * degrees.dp
    if batch % degrees.dp or batch // degrees.dp % size:
        raise InexpressibleError("the batch does not divide into micro-batches")
    workload = Workload(
        global_batch=batch,
        seq_len=seq_len_of(row),
        precision=precision_of(row),
        gradient_bytes=_gradient_bytes(row),
    )
    cluster = _cluster(row)
    if cluster.num_devices != degrees.tp * degrees.pp * degrees.dp:
        raise InexpressibleError("degrees do not make the number of GPUs")
    plan = _plan(row, model, cluster, replace(degrees, vpp=vpp), size, batch, policy)
    return Case(row, Problem(cluster, model, workload), plan, frameworks()[framework_of(row)])


def _sizes(row: Row) -> list[int]:
    """The sizes of micro-batches that the row leaves open; the largest part of a stated one that divides the batch."""
    degrees, stated = _degrees(row), row.micro_batch
    if row.global_batch is None:
        if stated is None:
            raise InexpressibleError("neither micro-batch nor batch is stated")
        return [stated]
    if row.global_batch % degrees.dp:
        raise InexpressibleError("the batch does not divide among the pipelines")
    own = row.global_batch // degrees.dp
    if stated is not None:
        return [next(size for size in range(min(stated, own), 0, -1) if own % size == 0)]
    return [1 << k for k in range(_LARGEST.bit_length()) if own % (1 << k) == 0]


def _chunks(row: Row, size: int) -> list[int]:
    """The layer ranges of a stage that the row leaves open."""
    degrees = _degrees(row)
    if row.vpp is not None or degrees.pp == 1 or row.global_batch is None:
        return [degrees.vpp]
    each, rest = divmod(model_of(row).num_layers, degrees.pp)
    if rest or row.global_batch // degrees.dp // size % degrees.pp:
        return [1]
    return [1 << k for k in range(_MOST_CHUNKS.bit_length()) if each % (1 << k) == 0]


def _policies(row: Row) -> tuple[str, ...]:
    if row.recompute:
        return (row.recompute,)
    return ("full",) if row.says("full-recompute", "counts full recompute") else RECOMPUTE_POLICIES


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees; `vpp` layer ranges of every stage."""

    tp: int
    pp: int
    dp: int
    vpp: int


def _degrees(row: Row) -> Degrees:
    if row.gpus is None:
        raise InexpressibleError("the number of GPUs is not stated")
    tp, pp = row.tp, row.pp
    parallel = row.note("model-parallel size tp*pp")
    if tp is None and pp is None and parallel:
        together = int(re.match(r"\d+", parallel)[0])  # type: ignore[index]
        tp = min(together, row.gpus_per_node or 8)
        while together % tp:
            tp -= 1
        pp = together // tp
    if tp is None or pp is None:
        raise InexpressibleError("parallel degrees are not stated")
    if row.gpus % (tp * pp):
        raise InexpressibleError("degrees do not make the number of GPUs")
    dp = row.dp or row.gpus // (tp * pp)
    return Degrees(tp, pp, dp, row.vpp or 1)


def precision_of(row: Row) -> str:
    text = row.precision.lower()
    for name in ("fp8", "bf16", "fp16", "tf32", "fp32"):
        if name in text.split("(")[0]:
            return name
    return "bf16" if not text else "fp32"


def framework_of(row: Row) -> str:
    text = f"{row.source} {row.notes}".lower()
    if "fsdp" in row.zero_stage_or_fsdp:
        return "fsdp"
    if "internevo" in text:
        return "internevo"
    if "nanotron" in text:
        return "nanotron"
    if "deepspeed" in text:
        return "deepspeed"
    if row.says("sequence parallel on"):
        return "megatron_2022"
    return "megatron_2021" if precision_of(row) == "fp16" or row.recompute == "full" else "megatron"


def _gradient_bytes(row: Row) -> int:
    half = row.note("mp_mode") == "PURE" or framework_of(row) in ("megatron_2021", "megatron_2022", "internevo")
    return 2 if half else 4


def _cluster(row: Row) -> Cluster:
    entries: list[dict[str, Any]] = []
    gpus = {}
    for k, machines in enumerate(machines_of(row)):
        inside, interfaces, each = links_of(row, machines, FITS)
        entries.append(
            {
                "name": f"m{k}",
                "gpu": machines.gpu.name,
                "num_gpus": machines.num_gpus,
                "count": machines.count,
                "intra_bandwidth_gb_per_s": inside,
                "network_interfaces": interfaces,
                "nic_bandwidth_gb_per_s": each,
            }
        )
        if framework_of(row) in _UNFUSED:
            gpus[machines.gpu.name] = {"flash_attention": False}
    content = {"name": "published", "machines": entries, "inter_machine": {"bandwidth_gb_per_s": 1.0}, "gpus": gpus}
    return replace(cluster_from_section(Section(content, f"line {row.line}")), profile=PROF)

from pathlib import Path
from hexiopt.profiles.files import read_profile
from hexiopt.profiles.network import sailor_network
PROF=read_profile(Path('experiments/data/sailor/layer_profiles.json'))
FITS=sailor_network(Path('experiments/data/sailor/network.json'))


def _plan(
    row: Row, model: ModelSpec, cluster: Cluster, d: Degrees, size: int, batch: int, policy: str
) -> Plan:
    counts = _layer_counts(row, model, d)
    if d.pp * d.vpp > model.num_layers:
        raise InexpressibleError("more stages than layers")
    ranges = layer_ranges(counts, d.vpp)
    pipelines = tuple(
        Pipeline(
            tuple(
                Stage((Replica(tuple((s * d.dp + p) * d.tp + t for t in range(d.tp))),), ranges[s], (policy,))
                for s in range(d.pp)
            ),
            batch // d.dp // size,
            size,
        )
        for p in range(d.dp)
    )
    for group in (stage.devices for pipeline in pipelines for stage in pipeline.stages):
        if len({int(cluster.machine_of[device]) for device in group}) > 1:
            raise InexpressibleError("tensor parallelism across machines")
    schedule = "interleaved" if d.vpp > 1 else "1f1b"
    plan = Plan(pipelines, schedule, _sharding(row, d))
    wrong = misaligned(plan) or next((w[1] for p in pipelines if (w := irregular(p, schedule))), None)
    if wrong is not None:
        raise InexpressibleError(wrong)
    return plan


def _sharding(row: Row, d: Degrees) -> Sharding:
    text = row.zero_stage_or_fsdp.lower()
    if d.dp == 1:
        return Sharding(0)
    if "shard_grad_op" in text:
        return Sharding(2)
    if "fsdp" in text:
        return Sharding(3)
    stage = re.search(r"zero-?(\d)", text)
    if stage is None:
        return Sharding(1 if row.says("param-gather") else 0)
    grouped = re.search(r"group=(\d+)", text)
    if grouped and int(grouped[1]) < d.dp:
        size = int(grouped[1])
        # Consecutive ranks of data parallelism, for every stage and rank of its TP groups.
        groups = [
            tuple((s * d.dp + first + k) * d.tp + t for k in range(size))
            for s in range(d.pp)
            for first in range(0, d.dp, size)
            for t in range(d.tp)
        ]
        return Sharding(int(stage[1]), tuple(groups))
    return Sharding(int(stage[1]))


def _layer_counts(row: Row, model: ModelSpec, d: Degrees) -> list[int]:
    cut = row.note("layer partition")
    if cut is not None:
        numbers = [int(x) for x in re.findall(r"\d+", cut.split("]")[0])]
        total = int(re.search(r"\((\d+) pipeline modules", cut)[1])  # type: ignore[index]
        before = 2  # modules of the embedding
        edges = [min(max(n - before, 0), model.num_layers) for n in numbers]
        edges[0], edges[-1] = 0, model.num_layers
        del total
        return [b - a for a, b in pairwise(edges)]
    stated = row.note("layers_per_stage")
    if stated is not None:
        counts = list(map(int, json.loads(stated)))
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    low, extra = divmod(model.num_layers, d.pp)
    return [low + (k < extra) for k in range(d.pp)]
