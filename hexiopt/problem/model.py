"""The shape of a decoder-only transformer, and its exact numbers of parameters and FLOPs."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from hexiopt.checks import is_number, is_whole
from hexiopt.errors import InputError
from hexiopt.problem.architectures import (
    ARCHITECTURES,
    DECODER,
    DEFAULTS,
    MAX_NAME,
    MAX_NORM_EPS,
    MAX_ROPE_THETA,
    MAY_BE_NONE,
    RANGES,
    Architecture,
)
from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, LayerKind
from hexiopt.problem.layer_rows import layer_of
from hexiopt.problem.operators import Holder, Layer, ParameterGroup, Shard, Split
from hexiopt.value import Value


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSpec(Value):
    """A decoder-only transformer's shape, checked once; `replace` edits it.

    All layers are equal, a multi-head attention and an MLP, unless `layers` states the kind of each: then heads, widths
    and biases are those of the first attention, `ffn_size` that of the widest MLP or expert.
    `attention_window` (in tokens; None: full attention) applies to every layer, in GPT-Neo to every second one. The
    runtime trains with it, but the FLOPs below are those of full causal attention, and the cost model refuses a window
    shorter than the sequence.
    `norm_eps`, `activation`, `rope_theta` and `rope_type` do not change the shape, but training needs them.

    Raises InputError where a value is out of `RANGES` or the architecture cannot have it.
    """

    name: str
    architecture: str
    """A key of `ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    """The LM head is the token embedding's matrix."""
    attention_bias: bool = False
    """Of the query, key and value projections."""
    mlp_bias: bool = False
    """Of every projection of the MLP."""
    final_norm: bool = True
    projected_embedding: int | None = None
    """Width of a token embedding that is projected to hidden_size and back (OPT-350M); None elsewhere."""
    attention_window: int | None = None
    activation: str = "silu"
    norm_eps: float = DEFAULTS["norm_eps"]
    rope_theta: float = DEFAULTS["rope_theta"]
    rope_type: str = "default"
    """`default` is plain RoPE; other names are Hugging Face's rules for scaling it."""
    form: Form | None = None
    """The form of the layers for the architecture `decoder`; None for the others, which fix it."""
    layers: tuple[LayerKind, ...] = ()
    """The kind of each layer by depth, for the architecture `decoder`; empty: equal layers by the fields above."""
    extra_layers: tuple[LayerKind, ...] = ()
    """The kinds of layers that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2), each behind a
    projection of two hidden states; they share embedding and head."""
    router: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """How experts are scored, by those of `ROUTER_KEYS` that the model's file states; training needs it, no price does,
    and models that differ in it alone are equal."""
    config: str = field(default="", compare=False)
    """Of a model whose type is trained, its `config.json` in JSON where training needs facts of it that are no fields;
    no part of the shape, so that models that differ in it alone are equal."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes on how the model was read, one line each; no part of the model."""

    def __post_init__(self) -> None:
        if not _is_word(self.name):
            raise InputError(f"model: the name must be printable text of at most {MAX_NAME} characters")
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            self._fail(f"the architecture is not modelled; known: {', '.join(ARCHITECTURES)}")
        self._check_values()
        self._check_layers()
        self._check_architecture()

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers, hidden size {self.hidden_size:,}"
        return f"ModelSpec({self.name}: {self.architecture}, {self.num_params / 1e9:.3g} B parameters, {shape})"

    def _check_values(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            if not is_whole(value) or not low <= value <= high:
                self._fail(f"{name} must be a whole number from {low} to {high}")
        for name in ("tied_embeddings", "attention_bias", "mlp_bias", "final_norm"):
            if not isinstance(getattr(self, name), bool):
                self._fail(f"{name} must be true or false")
        for name, most in (("norm_eps", MAX_NORM_EPS), ("rope_theta", MAX_ROPE_THETA)):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= most:
                self._fail(f"{name} must be a number above 0 and at most {most:g}")
        for name in ("activation", "rope_type"):
            if not _is_word(getattr(self, name)):
                self._fail(f"{name} must be a word of at most {MAX_NAME} characters")
        if self.num_heads % self.num_kv_heads:
            self._fail(
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key-value heads; "
                "every key-value head serves equally many heads"
            )

    def _check_layers(self) -> None:
        if not self.layers:
            if self.extra_layers:
                self._fail("extra_layers stand beside layers; state the kind of each layer")
            return
        if self.architecture != DECODER:
            self._fail(f"the architecture {self.architecture} has equal layers; state {DECODER} for layers of kinds")
        if len(self.layers) != self.num_layers:
            self._fail(f"layers has {len(self.layers)} kinds for {self.num_layers} layers; state one for each")
        attention = next((kind.attention for kind in self.layers if kind.attention is not None), None)
        if attention is None:
            self._fail("no layer attends; a decoder of recurrences alone is not modelled")
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        if heads != (attention.heads, attention.kv_heads, attention.qk_dim) or self.attention_window is not None:
            self._fail(
                "num_heads, num_kv_heads and head_dim are those of the first attention, and windows stand in its kind; "
                "state them so"
            )

    def _check_architecture(self) -> None:
        """Refuse values that the `config.json` of this architecture cannot express."""
        keys = self._facts.keys
        if (self.form is None) != (self._facts.form is not None):
            self._fail(
                f"{self.architecture} {'has' if self.form is None else 'fixes'} its form; state it for {DECODER} alone"
            )
        for name in ("attention_bias", "mlp_bias"):
            fixed = getattr(self._facts, name)
            fixed = self.attention_bias if fixed is None else fixed
            if name not in keys and getattr(self, name) is not fixed:
                self._fail(f"{self.architecture} has {name} {str(fixed).lower()}; set it to that")
        if "num_kv_heads" not in keys and self.num_kv_heads != self.num_heads:
            self._fail(f"{self.architecture} has as many key-value heads as heads; state {self.num_heads}")
        if "head_dim" not in keys and self.head_dim * self.num_heads != self.hidden_size:
            self._fail(
                f"hidden_size {self.hidden_size} is not {self.num_heads} heads times head_dim "
                f"{self.head_dim}; {self.architecture} needs it equal"
            )
        if self.decoder_form.gated_mlp and self._facts.form is not None and self.head_dim % 2:
            self._fail(f"head_dim {self.head_dim} is odd; RoPE rotates pairs of values, so make it even")
        if "final_norm" not in keys and not self.final_norm:
            self._fail(f"{self.architecture} always has a final norm; set final_norm true")
        for name in MAY_BE_NONE:
            if name not in keys and getattr(self, name) is not None:
                self._fail(f"{self.architecture} has no {name}; leave it out")
        if self.projected_embedding == self.hidden_size:
            self._fail("projected_embedding equals hidden_size, so nothing is projected; leave it out")
        for name, only in DEFAULTS.items():
            if name not in keys and getattr(self, name) != only:
                self._fail(f"{self.architecture} cannot state {name}; leave it at {only!r}")
        if self.rope_type != "default" and "rope_theta" not in keys:
            self._fail(f"{self.architecture} learns its positions; leave rope_type at 'default'")
        if self.architecture == "gpt_neo" and self.attention_window is not None and self.num_layers == 1:
            self._fail("in gpt_neo every second layer has the attention_window; with one layer leave it out")

    def _fail(self, rule: str) -> NoReturn:
        raise InputError(f"model {self.name}: {rule}")

    # What the architecture fixes

    @property
    def _facts(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @cached_property
    def decoder_form(self) -> Form:
        """The form of the layers: the architecture's, or the model's own."""
        form = self._facts.form or self.form
        assert form is not None, "checked by the constructor"
        return form

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies an activated projection by a plain one (three matrices instead of two)."""
        return self.decoder_form.gated_mlp

    @property
    def layer_norm(self) -> bool:
        """Whether norms are LayerNorm (mean and variance) rather than RMSNorm."""
        return self.decoder_form.norm == "layer"

    @property
    def norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.decoder_form.norm_vectors == 2

    @property
    def qk_norm(self) -> str | None:
        """How queries and keys are normed (`Form.qk_norm`); None where they are not."""
        return None if self.decoder_form.qk_norm == "none" else self.decoder_form.qk_norm

    @property
    def output_bias(self) -> bool:
        """Bias of attention's output projection."""
        fixed = self.decoder_form.output_bias
        return self.attention_bias if fixed is None else fixed

    @property
    def rope(self) -> bool:
        """Whether queries and keys are rotated by their position."""
        return self.decoder_form.positions == "rope"

    @property
    def learned_positions(self) -> int:
        """The number of rows of the learned position embedding, 0 without one."""
        return self.max_positions + self.decoder_form.extra_positions if self.decoder_form.positions == "learned" else 0

    # Widths

    @property
    def embedding_size(self) -> int:
        """Width of the token embedding and of the LM head."""
        return self.hidden_size if self.projected_embedding is None else self.projected_embedding

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    # Layers

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, in the order of their first layers, then those of `extra_layers`."""
        return tuple(dict.fromkeys((*self.layers, *self.extra_layers))) or (self._only_kind,)

    @property
    def _only_kind(self) -> LayerKind:
        form = self.decoder_form
        attention = Attention(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            qk_dim=self.head_dim,
            v_dim=self.head_dim,
            bias=self.attention_bias,
            output_bias=self.output_bias,
            qk_norm=form.qk_norm,
            qk_norm_vectors=form.qk_norm_vectors,
        )
        dense = Dense(ffn_size=self.ffn_size, gated=form.gated_mlp, bias=self.mlp_bias)
        return LayerKind((attention,), (dense,), form.norms)

    def layer_of(self, kind: LayerKind) -> Layer:
        """The operators of a layer of `kind`, be it one of the model's or another."""
        return self._layer_of.get(kind) or layer_of(self.decoder_form, self.hidden_size, kind)

    @cached_property
    def _layer_of(self) -> dict[LayerKind, Layer]:
        return {kind: layer_of(self.decoder_form, self.hidden_size, kind) for kind in self.kinds}

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """The number of each layer's kind among `kinds` [layers]."""
        number = {kind: k for k, kind in enumerate(self.kinds)}
        return tuple([number[kind] for kind in self.layers]) or (0,) * self.num_layers

    def with_num_layers(self, num_layers: int) -> "ModelSpec":
        """The same model with its first `num_layers` layers, or with more, whose kinds repeat as the last ones do."""
        layers = list(self.layers[:num_layers])
        if self.layers:
            period = self._period
            layers += [self.layers[-period + n % period] for n in range(num_layers - len(self.layers))]
        return self.replace(num_layers=num_layers, layers=tuple(layers))

    @property
    def _period(self) -> int:
        """The fewest layers after which the kinds of the second half of the layers repeat."""
        half = self.layers[len(self.layers) // 2 :]
        return next(n for n in range(1, len(half) + 1) if all(a == b for a, b in zip(half[n:], half, strict=False)))

    @property
    def weight_of_kinds(self) -> tuple[float, ...]:
        """The share of the layers that is of each of `kinds`."""
        return tuple([self._count_of.get(kind, 0) / self.num_layers for kind in self.kinds])

    @property
    def shares_experts(self) -> bool:
        """Whether layers have experts, which devices may share."""
        return any(kind.experts is not None for kind in self.kinds)

    @property
    def equal_layers(self) -> bool:
        """Whether all layers are of one kind, those too that predict further tokens."""
        return len(self.kinds) == 1

    @cached_property
    def layer(self) -> Layer:
        """The operators of one decoder layer, where all are equal."""
        assert self.equal_layers, "layers of several kinds have operators of their own"
        return self._layer_of[self.kinds[0]]

    @cached_property
    def _count_of(self) -> Mapping[LayerKind, int]:
        """The number of layers of each kind."""
        return Counter(self.layers) or {self.kinds[0]: self.num_layers}

    # Parameters

    @cached_property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """All parameters by who holds them: those of each layer, a tied matrix, what else embedding and head have."""
        form, hidden, matrix = self.decoder_form, self.hidden_size, Split(vocab=self.embedding_size)
        tied, untied = (matrix, Split()) if self.tied_embeddings else (Split(), matrix)
        embedding = (self.learned_positions + form.embedding_norm * form.norm_vectors) * hidden + self._projection
        head = self.final_norm_params + self._projection + form.head_bias * self.vocab_size
        rows: list[tuple[Holder, Split, Split]] = [
            ("ends", tied, Split()),
            ("first", untied._replace(whole=embedding), Split()),
            ("last", untied._replace(whole=head), Split(self.final_norm_params)),
        ]
        layers = [self._layer_of[kind] for kind in self.kinds]
        whole = layers[0].shard(1, self.vocab_size)
        of_layers = list[ParameterGroup]()
        for number, layer in enumerate(layers):
            params, vectors, whole_layer = layer.params, layer.vectors, layer.shard(1, 0)
            dense = params._replace(experts=0)
            of_kind = None if len(layers) == 1 else tuple([n for n, kind in enumerate(self.depth) if kind == number])
            vectors_of = vectors._replace(experts=0), Split(experts=vectors.experts)
            group = ParameterGroup("layer", dense.on(whole_layer), dense, vectors_of[0], number, False, of_kind)
            of_layers.append(group)
            if params.experts:
                split = Split(experts=params.experts)
                experts = ParameterGroup("layer", split.on(whole_layer), split, vectors_of[1], number, True, of_kind)
                of_layers.append(experts)
        ends = [ParameterGroup(holder, split.on(whole), split, vectors) for holder, split, vectors in rows]
        return (*of_layers, *ends, *self._extra_groups)

    @property
    def _extra_groups(self) -> Iterator[ParameterGroup]:
        """Parameters of layers that predict further tokens, which last stages hold: those of the layer, the projection
        of two hidden states to one, and the norms of both and of the output."""
        for kind in self.extra_layers:
            layer, number = self._layer_of[kind], self.kinds.index(kind)
            whole, norms = layer.shard(1, 0), 3 * self.hidden_size * self.decoder_form.norm_vectors
            dense = layer.params._replace(experts=0, whole=layer.params.whole + 2 * self.hidden_size**2 + norms)
            vectors = layer.vectors._replace(experts=0, whole=layer.vectors.whole + norms)
            yield ParameterGroup("last", dense.on(whole), dense, vectors, number)
            if layer.params.experts:
                split, biases = Split(experts=layer.params.experts), Split(experts=layer.vectors.experts)
                yield ParameterGroup("last", split.on(whole), split, biases, number, True)

    def params_of(self, *holders: Holder) -> int:
        """Parameters of all groups that any of `holders` holds."""
        return sum(group.params for group in self.parameter_groups if group.holder in holders)

    @cached_property
    def layer_params(self) -> int:
        """Parameters of a decoder layer, of the mean one where there are several kinds."""
        return round(
            sum(count * self._layer_of[kind].num_params for kind, count in self._count_of.items()) / self.num_layers
        )

    @cached_property
    def vocabulary_params(self) -> int:
        """Parameters of the token embedding or the LM head; if tied, first and last stage each hold a copy."""
        return self.vocab_size * self.embedding_size

    @cached_property
    def embedding_params(self) -> int:
        """Parameters of token embedding, its norm, learned positions and the projection to hidden_size."""
        return self.params_of("first", "ends")

    @property
    def final_norm_params(self) -> int:
        """The norm after the last layer."""
        return self.hidden_size * self.decoder_form.norm_vectors if self.final_norm else 0

    @cached_property
    def head_params(self) -> int:
        """Parameters of the final norm, the projection from hidden_size, the LM head's bias and, if untied, matrix."""
        return self.params_of("last") - self.extra_params

    @property
    def num_params(self) -> int:
        """All parameters, a tied matrix counted once, as in published counts, which leave out `extra_params`."""
        layers = sum(count * self._layer_of[kind].num_params for kind, count in self._count_of.items())
        return self.embedding_params + layers + self.head_params

    @property
    def extra_params(self) -> int:
        """Parameters of layers that predict further tokens."""
        return sum(group.params for group in self._extra_groups)

    @property
    def active_params(self) -> int:
        """Parameters that a token is multiplied by or added to: of experts, those of as many as it goes to; a look-up
        in the embedding counts none."""
        idle = sum(count * self._layer_of[kind].idle_params for kind, count in self._count_of.items())
        return self.num_params - idle - (0 if self.tied_embeddings else self.vocabulary_params)

    @property
    def _projection(self) -> int:
        return 0 if self.projected_embedding is None else self.projected_embedding * self.hidden_size

    # FLOPs, where a multiply-add counts as two

    @property
    def layer_gemm_flops_per_token(self) -> int:
        """Forward FLOPs per token of the mean layer's weight matrices."""
        weights = sum(count * self._layer_of[kind].active_weights for kind, count in self._count_of.items())
        return 2 * round(weights / self.num_layers)

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs per token of the mean layer's scores and weighted values, causal half of 4·s·q, and scans."""
        flops = (n * self._layer_of[kind].mixing_flops_per_token(seq_len) for kind, n in self._count_of.items())
        return round(sum(flops) / self.num_layers)

    def layers_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token of all layers; with those that predict further tokens, their projection and the head
        once more for each."""
        of = {
            kind: 2 * layer.active_weights + layer.mixing_flops_per_token(seq_len)
            for kind, layer in self._layer_of.items()
        }
        further = [of[kind] + 4 * self.hidden_size**2 + self.head_flops_per_token for kind in self.extra_layers]
        return sum(count * of[kind] for kind, count in self._count_of.items()) + sum(further)

    @property
    def embedding_flops_per_token(self) -> int:
        """Forward FLOPs per token before the first layer: the projection 2·e·h; a look-up counts none."""
        return 2 * self._projection

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs per token after the last layer: LM head 2·e·V, and the projection 2·h·e if any."""
        return 2 * (self.vocabulary_params + self._projection)

    def model_flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token at `seq_len` tokens; this defines MFU.

        They are three times those of the forward, since the backward has twice as many:
        3·(L·(layer GEMMs + causal attention) + embedding + head), without recompute. Megatron-LM's count (arXiv
        2104.04473, less its recompute) differs only in attention, which it counts whole.
        """
        layers = round(self.layers_flops_per_token(seq_len))
        return 3 * (layers + self.embedding_flops_per_token + self.head_flops_per_token)

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` mapping of JSON values, from which the reader makes an equal `ModelSpec`."""
        out: dict[str, Any] = {"name": self.name, "model_type": self.architecture}
        if self.form is not None:
            out |= self.form.to_dict()
        if self.layers:
            main = list(dict.fromkeys(self.layers))
            out |= {
                "layer_kinds": [kind.to_dict() for kind in main],
                "layer_pattern": [main.index(kind) for kind in self.layers],
                "extra_layer_kinds": [kind.to_dict() for kind in self.extra_layers],
            }
        if self.router:
            out["router"] = dict(self.router)
        if self.config and self.architecture == DECODER:
            out["config"] = json.loads(self.config)
        for name, key in self._facts.keys.items():
            value = getattr(self, name)
            out[key] = float(value) if name in ("norm_eps", "rope_theta") else value
        if "rope_theta" in self._facts.keys and self.rope_type != "default":
            out["rope_scaling"] = {"rope_type": self.rope_type}
            if self.config and self.architecture != DECODER:
                out["rope_scaling"] = json.loads(self.config)["rope_scaling"]
        if self.architecture in ("qwen2", "qwen3"):
            out |= {"use_sliding_window": self.attention_window is not None, "max_window_layers": 0}
        if self.architecture == "gpt_neo":
            kinds = ["global"] if self.attention_window is None else ["global", "local"]
            repeats, rest = divmod(self.num_layers, len(kinds))
            out["attention_types"] = [[kinds, repeats]] * (repeats > 0) + [[["global"], 1]] * rest
            out["window_size"] = self.attention_window or 256
        if self.architecture == "opt":
            out["word_embed_proj_dim"] = self.embedding_size
        return out


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip()) and len(value) <= MAX_NAME


def largest_shard(model: ModelSpec, tp: int) -> Shard:
    """The share of the busiest rank: see `Layer.shard`; of several kinds of layers that of the first."""
    return model.layer_of(model.kinds[0]).shard(tp, model.vocab_size)
