"""A model's shape as arguments of Megatron-LM, and back."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem

Arguments = dict[str, list[str]]  # by name without dashes; flags have no value

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_ROPE_SCALING: dict[str, Arguments] = {"llama3": {"use-rope-scaling": []}, "default": {}}


def unsuitable(problem: Problem) -> str | None:
    """Why Megatron-LM's GPT model cannot be a problem's model, with a remedy; None where it can."""
    model = problem.model
    if model.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return f"model {model.name}: {model.architecture} is not a GPT model of Megatron-LM; take {known}"
    if model.output_bias != model.mlp_bias or (model.mlp_bias and not model.attention_bias):
        return f"model {model.name}: Megatron-LM has biases in all linear layers or in none but the QKV projection"
    if model.rope_type not in _ROPE_SCALING:
        return f"model {model.name}: rope_type {model.rope_type} has no argument of Megatron-LM; take default or llama3"
    return None


def takes_tp(problem: Problem, tp: int) -> bool:
    """Whether a TP degree divides heads, MLP columns and tokens, and groups of queries or they it."""
    model = problem.model
    groups = model.num_kv_heads
    divided = model.num_heads % tp == model.ffn_size % tp == problem.workload.seq_len % tp == 0
    return divided and gcd(groups, tp) in (groups, tp)


def model_arguments(model: ModelSpec, seq_len: int) -> Arguments:
    """The arguments that state a model's shape."""
    found: Arguments = {
        "num-layers": [str(model.num_layers)],
        "hidden-size": [str(model.hidden_size)],
        "ffn-hidden-size": [str(model.ffn_size)],
        "num-attention-heads": [str(model.num_heads)],
        "seq-length": [str(seq_len)],
        "max-position-embeddings": [str(max(model.max_positions, seq_len))],
        "vocab-size": [str(model.vocab_size)],
        "make-vocab-size-divisible-by": ["1"],
        "norm-epsilon": [repr(model.norm_eps)],
    }
    if model.num_kv_heads != model.num_heads:
        found |= {"group-query-attention": [], "num-query-groups": [str(model.num_kv_heads)]}
    if model.head_dim * model.num_heads != model.hidden_size:
        found["kv-channels"] = [str(model.head_dim)]
    if model.gated_mlp:
        found |= {"swiglu": [], "normalization": ["RMSNorm"], "position-embedding-type": ["rope"]}
        found |= {"rotary-base": [f"{model.rope_theta:.0f}"], **_ROPE_SCALING[model.rope_type]}
    else:
        found["position-embedding-type"] = ["learned_absolute"]
    if not model.mlp_bias:
        found["disable-bias-linear"] = []
        found |= {"add-qkv-bias": []} if model.attention_bias else {}
    found |= {"qk-layernorm": []} if model.qk_norm else {}
    found |= {} if model.tied_embeddings else {"untie-embeddings-and-output-weights": []}
    return found


def read_model(arguments: Mapping[str, list[str]], context: ImportContext) -> tuple[ModelSpec, list[str]]:
    """The model that arguments state, or that of the context where it is given, and what was assumed.

    Raises InputError where arguments and context disagree, or arguments state too little.
    """

    def whole(name: str, default: int | None = None) -> int:
        return integer(arguments, name, context, default)

    heads, hidden = whole("num-attention-heads", 0), whole("hidden-size", 0)
    if context.model is not None:
        stated = {"num-layers": context.model.num_layers, "hidden-size": context.model.hidden_size}
        stated |= {"num-attention-heads": context.model.num_heads}
        for name, own in stated.items():
            if name in arguments and whole(name) != own:
                context.fail(
                    f"--{name} {whole(name)} is not that of model {context.model.name} ({own}); give the model"
                )
        return context.model, []
    gated, notes = "swiglu" in arguments, list[str]()
    rotary = "use-rotary-position-embeddings" in arguments or arguments.get("position-embedding-type") == ["rope"]
    norm = arguments.get("normalization", ["LayerNorm"])
    if not gated == rotary == (norm == ["RMSNorm"]):
        context.fail("its MLP, norm and positions are together no architecture known here; give model=config.json")
    vocab, positions = whole("vocab-size", 0), whole("max-position-embeddings")
    if not vocab:
        vocab = 50257
        notes.append("--vocab-size is not stated: 50257, that of GPT-2's tokenizer, is assumed; give model=config.json")
    values: dict[str, Any] = {
        "name": "imported",
        "num_layers": whole("num-layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": whole("num-query-groups", heads) if "group-query-attention" in arguments else heads,
        "head_dim": whole("kv-channels", hidden // max(1, heads)),
        "ffn_size": whole("ffn-hidden-size", 4 * hidden),
        "vocab_size": vocab,
        "max_positions": positions,
        "tied_embeddings": "untie-embeddings-and-output-weights" not in arguments,
    }
    if not gated:
        if "disable-bias-linear" in arguments:
            context.fail("--disable-bias-linear without --swiglu is no architecture known here; give model=config.json")
        return ModelSpec(
            architecture="gpt2", attention_bias=True, mlp_bias=True, activation="gelu_new", **values
        ), notes
    if "disable-bias-linear" not in arguments:
        values |= {"attention_bias": True, "mlp_bias": True}
    architecture = "qwen3" if "qk-layernorm" in arguments else "qwen2" if "add-qkv-bias" in arguments else "llama"
    values |= {"attention_bias": True} if architecture == "qwen2" else {}
    return ModelSpec(architecture=architecture, rope_theta=float(whole("rotary-base", 10000)), **values), notes


def integer(arguments: Mapping[str, list[str]], name: str, context: ImportContext, default: int | None = None) -> int:
    """The whole number of an argument. Raises InputError where it is no number, or missing without a default."""
    if name not in arguments:
        if default is None:
            context.fail(f"--{name}: is missing; state it")
        return default
    values = arguments[name]
    if len(values) != 1 or not values[0].isdecimal() or len(values[0]) > 9:
        raise InputError(f"{context.where}: --{name}: {' '.join(values)!r} is not a whole number; write one out")
    return int(values[0])
