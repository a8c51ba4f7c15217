"""Megatron-Bridge (NeMo 2): the same values as of Megatron-LM, as overrides of a recipe, one a line.

They are for `scripts/training/run_recipe.py` and other programs that take overrides of a `ConfigContainer`; the model
is the recipe's.
"""

from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Trainer
from hexiopt.exports.trainers.megatron import PRESET, imported, plan_arguments
from hexiopt.exports.trainers.megatron_model import Arguments, takes_tp, unsuitable
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem

TARGET = "Megatron-Bridge with Megatron-Core 0.16 to 0.19"
FILE = "megatron_bridge.overrides"

# Of each argument of Megatron-LM, the override that has its value; flags are true.
OVERRIDES = {
    "tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "sequence-parallel": "model.sequence_parallel",
    "recompute-granularity": "model.recompute_granularity",
    "recompute-method": "model.recompute_method",
    "recompute-num-layers": "model.recompute_num_layers",
    "recompute-modules": "model.recompute_modules",
    "seq-length": "model.seq_length",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
    "bf16": "model.bf16",
    "fp16": "model.fp16",
}
_LISTS = {"recompute-modules"}
_VIRTUAL = "model.virtual_pipeline_model_parallel_size"


def _write(problem: Problem, plan: Plan) -> Program:
    arguments, grid, devices = plan_arguments(problem, plan, "megatron_bridge")
    arguments["seq-length"] = [str(problem.workload.seq_len)]
    lines = [
        f"# For {TARGET}: overrides of a recipe for {problem.model.name}. Rank r runs on the",
        "# GPU of row r of ranks.tsv.",
        *(f"# Note: {note}." for note in grid.notes()),
        *(f"{OVERRIDES[name]}={_value(name, values)}" for name, values in arguments.items()),
    ]
    if grid.num_chunks > 1:
        lines.append(f"{_VIRTUAL}={grid.num_chunks}")
    if grid.degrees[0] > 1 and not problem.workload.sequence_parallel:
        lines.append(f"{OVERRIDES['sequence-parallel']}=false")  # the recipe may have it
    if "use-distributed-optimizer" in arguments:
        lines.append("optimizer.use_distributed_optimizer=true")
    command = f'"${{BRIDGE:-.}}/scripts/training/run_recipe.py" $(grep -v \'^#\' "$HERE/{FILE}")'
    return Program(
        devices,
        command,
        {FILE: "\n".join(lines) + "\n"},
        setup="set -f",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        notes=grid.notes(),
    )


def _value(name: str, values: list[str]) -> str:
    if name in _LISTS:
        return f"[{','.join(values)}]"
    return values[0] if values else "true"


def _read(text: str, context: ImportContext) -> ImportedPlan:
    """Overrides that are not of the layout, such as those of the optimizer, are left alone."""
    names = {override: name for name, override in OVERRIDES.items()}
    arguments: Arguments = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        value = value.strip("'\"")
        if key in names and equals and value != "false":
            name = names[key]
            arguments[name] = [] if value == "true" else value.strip("[]").split(",") if name in _LISTS else [value]
    if "tensor-model-parallel-size" not in arguments and "pipeline-model-parallel-size" not in arguments:
        context.fail("has no override model.tensor_model_parallel_size=...; give one override a line")
    context.stated_model("Megatron-Bridge")
    return imported(arguments, context)


TRAINER = Trainer(
    name="megatron_bridge",
    target=TARGET,
    expresses="as `megatron`; the model is that of the recipe",
    preset=lambda problem: PRESET,
    takes_tp=takes_tp,
    write=_write,
    read=_read,
    unsuitable=unsuitable,
    optional_sequence_parallelism=True,
    recomputes_together=True,
)
