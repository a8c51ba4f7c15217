"""torchtitan: a Python function that returns a `Trainer.Config`, as versions from 0.3 on take it; TOML is read too.

Ranks are t + T·(p + P·s), a row-major mesh (pp, dp_replicate, dp_shard, cp, tp)
(`torchtitan/distributed/parallel_dims.py`).
Replicated parameters are ZeRO-0; sharded ones ZeRO-3, or where they are not resharded after the forward, ZeRO-2.
"""

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refusal, Trainer, divides_model_and_sequence
from hexiopt.exports.grid import BlockRecompute, Grid, grid_of, one_schedule, one_tp, plan_of, zero_stage
from hexiopt.exports.trainers.megatron import EVEN
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import ranges_of
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B

TARGET = "torchtitan 0.3"
FILE, MODULE = "hexiopt_plan.py", "hexiopt_plan"
_SCHEDULES = {ONE_F_ONE_B: "1F1B", GPIPE: "GPipe", INTERLEAVED: "Interleaved1F1B"}
PRESET = EVEN | {
    "workload.schedule": (ONE_F_ONE_B.name, INTERLEAVED.name, GPIPE.name),
    "workload.optimizer_sharding": ("2", "3", "0"),
    "workload.recompute": ("full", "none"),
}


def _unsuitable(problem: Problem) -> str | None:
    model = problem.model
    if model.gated_mlp:
        return None
    return (
        f"model {model.name}: {model.architecture} has no family in torchtitan; take a llama, mistral, qwen2 or qwen3"
    )


def _write(problem: Problem, plan: Plan) -> Program:
    refuse = Refusal("torchtitan")
    grid = grid_of(plan, refuse)
    tp = one_tp(grid, refuse)
    if not divides_model_and_sequence(problem, tp):
        refuse(f"TP degree {tp} does not divide the model's heads and columns", "constraints.max_tp")
    schedule = one_schedule(plan, tuple(_SCHEDULES), refuse)
    zero = zero_stage(plan, (2, 3, 0), refuse)
    policies = {policy for own in grid.recompute for policy in own}
    if len(policies) > 1:
        refuse(
            "stages or layers differ in recompute", "space.recompute_per_stage=false space.recompute_per_layer=false"
        )
    if policies == {"selective"}:
        refuse("it recomputes selectively, which torchtitan does by other operators", "workload.recompute=full")
    shard = grid.num_pipelines if zero else 1
    values: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": grid.num_stages,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.data_parallel_replicate_degree": grid.num_pipelines // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "training.local_batch_size": grid.num_micro_batches * grid.micro_batch_size,
        "training.global_batch_size": grid.global_batch,
        "training.seq_len": problem.workload.seq_len,
    }
    if zero:
        values["parallelism.fsdp_reshard_after_forward"] = "always" if zero == 3 else "never"
    if grid.num_stages > 1:
        values |= {
            "parallelism.pipeline_parallel_schedule": _SCHEDULES[schedule],
            "parallelism.module_fqns_per_model_part": _modules(grid.parts),
            "parallelism.pipeline_parallel_microbatch_size": grid.micro_batch_size,
            "training.disable_cuda_graphs": True,
        }
    elif grid.micro_batch_size != grid.num_micro_batches * grid.micro_batch_size:
        values["training.local_batch_size"] = grid.micro_batch_size  # the rest is accumulated
    notes = (
        *grid.notes(),
        "the model is that of the configuration which the file imports as `base`; change it to yours",
        "the recompute policy is stated in a comment: set `activation_checkpoint` as your version names it",
    )
    text = _text(values, policies.pop(), notes)
    command = f"-m torchtitan.train --module {MODULE} --config plan"
    return Program(
        grid.stage_major(),
        command,
        {FILE: text},
        setup='export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"',
        notes=notes,
    )


