"""Layouts of trainers that fold expert parallelism into data parallelism and TP, as plans.

An EP group is so many consecutive ranks, which hold whole experts, equally many each. It is one or more whole TP
groups, each with sequences of its own: of a plan, the devices of a stage of several replicas
(`TensorParallel.degree`). Other layers take its ranks for those replicas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexiopt.exports.formats import ImportedPlan
from hexiopt.exports.layout import expert_counts
from hexiopt.exports.settings import FileSettings
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Stage
from hexiopt.problem.model import ModelSpec

NO_FURTHER_LAYERS = (
    "trains no layers that predict further tokens; plan without them, as by model.num_nextn_predict_layers=0"
)


def divides_layers(model: ModelSpec, tp: int) -> bool:
    """Whether a TP degree divides the query heads, key-value heads and MLP columns of every layer, those that all
    tokens take of experts among them, and the number of experts."""
    sizes: list[int] = []
    for kind in model.kinds:
        if kind.attention is not None:
            sizes += kind.attention.heads, kind.attention.kv_heads
        if kind.recurrent is not None:
            sizes += kind.recurrent.heads, kind.recurrent.groups
        if kind.dense is not None:
            sizes.append(kind.dense.ffn_size)
        if kind.experts is not None:
            sizes += kind.experts.shared, kind.experts.count
    return all(size % tp == 0 for size in sizes)


def expert_degree(settings: FileSettings, key: str, model: ModelSpec, *, ep: int, tp: int, shard: int) -> int:
    """The EP degree of a file, whose value under `key` is `ep`; 1 where the model has no experts.

    `shard` is the number of TP groups between which EP groups are formed. What no plan states becomes a fault.
    """
    what, counts = f"{key} {ep}", sorted(expert_counts(model))
    if not counts:
        if ep > 1:
            settings.fault(what, f"shares experts, of which {model.name} has none; give the model that is trained")
        return 1
    if ep == 1 < tp:
        settings.fault(
            what, f"cuts each expert by columns over TP {tp}, which is not modelled; take a multiple of {tp}"
        )
    elif ep % tp:
        settings.fault(what, f"parts the TP groups of {tp}, which is not modelled; take a multiple of {tp}")
    elif shard * tp % ep:
        settings.fault(what, f"does not divide the {shard} × {tp} GPUs of a stage that shard together; correct one")
    elif any(count % ep for count in counts):
        settings.fault(what, f"does not divide {' or '.join(map(str, counts))} experts; take a divisor")
    else:
        return ep
    return tp


def with_expert_groups(layout: ImportedPlan, tp: int, ep: int) -> ImportedPlan:
    """The layout in which consecutive pipelines, as many as fill EP groups, are one pipeline of replicas that share
    experts.

    Pipelines are all alike, of stages of TP degree `tp`, which divides `ep`.
    """
    if not layout.problem.model.shares_experts:
        return layout
    pipelines = tuple(_together(pipelines, tp) for pipelines in _runs(layout.plan.pipelines, ep // tp))
    return replace(layout, plan=replace(layout.plan, pipelines=pipelines))


def _runs(pipelines: Sequence[Pipeline], length: int) -> Iterator[Sequence[Pipeline]]:
    return (pipelines[at : at + length] for at in range(0, len(pipelines), length))


def _together(pipelines: Sequence[Pipeline], tp: int) -> Pipeline:
    def join(stages: tuple[Stage, ...]) -> Stage:
        devices = tuple(device for stage in stages for device in stage.devices)
        return replace(stages[0], parallelism=TensorParallel(devices, degree=tp if len(devices) > 1 else None))

    stages = tuple(map(join, zip(*(pipeline.stages for pipeline in pipelines), strict=True)))
    size = sum(pipeline.micro_batch_size for pipeline in pipelines)
    return replace(pipelines[0], stages=stages, micro_batch_size=size)
