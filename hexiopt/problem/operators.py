"""A decoder layer as data: one row for each operator. Parameters, FLOPs, memory traffic and stored activations are sums
over these rows, so that another kind of layer is other rows. Parameters of a whole model are rows too, by who holds
them (`ParameterGroup`).

Amounts in a row are for one token (weights aside), by the dimension along which tensor parallelism splits them
(`Split`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from operator import attrgetter
from typing import Literal, NamedTuple, assert_never, get_args

from hexiopt.numbers import coefficients as c
from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent

_RESIDUAL_PASSES = (c.LAYER_HIDDEN_PASSES - 2 * c.NORM_PASSES) // 2  # of each of two residual adds


class Shard(NamedTuple):
    """The largest share of a layer that a rank of a TP group holds: heads, MLP columns, rows of the vocabulary, columns
    of shared experts, heads and groups of recurrences, whole experts."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tp: int
    shared: int = 0
    state_heads: int = 0
    state_groups: int = 0
    experts: int = 0


class Split(NamedTuple):
    """An amount: what every rank of a TP group has whole, and what there is for each query head, key-value head, MLP
    column, row of the vocabulary, column of shared experts, head and group of a recurrence, and whole expert, which the
    ranks share."""

    whole: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    shared: int = 0
    state_heads: int = 0
    state_groups: int = 0
    experts: int = 0

    def on(self, shard: Shard) -> int:
        """The amount on a rank that holds `shard`."""
        layer = self.whole + self.heads * shard.heads + self.kv_heads * shard.kv_heads + self.ffn * shard.ffn
        layer += self.vocab * shard.vocab + self.shared * shard.shared + self.experts * shard.experts
        return layer + self.state_heads * shard.state_heads + self.state_groups * shard.state_groups

    def times(self, factor: int) -> "Split":
        """So many times the amount."""
        return Split(*(factor * amount for amount in self))


_NONE = Split()

Holder = Literal["layer", "ends", "first", "last"]
"""Which stages hold parameters: those with the layer, the first and the last one, or one of these."""
HOLDERS: tuple[Holder, ...] = get_args(Holder)


class ParameterGroup(NamedTuple):
    """Parameters that the same devices hold: so many of the whole model, of one layer where each layer has such.

    Each kind of layer has such a group, with its number among the model's kinds, and one of its `experts`, which
    replicas of a stage may share; `layers` are those of the kind (None: all). `split` says by what a TP group
    divides them; of these, `vectors` are norms and biases, which ZeRO-2 and 3 spread no
    more than ZeRO-1 does.
    """

    holder: Holder
    params: int
    split: Split
    vectors: Split = _NONE
    kind: int = 0
    experts: bool = False
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOperator:
    """An operator of a layer: the counts from which its parameters, time and memory follow.

    `weights` are those of one matrix product, with two FLOPs a token each; `vectors` are the parameters of norms and
    biases. `moves` counts elements that an element-wise kernel reads or writes, `casts` elements of its output that
    matrix products read. For the backward it stores `stores` elements in the width of activations, `stores_cast` in the
    width of what products read, and `statistics` in FP32. Sequence parallelism divides the tokens of `divided`
    operators. `after` marks operators after attention. The amounts of `routed` operators, weights aside, are for one
    of the copies of a token that go to an expert, and their weights have a part for each expert.
    """

    name: str
    after: bool = False
    weights: Split = _NONE
    vectors: Split = _NONE
    moves: Split = _NONE
    casts: Split = _NONE
    stores: Split = _NONE
    stores_cast: Split = _NONE
    statistics: Split = _NONE
    divided: bool = False
    routed: bool = False


class ElementwiseShare(NamedTuple):
    """The elements that the operators before or after attention move, cast and store on a rank, per token."""

    after: bool
    divided: bool
    moves: int
    casts: int
    stores: int
    stores_cast: int
    statistics: int


class Product(NamedTuple):
    """The weights of a matrix product on a rank, whether it stands after attention, and whether sequence parallelism
    divides its tokens."""

    after: bool
    weights: int
    divided: bool


