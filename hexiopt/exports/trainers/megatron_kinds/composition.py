"""What the layers of a Megatron-LM model have in common, and the reasons why a model is not made of such layers.

Facts from `transformer_config.py`, `attention.py`, `moe/router.py`, `moe/shared_experts.py` in
`megatron/core/transformer`, and `megatron/core/ssm/mamba_mixer.py`, of core_v0.16.0 to core_v0.19.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Part, Recurrent
from hexiopt.problem.model import ModelSpec

MAMBA_CONV, MAMBA_CHUNK, DELTA_CHUNK = 4, 128, 64  # fixed in the program
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ACTIVATIONS = {True: ("silu", "swish"), False: (*_GELUS, "relu2")}
_P = TypeVar("_P", bound=Part)


@dataclass(frozen=True)
class Composition:
    """The parts of all layers, of which there is one of each sort; `windowed` layers attend to `window` tokens."""

    attention: Attention
    window: int | None
    recurrent: Recurrent | None
    dense: Dense | None
    experts: Experts | None

    @property
    def has_biases(self) -> bool:
        """Whether all products have biases."""
        return self.attention.output_bias


def _different(layers: tuple[LayerKind, ...], sort: type[_P]) -> list[_P]:
    """The different parts of a sort."""
    return list(dict.fromkeys(part for kind in dict.fromkeys(layers) for part in kind.parts if isinstance(part, sort)))


def _attentions(layers: tuple[LayerKind, ...]) -> list[Attention]:
    """The different attentions, windows aside."""
    every = _different(layers, Attention)
    return list(dict.fromkeys(replace(part, window=None, chunked=False) for part in every))


def composition_of(model: ModelSpec) -> Composition:
    """The composition of a model without faults (`faults`)."""
    layers = (*model.layers, *model.extra_layers)
    windows = {kind.attention.window for kind in layers if kind.attention is not None} - {None}
    return Composition(
        _attentions(layers)[0],
        max(windows) if windows else None,  # type: ignore[type-var]
        next(iter(_different(layers, Recurrent)), None),
        next(iter(_different(layers, Dense)), None),
        next(iter(_different(layers, Experts)), None),
    )


def is_hybrid(model: ModelSpec) -> bool:
    """Whether a model has Mamba-2 blocks or layers of one part, and so is stated by a pattern of blocks."""
    if not model.layers:
        return False
    recurrent = _different(model.layers, Recurrent)
    return any(not part.delta for part in recurrent) or any(len(kind.parts) == 1 for kind in model.layers)


def faults(model: ModelSpec) -> Iterator[str]:
    """What layers of a model have that Megatron-LM's have not."""
    layers = (*model.layers, *model.extra_layers)
    if len(_attentions(layers)) > 1:
        yield "attentions of several shapes"
    for sort, words in ((Recurrent, "recurrences"), (Dense, "MLPs"), (Experts, "experts")):
        if len(_different(layers, sort)) > 1:
            yield f"{words} of several shapes"
    windows = {kind.attention.window for kind in layers if kind.attention is not None} - {None}
    if len(windows) > 1:
        yield "windows of several lengths"
    if windows and is_hybrid(model):
        yield "windows in a model of blocks"
    yield from _of_model(model)
    for kind in dict.fromkeys(layers):
        yield from _of_kind(model, kind)
    biases = {bias for part in _all_parts(layers) for bias in _biases(part)}
    if len(biases) > 1:
        yield "biases in some products, and not in the query, key and value projections alone"
    gated = {part.gated for part in _all_parts(layers) if isinstance(part, Dense | Experts)}
    if len(gated) > 1:
        yield "gates in some MLPs alone"


def _all_parts(layers: tuple[LayerKind, ...]) -> list[Part]:
    return list(dict.fromkeys(part for kind in dict.fromkeys(layers) for part in kind.parts))


def _biases(part: Part) -> set[bool]:
    """Whether products of a part have biases, but for the query, key and value projections, where they stand alone."""
    match part:
        case Attention():
            return {part.output_bias, part.bias} if part.output_bias else {part.output_bias}
        case Dense():
            return {part.bias}
        case Experts():
            return {part.bias, part.router_bias} | ({part.shared_bias} if part.shared else set())
        case _:
            return set()


def _of_model(model: ModelSpec) -> Iterator[str]:
    form, hybrid = model.decoder_form, is_hybrid(model)
    if form.inner_norms or form.activation_params or form.embedding_norm or form.head_bias or form.extra_positions:
        yield "norms inside its parts, of the embedding, or trained activations"
    if (form.norm, form.norm_vectors) not in (("rms", 1), ("layer", 2)) or not model.final_norm:
        yield "norms of this kind"
    if model.activation not in _ACTIVATIONS[form.gated_mlp]:
        yield f"a {'gated' if form.gated_mlp else 'plain'} MLP with activation {model.activation}"
    latent = any(part.kv_rank for part in _attentions(model.layers))
    known = ("default", "yarn") if latent else ("default", "llama3", "yarn")
    if form.positions == "rope" and model.rope_type not in (known[:1] if hybrid else known):
        yield f"positions scaled by {model.rope_type}"
    if not model.extra_layers:
        return
    if len(set(model.extra_layers)) > 1 or (not hybrid and model.extra_layers[0] != model.layers[-1]):
        yield "layers for further tokens other than its last layer"
    if form.positions == "learned" or (model.rope_type == "yarn" and not latent):
        yield "layers for further tokens with these positions"


def _of_kind(model: ModelSpec, kind: LayerKind) -> Iterator[str]:
    if len(kind.mixers) > 1 or len(kind.channels) > 1:
        yield "parts side by side"
    if kind.norms != len(kind.parts):
        yield f"{kind.norms} norms in a layer of {len(kind.parts)} parts"
    for part in kind.parts:
        match part:
            case Attention():
                yield from _of_attention(model, part)
            case Recurrent():
                yield from _of_recurrence(part)
            case Experts():
                if part.router_vectors or part.expert_scales:
                    yield "trained scales of the router's input or of experts"
                if part.scales_input:
                    yield "weights of a router that multiply what experts read"
                if part.shared and part.bias:
                    yield "shared experts with biases"
                if part.latent_bias:
                    yield "biases of a latent width"


def _of_attention(model: ModelSpec, part: Attention) -> Iterator[str]:
    if part.chunked:
        yield "attention in chunks"
    if part.keys_are_values:
        yield "keys that are values"
    if part.kv_rank:
        if part.window is not None or part.sinks or part.gated or part.bias:
            yield "latent attention with windows, sinks, gates or biases"
        if part.qk_norm != "none":
            yield "latent attention with norms of queries and keys"
        return
    if part.qk_dim != part.v_dim:
        yield "keys and values of different widths"
    if part.qk_norm not in ("none", "head", "plain"):
        yield "norms of queries and keys over all heads"
    if part.qk_norm == "head" and part.qk_norm_vectors != model.decoder_form.norm_vectors:
        yield "norms of queries and keys other than those of layers"


def _of_recurrence(part: Recurrent) -> Iterator[str]:
    if part.bias or not part.norm or (not part.delta and (part.conv != MAMBA_CONV or not part.conv_bias)):
        yield "recurrences of this kind"
    if part.delta and part.conv_bias:
        yield "recurrences of this kind"
