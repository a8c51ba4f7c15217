"""The kinds of layers that arguments of Megatron-LM state: defaults and rules of core_v0.19.0 (`megatron/training/
arguments.py`, `megatron/core/transformer/transformer_config.py`)."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.exports.trainers.megatron_kinds.composition import DELTA_CHUNK, MAMBA_CHUNK, composition_of
from hexiopt.exports.trainers.megatron_kinds.patterns import letters_of, read_hybrid, read_pattern
from hexiopt.ledger import OFF
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.model import ModelSpec

_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
PATTERNS = ("hybrid-layer-pattern", "hybrid-override-pattern")
_VARIANTS = ("experimental-attention-variant", "linear-attention-type")
_SIGNS = (
    *("num-experts", "multi-latent-attention", "window-size", "softmax-type", "attention-output-gate", "qk-l2-norm"),
    *("mtp-num-layers", "linear-attention-freq", *_VARIANTS, *PATTERNS),
)
_FURTHER, _REPEATED = "mtp-num-layers", "mtp-use-repeated-layer"


def states_kinds(arguments: MegatronArguments) -> bool:
    """Whether arguments state layers of other kinds than equal ones of an attention and an MLP."""
    return any(sign in arguments and _is_on(arguments, sign) for sign in _SIGNS)


def _is_on(arguments: MegatronArguments, name: str) -> bool:
    values = arguments[name]
    return not values or values[0] not in (*OFF, "vanilla")


def pattern_of(arguments: MegatronArguments) -> tuple[list[str], list[str]] | None:
    """The blocks of each virtual stage and of each layer for a further token, where a pattern states them."""
    name = next((name for name in PATTERNS if name in arguments and _is_on(arguments, name)), None)
    if name is None:
        return None
    if "spec" in arguments and arguments.words("spec")[-1].strip("[]") not in _SPECS:
        arguments.fail("spec", f"{' '.join(arguments.words('spec'))} makes other blocks; state {_SPECS[0]}")
    return read_hybrid("".join(arguments.words(name)), partial(arguments.fail, name))


def kinds_of(arguments: MegatronArguments, shape: dict[str, Any], norm: str, position: str) -> ModelSpec:
    """The model that arguments state by the kinds of its layers; `shape` has its other fields.

    Raises InputError for kinds that are not modelled.
    """
    reader = _Reader(arguments, shape, "layer" if norm == "LayerNorm" else "rms")
    pattern = pattern_of(arguments)
    if pattern is None:
        layers = reader.layers(shape["num_layers"])
        extra = layers[-1:] * further_layers(arguments)
    else:
        segments, further = pattern
        layers = [reader.block(letter) for letter in "".join(segments)]
        _agree(arguments, "num-layers", len(layers))
        extra = [reader.further_layer(blocks) for blocks in further[: further_layers(arguments, further)]]
    attention = next((kind.attention for kind in layers if kind.attention is not None), reader.attention())
    names = {"rope": "rope", "yarn": "rope", "learned_absolute": "learned", "none": "none"}
    if position not in names:
        arguments.fail("position-embedding-type", f"{position!r} is not modelled; state rope, learned_absolute or none")
    form = Form(
        gated_mlp=reader.gated,
        norm=reader.norm,
        norm_vectors=2 if reader.norm == "layer" else 1,
        positions=names[position],
        qk_norm=attention.qk_norm,
        qk_norm_vectors=attention.qk_norm_vectors,
        output_bias=attention.output_bias,
    )
    widths = [part.ffn_size for kind in layers for part in kind.channels]
    return ModelSpec(
        architecture=DECODER,
        **shape
        | {
            "num_layers": len(layers),
            "num_kv_heads": attention.kv_heads,
            "head_dim": attention.qk_dim,
            "ffn_size": max(widths, default=shape["ffn_size"]),
        },
        attention_bias=attention.bias,
        mlp_bias=any(part.bias for kind in layers for part in kind.channels),
        activation=reader.activation,
        rope_type=reader.rope_type(position) if names[position] == "rope" else "default",
        form=form,
        layers=tuple(layers),
        extra_layers=tuple(extra),
    )


def notes_on_kinds(arguments: MegatronArguments) -> list[str]:
    """Notes on how the layers that arguments state differ from those that are priced."""
    latent, normed = arguments.flag("multi-latent-attention"), arguments.flag("qk-layernorm")
    without = f"without {arguments.label('qk-layernorm')} latent vectors have no norms, which are priced all the same"
    return [without] if latent and not normed else []


def further_layers(arguments: MegatronArguments, of_pattern: Sequence[str] | None = None) -> int:
    """The number of layers that predict further tokens, that `of_pattern` where there is one."""
    number = arguments.whole(_FURTHER, 0)
    if of_pattern is not None:
        number = len(of_pattern)
        _agree(arguments, _FURTHER, number)
    if arguments.flag(_REPEATED) and number > 1:
        arguments.fail(_REPEATED, "has one layer for several tokens, not modelled; leave it out")
    return number


def _agree(arguments: MegatronArguments, name: str, of_pattern: int) -> None:
    """Refuse a stated number other than that of the pattern, which is read."""
    if name in arguments and (number := arguments.whole(name)) != of_pattern:
        arguments.fail(name, f"{number} is not the {of_pattern} of the pattern of blocks; state it, or leave it out")


class _Reader:
    """The parts that arguments state."""

    def __init__(self, arguments: MegatronArguments, shape: dict[str, Any], norm: str) -> None:
        self._arguments, self._shape, self.norm = arguments, shape, norm
        self._quick = arguments.flag("quick-geglu")
        self.gated = arguments.flag("swiglu") or self._quick
        self.activation = "silu" if self.gated else "relu2" if arguments.flag("squared-relu") else "gelu"
        self._has_biases = not arguments.flag("disable-bias-linear")
        self._latent = arguments.flag("multi-latent-attention")
        self._by_head, self._plain = arguments.flag("qk-layernorm"), arguments.flag("qk-l2-norm")
        self._qkv_bias = arguments.flag("add-qkv-bias")

    def layers(self, num_layers: int) -> list[LayerKind]:
        """The layers of a model without a pattern of blocks."""
        arguments = self._arguments
        window, attention, dense = self._window(), self.attention(), self.dense()
        experts = self.experts() if arguments.whole("num-experts", 0) else None
        windowed, linear = [window is not None] * num_layers, [False] * num_layers
        with_experts = [experts is not None] * num_layers
        if "window-attn-skip-freq" in arguments and window is not None:
            windowed = self._pattern("window-attn-skip-freq", num_layers, lambda layer, n: (layer + 1) % n != 0)
        if "moe-layer-freq" in arguments and experts is not None:
            with_experts = self._pattern("moe-layer-freq", num_layers, lambda layer, n: layer % n == 0)
        if self._has_linear_attention():
            if "linear-attention-freq" not in arguments:
                arguments.fail("linear-attention-freq", "is missing; state which layers have linear attention")
            linear = self._pattern("linear-attention-freq", num_layers, lambda layer, n: (layer + 1) % n != 0)
        recurrent = self._delta() if any(linear) else None
        return [
            LayerKind(
                (recurrent if is_linear and recurrent else replace(attention, window=window if is_windowed else None),),
                (experts if has_experts and experts else dense,),
            )
            for is_linear, is_windowed, has_experts in zip(linear, windowed, with_experts, strict=True)
        ]

    def block(self, letter: str) -> LayerKind:
        """A block of a pattern."""
        part = self._part(letter)
        return LayerKind((part,), (), 1) if isinstance(part, Attention | Recurrent) else LayerKind((), (part,), 1)

    def further_layer(self, blocks: str) -> LayerKind:
        """A layer for a further token, of a mixer and of channels."""
        kinds = [self.block(letter) for letter in blocks]
        mixers = tuple(part for kind in kinds for part in kind.mixers)
        channels = tuple(part for kind in kinds for part in kind.channels)
        if len(mixers) > 1 or len(channels) > 1:
            name = next(name for name in PATTERNS if name in self._arguments)
            self._arguments.fail(name, f"predicts further tokens by {blocks}; one mixer and one MLP are modelled")
        return LayerKind(mixers, channels, len(blocks))

    def _part(self, letter: str) -> Attention | Recurrent | Dense | Experts:
        match letter:
            case "M":
                return self._mamba()
            case "G":
                return self._delta()
            case "-":
                return self.dense()
            case "E":
                return self.experts()
            case _:
                self._latent = self._latent or letter == "+"
                return self.attention()

    def attention(self) -> Attention:
        """Attention, without a window."""
        arguments, heads = self._arguments, self._shape["num_heads"]
        if self._latent:
            rope, content = arguments.whole("qk-pos-emb-head-dim", 64), arguments.whole("qk-head-dim", 128)
            return Attention(
                heads=heads,
                kv_heads=heads,
                qk_dim=content + rope,
                v_dim=arguments.whole("v-head-dim", 128),
                q_rank=arguments.whole("q-lora-rank", 0),
                kv_rank=arguments.whole("kv-lora-rank", 32),
                rope_dim=rope,
                output_bias=self._has_biases,
            )
        head_dim = self._shape["head_dim"]
        return Attention(
            heads=heads,
            kv_heads=self._shape["num_kv_heads"],
            qk_dim=head_dim,
            v_dim=head_dim,
            bias=self._has_biases or self._qkv_bias,
            output_bias=self._has_biases,
            qk_norm="plain" if self._plain else "head" if self._by_head else "none",
            qk_norm_vectors=2 if self.norm == "layer" and self._by_head else 1,
            gated=arguments.flag("attention-output-gate"),
            sinks=arguments.word("softmax-type", "vanilla", ("vanilla", "learnable"), noted=False) == "learnable",
        )

    def dense(self) -> Dense:
        """The MLP."""
        return Dense(ffn_size=self._shape["ffn_size"], gated=self.gated, bias=self._has_biases)

    def experts(self) -> Experts:
        """The experts."""
        arguments = self._arguments
        shared = arguments.whole("moe-shared-expert-intermediate-size", 0)
        return Experts(
            count=arguments.whole("num-experts"),
            top_k=arguments.whole("moe-router-topk", 2),
            ffn_size=arguments.whole("moe-ffn-hidden-size", self._shape["ffn_size"]),
            shared=shared,
            gated=self.gated,
            bias=self._has_biases,
            router_bias=self._has_biases,
            shared_gate=bool(shared) and arguments.flag("moe-shared-expert-gate"),
            latent=arguments.whole("moe-latent-size", 0),
        )

    def _mamba(self) -> Recurrent:
        arguments, width = self._arguments, self._arguments.whole("mamba-head-dim", 64)
        return Recurrent(
            heads=arguments.whole("mamba-num-heads", 2 * self._shape["hidden_size"] // max(1, width)),
            groups=arguments.whole("mamba-num-groups", 8),
            key_dim=arguments.whole("mamba-state-dim", 128),
            value_dim=width,
            chunk=MAMBA_CHUNK,
        )

    def _delta(self) -> Recurrent:
        arguments = self._arguments
        return Recurrent(
            heads=arguments.whole("linear-num-value-heads", 32),
            groups=arguments.whole("linear-num-key-heads", 16),
            key_dim=arguments.whole("linear-key-head-dim", 128),
            value_dim=arguments.whole("linear-value-head-dim", 128),
            conv=arguments.whole("linear-conv-kernel-dim", 4),
            conv_bias=False,
            chunk=DELTA_CHUNK,
            delta=True,
        )

    def _has_linear_attention(self) -> bool:
        for name in _VARIANTS:
            if name in self._arguments and _is_on(self._arguments, name):
                self._arguments.word(name, choices=("gated_delta_net", "gdn"))
                return True
        return False

    def _window(self) -> int | None:
        """Tokens of the window, itself included: those before it are stated, -1 for all."""
        if "window-size" not in self._arguments or not _is_on(self._arguments, "window-size"):
            return None
        text = "".join(self._arguments.words("window-size"))
        before, _, after = text.strip("()[] ").partition(",")
        if not before.strip().lstrip("-").isdecimal() or after.strip() != "0":
            self._arguments.fail("window-size", f"{text!r} is not the tokens before and 0; write 127,0 for 128 tokens")
        return None if int(before) < 0 else int(before) + 1

    def _pattern(self, name: str, num_layers: int, every: Any) -> list[bool]:
        text = "".join(self._arguments.words(name))
        return read_pattern(text, num_layers, every, partial(self._arguments.fail, name))

    def rope_type(self, position: str) -> str:
        """Hugging Face's name of the rule that scales positions; latent attention has YaRN by default."""
        scaling = self._arguments.word("rope-type", "yarn", ("rope", "yarn"), noted=self._latent)
        if self._latent:
            return "yarn" if scaling == "yarn" else "default"
        if position == "yarn":
            return "yarn"
        return "llama3" if self._arguments.flag("use-rope-scaling") else "default"