class LayerShare(NamedTuple):
    """What a rank of a TP group has of a layer: its matrix products, the sums of all but parameters, and those of
    operators on copies of tokens that experts take; the number of element-wise kernels."""

    products: tuple[Product, ...]
    elementwise: tuple[ElementwiseShare, ...]
    routed: ElementwiseShare
    kernels: int


@dataclass(frozen=True)
class Layer:
    """The operators of a layer in order, without attention's kernels, whose cost depends on pairs of tokens
    (`hexiopt/cost/executors`)."""

    operators: tuple[LayerOperator, ...]
    kind: LayerKind

    def shard(self, tp: int, vocab_size: int, devices: int | None = None) -> Shard:
        """The share of the busiest rank if heads, columns and experts are split as evenly as whole ones allow: experts
        over `devices`, which may be several TP groups, by default one.

        Key-value heads that serve query heads of several ranks are replicated, as groups of recurrences are.
        """
        attention, recurrent, dense, experts = (
            getattr(self.kind, name) for name in ("attention", "recurrent", "dense", "experts")
        )
        heads, kv_heads = (attention.heads, attention.kv_heads) if attention else (0, 0)
        states, groups = (recurrent.heads, recurrent.groups) if recurrent else (0, 0)
        return Shard(
            heads=ceil(heads / tp),
            kv_heads=groups_on_rank(heads, kv_heads, tp),
            ffn=ceil(dense.ffn_size / tp) if dense else 0,
            vocab=ceil(vocab_size / tp),
            tp=tp,
            shared=ceil(experts.shared / tp) if experts else 0,
            state_heads=ceil(states / tp),
            state_groups=groups_on_rank(states, groups, tp),
            experts=ceil(experts.count / (devices or tp)) if experts else 0,
        )

    @cached_property
    def active_weights(self) -> int:
        """Weights of the whole layer that a token is multiplied by: of experts, those of as many as it goes to."""
        whole = self.shard(1, 0)
        experts = self.kind.experts
        return self._weights.on(whole if experts is None else whole._replace(experts=experts.top_k))

    @cached_property
    def num_params(self) -> int:
        """All parameters of the whole layer."""
        return self.params.on(self.shard(1, 0))

    @property
    def idle_params(self) -> int:
        """Parameters of the experts to which a token does not go."""
        experts = self.kind.experts
        return 0 if experts is None else self.params.experts * (experts.count - experts.top_k)

    def mixing_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token of what mixes tokens, beside its projections: scores and weighted values of the pairs
        that the causal mask leaves, and scans."""
        attention, recurrent = self.kind.attention, self.kind.recurrent
        flops = 0.0 if recurrent is None else float(recurrent.scan_flops_per_token)
        if attention is not None:
            flops += attention.heads * attention.pair_flops * attention.pairs(seq_len) / seq_len
        return flops

    @cached_property
    def _weights(self) -> Split:
        return _sum(operator.weights for operator in self.operators)

    @cached_property
    def vectors(self) -> Split:
        """Parameters of all norms and biases."""
        return _sum(operator.vectors for operator in self.operators)

    @cached_property
    def params(self) -> Split:
        """All parameters."""
        return _sum((self.vectors, self._weights))

    @cached_property
    def _shares(self) -> dict[Shard, LayerShare]:
        return {}

    def on(self, shard: Shard) -> LayerShare:
        """The layer's share on a rank that holds `shard`."""
        share = self._shares.get(shard)
        if share is None:
            share = self._shares[shard] = self._share(shard)
        return share

    def _share(self, shard: Shard) -> LayerShare:
        whole = [row for row in self.operators if not row.routed]
        products = [Product(row.after, weights, row.divided) for row in whole if (weights := row.weights.on(shard))]
        groups = [
            _elementwise([row for row in whole if (row.after, row.divided) == (after, divided)], after, divided, shard)
            for after, divided in product((False, True), repeat=2)
        ]
        routed = _elementwise([row for row in self.operators if row.routed], True, False, shard)
        kernels = sum(row.moves != _NONE for row in self.operators)
        return LayerShare(tuple(products), tuple(groups), routed, kernels)


