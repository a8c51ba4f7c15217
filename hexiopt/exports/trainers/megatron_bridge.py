"""Megatron-Bridge (NeMo 2): the same values as of Megatron-LM, as overrides of a recipe, one a line.

They are for `scripts/training/run_recipe.py` and other programs that take overrides of a `ConfigContainer`; the model
is the recipe's.
"""

import re
from typing import Any

import yaml

from hexiopt.exports.formats import ImportContext, ImportedPlan, Program
from hexiopt.exports.layout import note_lines, tied_notes
from hexiopt.exports.python_settings import Computed, python_settings
from hexiopt.exports.shell.scripts import Words
from hexiopt.exports.shell.values import Unknown
from hexiopt.exports.trainers.megatron import MegatronFormat, import_arguments, plan_arguments
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.ledger import words
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem

TARGET = "Megatron-Bridge with Megatron-Core 0.16 to 0.19"
FILE = "megatron_bridge.overrides"

# Of each argument of Megatron-LM, the override that has its value; flags are true.
OVERRIDES = {
    "tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "expert-model-parallel-size": "model.expert_model_parallel_size",
    "expert-tensor-parallel-size": "model.expert_tensor_parallel_size",
    "moe-router-force-load-balancing": "model.moe_router_force_load_balancing",
    "hybrid-layer-pattern": "model.hybrid_layer_pattern",
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
_MIXED = "mixed_precision"
_VIRTUAL = "model.virtual_pipeline_model_parallel_size"
# Other keys whose argument has another name.
_OTHER_NAMES = {
    _VIRTUAL: "num-virtual-stages-per-pipeline-rank",
    "model.num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "model.num_moe_experts": "num-experts",
    "model.fp8": "fp8-format",
    "model.fp4": "fp4-format",
    "model.vocab_size": "padded-vocab-size",
    "dataset.seq_length": "seq-length",
    "dataset.sequence_length": "seq-length",
}
_SECTIONS = ("model", "train", "ddp", "dist", "optimizer")
# Sections that change nothing that is priced, but for the keys above.
_HARMLESS = words("checkpoint logger tokenizer scheduler rng profiling validation straggler ft nvrx")
_LAYERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
_ASKED = (
    "sequence-parallel",
    "recompute-granularity",
    "micro-batch-size",
    "global-batch-size",
    "use-distributed-optimizer",
)


def _value(name: str, values: list[str]) -> str:
    if name in _LISTS:
        return f"[{','.join(values)}]"
    return values[0] if values else "true"


def _name(key: str) -> str:
    """The argument of Megatron-LM that a key is."""
    section, _, rest = key.partition(".")
    names = {override: name for name, override in OVERRIDES.items()} | _OTHER_NAMES
    return names.get(key, rest.replace("_", "-") if section in _SECTIONS and "." not in rest else key)


def _words(name: str, value: Any) -> Words:
    """A value of YAML or Python as the words of an argument."""
    if name == "pipeline-model-parallel-layout" and isinstance(value, list):
        value = "|".join("".join(_LAYERS.get(str(layer), "?") for layer in part) for part in value)
    if isinstance(value, list):
        return [str(word) for word in value]
    return [] if value is True else [value if isinstance(value, Unknown) else str(value)]


def _precision_arguments(value: Any, context: ImportContext) -> dict[str, Words]:
    """The arguments for which a recipe of mixed precision stands, such as `bf16_with_mxfp8_mixed`."""
    words = str(value).split("_")
    if isinstance(value, Unknown) or words[0] not in ("bf16", "fp16") or words[-1] != "mixed":
        context.fail(
            f"{_MIXED}: {value} is not read; state bf16_mixed, fp16_mixed, or one with fp8 such as Bridge names it"
        )
    arguments: dict[str, Words] = {words[0]: []}
    if "nvfp4" in words:
        return arguments | {"fp4-format": ["e2m1"]}
    if "mxfp8" in words:
        return arguments | {"fp8-format": ["hybrid"], "fp8-recipe": ["mxfp8"]}
    return arguments | ({"fp8-format": ["hybrid"]} if "fp8" in words else {})


def _values(text: str, context: ImportContext) -> tuple[dict[str, Any], list[str]]:
    """The values by key, and notes, from overrides, one a line, or from a recipe in Python, which is not run."""
    lines = [line.strip() for line in text.splitlines()]
    overrides = [line for line in lines if line and not line.startswith("#")]
    if all(re.match(r"\+{0,2}[A-Za-z_][\w.]*=[^=]", line) for line in overrides):
        values_by_key: dict[str, Any] = {}
        for line in overrides:
            key, _, value = line.lstrip("+").partition("=")
            try:
                values_by_key[key] = yaml.safe_load(value)
            except yaml.YAMLError:
                values_by_key[key] = value.strip("'\"")
        return values_by_key, []
    values, bases = python_settings(text, context.where)
    computed = "is computed where the recipe runs"
    values_by_key = {key: Unknown(repr(v), computed) if isinstance(v, Computed) else v for key, v in values.items()}
    return values_by_key, [f"not read: what {base} returns, which the recipe changes" for base in bases]


class MegatronBridgeFormat(MegatronFormat):
    """Megatron-Bridge's overrides, which state what Megatron-LM's arguments do."""

    name = "megatron_bridge"
    target = TARGET
    expresses = "as `megatron`; the model is that of the recipe"

    def write(self, problem: Problem, plan: Plan) -> Program:
        arguments, grid, devices = plan_arguments(problem, plan, self)
        arguments["seq-length"] = [str(problem.workload.seq_len)]
        notes = (*grid.notes(), *tied_notes(problem, plan))
        lines = [
            f"# For {TARGET}: overrides of a recipe for {problem.model.name}. Rank r runs on the",
            "# GPU of row r of ranks.tsv.",
            *note_lines(notes),
            *(f"{OVERRIDES[name]}={_value(name, values)}" for name, values in arguments.items()),
        ]
        if grid.num_chunks > 1:
            lines.append(f"{_VIRTUAL}={grid.num_chunks}")
        if grid.stages[0].tp > 1 and not problem.workload.sequence_parallel:
            lines.append(f"{OVERRIDES['sequence-parallel']}=false")  # the recipe may have it
        if problem.workload.precision == "fp32":
            lines.append(f"{OVERRIDES['bf16']}=false")  # as recipes have it
        if "use-distributed-optimizer" in arguments:
            lines.append("optimizer.use_distributed_optimizer=true")
        command = f'"${{BRIDGE:-.}}/scripts/training/run_recipe.py" $(grep -v \'^#\' "$HERE/{FILE}")'
        return Program(
            devices,
            command,
            {FILE: "\n".join(lines) + "\n"},
            setup="set -f",
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            notes=notes,
        )

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        values, notes = _values(text, context)
        names = {key: _name(key) for key in values}
        if not {"tensor-model-parallel-size", "pipeline-model-parallel-size"} & set(names.values()):
            context.fail("has no override model.tensor_model_parallel_size=...; give one override a line, or a recipe")
        model = context.require_model("Megatron-Bridge")
        if adapters := [key for key in values if key.startswith("peft")]:
            context.fail(f"{adapters[0]}: adapters are not modelled; import a run that trains all weights")
        arguments: dict[str, Words] = {}
        for key, value in values.items():
            name = names[key]
            if name == _MIXED:
                arguments |= _precision_arguments(value, context)
            elif name == "grad-reduce-in-fp32":
                arguments["grad-reduce-in-bf16" if value is False else "accumulate-allreduce-grads-in-fp32"] = []
            elif name == "mtp-num-layers" and not value:
                arguments[name] = ["0"]  # without those of the recipe
            elif value is not False and value is not None and key.partition(".")[0] not in _HARMLESS:
                arguments[name] = _words(name, value)
        if not {"bf16", "fp16", _MIXED} & set(names.values()) and context.workload.precision in ("bf16", "fp16"):
            arguments[context.workload.precision] = []
        if "global-batch-size" not in arguments:
            arguments["global-batch-size"] = [str(context.workload.global_batch)]
        settings: tuple[str, ...] = _ASKED
        if model.shares_experts:
            settings += ("expert-model-parallel-size",)
            if "expert-tensor-parallel-size" not in arguments:
                arguments["expert-tensor-parallel-size"] = ["1"]
                notes.append(f"not stated, and taken as recipes have it: {OVERRIDES['expert-tensor-parallel-size']} 1")
        absent = [OVERRIDES[name] for name in settings if name not in names.values()]
        if not {"bf16", "fp16", _MIXED} & set(names.values()):
            absent.append(_MIXED)
        if absent:
            notes.append(f"not stated, and taken as Megatron-Core's defaults, not the recipe's: {', '.join(absent)}")
        by_name = {name: key for key, name in reversed(names.items())}
        ledger = MegatronArguments(context, arguments, lambda name: by_name.get(name, OVERRIDES.get(name, name)))
        return import_arguments(ledger, context, None, notes)


TRAINER = MegatronBridgeFormat()
