"""A measured run as a problem and a plan.

Ranks are ordered as in Megatron and DeepSpeed: tensor parallelism innermost, then context and data parallelism, then
stages.
Layers are split as evenly as possible, earlier stages first, unless the notes state otherwise (`stage_layers.py`).
Devices that share experts (`EP=n` in the notes) are one group of a stage: n / TP replicas, with a micro-batch each.
Other notes that are read: `local batch N` (sequences of a pipeline), `model-parallel size tp*pp`, `mp_mode`, and words
that name software (`rules.py`).
"""

import re
from dataclasses import dataclass, replace
from itertools import product

from experiments.validation.clusters import cluster_of
from experiments.validation.features import ADAPTERS, OF_KINDS, QUANTISED, unpriced_features
from experiments.validation.predict import Case, predict
from experiments.validation.rows import Row
from experiments.validation.rules import (
    framework_of,
    gradient_bytes_of,
    policies_of,
    precision_of,
    recompute_of,
    routing_of,
    stores_scores,
)
from experiments.validation.shapes import InexpressibleError, adapters_of, has_experts, model_of, seq_len_of
from experiments.validation.stage_layers import stage_layers
from hexiopt.errors import InputError
from hexiopt.files.link_files import NetworkFits
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Profile
from hexiopt.problem.space import layer_ranges
from hexiopt.problem.workload import LORA, Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B

_LARGEST_MICRO_BATCH = 64
_MOST_CHUNKS = 8


@dataclass(frozen=True)
class Measurements:
    """Measurements of layers and of links with which rows are predicted."""

    profile: Profile
    network: NetworkFits | None


@dataclass(frozen=True)
class _Degrees:
    """Parallel degrees; `vpp` layer ranges of every stage; `dp` replicas, of which `cp` share a sequence, and `sharing`
    share experts, as one pipeline."""

    tp: int
    pp: int
    dp: int
    vpp: int
    cp: int
    sharing: int = 1


def case_of(row: Row, measurements: Measurements) -> Case:
    """The case of a row. Raises InexpressibleError with the reason where no problem or plan expresses the row.

    Where the micro-batch size, the recompute policy, the number of layer ranges or Megatron's ZeRO stage is blank, the
    cost model's fastest choice that fits in memory is taken (of all choices, where none fits), since published runs
    are tuned.
    """
    adapters = adapters_of(row)
    priced = (*(() if adapters is None else (ADAPTERS, QUANTISED)), *(OF_KINDS if has_experts(row) else ()))
    if feature := unpriced_features(row.notes, row.model_name, row.others, priced):
        raise InexpressibleError(feature)
    try:
        cases = _cases(row, measurements, adapters)
    except InputError as error:
        raise InexpressibleError(str(error)) from None
    if len(cases) == 1:
        return cases[0]
    costs = [predict(case) for case in cases]
    fits = any(cost.fits for cost in costs)
    return cases[min(range(len(cases)), key=lambda k: costs[k].objective if fits else costs[k].step_time_s)]


