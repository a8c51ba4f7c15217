"""A model's shape as arguments of Megatron-LM, and back."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from hexiopt.exports.formats import ImportContext
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.exports.trainers.megatron_kinds.composition import faults, is_hybrid
from hexiopt.exports.trainers.megatron_kinds.reading import (
    difference_of_layers,
    kinds_of,
    model_in_use,
    notes_on_kinds,
    pattern_of,
    states_kinds,
)
from hexiopt.exports.trainers.megatron_kinds.writing import divides_kinds, kinds_arguments
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem

Arguments = dict[str, list[str]]  # by name without dashes; flags have no value

_NORM_EPS = ("norm-epsilon", "layernorm-epsilon")  # today's name, and an earlier one
_SHAPE = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "num_heads": "num-attention-heads",
    "num_kv_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "ffn_size": "ffn-hidden-size",
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_ROPE_SCALING: dict[str, Arguments] = {"llama3": {"use-rope-scaling": []}, "default": {}}


def unsuitable(problem: Problem) -> str | None:
    """The reason why Megatron-LM's GPT model cannot be a problem's model, whose layers are equal, with a remedy; None
    if it can."""
    model = problem.model
    if model.layers:
        return None
    if model.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"model {model.name}: {model.architecture} is not a GPT model of Megatron-LM; take {known}"
    if model.output_bias != model.mlp_bias or (model.mlp_bias and not model.attention_bias):
        return f"model {model.name}: Megatron-LM has biases in all linear layers or in none but the QKV projection"
    if model.rope_type not in _ROPE_SCALING:
        return f"model {model.name}: rope_type {model.rope_type} has no argument of Megatron-LM; take default or llama3"
    return None


def unsuitable_kinds(problem: Problem) -> str | None:
    """The reason why Megatron-LM has no layers as those that a model states, with a remedy; None if it has."""
    model = problem.model
    fault = next(faults(model), None) if model.layers else None
    return None if fault is None else f"has no {fault}, as {model.name} has; export plans of a model without"


def takes_tp(problem: Problem, tp: int) -> bool:
    """Whether a TP degree divides heads, MLP columns and tokens, and divides or is divided by the key-value heads."""
    model = problem.model
    if model.layers:
        return divides_kinds(problem, tp)
    groups = model.num_kv_heads
    divided = model.num_heads % tp == model.ffn_size % tp == problem.workload.seq_len % tp == 0
    return divided and gcd(groups, tp) in (groups, tp)


def model_arguments(model: ModelSpec, seq_len: int) -> Arguments:
    """The arguments that state a model's shape."""
    dense = next((kind.dense.ffn_size for kind in model.layers if kind.dense is not None), model.ffn_size)
    arguments: Arguments = {
        **({} if is_hybrid(model) else {"num-layers": [str(model.num_layers)]}),  # a pattern of blocks says it
        "hidden-size": [str(model.hidden_size)],
        "ffn-hidden-size": [str(dense)],
        "num-attention-heads": [str(model.num_heads)],
        "seq-length": [str(seq_len)],
        "max-position-embeddings": [str(max(model.max_positions, seq_len))],
        "vocab-size": [str(model.vocab_size)],
        "make-vocab-size-divisible-by": ["1"],
        "norm-epsilon": [repr(model.norm_eps)],
    }
    arguments |= kinds_arguments(model) if model.layers else _equal_layers(model)
    return arguments | ({} if model.tied_embeddings else {"untie-embeddings-and-output-weights": []})


def _equal_layers(model: ModelSpec) -> Arguments:
    arguments: Arguments = {}
    if model.num_kv_heads != model.num_heads:
        arguments |= {"group-query-attention": [], "num-query-groups": [str(model.num_kv_heads)]}
    if model.head_dim * model.num_heads != model.hidden_size:
        arguments["kv-channels"] = [str(model.head_dim)]
    if model.gated_mlp:
        arguments |= {"swiglu": [], "normalization": ["RMSNorm"], "position-embedding-type": ["rope"]}
        arguments |= {"rotary-base": [f"{model.rope_theta:.0f}"], **_ROPE_SCALING[model.rope_type]}
    else:
        arguments["position-embedding-type"] = ["learned_absolute"]
    if not model.mlp_bias:
        arguments["disable-bias-linear"] = []
        arguments |= {"add-qkv-bias": []} if model.attention_bias else {}
    return arguments | ({"qk-layernorm": []} if model.qk_norm else {})


