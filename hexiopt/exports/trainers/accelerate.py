"""Hugging Face Accelerate with FSDP2: a template of its YAML configuration, for plans without pipeline parallelism.

`accelerate launch` takes equal machines alone, so ranks are started by torchrun. The batch is the training script's:
the numbers stand in a comment and are read from there. Ranks are t + T·p.
"""

import re

import yaml

from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refusal, Trainer, divides_model, stage_name
from hexiopt.exports.layout import (
    BlockRecompute,
    grid_of,
    note_lines,
    schedule_of,
    uniform_policy,
    uniform_tp,
    zero_stage,
)
from hexiopt.exports.stated_jobs import StatedJob, imported_job
from hexiopt.exports.trainers.megatron import EVEN
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, as_mapping, parse
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B

TARGET = "Accelerate 1.15"
FILE = "accelerate.yaml"
_LAYERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_BATCH = re.compile(r"(per_device_train_batch_size|gradient_accumulation_steps)=(\d{1,7})\b")
PRESET = EVEN | {
    "space.uneven_layers": (False,),
    "constraints.num_stages": (1,),
    "workload.schedule": (ONE_F_ONE_B.name, GPIPE.name, INTERLEAVED.name),
    "workload.optimizer_sharding": ("3", "2"),
    "workload.recompute": ("full", "none"),
}


def _unsuitable(problem: Problem) -> str | None:
    model = problem.model
    known = ", ".join(_LAYERS)
    return None if model.architecture in _LAYERS else f"model {model.name}: the template is for {known}; take one"


def _write(problem: Problem, plan: Plan) -> Program:
    refuse = Refusal("accelerate")
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) > 1:
            refuse(f"{stage_name(p, 1)} is a second stage", "constraints.num_stages=1")
    schedule_of(plan, (ONE_F_ONE_B, GPIPE, INTERLEAVED), refuse)  # with one stage all are the same
    grid, zero = grid_of(plan, refuse), zero_stage(plan, (3, 2), refuse)
    tp, policy = uniform_tp(problem, grid, divides_model, refuse), uniform_policy(grid, refuse)
    devices = grid.stage_major()
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": problem.workload.precision if problem.workload.precision in ("bf16", "fp16") else "no",
        "num_machines": 1,
        "num_processes": len(devices),
        "machine_rank": 0,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": f"{_LAYERS[problem.model.architecture]}DecoderLayer",
            "fsdp_activation_checkpointing": policy == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": grid.dp,
            "parallelism_config_tp_size": tp,
            "parallelism_config_cp_size": 1,
        },
    }
    notes = (
        *grid.notes(),
        "the batch is your script's: give its TrainingArguments per_device_train_batch_size="
        f"{grid.samples} gradient_accumulation_steps={grid.num_micro_batches}",
    )
    header = [f"# For {TARGET}: ACCELERATE_CONFIG_FILE, or --config_file.", *note_lines(notes)]
    text = "\n".join(header) + "\n" + yaml.safe_dump(document, sort_keys=False)
    setup = f'export ACCELERATE_CONFIG_FILE="$HERE/{FILE}"'
    command = f'-m accelerate.commands.launch --config_file "$HERE/{FILE}" "${{TRAIN:-train.py}}"'
    return Program(devices, command, {FILE: text}, setup=setup, notes=notes)


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    section = Section(as_mapping(parse(text, context.where, as_json=False), context.where), context.where)
    model, world = context.stated_model("Accelerate"), len(context.devices)
    fsdp, sizes = section.section("fsdp_config"), section.section("parallelism_config", optional=True)

    def degree(name: str, default: int) -> int:
        found: int = sizes.integer(f"parallelism_config_{name}_size", at_least=1, at_most=10**5, default=default)
        return found

    tp = degree("tp", 1)
    replicate, shard = degree("dp_replicate", 1), degree("dp_shard", max(1, world // tp))
    if degree("cp", 1) > 1 or replicate > 1:
        context.fail("parallelism_config: context parallelism and replicated shards are not modelled; set both to 1")
    if tp * shard != world:
        context.fail(f"parallelism_config: takes {tp * shard} GPUs, not {world}; give ranks=ranks.tsv or the cluster")
    stated = {name: int(value) for name, value in _BATCH.findall(text)}
    size = stated.get("per_device_train_batch_size", 1)
    named = section.text("mixed_precision", default="no")
    return imported_job(
        context,
        StatedJob(
            model,
            tp=tp,
            recompute=BlockRecompute("full" if fsdp.raw("fsdp_activation_checkpointing", False) is True else "none"),
            micro_batch_size=size,
            num_micro_batches=stated.get(
                "gradient_accumulation_steps", max(1, context.workload.global_batch // (shard * size))
            ),
            sharding=3 if fsdp.raw("fsdp_reshard_after_forward", True) is True else 2,
            workload={"precision": named if named in ("bf16", "fp16") else "fp32"},
            notes=("the batch is not stated: micro-batches of one sequence are assumed",) * (not stated),
        ),
    )


TRAINER = Trainer(
    name="accelerate",
    target=TARGET,
    expresses="data parallelism with one TP degree, ZeRO-2 or 3 (FSDP2); no pipelines",
    preset=lambda problem: PRESET,
    takes_tp=divides_model,
    write=_write,
    read=_read,
    unsuitable=_unsuitable,
)
