"""torchtitan: a Python function that returns a `Trainer.Config`, as versions from 0.3 on take it; TOML is read too.

Ranks are t + T·(p + P·s), a row-major mesh (pp, dp_replicate, dp_shard, cp, tp)
(`torchtitan/distributed/parallel_dims.py`).
Replicated parameters are ZeRO-0; sharded ones ZeRO-3, or where they are not resharded after the forward, ZeRO-2.
Its ranks of dp_shard, cp and tp form (efsdp, ep) too: an EP group is so many consecutive ones, over which experts are
`Shard(0)`, and each of its TP groups has a batch of its own.
Where backwards are split, a CSV file says what each rank computes (`torch_lists.py`).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.expert_groups import NO_FURTHER_LAYERS, divides_layers
from hexiopt.exports.formats import EVEN, Program, Trainer, divides_model_and_sequence
from hexiopt.exports.layout import devices_of_experts, grid_of, schedule_of, uniform_policy, uniform_tp, zero_stage
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.torch_lists import TorchLists, torch_lists
from hexiopt.exports.trainers.torchtitan_models import MODELS, TitanModel, model_with_shape_of
from hexiopt.exports.trainers.torchtitan_reading import read_torchtitan
from hexiopt.plan.plan import Plan
from hexiopt.problem.architectures import LLAMA_FAMILY
from hexiopt.problem.problem import Problem

TARGET = "torchtitan 0.3"
FILE, MODULE = "hexiopt_plan.py", "hexiopt_plan"
LISTS = "schedule.csv"
_SCHEDULES = TRAINER_SCHEDULES["torchtitan"]
_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
_GRADIENTS = ("gradients are reduced in float32, 4 bytes where the plan was priced with 2",)


def _modules(parts: list[int]) -> list[list[str]]:
    """The modules of each virtual stage, by their names in 0.3."""
    ends = [0]
    for count in parts:
        ends.append(ends[-1] + count)
    modules = [[f"layers.{layer}" for layer in range(a, b)] for a, b in pairwise(ends)]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "lm_head"]
    return modules


def _takes_tp(problem: Problem, tp: int) -> bool:
    if problem.model.shares_experts:
        return divides_layers(problem.model, tp) and problem.workload.seq_len % tp == 0
    return divides_model_and_sequence(problem, tp)


def _model_note(titan: TitanModel | None) -> str:
    if titan is None:
        return "the model is that of the configuration which the file imports as `base`; change it to yours"
    if titan.flavor is None:
        return f"the model is that of {titan.function}"
    return f"the model is {titan.flavor}, but tokenizer and checkpoint are those of {titan.function}; change them"


def _lists(problem: Problem, plan: Plan, policy: str) -> TorchLists:
    """What each rank computes. Raises InputError for a plan that recomputes."""
    if policy != "none":
        raise InputError(
            "export.format: torchtitan cannot express the plan: its backwards are split and recompute layers, which "
            "torch does once more for each of a layer's weights; plan with workload.recompute=none, or another "
            "workload.schedule"
        )
    return torch_lists(plan, PlanPricer(problem).place_pipelines(plan))


def _text(values: Mapping[str, Any], policy: str, notes: tuple[str, ...], lists: bool, titan: TitanModel | None) -> str:
    base = (
        ["from torchtitan.models.llama3.config_registry import llama3_8b as base"] if titan is None else titan.imports
    )
    flavor = None if titan is None else titan.flavor
    lines = [
        f'"""For {TARGET}: torchrun -m torchtitan.train --module {MODULE} --config plan.',
        "",
        "Rank r runs on the GPU of row r of ranks.tsv.",
        *(f"Note: {note}." for note in notes),
        '"""',
        "",
        *["from pathlib import Path", ""] * lists,
        "from torchtitan.distributed.activation_checkpoint import FullAC",
        *base,
        "",
        "",
        "def plan():",
        "    config = base()",
        *([] if flavor is None else [f"    config.model_spec = model_registry({flavor!r})"]),
    ]
    for key, value in values.items():
        if key == "parallelism.module_fqns_per_model_part":
            lines += [f"    config.{key} = [", *(f"        {part!r}," for part in value), "    ]"]
        else:
            lines.append(f"    config.{key} = {value!r}")
    if lists:
        path = f"str(Path(__file__).with_name({LISTS!r}))"
        lines.append(f"    config.parallelism.pipeline_parallel_schedule_csv = {path}")
    lines.append(f"    config.activation_checkpoint = {'FullAC.Config()' if policy == 'full' else None}")
    return "\n".join([*lines, "    return config"]) + "\n"


