"""FlashFlex (HexiScale's released trainer): pipelines of any structure, as JSON and arguments of `llama_train.py`.

Ranks go through pipelines, stages and TP ranks. It trains four Llama shapes in fp16 at 4,096 tokens, whatever is asked
(`hexiscale/process_args.py`); each pipeline's gradient is averaged over its own sequences, and then over pipelines.
"""

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refusal, Trainer, stage_name
from hexiopt.exports.layout import UNIFORM_RECOMPUTE, note_lines, schedule_of, zero_stage
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, as_mapping, parse
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B

TARGET = "FlashFlex 5ee1726"
FILE, ARGUMENTS = "flashflex.json", "flashflex.sh"
# Of each model size: layers, hidden size, heads.
SIZES = {
    (32, 4096, 32): "llama-7b",
    (40, 5120, 40): "llama-13b",
    (60, 6656, 52): "llama-30b",
    (80, 8192, 64): "llama-70b",
}
SEQ_LEN = 4096
_SCHEDULES = {ONE_F_ONE_B: "1F1B", GPIPE: "Gpipe"}
_OWN = "hexiopt"  # a key of the JSON that FlashFlex does not read
PRESET = {
    "space.replicas": (False,),
    "space.recompute_per_stage": (False,),
    "space.recompute_per_layer": (False,),
    "space.sequence": (False,),
    "space.tp_degrees": ("powers_of_two",),
    "workload.schedule": (ONE_F_ONE_B.name, GPIPE.name),
    "workload.optimizer_sharding": ("0",),
    "workload.recompute": ("full", "none"),
}


def _takes_tp(problem: Problem, tp: int) -> bool:
    return problem.model.num_heads % tp == 0


def _unsuitable(problem: Problem) -> str | None:
    model, workload = problem.model, problem.workload
    if model.architecture != "llama" or (model.num_layers, model.hidden_size, model.num_heads) not in SIZES:
        return f"model {model.name}: FlashFlex trains {', '.join(SIZES.values())} alone; take one of these shapes"
    if workload.seq_len != SEQ_LEN:
        return f"workload.seq_len: FlashFlex trains {SEQ_LEN} tokens whatever is asked; take workload.seq_len={SEQ_LEN}"
    if workload.precision != "fp16":
        return f"workload.precision: FlashFlex trains in fp16, not {workload.precision}; take workload.precision=fp16"
    return None


def _write(problem: Problem, plan: Plan) -> Program:
    refuse = Refusal("flashflex")
    schedule = schedule_of(plan, tuple(_SCHEDULES), refuse)
    zero_stage(plan, (0,), refuse)
    policies = set[str]()
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.sequence or len(stage.replicas) > 1:
                refuse(f"{stage_name(p, s)} has more than one TP group", "space.replicas=false space.sequence=false")
            if len(stage.layers) > 1:
                refuse(f"{stage_name(p, s)} has several layer ranges", "workload.schedule=1f1b")
            policies |= set(stage.recompute)
            if len(policies) > 1:
                said = f"{stage_name(p, s)} recomputes {stage.recompute[-1]}, a layer before it does not"
                refuse(said, UNIFORM_RECOMPUTE)
    if policies == {"selective"}:
        refuse("it recomputes selectively", "workload.recompute=full")
    unequal = len({pipeline.num_sequences for pipeline in plan.pipelines}) > 1
    biased = "pipelines take unequally many sequences, and FlashFlex weighs their gradients equally"
    notes = (biased,) * unequal
    chunks = [pipeline.num_micro_batches for pipeline in plan.pipelines]
    sequences = [pipeline.num_sequences for pipeline in plan.pipelines]
    machine_of = problem.cluster.machine_of
    own = {"target": TARGET, "chunks": chunks, "global_bsz_size": sequences, "pipeline_type": _SCHEDULES[schedule]}
    document = {
        "hetero_configs": [[stage.tp for stage in pipeline.stages] for pipeline in plan.pipelines],
        "layer_partitions": [[stage.num_layers for stage in pipeline.stages] for pipeline in plan.pipelines],
        "devices_id": [
            [[int(machine_of[d]) for d in stage.devices] for stage in pipeline.stages] for pipeline in plan.pipelines
        ],
        _OWN: own | {"recompute": policies.pop(), "notes": list(notes)},
    }
    lines = [
        f"# For {TARGET}. Rank r runs on the GPU of row r of ranks.tsv.",
        *note_lines(notes),
        f"PLAN='{_arguments(problem, document)}'",
    ]
    files = {FILE: json.dumps(document, indent=1) + "\n", ARGUMENTS: "\n".join(lines) + "\n"}
    setup = f'. "$HERE/{ARGUMENTS}"'
    command = f'"${{FLASHFLEX:-.}}/llama_train.py" --all_hetero_configs_path "$HERE/{FILE}" $PLAN'
    return Program(plan.devices(), command, files, setup=setup, notes=notes)