def model_in_use(arguments: MegatronArguments, model: ModelSpec, has_shape: bool) -> tuple[ModelSpec, list[str]]:
    """The context's model with as many layers for further tokens as arguments state, and a note where its file has
    others; `stated` is whether they state the model's shape.

    Raises InputError where the arguments state other numbers or kinds of layers than the model's.
    """
    for name, number in _numbers(model).items():
        if name in arguments and _is_on(arguments, name) and arguments.whole(name) != number:
            what = f"{arguments.whole(name)} is not that of model {model.name} ({number})"
            arguments.fail(name, f"{what}; give the model that is trained")
    if (pattern := pattern_of(arguments)) is not None:
        segments, further = pattern
        if "".join(segments) != "".join(map(letters_of, model.layers)):
            name = next(name for name in PATTERNS if name in arguments)
            arguments.fail(name, f"has other blocks than model {model.name}; give the model that is trained")
        number = further_layers(arguments, further)
    elif has_shape or _FURTHER in arguments:
        number = further_layers(arguments)
    else:  # a recipe has the model's
        return model, []
    if number == len(model.extra_layers):
        return model, []
    extra = (model.extra_layers or model.layers[-1:])[:1] * number
    if number and not extra:
        arguments.fail(_FURTHER, f"model {model.name} has no such layers; give the model that is trained")
    note = f"{number} layers predict further tokens, where model {model.name} has {len(model.extra_layers)}"
    return model.replace(extra_layers=extra), [note]