class TorchTitanFormat(Trainer):
    """torchtitan's configuration in Python."""

    name = "torchtitan"
    target = TARGET
    expresses = (
        "pipelines all alike with one TP and one EP degree; uneven and interleaved layers, one recompute policy; split "
        "backwards without recompute"
    )
    schedules = TRAINER_SCHEDULES["torchtitan"]
    precisions = tuple(_PRECISIONS)
    choices = EVEN | {"workload.optimizer_sharding": ("2", "3", "0"), "workload.recompute": ("full", "none")}
    optional_sequence_parallelism = True
    takes_tp = staticmethod(_takes_tp)
    read = staticmethod(read_torchtitan)

    def unsuitable(self, problem: Problem) -> str | None:
        model = problem.model
        if model.architecture in LLAMA_FAMILY or model.layers:
            return None
        known = ", ".join(LLAMA_FAMILY)
        return f"model {model.name}: {model.architecture} has no family in torchtitan; take one of {known}"

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        model = problem.model
        if not model.shares_experts:
            return super().unsuitable_kinds(problem)
        if model_with_shape_of(model) is None:
            known = ", ".join(titan.flavor or titan.function for titan in MODELS if "debug" not in titan.function)
            return f"has no model with experts of the shape of {model.name}; take that of one of {known}"
        return NO_FURTHER_LAYERS if model.extra_layers else None  # torchtitan has them outside of pipelines alone

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        preset = super().preset(problem)
        # Replicas that share experts shard the other layers.
        return {**preset, "workload.optimizer_sharding": ("2", "3")} if problem.model.shares_experts else preset

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse, model = self.refuse, problem.model
        grid = grid_of(plan, refuse)
        ep = devices_of_experts(problem, grid)
        tp, policy = uniform_tp(problem, grid, _takes_tp, refuse), uniform_policy(grid, refuse)
        schedule = schedule_of(plan, self.schedules, refuse)
        zero, precision = zero_stage(plan, (2, 3, 0), refuse), problem.workload.precision
        self.check_precision(problem)
        shard = grid.dp if zero else 1
        if ep > shard * tp:
            refuse("its replicas share experts and shard nothing else", "workload.optimizer_sharding=2")
        titan = model_with_shape_of(model) if model.shares_experts else None
        values: dict[str, Any] = {
            "parallelism.pipeline_parallel_degree": grid.num_stages,
            "parallelism.tensor_parallel_degree": tp,
            "parallelism.data_parallel_replicate_degree": grid.dp // shard,
            "parallelism.data_parallel_shard_degree": shard,
            "training.local_batch_size": grid.num_micro_batches * grid.samples,
            "training.global_batch_size": grid.global_batch,
            "training.seq_len": problem.workload.seq_len,
            "training.mixed_precision_param": _PRECISIONS[precision],
        }
        if titan is not None:
            values["parallelism.expert_parallel_degree"] = ep
            values["debug.moe_force_load_balance"] = problem.workload.routing == "forced"
        if tp > 1 and not problem.workload.sequence_parallel:
            values["parallelism.enable_sequence_parallel"] = False
        if zero:
            values["parallelism.fsdp_reshard_after_forward"] = "always" if zero == 3 else "never"
        if grid.num_stages > 1:
            values |= {
                "parallelism.pipeline_parallel_schedule": _SCHEDULES[schedule],
                "parallelism.module_fqns_per_model_part": _modules(grid.parts),
                "parallelism.pipeline_parallel_microbatch_size": grid.samples,
                "training.disable_cuda_graphs": True,
            }
        elif grid.samples != grid.num_micro_batches * grid.samples:
            values["training.local_batch_size"] = grid.samples  # the rest is accumulated
        notes = grid.notes()
        lists = _lists(problem, plan, policy) if schedule.splits and grid.num_stages > 1 else None
        if lists is not None:
            values["compile.enable"] = False  # torch refuses it for split backwards of its own
            notes += (
                "torch puts off gradients of weights by stage, not by layer, and holds activations until then: by the "
                f"clock its pipelines end after {lists.end_s:.4g} s, those of the plan after {lists.planned_s:.4g} s",
            )
        notes += (
            _model_note(titan),
            *_GRADIENTS * (problem.workload.gradient_bytes == 2 and precision == "bf16"),
        )
        text = _text(values, policy, notes, lists is not None, titan)
        command = f"-m torchtitan.train --module {MODULE} --config plan"
        return Program(
            grid.stage_major(),
            command,
            {FILE: text, **({} if lists is None else {LISTS: lists.csv})},
            setup='export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"',
            notes=notes,
        )


TRAINER = TorchTitanFormat()
