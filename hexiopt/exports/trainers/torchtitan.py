"""torchtitan: a Python function that returns a `Trainer.Config`, as versions from 0.3 on take it; TOML is read too.

Ranks are t + T·(p + P·s), a row-major mesh (pp, dp_replicate, dp_shard, cp, tp)
(`torchtitan/distributed/parallel_dims.py`).
Replicated parameters are ZeRO-0; sharded ones ZeRO-3, or where they are not resharded after the forward, ZeRO-2.
Its ranks of dp_shard, cp and tp form (efsdp, ep) too: an EP group is so many consecutive ones, over which experts are
`Shard(0)`, and each of its TP groups has a batch of its own.
Where backwards are split, a CSV file says what each rank computes (`torch_lists.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.expert_groups import NO_FURTHER_LAYERS, divides_layers
from hexiopt.exports.formats import EVEN, Program, Trainer, divides_model_and_sequence
from hexiopt.exports.layout import devices_of_experts, grid_of, schedule_of, uniform_policy, uniform_tp, zero_stage
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.torch_lists import TorchLists, torch_lists
from hexiopt.exports.trainers.torchtitan_reading import read_torchtitan
from hexiopt.plan.plan import Plan
from hexiopt.problem.architectures import LLAMA_FAMILY
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem


@dataclass(frozen=True)
class TitanModel:
    """A model by its shape: the `function` of `torchtitan.models.{module}` whose configuration has it or, with a
    `flavor`, has another of the same vocabulary, which the one of the registry under this name replaces."""

    module: str
    function: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerKind, ...]
    flavor: str | None = None

    def trains(self, model: ModelSpec) -> bool:
        """Whether a model has this shape, layers that predict further tokens aside."""
        sizes, form = (model.hidden_size, model.vocab_size), model.decoder_form
        if model.tied_embeddings or (form.norm, form.positions, form.head_bias) != ("rms", "rope", False):
            return False
        return sizes == (self.hidden_size, self.vocab_size) and model.layers == self.layers

    @property
    def imports(self) -> list[str]:
        """The lines that import the configuration as `base`."""
        package = f"from torchtitan.models.{self.module}"
        registry = [] if self.flavor is None else [f"{package} import model_registry"]
        return [*registry, f"{package}.config_registry import {self.function} as base"]


def _latent(heads: int, q_rank: int) -> Attention:
    return Attention(heads=heads, kv_heads=heads, qk_dim=192, v_dim=128, q_rank=q_rank, kv_rank=512, rope_dim=64)


def _deepseek(attention: Attention, dense: tuple[int, int], experts: tuple[int, Experts]) -> tuple[LayerKind, ...]:
    """Dense layers, of so many columns, then those with experts."""
    (num_dense, ffn_size), (num_sparse, part) = dense, experts
    first = LayerKind((attention,), (Dense(ffn_size=ffn_size),))
    return (first,) * num_dense + (LayerKind((attention,), (part,)),) * num_sparse


def _qwen(num_layers: int, heads: tuple[int, int], count: int, ffn_size: int) -> tuple[LayerKind, ...]:
    attention = Attention(heads=heads[0], kv_heads=heads[1], qk_dim=128, v_dim=128, qk_norm="head")
    return (LayerKind((attention,), (Experts(count=count, top_k=8, ffn_size=ffn_size),)),) * num_layers


def _gpt_oss(num_layers: int, count: int) -> tuple[LayerKind, ...]:
    full = Attention(heads=64, kv_heads=8, qk_dim=64, v_dim=64, bias=True, output_bias=True, sinks=True)
    experts = Experts(count=count, top_k=4, ffn_size=2880, bias=True, router_bias=True)
    kinds = [LayerKind((attention,), (experts,)) for attention in (replace(full, window=128), full)]
    return tuple(kinds[number % 2] for number in range(num_layers))


_16B = Experts(count=64, top_k=6, ffn_size=1408, shared=2816)
_236B = Experts(count=160, top_k=6, ffn_size=1536, shared=3072)
_671B = Experts(count=256, top_k=8, ffn_size=2048, shared=2048)
_DEBUG = Experts(count=8, top_k=3, ffn_size=256, shared=512)
MODELS = (
    TitanModel("deepseek_v3", "deepseek_v3_debugmodel", 256, 2048, _deepseek(_latent(16, 0), (1, 1024), (5, _DEBUG))),
    TitanModel("deepseek_v3", "deepseek_v3_16b", 2048, 102400, _deepseek(_latent(16, 0), (1, 10944), (26, _16B))),
    TitanModel(
        "deepseek_v3", "deepseek_v3_16b", 5120, 102400, _deepseek(_latent(128, 1536), (1, 12288), (59, _236B)), "236B"
    ),
    TitanModel("deepseek_v3", "deepseek_v3_671b", 7168, 129280, _deepseek(_latent(128, 1536), (3, 18432), (58, _671B))),
    TitanModel("qwen3", "qwen3_moe_debug", 256, 2048, _qwen(8, (16, 8), 64, 768)),
    TitanModel("qwen3", "qwen3_30b_a3b", 2048, 151936, _qwen(48, (32, 4), 128, 768)),
    TitanModel("qwen3", "qwen3_30b_a3b", 4096, 151936, _qwen(94, (64, 4), 128, 1536), "235B-A22B"),
    TitanModel("gpt_oss", "gpt_oss_debugmodel", 256, 2048, _gpt_oss(4, 8)),
    TitanModel("gpt_oss", "gpt_oss_20b", 2880, 201088, _gpt_oss(24, 32)),
    TitanModel("gpt_oss", "gpt_oss_120b", 2880, 201088, _gpt_oss(36, 128)),
)


def model_with_shape_of(model: ModelSpec) -> TitanModel | None:
    """The model of torchtitan that has the shape of `model`, layers that predict further tokens aside; None if none."""
    return next((titan for titan in MODELS if titan.trains(model)), None)


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
        notes += (_model_note(titan), *_GRADIENTS * (problem.workload.gradient_bytes == 2 and precision == "bf16"))
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
