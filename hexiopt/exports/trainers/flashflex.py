"""FlashFlex (HexiScale's released trainer): pipelines of any structure, as JSON and arguments of `llama_train.py`.

Ranks go through pipelines, stages and TP ranks. It trains four Llama shapes in fp16 at 4,096 tokens, whatever is asked
(`hexiscale/process_args.py`); each pipeline's gradient is averaged over its own sequences, and then over pipelines.
"""

import json
from itertools import accumulate, pairwise
from typing import Any

from hexiopt.exports.file_jobs import import_plan
from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Trainer, stage_name
from hexiopt.exports.layout import UNIFORM_RECOMPUTE, note_lines, schedule_of, zero_stage
from hexiopt.exports.settings import FileSettings, script_notes
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.ledger import Vocabulary
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem

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
_SCHEDULES = TRAINER_SCHEDULES["flashflex"]
_OWN = "hexiopt"  # a key of the JSON that FlashFlex does not read


def _arguments(problem: Problem, document: dict[str, Any]) -> str:
    model, run = problem.model, document[_OWN]
    size = SIZES[model.num_layers, model.hidden_size, model.num_heads]
    arguments = [
        f"--model_size {size} --total-layer-num {model.num_layers}",
        "--fp16 --mixed_precision fp16 --use-flash-attn",
        f"--chunks {' '.join(map(str, run['chunks']))} --global_bsz_size {' '.join(map(str, run['global_bsz_size']))}",
        f"--pipeline-type {run['pipeline_type']} --default_dp_type ddp",
    ]
    return " ".join(arguments + ["--checkpoint-layers --checkpoint-all"] * (run["recompute"] == "full"))


# ----------------------------------------------------------------------------- reading

_KEYS = frozenset(
    {"devices_id", "hetero_configs", "layer_partitions"}
    | {f"{_OWN}.{key}" for key in ("chunks", "global_bsz_size", "pipeline_type", "recompute")}
)
VOCABULARY = Vocabulary(harmless=frozenset({"hexiopt.notes", "hexiopt.target"}))


def _check_machines(settings: FileSettings, context: ImportContext, degrees: list[list[int]]) -> None:
    """Refuse ranks on other machines than in the file, up to the numbering of machines."""
    machines = settings.get("devices_id")
    if machines is None:
        settings.by_default("devices_id", "the ranks in order")
        return
    counts = [[len(stage) for stage in pipeline] for pipeline in machines] if _is_nested(machines) else None
    settings.require(
        counts == degrees, "devices_id", "does not list a machine for every GPU of hetero_configs; correct it"
    )
    theirs = [machine for pipeline in machines for stage in pipeline for machine in stage]
    ours = [int(context.cluster.machine_of[device]) for device in context.devices]
    if len(set(zip(theirs, ours, strict=True))) != len(set(ours)) or len(set(theirs)) != len(set(ours)):
        settings.fault("devices_id", "puts ranks on other machines than the cluster's order does; give ranks=ranks.tsv")


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pipeline, list) and all(isinstance(stage, list) for stage in pipeline) for pipeline in value
    )


def _batch(settings: FileSettings, context: ImportContext, count: int) -> tuple[list[int], list[int], list[str]]:
    """Micro-batches and sequences of each pipeline, which are arguments of the run that only our files state; notes."""
    keys = f"{_OWN}.chunks", f"{_OWN}.global_bsz_size"
    if not any(key in settings for key in keys):
        share, rest = divmod(context.workload.global_batch, count)
        counts = [share + (p < rest) for p in range(count)]
        return counts, counts, ["micro-batches are arguments of the run: equal ones of one sequence are assumed"]
    chunks, sequences = (settings.get(key, ()) for key in keys)
    for key, values in zip(keys, (chunks, sequences), strict=True):
        settings.require(_fit(values, count), key, f"is not a list of {count} whole numbers from 1; state it")
    if any(total % number for total, number in zip(sequences, chunks, strict=True)):
        settings.fault(keys[0], f"do not divide {keys[1]}; give micro-batches of whole sequences")
    return list(chunks), list(sequences), []


def _fit(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(v) is int and v > 0 for v in values)


def _lists(settings: FileSettings, key: str) -> list[list[int]]:
    lists = settings.get(key)
    if (
        isinstance(lists, list)
        and lists
        and all(isinstance(inner, list) and inner and _fit(inner, len(inner)) for inner in lists)
    ):
        return lists
    settings.require(key in settings, key, "is missing; state it")
    settings.fault(key, "is not a list of lists of whole numbers from 1, one for each pipeline; correct it")
    return []


_CHOICES: dict[str, tuple[Any, ...]] = {
    "space.replicas": (False,),
    "space.recompute_per_stage": (False,),
    "space.recompute_per_layer": (False,),
    "space.sequence": (False,),
    "space.depth": (False,),
    "space.tp_degrees": ("powers_of_two",),
    "workload.optimizer_sharding": ("0",),
    "workload.recompute": ("full", "none"),
}


