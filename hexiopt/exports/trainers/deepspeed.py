"""DeepSpeed with a pipeline: its JSON configuration, and the layers of stages as bounds over the list of layers.

`PipelineModule` balances stages by weight; other bounds need a subclass that sets `self.parts`. Layers of that list are
the embedding, the decoder layers, and the final norm with the head. Ranks are t + T·(p + P·s)
(`deepspeed/runtime/pipe/topology.py`), started by torchrun, since DeepSpeed's launcher rotates unequal machines.
"""

import json
from dataclasses import replace
from itertools import accumulate, pairwise

from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refusal, Trainer
from hexiopt.exports.grid import BlockRecompute, Grid, grid_of, one_schedule, one_tp, plan_of, zero_stage
from hexiopt.exports.trainers.megatron import EVEN
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import ranges_of
from hexiopt.reading import Section, as_mapping, parse
from hexiopt.schedules.registry import ONE_F_ONE_B

TARGET = "DeepSpeed 0.19"
FILE = "deepspeed.json"
_OWN = "hexiopt"  # DeepSpeed ignores unknown keys at the top level
PRESET = EVEN | {
    "space.uneven_layers": (False,),
    "workload.schedule": (ONE_F_ONE_B.name,),
    "workload.optimizer_sharding": ("1", "0"),
    "workload.recompute": ("full", "none"),
}


def _takes_tp(problem: Problem, tp: int) -> bool:
    return problem.model.num_heads % tp == problem.model.ffn_size % tp == 0


def _write(problem: Problem, plan: Plan) -> Program:
    refuse = Refusal("deepspeed")
    one_schedule(plan, (ONE_F_ONE_B,), refuse)
    grid, zero = grid_of(plan, refuse), zero_stage(plan, (1, 0), refuse)
    tp = one_tp(grid, refuse)
    if not _takes_tp(problem, tp):
        refuse(f"TP degree {tp} does not divide the model's heads and columns", "constraints.max_tp")
    policies = {policy for own in grid.recompute for policy in own}
    if len(policies) > 1:
        refuse(
            "stages or layers differ in recompute", "space.recompute_per_stage=false space.recompute_per_layer=false"
        )
    if policies == {"selective"}:
        refuse("it recomputes selectively", "workload.recompute=full")
    bounds = [0, *(end + 1 for end in accumulate(grid.parts))]
    bounds[-1] += 1
    notes = (
        *grid.notes(),
        "the TP degree is the model's, such as Megatron's, to which it must be given",
        *("sequence parallelism is the model's: turn it off",) * (tp > 1 and not problem.workload.sequence_parallel),
        f"a subclass of PipelineModule must set self.parts = {bounds}, the bounds of stages over its layers",
    )
    document = {
        "train_batch_size": grid.global_batch,
        "train_micro_batch_size_per_gpu": grid.micro_batch_size,
        "gradient_accumulation_steps": grid.num_micro_batches,
        **({problem.workload.precision: {"enabled": True}} if problem.workload.precision in ("bf16", "fp16") else {}),
        "zero_optimization": {"stage": zero},
        "pipeline": {"activation_checkpoint_interval": int(policies == {"full"})},
        _OWN: {"target": TARGET, "pipe": grid.num_stages, "model": tp, "parts": bounds, "notes": list(notes)},
    }
    command = f'"${{TRAIN:-train.py}}" --deepspeed --deepspeed_config "$HERE/{FILE}"'
    return Program(grid.stage_major(), command, {FILE: json.dumps(document, indent=1) + "\n"}, notes=notes)


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    section = Section(as_mapping(parse(text, context.where, as_json=True), context.where), context.where)
    model, world = context.stated_model("DeepSpeed"), len(context.devices)
    own = section.section(_OWN, optional=True)
    stages = own.integer("pipe", at_least=1, at_most=1024, default=1)
    tp = own.integer("model", at_least=1, at_most=1024, default=1)
    size = section.integer("train_micro_batch_size_per_gpu", at_least=1, at_most=10**7)
    count = section.integer("gradient_accumulation_steps", at_least=1, at_most=10**7, default=1)
    if world % (tp * stages):
        context.fail(f"{world} GPUs are not divided by {stages} stages of TP {tp}; give ranks=ranks.tsv or the cluster")
    pipelines = world // (tp * stages)
    batch = section.integer("train_batch_size", at_least=1, at_most=10**7, default=size * count * pipelines)
    if batch != size * count * pipelines:
        context.fail(f"train_batch_size {batch} is not {size} × {count} × {pipelines} pipelines; give ranks=ranks.tsv")
    bounds = own.items("parts", optional=True)
    parts = [b - a for a, b in pairwise(bounds)]
    if parts:
        parts[0] -= 1  # the embedding
        parts[-1] -= 1  # norm and head
    elif model.num_layers % stages == 0:
        parts = [model.num_layers // stages] * stages
    if len(parts) != stages or sum(parts) != model.num_layers or min(parts) < 1:
        context.fail(
            f"hexiopt.parts: are not the bounds of {stages} stages over {model.num_layers} layers and two ends"
        )
    interval = section.section("pipeline", optional=True).integer(
        "activation_checkpoint_interval", at_least=0, at_most=10**6, default=0
    )
    if interval > 1:
        context.fail(f"activation_checkpoint_interval {interval} keeps one input in {interval} layers; take 0 or 1")
    layers, recompute = ranges_of(parts, stages), BlockRecompute("full" if interval else "none")
    order = context.devices
    groups = tuple(
        tuple(tuple(order[tp * (p + pipelines * s) :][:tp]) for s in range(stages)) for p in range(pipelines)
    )
    grid = Grid(groups, layers, tuple(map(recompute.of, layers)), count, size)
    zero = section.section("zero_optimization", optional=True).integer("stage", at_least=0, at_most=3, default=0)
    on = [name for name in ("bf16", "fp16") if section.section(name, optional=True).raw("enabled", False) is True]
    workload = replace(context.workload, global_batch=batch, precision=on[0] if on else "fp32")
    problem = Problem(context.cluster, model, workload, context.space)
    assumed = () if own.keys() else ("stages and TP are not in the file: data parallelism alone is assumed",)
    return ImportedPlan(problem, plan_of(grid, ONE_F_ONE_B, zero), assumed)


TRAINER = Trainer(
    name="deepspeed",
    target=TARGET,
    expresses="pipelines all alike with one TP degree, one recompute policy; uneven layers by bounds set in Python",
    preset=lambda problem: PRESET,
    takes_tp=_takes_tp,
    write=_write,
    read=_read,
    optional_sequence_parallelism=True,
)