def _cases(row: Row, measurements: Measurements, adapters: Lora | None) -> list[Case]:
    """One case for every combination of choices that the row leaves open."""
    degrees = _degrees(row)
    published = cluster_of(row, fused_attention=not stores_scores(row), fits=measurements.network)
    cluster = replace(published.cluster, profile=measurements.profile)
    if cluster.num_devices != degrees.tp * degrees.pp * degrees.dp:
        raise InexpressibleError("degrees do not multiply to the number of GPUs")
    model, precision = model_of(row), precision_of(row)
    if model.shares_experts:
        degrees = replace(degrees, sharing=_replicas_sharing(row, degrees))
    if any(machine.gpu.peak_flops(precision) is None for machine in cluster.machines):
        raise InexpressibleError(f"a GPU without {precision}")
    length, rest = divmod(seq_len_of(row), degrees.cp)
    if rest:
        raise InexpressibleError("context parallelism does not divide the sequences")
    cases = []
    for size in _sizes(row, degrees):
        batch = _pipeline_batch(row, degrees, size) * degrees.dp
        workload = Workload(
            global_batch=batch,
            seq_len=length,
            precision=precision,
            gradient_bytes=gradient_bytes_of(row),
            routing=routing_of(row),
        )
        if adapters is not None:
            workload = replace(workload, training=LORA, lora=adapters)
        problem = Problem(cluster, model, workload)
        for vpp in _chunks(row, degrees, batch // degrees.dp // size, model.num_layers):
            for policy, sharding in product(policies_of(row), _shardings(row, degrees, model)):
                plan = _plan(row, problem, replace(degrees, vpp=vpp), size, policy, sharding)
                cases.append(Case(row, problem, plan, framework_of(row), published.links_measured, degrees.cp))
    return cases


def _degrees(row: Row) -> _Degrees:
    tp, pp, parallel = row.tp, row.pp, row.note("model-parallel size tp*pp")
    if row.gpus is None:
        raise InexpressibleError("the number of GPUs is not stated")
    if tp is None and pp is None and parallel and (together := re.match(r"\d+", parallel)):
        # the largest TP degree within a machine
        size = int(together[0])
        tp = max(t for t in range(1, min(size, row.gpus_per_node or 8) + 1) if size % t == 0)
        pp = size // tp
    if tp is None or pp is None:
        raise InexpressibleError("parallel degrees are not stated")
    if row.gpus % (tp * pp):
        raise InexpressibleError("degrees do not multiply to the number of GPUs")
    cp = row.cp or 1
    dp = row.dp * cp if row.dp else row.gpus // (tp * pp)
    if dp % cp:
        raise InexpressibleError("degrees do not multiply to the number of GPUs")
    return _Degrees(tp, pp, dp, row.vpp or 1, cp)


def _replicas_sharing(row: Row, degrees: _Degrees) -> int:
    """The number of replicas of a stage that share experts."""
    cut, ep = row.note("ETP"), row.note("EP")
    if cut not in (None, "1"):
        raise InexpressibleError("experts cut by columns")
    sharing = max(1, int(ep or 1) // degrees.tp)
    if degrees.dp % sharing:
        raise InexpressibleError("degrees do not multiply to the number of GPUs")
    return sharing


def _sizes(row: Row, degrees: _Degrees) -> list[int]:
    """The micro-batch sizes that the row leaves open, or the largest divisor up to a stated size."""
    micro_batch = row.micro_batch
    sequences = _pipeline_batch(row, degrees, micro_batch)
    if micro_batch is not None:
        return [next(size for size in range(min(micro_batch, sequences), 0, -1) if sequences % size == 0)]
    return [1 << k for k in range(_LARGEST_MICRO_BATCH.bit_length()) if sequences % (1 << k) == 0]


def _pipeline_batch(row: Row, degrees: _Degrees, micro_batch: int | None) -> int:
    """Sequences of a pipeline, or their parts; one micro-batch where the row states no batch."""
    local = re.search(r"\blocal batch (\d+)", row.notes)
    if row.global_batch is not None:
        sequences, rest = divmod(row.global_batch * degrees.cp, degrees.dp)
        if rest:
            raise InexpressibleError("the batch does not divide among the pipelines")
        return sequences
    if local is None and micro_batch is None:
        raise InexpressibleError("neither micro-batch nor batch is stated")
    return int(local[1]) if local else micro_batch or 1


def _chunks(row: Row, degrees: _Degrees, num_micro_batches: int, num_layers: int) -> list[int]:
    """The numbers of layer ranges of a stage that the row leaves open."""
    if row.vpp is not None or degrees.pp == 1:
        return [degrees.vpp]
    layers_per_stage, rest = divmod(num_layers, degrees.pp)
    if rest or num_micro_batches % degrees.pp or (row.says("1F1B") and not row.says("interleaved")):
        return [1]
    counts = [1 << k for k in range(_MOST_CHUNKS.bit_length()) if layers_per_stage % (1 << k) == 0]
    return counts[1:] or counts if row.says("interleaved") else counts


def _plan(row: Row, problem: Problem, d: _Degrees, size: int, policy: str, sharding: Sharding) -> Plan:
    counts = stage_layers(row, problem.model, d.pp)
    if len(counts) != d.pp or sum(counts) != problem.model.num_layers:
        raise InexpressibleError("layers do not divide into the stages")
    # Megatron's embedding and head may be layer ranges without a layer; then fewer, longer ranges are taken.
    vpp = next((n for n in range(d.vpp, 0, -1) if d.vpp % n == 0 and n <= min(counts)), 0)
    if not vpp:
        raise InexpressibleError("layers do not divide into the stages")
    ranges, group = layer_ranges(counts, vpp), d.tp * d.sharing
    degree = d.tp if problem.model.shares_experts else None

    def stage(s: int, pipeline: int) -> Stage:
        first = s * d.dp * d.tp + pipeline * group
        devices = tuple(range(first, first + group))
        return Stage(TensorParallel(devices, degree=degree), ranges[s], recompute_of(row, policy, counts[s]))

    try:
        pipelines = tuple(
            Pipeline(
                tuple(stage(s, p) for s in range(d.pp)),
                problem.workload.global_batch // d.dp // size,
                size * d.sharing,
            )
            for p in range(d.dp // d.sharing)
        )
        _check_machines(problem.cluster, pipelines)
        return Plan(pipelines, INTERLEAVED if vpp > 1 else ONE_F_ONE_B, sharding)
    except InputError as error:
        raise InexpressibleError(str(error)) from None


def _check_machines(cluster: Cluster, pipelines: tuple[Pipeline, ...]) -> None:
    for pipeline in pipelines:
        for stage in pipeline.stages:
            for devices in stage.parallelism.parameter_copies:
                if len({int(cluster.machine_of[device]) for device in devices}) > 1:
                    raise InexpressibleError("tensor parallelism across machines")


def _shardings(row: Row, d: _Degrees, model: ModelSpec) -> list[Sharding]:
    """The optimiser shardings that the row leaves open."""
    shardings, several = _stated_shardings(row, d), len(model.kinds) > 1 or d.sharing > 1
    if several and any(sharding.stage >= 2 for sharding in shardings):
        raise InexpressibleError("layers of several kinds or shared experts under ZeRO-2 or 3")
    return shardings


def _stated_shardings(row: Row, d: _Degrees) -> list[Sharding]:
    text = row.zero_stage_or_fsdp.lower()
    if d.dp == 1:
        return [Sharding(0)]
    if "shard_grad_op" in text:
        return [Sharding(2)]
    if "fsdp" in text:
        # torchtitan keeps gathered weights from one micro-batch of a pipeline to the next.
        return [Sharding(2 if d.pp > 1 and framework_of(row).startswith("torchtitan") else 3)]
    if not text and row.says("param-gather"):
        # Megatron overlaps the gathering of parameters with the forward only in its distributed optimiser, ZeRO-1.
        return [Sharding(1)]
    if not text and framework_of(row) in ("megatron", "megatron_2025", "maxtext"):
        return [Sharding(0), Sharding(1)]
    named, grouped = re.search(r"zero-?(\d)", text), re.search(r"group=(\d+)", text)
    stage = int(named[1]) if named else 0
    size = int(grouped[1]) if grouped else d.dp
    if stage == 0 or size >= d.dp or d.dp % size:
        return [Sharding(stage)]
    groups = tuple(
        tuple((s * d.dp + first + k) * d.tp + t for k in range(size))
        for s in range(d.pp)
        for first in range(0, d.dp, size)
        for t in range(d.tp)
    )
    return [Sharding(stage, groups)]