class FlashFlexFormat(Trainer):
    """FlashFlex's layers of each stage of each pipeline."""

    name = "flashflex"
    target = TARGET
    expresses = "pipelines of any structure and batch; one recompute policy, no replicas, no ZeRO, four Llama shapes"
    schedules = TRAINER_SCHEDULES["flashflex"]
    choices = _CHOICES

    def unsuitable(self, problem: Problem) -> str | None:
        model, workload = problem.model, problem.workload
        if model.architecture != "llama" or (model.num_layers, model.hidden_size, model.num_heads) not in SIZES:
            return f"model {model.name}: FlashFlex trains {', '.join(SIZES.values())} alone; take one of these shapes"
        if workload.seq_len != SEQ_LEN:
            what = f"FlashFlex trains {SEQ_LEN} tokens whatever is asked"
            return f"workload.seq_len: {what}; take workload.seq_len={SEQ_LEN}"
        if workload.precision != "fp16":
            what = f"FlashFlex trains in fp16, not {workload.precision}"
            return f"workload.precision: {what}; take workload.precision=fp16"
        return None

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        return problem.model.num_heads % tp == 0

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse = self.refuse
        schedule = schedule_of(plan, self.schedules, refuse)
        zero_stage(plan, (0,), refuse)
        policies = set[str]()
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if isinstance(stage.parallelism, SequenceParallel) or len(stage.parallelism.replicas) > 1:
                    refuse(
                        f"{stage_name(p, s)} has more than one TP group", "space.replicas=false space.sequence=false"
                    )
                if len(stage.layers) > 1:
                    refuse(f"{stage_name(p, s)} has several layer ranges", "workload.schedule=1f1b")
                policies |= set(stage.recompute)
                if len(policies) > 1:
                    what = f"{stage_name(p, s)} recomputes {stage.recompute[-1]}, a layer before it does not"
                    refuse(what, UNIFORM_RECOMPUTE)
        if policies == {"selective"}:
            refuse("it recomputes selectively", "workload.recompute=full")
        unequal = len({pipeline.num_sequences for pipeline in plan.pipelines}) > 1
        biased = "pipelines take unequally many sequences, and FlashFlex weighs their gradients equally"
        notes = (biased,) * unequal
        chunks = [pipeline.num_micro_batches for pipeline in plan.pipelines]
        sequences = [pipeline.num_sequences for pipeline in plan.pipelines]
        machine_of = problem.cluster.machine_of
        run = {"target": TARGET, "chunks": chunks, "global_bsz_size": sequences, "pipeline_type": _SCHEDULES[schedule]}
        document = {
            "hetero_configs": [[stage.tp for stage in pipeline.stages] for pipeline in plan.pipelines],
            "layer_partitions": [[stage.num_layers for stage in pipeline.stages] for pipeline in plan.pipelines],
            "devices_id": [
                [[int(machine_of[d]) for d in stage.devices] for stage in pipeline.stages]
                for pipeline in plan.pipelines
            ],
            _OWN: run | {"recompute": policies.pop(), "notes": list(notes)},
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

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        settings = FileSettings.of_json(text, context, VOCABULARY, _KEYS)
        model = context.require_model("FlashFlex")
        degrees, layers = _lists(settings, "hetero_configs"), _lists(settings, "layer_partitions")
        if list(map(len, degrees)) != list(map(len, layers)):
            settings.fault("hetero_configs and layer_partitions", "differ in stages; give both as many")
        if any(sum(counts) != model.num_layers for counts in layers):
            settings.fault(
                "layer_partitions", f"do not all sum to the {model.num_layers} layers of {model.name}; correct it"
            )
        settings.refuse()
        devices, of_ranks = context.ranks_of(sum(map(sum, degrees)))
        _check_machines(settings, context, degrees)
        chunks, sequences, assumed = _batch(settings, context, len(degrees))
        policy = settings.word(f"{_OWN}.recompute", {"none": "none", "full": "full"}, "full")
        schedule = settings.word(
            f"{_OWN}.pipeline_type", {word: schedule for schedule, word in _SCHEDULES.items()}, "Gpipe"
        )
        settings.refuse()
        pipelines, rank = [], 0
        for p, (tps, counts) in enumerate(zip(degrees, layers, strict=True)):
            stages = []
            for tp, (first, end) in zip(tps, pairwise([0, *accumulate(counts)]), strict=True):
                stages.append(Stage.of(devices[rank : rank + tp], first, end, policy))
                rank += tp
            pipelines.append(Pipeline(tuple(stages), chunks[p], sequences[p] // chunks[p]))
        workload = {"global_batch": sum(sequences), "precision": "fp16", "seq_len": SEQ_LEN}
        of_tp = {"sequence_parallel": context.workload.sequence_parallel} if max(map(max, degrees)) > 1 else {}
        notes = (*of_ranks, *assumed, *script_notes(context, **of_tp), *settings.notes())
        return import_plan(context, model, Plan(tuple(pipelines), schedule, Sharding(0)), workload, notes)


TRAINER = FlashFlexFormat()