def groups_on_rank(heads: int, groups: int, tp: int) -> int:
    """The most groups, such as key-value heads, that serve the heads of a rank, if `tp` ranks share `heads`."""
    if not groups:
        return 0
    size = heads // groups
    low, extra = divmod(heads, tp)
    most, start = 1, 0
    for rank in range(tp):
        end = start + low + (rank < extra)
        if end > start:
            most = max(most, (end - 1) // size - start // size + 1)
        start = end
    return most


def _elementwise(rows: Sequence[LayerOperator], after: bool, divided: bool, shard: Shard) -> ElementwiseShare:
    sums = (_sum(map(attrgetter(name), rows)).on(shard) for name in ElementwiseShare._fields[2:])
    return ElementwiseShare(after, divided, *sums)


def _sum(amounts: Iterable[Split]) -> Split:
    return Split(*map(sum, zip(_NONE, *amounts, strict=True)))


@dataclass(frozen=True)
class _Rows:
    """The operators of layers of one form: rows for a norm, and for each part of a layer.

    What parts store follows Korthikanti et al. (arXiv 2205.05198, section 4), without dropout: a norm stores its input,
    a statistic or two a vector, and its output, which the product after it reads; the activation stores its inputs and
    its output. A sum that reads the output of a norm after attention or MLP stores nothing.
    """

    form: Form
    hidden: int

    @property
    def residual(self) -> LayerOperator:
        return LayerOperator(name="residual", after=True, moves=Split(_RESIDUAL_PASSES * self.hidden), divided=True)

    @property
    def statistics(self) -> int:
        return 2 if self.form.norm == "layer" else 1

    def norm(self, name: str, after: bool, products: int) -> LayerOperator:
        """A norm of the hidden states, whose output is read by `products` matrix products."""
        product_inputs = Split(self.hidden * products)
        return LayerOperator(
            name=name,
            after=after,
            vectors=Split(self.hidden * self.form.norm_vectors),
            moves=Split(c.NORM_PASSES * self.hidden),
            casts=product_inputs,
            stores=Split(self.hidden),
            stores_cast=Split(self.hidden * (products > 0)),
            statistics=Split(self.statistics),
            divided=True,
        )

    def inner_norm(self, name: str, weights: int, split: Split, after: bool = True) -> LayerOperator:
        """A norm of a projection's input, `weights` wide, whose weights every rank has."""
        return LayerOperator(
            name=name,
            after=after,
            vectors=Split(self.form.norm_vectors * weights),
            moves=split.times(c.NORM_PASSES),
            stores=split,
            statistics=Split(self.statistics),
        )

    def attention(self, part: Attention) -> list[LayerOperator]:
        """Projections, norms and rotation before attention's kernels, the projection after them."""
        heads, kv_heads = part.heads, part.kv_heads
        rows = self._latent(part) if part.kv_rank else [self._projection(part)]
        if part.qk_norm != "none":
            whole = part.qk_norm == "whole"
            size = {"plain": 0, "head": 2 * part.qk_dim}.get(part.qk_norm, (heads + kv_heads) * part.qk_dim)
            statistics = Split(2 * self.statistics) if whole else Split(heads=self.statistics, kv_heads=self.statistics)
            rows.append(
                LayerOperator(
                    name="query and key norms",
                    vectors=Split(part.qk_norm_vectors * size),
                    stores=Split(heads=part.qk_dim, kv_heads=part.qk_dim),
                    statistics=statistics,
                )
            )
        rotated = part.rope_dim or part.qk_dim
        rows += [
            LayerOperator(name="rotary positions", moves=Split(heads=2 * rotated, kv_heads=2 * rotated)),
            LayerOperator(
                name="attention", after=True, vectors=Split(heads=int(part.sinks)), casts=Split(heads=part.v_dim)
            ),
        ]
        if part.gated:
            gate = Split(heads=part.v_dim)
            rows.append(LayerOperator(name="output gate", after=True, moves=gate.times(3), stores=gate.times(2)))
        if self.form.inner_norms:
            rows.append(self.inner_norm("norm before projection", heads * part.v_dim, Split(heads=part.v_dim)))
        output = LayerOperator(
            name="output projection",
            after=True,
            weights=Split(heads=part.v_dim * self.hidden),
            vectors=Split(part.output_bias * self.hidden),
        )
        return [*rows, output]

    def _projection(self, part: Attention) -> LayerOperator:
        queries = (2 if part.gated else 1) * part.qk_dim
        keys = part.qk_dim if part.keys_are_values else part.qk_dim + part.v_dim
        return LayerOperator(
            name="query, key, value",
            weights=Split(heads=self.hidden * queries, kv_heads=self.hidden * keys),
            vectors=Split(heads=part.bias * queries, kv_heads=part.bias * keys),
        )

    def _latent(self, part: Attention) -> list[LayerOperator]:
        """Products to latent vectors, which every rank makes whole, their norms, and products to heads."""

        def down(name: str, width: int) -> LayerOperator:
            return LayerOperator(name=name, weights=Split(self.hidden * width), vectors=Split(part.bias * width))

        def latent_norm(name: str, rank: int) -> LayerOperator:
            row = self.inner_norm(name, rank, Split(rank), after=False)
            return replace(row, casts=Split(rank), stores_cast=Split(rank))

        if part.q_rank:
            up = LayerOperator(name="latent to queries", weights=Split(heads=part.q_rank * part.qk_dim))
            rows = [down("latent queries", part.q_rank), latent_norm("query norm", part.q_rank), up]
        else:
            rows = [LayerOperator(name="queries", weights=Split(heads=self.hidden * part.qk_dim))]
        width = part.qk_dim - part.rope_dim + part.v_dim
        return [
            *rows,
            down("latent keys and values", part.kv_rank + part.rope_dim),
            latent_norm("key and value norm", part.kv_rank),
            LayerOperator(name="latent to keys and values", weights=Split(heads=part.kv_rank * width)),
        ]

    def recurrent(self, part: Recurrent) -> list[LayerOperator]:
        """The projection to what is scanned, its convolution, the scan's vectors, norm and projection back."""
        # For each head its values, a gate as wide, and the step of its decay, with `delta` also of its writes; for each
        # group keys and queries.
        steps = 2 if part.delta else 1
        scanned = Split(state_heads=2 * part.value_dim + steps, state_groups=2 * part.key_dim)
        mixed = Split(state_heads=part.value_dim, state_groups=2 * part.key_dim)
        value = Split(state_heads=part.value_dim)
        rows = [
            LayerOperator(
                name="recurrent inward", weights=scanned.times(self.hidden), vectors=scanned.times(part.bias)
            ),
            LayerOperator(
                name="convolution",
                vectors=mixed.times(part.conv + part.conv_bias),
                moves=mixed.times(2),
                stores=mixed.times(2),
            ),
            # Decay and step of a head, and where there is no delta rule its direct path.
            LayerOperator(name="scan", after=True, vectors=Split(state_heads=2 if part.delta else 3), stores=value),
        ]
        if part.norm:
            weights = Split(part.value_dim) if part.delta else value
            gated = LayerOperator(
                name="gated norm",
                after=True,
                vectors=weights.times(self.form.norm_vectors),
                moves=value.times(c.NORM_PASSES + 1),
                stores=value.times(2),
                statistics=Split(state_heads=self.statistics),
            )
            rows.append(gated)
        outward = LayerOperator(
            name="recurrent outward",
            after=True,
            weights=value.times(self.hidden),
            vectors=Split(part.bias * self.hidden),
            casts=value,
        )
        return [*rows, outward]

    def columns(self, name: str, gated: bool, bias: bool, column: Split, width: int) -> list[LayerOperator]:
        """An MLP from `width` values and back, with so many columns as `column` says once."""
        inward = 2 if gated else 1
        rows = [
            LayerOperator(
                name=f"{name} inward",
                after=True,
                weights=column.times(inward * width),
                vectors=column.times(inward * bias),
            ),
            LayerOperator(
                name="activation",
                after=True,
                vectors=Split(self.form.activation_params),
                moves=column.times(inward + 1),
                casts=column,
                stores=column.times(inward),
                stores_cast=column,
            ),
        ]
        return [
            *rows,
            LayerOperator(name=f"{name} outward", after=True, weights=column.times(width), vectors=Split(bias * width)),
        ]

    def dense(self, part: Dense) -> list[LayerOperator]:
        """The MLP."""
        rows = self.columns("MLP", part.gated, part.bias, Split(ffn=1), self.hidden)
        if self.form.inner_norms:
            rows.insert(2, self.inner_norm("norm inside MLP", part.ffn_size, Split(ffn=1)))
        return rows

    def experts(self, part: Experts) -> list[LayerOperator]:
        """Router, projection to the experts' width, experts, projection back, shared columns."""
        width, inward = part.width(self.hidden), 2 if part.gated else 1
        router = LayerOperator(
            name="router",
            after=True,
            divided=True,
            weights=Split(self.hidden * part.count),
            vectors=Split(
                part.router_bias * part.count + part.router_vectors * self.hidden + part.expert_scales * part.count
            ),
            statistics=Split(2 * part.count),
        )
        rows = [router]
        latent = LayerOperator(
            name="latent inward",
            after=True,
            weights=Split(self.hidden * part.latent),
            vectors=Split(part.latent_bias * part.latent),
            stores=Split(part.latent),
        )
        if part.latent:
            rows.append(latent)
        activated = Split(part.ffn_size)
        rows += [
            LayerOperator(
                name="experts inward",
                after=True,
                routed=True,
                weights=Split(experts=inward * width * part.ffn_size),
                vectors=Split(experts=part.bias * inward * part.ffn_size),
                stores_cast=Split(width),
            ),
            LayerOperator(
                name="experts' activation",
                after=True,
                routed=True,
                moves=activated.times(inward + 1),
                casts=activated,
                stores=activated.times(inward),
                stores_cast=activated,
            ),
            LayerOperator(
                name="experts outward",
                after=True,
                routed=True,
                weights=Split(experts=part.ffn_size * width),
                vectors=Split(experts=part.bias * width),
                stores=Split(width),
            ),
        ]
        if part.latent:
            bias = Split(part.latent_bias * self.hidden)
            rows.append(replace(latent, name="latent outward", vectors=bias))
        if part.shared:
            rows += self.columns("shared experts", part.gated, part.shared_bias, Split(shared=1), self.hidden)
        if part.shared_gate:
            rows.append(LayerOperator(name="gate of shared experts", after=True, weights=Split(self.hidden)))
        return rows


def layer_of(form: Form, hidden_size: int, kind: LayerKind) -> Layer:
    """The operators of a layer of `kind`, in order: norms as `kind` counts them, its parts, residual sums."""
    rows = _Rows(form, hidden_size)
    mixing = [row for part in kind.mixers for row in _rows_of(rows, part)]
    channels = [row for part in kind.channels for row in _rows_of(rows, part)]
    if not mixing or not channels:  # a block of one part, and norms of it
        norms = [rows.norm("output norm", True, 0)] * (kind.norms - 1)
        return Layer((rows.norm("norm", False, 1), *mixing, *channels, *norms, rows.residual), kind)
    first = rows.norm("norm", False, 2 if kind.norms == 1 else 1)
    second = [rows.norm("MLP norm", True, 1)] * (kind.norms > 1) + [rows.norm("output norm", True, 0)] * (
        kind.norms - 2
    )
    return Layer((first, *mixing, rows.residual, *second, *channels, rows.residual), kind)


def _rows_of(rows: _Rows, part: Attention | Recurrent | Dense | Experts) -> list[LayerOperator]:
    match part:
        case Attention():
            return rows.attention(part)
        case Recurrent():
            return rows.recurrent(part)
        case Dense():
            return rows.dense(part)
        case Experts():
            return rows.experts(part)
        case never:
            assert_never(never)
