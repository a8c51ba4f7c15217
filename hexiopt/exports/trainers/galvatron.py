"""Galvatron: one chain of stages with equally many GPUs; TP degree and full recompute by layer, as a JSON file.

Ranks are t + T·(r + R·s) for replica r of R of stage s (`galvatron/core/runtime/comm_groups.py`).
"""

import json
from itertools import accumulate, pairwise
from typing import Any

from hexiopt.exports.formats import (
    ImportContext,
    ImportedPlan,
    Program,
    Refusal,
    Trainer,
    divides_model_and_sequence,
    stage_name,
)
from hexiopt.exports.layout import Layout, LayoutStage, chain_of, check_tp, schedule_of, zero_stage
from hexiopt.exports.stated_jobs import imported_layout
from hexiopt.exports.trainers.megatron import EVEN
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, as_mapping, parse
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B

TARGET = "Galvatron cea12ff"
FILE = "galvatron.json"
_SCHEDULES = {ONE_F_ONE_B: "pipedream_flush", GPIPE: "gpipe"}
_ZERO = {0: "ddp", 2: "zero2", 3: "zero3"}
PRESET = EVEN | {
    "workload.schedule": (ONE_F_ONE_B.name, GPIPE.name),
    "workload.optimizer_sharding": ("2", "3", "0"),
    "workload.recompute": ("full", "none"),
}


def _unsuitable(problem: Problem) -> str | None:
    model = problem.model
    known = ("llama", "mistral", "qwen2", "gpt2")
    return None if model.architecture in known else f"model {model.name}: Galvatron trains {', '.join(known)}; take one"


def _write(problem: Problem, plan: Plan) -> Program:
    refuse = Refusal("galvatron")
    schedule = schedule_of(plan, tuple(_SCHEDULES), refuse)
    chain, zero = chain_of(plan, refuse), zero_stage(plan, tuple(_ZERO), refuse)
    check_tp(problem, chain, divides_model_and_sequence, refuse)
    for s, stage in enumerate(chain.stages):
        if stage.tp * stage.dp != chain.stages[0].tp * chain.stages[0].dp:
            said = f"{stage_name(0, s)} has {stage.tp * stage.dp} GPUs, stage 0 has"
            refuse(f"{said} {chain.stages[0].tp * chain.stages[0].dp}", "space.uneven_tp=false space.replicas=false")
        if "selective" in stage.recompute:
            refuse(f"{stage_name(0, s)} recomputes selectively", "workload.recompute=full")
    tps = [stage.tp for stage in chain.stages for _ in range(stage.num_layers)]
    checkpoint = [
        int(policy == "full") for stage in chain.stages for policies in stage.policies() for policy in policies
    ]
    ends = chain.stages[0].tp, chain.stages[-1].tp
    said = f"embedding and head have one TP degree, {ends[0]}, where the plan has {ends[0]} and {ends[1]}"
    notes = (said,) * (ends[0] != ends[1])
    document = {
        "pp_deg": len(chain.stages),
        "tp_sizes_enc": _listed(tps),
        "tp_consecutive_flags": _listed([1] * len(tps)),
        "dp_types_enc": _listed([int(zero == 3)] * len(tps)),
        "use_sp": _listed([0] * len(tps)),
        "checkpoint": _listed(checkpoint),
        "global_bsz": chain.global_batch,
        "chunks": chain.num_micro_batches,
        "pp_division": _listed([stage.num_layers for stage in chain.stages]),
        "pipeline_type": _SCHEDULES[schedule],
        "default_dp_type": _ZERO[zero],
        "vtp": ends[0],
        "vsp": 0,
        "hexiopt": {"target": TARGET, "notes": list(notes)},
    }
    command = f'"${{GALVATRON:-.}}/train_dist.py" --galvatron_config_path "$HERE/{FILE}"'
    return Program(chain.stage_major(), command, {FILE: json.dumps(document, indent=1) + "\n"}, notes=notes)


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    section = Section(as_mapping(parse(text, context.where, as_json=True), context.where), context.where)
    model, world = context.stated_model("Galvatron"), len(context.devices)
    stages = section.integer("pp_deg", at_least=1, at_most=1024)
    division, tps = _numbers(section, "pp_division"), _numbers(section, "tp_sizes_enc")
    checkpoint = _numbers(section, "checkpoint", [0] * len(tps))
    if len(division) != stages or sum(division) != model.num_layers or len(tps) != model.num_layers:
        context.fail(f"pp_division and tp_sizes_enc: are not those of {stages} stages and {model.num_layers} layers")
    if len(checkpoint) != len(tps) or world % stages:
        context.fail(
            f"checkpoint has {len(checkpoint)} layers of {len(tps)}, or {stages} stages do not divide {world} GPUs"
        )
    if any(_numbers(section, "use_sp", [0])) or max(_numbers(section, "cp_sizes_enc", [1])) > 1:
        context.fail("use_sp or cp_sizes_enc: sequence parallelism of Galvatron is not modelled; import without")
    batch = section.integer("global_bsz", at_least=1, at_most=10**7)
    chunks = section.integer("chunks", at_least=1, at_most=10**7)
    size, per = batch // chunks, world // stages
    found = []
    for s, (first, end) in enumerate(pairwise([0, *accumulate(division)])):
        if len(set(tps[first:end])) != 1:
            context.fail(
                f"tp_sizes_enc: layers of stage {s} have several TP degrees, which are not modelled; give it one"
            )
        tp, rank = tps[first], s * per
        if per % tp or size % (per // tp) or batch % chunks:
            context.fail(
                f"stage {s}: TP {tp} on {per} GPUs does not divide micro-batches of {batch} / {chunks} sequences"
            )
        replicas = tuple(context.devices[rank + r * tp : rank + (r + 1) * tp] for r in range(per // tp))
        policies = tuple("full" if own else "none" for own in checkpoint[first:end])
        found.append(LayoutStage(replicas, ((first, end),), policies if len(set(policies)) > 1 else policies[:1]))
    named = section.text("pipeline_type", choices=tuple(_SCHEDULES.values()), default="gpipe")
    kind = section.text("default_dp_type", choices=tuple(_ZERO.values()), default="ddp")
    types = set(_numbers(section, "dp_types_enc", [0] * len(tps)))
    zero = 3 if types == {1} else next(own for own, theirs in _ZERO.items() if theirs == kind)
    if len(types) > 1:
        context.fail("dp_types_enc: layers differ in ZeRO stage, which is not modelled; give all the same")
    schedule = next(own for own, theirs in _SCHEDULES.items() if theirs == named)
    return imported_layout(context, model, Layout(tuple(found), chunks, size), schedule, zero, {"global_batch": batch})


def _numbers(section: Section, key: str, default: list[int] | None = None) -> list[int]:
    """The numbers in a text that commas divide."""
    if key not in section and default is not None:
        return default
    value: Any = section.raw(key)
    parts = str(value).split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        section.fail(key, "is not a list of whole numbers with commas between; correct it")
    return [int(part) for part in parts]


TRAINER = Trainer(
    name="galvatron",
    target=TARGET,
    expresses="one chain of stages with equally many GPUs; TP degree by stage, full recompute by layer",
    preset=lambda problem: PRESET,
    takes_tp=divides_model_and_sequence,
    write=_write,
    read=_read,
    unsuitable=_unsuitable,
)