def read_model(arguments: MegatronArguments, context: ImportContext, tp: int) -> tuple[ModelSpec, list[str]]:
    """The context's model if it has one, else the model that arguments state; and notes on what was assumed.

    Raises InputError where arguments and context disagree, or arguments state too little.
    """
    hidden, heads = arguments.whole("hidden-size", 0), arguments.whole("num-attention-heads", 0)
    grouped = arguments.flag("group-query-attention")
    gated = arguments.flag("swiglu")
    columns = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden  # Megatron-LM's own default
    noted = context.model is None
    shape = {
        "num_layers": arguments.whole("num-layers", 0),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": arguments.whole("num-query-groups", 1, noted=noted) if grouped else heads,
        "head_dim": arguments.whole("kv-channels", hidden // max(1, heads), noted=noted),
        "ffn_size": arguments.whole("ffn-hidden-size", columns, noted=noted),
        "tied_embeddings": not arguments.flag("untie-embeddings-and-output-weights"),
    }
    norm = arguments.word("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"), noted=noted)
    position = arguments.word("position-embedding-type", "learned_absolute", noted=noted)
    rotary = position in ("rope", "yarn") or arguments.flag("use-rotary-position-embeddings")
    biased, qkv_bias = not arguments.flag("disable-bias-linear"), arguments.flag("add-qkv-bias")
    qk_norm = arguments.flag("qk-layernorm")
    values: dict[str, Any] = {
        **shape,
        "name": "imported",
        "max_positions": arguments.whole("max-position-embeddings", 0),
        "norm_eps": arguments.number(_NORM_EPS[_NORM_EPS[1] in arguments], "1e-5", noted=noted),
    }
    theta = float(arguments.whole("rotary-base", 10000, noted=noted)) if rotary or not noted else 10000.0
    scaled = arguments.flag("use-rope-scaling")
    vocab, notes = _vocabulary(arguments, context, tp)
    position = "rope" if rotary and position != "yarn" else position
    whole = values | {"vocab_size": vocab, "rope_theta": theta}
    if context.model is not None:
        model, further = model_in_use(arguments, context.model, _states_shape(arguments))
        differences = _differences(arguments, model, shape)
        if states_kinds(arguments) and model.layers and _states_shape(arguments):
            with context.blame_file():
                differences += difference_of_layers(kinds_of(arguments, whole, norm, position), model)
        return model, [*differences, *further]
    if states_kinds(arguments):
        for name in ("hidden-size", "num-attention-heads", "max-position-embeddings"):
            arguments.whole(name)
        if pattern_of(arguments) is None:
            arguments.whole("num-layers")
        with context.blame_file():
            return kinds_of(arguments, whole, norm, position), [*notes, *notes_on_kinds(arguments)]
    for name in ("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings"):
        arguments.whole(name)
    if position == "yarn" or arguments.word("rope-type", "rope", ("rope", "yarn"), noted=False) == "yarn":
        context.fail("positions scaled by YaRN need a model of kinds of layers here; give model=config.json")
    if not gated == rotary == (norm == "RMSNorm") or (not gated and position != "learned_absolute"):
        context.fail("its MLP, norm and positions are together no architecture known here; give model=config.json")
    values["vocab_size"] = vocab
    if not gated:
        if not biased:
            context.fail("--disable-bias-linear without --swiglu is no architecture known here; give model=config.json")
        return ModelSpec(
            architecture="gpt2", attention_bias=True, mlp_bias=True, activation="gelu_new", **values
        ), notes
    if biased:
        values |= {"attention_bias": True, "mlp_bias": True}
    architecture = "qwen3" if qk_norm else "qwen2" if qkv_bias else "llama"
    values |= {"attention_bias": True} if architecture == "qwen2" else {}
    values |= {"rope_type": "llama3"} if scaled else {}
    return ModelSpec(architecture=architecture, rope_theta=theta, **values), notes


def _states_shape(arguments: MegatronArguments) -> bool:
    """Whether the model's shape is stated, as it is for Megatron-LM, or left to a recipe."""
    depth = "num-layers" in arguments or pattern_of(arguments) is not None
    return all([depth, "hidden-size" in arguments, "num-attention-heads" in arguments])


def _fields_without_meaning(model: ModelSpec) -> tuple[str, ...]:
    """Fields that arguments state of another part than the model does: widths of an MLP beside experts, and of heads
    that latent vectors make."""
    if not model.layers:
        return ()
    dense = any(kind.dense is not None for kind in model.layers)
    latent = any(kind.attention is not None and kind.attention.kv_rank for kind in model.layers)
    return (*(() if dense else ("ffn_size",)), *(("head_dim", "num_kv_heads") if latent else ()))


def _vocabulary(arguments: MegatronArguments, context: ImportContext, tp: int) -> tuple[int, list[str]]:
    """The rows of the embedding, padded as Megatron-LM pads them, and notes on what was assumed."""
    multiple = arguments.whole("make-vocab-size-divisible-by", 128, noted=context.model is None) * tp
    size, padded = arguments.whole("vocab-size", 0), arguments.whole("padded-vocab-size", 0)
    exact = any([arguments.flag("no-pad-vocab-size"), bool(padded)])
    if not size and not padded:
        note = "--vocab-size is not stated: 50257, that of GPT-2's tokenizer, is assumed; give model=config.json"
        return -(-50257 // multiple) * multiple, [note]
    rows = padded or size + arguments.whole("vocab-extra-ids", 0)
    rows = rows if exact else -(-rows // multiple) * multiple
    return rows, [f"the vocabulary is padded from {size} to {rows}"] if rows != (padded or size) else []


def _differences(arguments: MegatronArguments, model: ModelSpec, shape: Mapping[str, Any]) -> list[str]:
    """Notes on flags that contradict the model. Raises InputError where numbers do."""
    for name, key in _SHAPE.items():
        if key in arguments and name not in _fields_without_meaning(model) and shape[name] != getattr(model, name):
            what = f"{shape[name]} is not that of model {model.name} ({getattr(model, name)})"
            arguments.fail(key, f"{what}; give the model that is trained")
    if not _states_shape(arguments):
        return []
    flags = {"untie-embeddings-and-output-weights": not model.tied_embeddings, "swiglu": model.gated_mlp}
    wrong = [
        f"{arguments.label(flag)} is {'absent' if on else 'stated'}"
        for flag, on in flags.items()
        if on != (flag in arguments)
    ]
    return (
        [f"{' and '.join(wrong)}, which model {model.name} has otherwise: that of the model is taken"] if wrong else []
    )