def _arguments(problem: Problem, document: dict[str, Any]) -> str:
    model, own = problem.model, document[_OWN]
    size = SIZES[model.num_layers, model.hidden_size, model.num_heads]
    found = [
        f"--model_size {size} --total-layer-num {model.num_layers}",
        "--fp16 --mixed_precision fp16 --use-flash-attn",
        f"--chunks {' '.join(map(str, own['chunks']))} --global_bsz_size {' '.join(map(str, own['global_bsz_size']))}",
        f"--pipeline-type {own['pipeline_type']} --default_dp_type ddp",
    ]
    return " ".join(found + ["--checkpoint-layers --checkpoint-all"] * (own["recompute"] == "full"))


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    section = Section(as_mapping(parse(text, context.where, as_json=True), context.where), context.where)
    model, notes = context.stated_model("FlashFlex"), list[str]()
    degrees, layers = _lists(section, "hetero_configs"), _lists(section, "layer_partitions")
    if [len(own) for own in degrees] != [len(own) for own in layers]:
        context.fail("hetero_configs and layer_partitions differ in stages; give both as many")
    if any(sum(own) != model.num_layers for own in layers):
        context.fail(f"layer_partitions: do not all sum to the {model.num_layers} layers of {model.name}")
    if sum(map(sum, degrees)) != len(context.devices):
        context.fail(f"its stages have {sum(map(sum, degrees))} GPUs, not {len(context.devices)}; give ranks=ranks.tsv")
    own = section.section(_OWN, optional=True)
    chunks, sequences = (own.raw(key, None) for key in ("chunks", "global_bsz_size"))
    if not _fit(chunks, len(degrees)) or not _fit(sequences, len(degrees)):
        each, rest = divmod(context.workload.global_batch, len(degrees))
        sequences = chunks = [each + (p < rest) for p in range(len(degrees))]
        notes.append("micro-batches are arguments of the run: equal ones of one sequence are assumed")
    if any(total % count for total, count in zip(sequences, chunks, strict=True)):
        context.fail("chunks: do not divide global_bsz_size; give micro-batches of whole sequences")
    policy = own.text("recompute", choices=("none", "full"), default="full")
    named = own.text("pipeline_type", choices=tuple(_SCHEDULES.values()), default="Gpipe")
    schedule = next(mine for mine, theirs in _SCHEDULES.items() if theirs == named)
    pipelines, rank = [], 0
    for p, (tps, counts) in enumerate(zip(degrees, layers, strict=True)):
        ends, stages = [0, *accumulate(counts)], []
        for tp, (first, end) in zip(tps, pairwise(ends), strict=True):
            stages.append(Stage.of(tuple(context.devices[rank : rank + tp]), first, end, policy))
            rank += tp
        pipelines.append(Pipeline(tuple(stages), chunks[p], sequences[p] // chunks[p]))
    workload = replace(context.workload, global_batch=sum(sequences), precision="fp16", seq_len=SEQ_LEN)
    problem = Problem(context.cluster, model, workload, context.space)
    return ImportedPlan(problem, Plan(tuple(pipelines), schedule, Sharding(0)), tuple(notes))


def _fit(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(v) is int and v > 0 for v in values)


def _lists(section: Section, key: str) -> list[list[int]]:
    found = section.items(key)
    for own in found:
        if not isinstance(own, list) or not own or not _fit(own, len(own)):
            section.fail(key, "is not a list of lists of whole numbers from 1, one for each pipeline")
    return found


TRAINER = Trainer(
    name="flashflex",
    target=TARGET,
    expresses="pipelines of any structure and batch; one recompute policy, no replicas, no ZeRO, four Llama shapes",
    preset=lambda problem: PRESET,
    takes_tp=_takes_tp,
    write=_write,
    read=_read,
    unsuitable=_unsuitable,
)