def _modules(parts: list[int]) -> list[list[str]]:
    """The modules of each virtual stage, by their names in 0.3."""
    ends = [0]
    for count in parts:
        ends.append(ends[-1] + count)
    found = [[f"layers.{layer}" for layer in range(a, b)] for a, b in pairwise(ends)]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def _text(values: Mapping[str, Any], policy: str, notes: tuple[str, ...]) -> str:
    lines = [
        f'"""For {TARGET}: torchrun -m torchtitan.train --module {MODULE} --config plan.',
        "",
        "Rank r runs on the GPU of row r of ranks.tsv.",
        *(f"Note: {note}." for note in notes),
        '"""',
        "",
        "from torchtitan.models.llama3.config_registry import llama3_8b as base",
        "",
        f'RECOMPUTE = "{policy}"  # of every layer, as the plan was priced',
        "",
        "",
        "def plan():",
        "    config = base()",
    ]
    for key, value in values.items():
        if key == "parallelism.module_fqns_per_model_part":
            lines += [f"    config.{key} = [", *(f"        {part!r}," for part in value), "    ]"]
        else:
            lines.append(f"    config.{key} = {value!r}")
    return "\n".join([*lines, "    return config"]) + "\n"


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    values = _values(text, context)
    model, world = context.stated_model("torchtitan"), len(context.devices)

    def whole(name: str, default: int) -> int:
        value = values.get(name, default)
        if type(value) is not int:
            context.fail(f"{name}: {value!r} is not a whole number; write one out")
        return value

    if whole("context_parallel_degree", 1) > 1:
        context.fail("context_parallel_degree above 1 is not modelled; import a layout without it")
    tp, stages = whole("tensor_parallel_degree", 1), whole("pipeline_parallel_degree", 1)
    replicate, shard = whole("data_parallel_replicate_degree", 1), whole("data_parallel_shard_degree", -1)
    if min(tp, stages, replicate) < 1 or world % (tp * stages * replicate):
        context.fail(f"{world} GPUs are not divided by its degrees; give ranks=ranks.tsv or the cluster")
    pipelines = world // (tp * stages)
    if shard not in (-1, pipelines // replicate):
        context.fail(f"its degrees take {tp * stages * replicate * shard} GPUs, not {world}; give ranks=ranks.tsv")
    shard = pipelines // replicate
    if shard > 1 and replicate > 1:
        context.fail("parameters both replicated and sharded are not modelled; set one of the degrees to 1")
    local = whole("local_batch_size", 1)
    batch = whole("global_batch_size", -1)
    batch = pipelines * local if batch == -1 else batch
    size = whole("pipeline_parallel_microbatch_size", 1) if stages > 1 else local
    if size < 1 or batch % (pipelines * size):
        context.fail(f"global_batch_size {batch} is not divided by {pipelines} pipelines times micro-batches of {size}")
    name = values.get("pipeline_parallel_schedule", "1F1B")
    schedule = next((own for own, theirs in _SCHEDULES.items() if theirs.lower() == str(name).lower()), None)
    if schedule is None:
        context.fail(f"pipeline_parallel_schedule: {name!r} is not modelled; take 1F1B, GPipe or Interleaved1F1B")
    parts = _parts(values, context, model.num_layers, stages)
    layers = ranges_of(parts, stages)
    policy = str(values.get("RECOMPUTE", values.get("mode", "none")))
    policy = policy if policy in ("none", "full", "selective") else "none"
    recompute = BlockRecompute(policy)
    order = context.devices
    groups = tuple(
        tuple(tuple(order[tp * (p + pipelines * s) :][:tp]) for s in range(stages)) for p in range(pipelines)
    )
    grid = Grid(groups, layers, tuple(map(recompute.of, layers)), batch // (pipelines * size), size)
    resharded = values.get("fsdp_reshard_after_forward", "default")
    zero = 0 if shard == 1 else 3 if resharded == "always" or (resharded == "default" and stages == 1) else 2
    workload = replace(context.workload, global_batch=batch, seq_len=whole("seq_len", context.workload.seq_len))
    if stages > 1 and grid.num_chunks == 1 and schedule == INTERLEAVED:
        schedule = ONE_F_ONE_B
    notes = () if "RECOMPUTE" in values or "mode" in values else ("recompute is not stated: none is assumed",)
    return ImportedPlan(Problem(context.cluster, model, workload, context.space), plan_of(grid, schedule, zero), notes)


def _parts(values: Mapping[str, Any], context: ImportContext, num_layers: int, stages: int) -> list[int]:
    modules = values.get("module_fqns_per_model_part")
    if modules is None:
        if num_layers % stages:
            context.fail(f"{num_layers} layers are not divided by {stages} stages; state module_fqns_per_model_part")
        return [num_layers // stages] * stages
    parts = [sum(str(name).startswith("layers.") for name in part) for part in modules]
    if sum(parts) != num_layers or 0 in parts or len(parts) % stages:
        context.fail(f"module_fqns_per_model_part has layers {parts} for {stages} stages of {num_layers} layers")
    return parts


def _values(text: str, context: ImportContext) -> dict[str, Any]:
    """The literals that a Python configuration assigns, or the values of a TOML file; nothing is run."""
    try:
        tables = tomllib.loads(text)
        return {key: value for table in tables.values() if isinstance(table, dict) for key, value in table.items()}
    except tomllib.TOMLDecodeError:
        pass
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        raise InputError(f"{context.where}: is neither a Python configuration nor TOML; give one of them") from None
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = getattr(target, "attr", getattr(target, "id", None))
                try:
                    found[str(name)] = ast.literal_eval(node.value)
                except ValueError:
                    continue
    if not any(name.endswith("_parallel_degree") for name in found):
        context.fail("assigns no ..._parallel_degree; give the configuration of a torchtitan run")
    return found


TRAINER = Trainer(
    name="torchtitan",
    target=TARGET,
    expresses="pipelines all alike with one TP degree; uneven and interleaved layers, one recompute policy",
    preset=lambda problem: PRESET,
    takes_tp=divides_model_and_sequence,
    write=_write,
    read=_read,
    unsuitable=_unsuitable,
)