def difference_of_layers(stated_model: ModelSpec, model: ModelSpec) -> list[str]:
    """A note on how the layers that arguments state differ from the model's, but for norms."""
    parts, others = ([part for kind in spec.layers for part in kind.parts] for spec in (stated_model, model))
    if [part.name for part in parts] != [part.name for part in others]:
        return [f"its layers are not those of model {model.name}: that of the model is taken"]
    values = {
        f"{part.name}.{field.name}": (getattr(part, field.name), getattr(other, field.name))
        for part, other in zip(parts, others, strict=True)
        for field in fields(part)
        if getattr(part, field.name) != getattr(other, field.name)
    }
    if not values:
        return []
    words = ", ".join(f"{name} {pair[0]} for {pair[1]}" for name, pair in sorted(values.items()))
    return [f"its layers differ from those of model {model.name} in {words}: that of the model is taken"]


def _numbers(model: ModelSpec) -> dict[str, int]:
    """Numbers of a model's layers by the arguments that state them."""
    if not model.layers:
        return {"num-experts": 0, "kv-lora-rank": 0}
    parts = composition_of(model)
    attention, experts, recurrent = parts.attention, parts.experts, parts.recurrent
    numbers = {"num-experts": 0, "kv-lora-rank": attention.kv_rank}
    if attention.kv_rank:
        numbers |= {"q-lora-rank": attention.q_rank, "qk-pos-emb-head-dim": attention.rope_dim}
        numbers |= {"qk-head-dim": attention.qk_dim - attention.rope_dim, "v-head-dim": attention.v_dim}
    if experts is not None:
        numbers |= {"num-experts": experts.count, "moe-router-topk": experts.top_k}
        numbers |= {"moe-ffn-hidden-size": experts.ffn_size, "moe-shared-expert-intermediate-size": experts.shared}
    if recurrent is not None and recurrent.delta:
        numbers |= {"linear-num-value-heads": recurrent.heads, "linear-num-key-heads": recurrent.groups}
    elif recurrent is not None:
        numbers |= {"mamba-num-heads": recurrent.heads, "mamba-num-groups": recurrent.groups}
        numbers |= {"mamba-state-dim": recurrent.key_dim, "mamba-head-dim": recurrent.value_dim}
    return numbers


def layers_of_blocks(model: ModelSpec, segments: Sequence[str], stages: int, fail: Any) -> list[int]:
    """The layers of each virtual stage, whose blocks are `segments`, or equally many blocks of one segment for each of
    `stages`. `fail` raises InputError where stages do not hold whole layers."""
    blocks = [len(segment) for segment in segments]
    if len(blocks) == 1:
        if blocks[0] % stages:
            fail(f"{stages} stages do not divide {blocks[0]} blocks; divide them by |")
        blocks = [blocks[0] // stages] * stages
    if len(blocks) % stages:
        fail(f"has {len(blocks)} parts for {stages} stages; make them a multiple of the stages")
    of_layer, parts, layer = [len(letters_of(kind)) for kind in model.layers], [], 0
    for count in blocks:
        first = layer
        while count > 0 and layer < len(of_layer):
            count -= of_layer[layer]
            layer += 1
        if count:
            fail(f"divides layer {layer - 1} of model {model.name} over two stages; keep its blocks together")
        parts.append(layer - first)
    return parts
