"""A decoder layer as data: one row for each operator. Parameters, FLOPs, memory traffic and stored activations are sums
over these rows, so that another kind of layer is other rows. Parameters of a whole model are rows too, by who holds
them (`ParameterGroup`).

Amounts in a row are for one token (weights aside), by the dimension along which tensor parallelism splits them
(`Split`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from hexiopt.numbers import coefficients as c
from hexiopt.problem.form import Form

_RESIDUAL_PASSES = (c.LAYER_HIDDEN_PASSES - 2 * c.NORM_PASSES) // 2  # of each of two residual adds


class Shard(NamedTuple):
    """The largest share of a layer that a rank of a TP group holds: heads, MLP columns, rows of the vocabulary."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tp: int


class Split(NamedTuple):
    """An amount: what every rank of a TP group has whole, and what there is for each query head, key-value head, MLP
    column and row of the vocabulary, which the ranks share."""

    whole: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0

    def on(self, shard: Shard) -> int:
        """The amount on a rank that holds `shard`."""
        layer = self.whole + self.heads * shard.heads + self.kv_heads * shard.kv_heads + self.ffn * shard.ffn
        return layer + self.vocab * shard.vocab


_NONE = Split()

Holder = Literal["layer", "ends", "first", "last"]
"""Which stages hold parameters: those with the layer, the first and the last one, or one of these."""
HOLDERS: tuple[Holder, ...] = get_args(Holder)


class ParameterGroup(NamedTuple):
    """Parameters that the same devices hold: so many of the whole model, of one layer where each layer has such.

    `split` says by what a TP group divides them; of these, `vectors` are norms and biases, which ZeRO-2 and 3 spread no
    more than ZeRO-1 does.
    """

    holder: Holder
    params: int
    split: Split
    vectors: Split = _NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOperator:
    """An operator of a layer: the counts from which its parameters, time and memory follow.

    `weights` are those of one matrix product, with two FLOPs a token each; `vectors` are the parameters of norms and
    biases. `moves` counts elements that an element-wise kernel reads or writes, `casts` elements of its output that
    matrix products read. For the backward it stores `stores` elements in the width of activations, `stores_cast` in the
    width of what products read, and `statistics` in FP32. Sequence parallelism divides the tokens of `divided`
    operators. `after` marks operators after attention.
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


class ElementwiseShare(NamedTuple):
    """The elements that the operators before or after attention move, cast and store on a rank, per token."""

    after: bool
    divided: bool
    moves: int
    casts: int
    stores: int
    stores_cast: int
    statistics: int


class LayerShare(NamedTuple):
    """What a rank of a TP group has of a layer: the weights of each matrix product with whether it stands after
    attention, and the sums of all but parameters."""

    products: tuple[tuple[bool, int], ...]
    elementwise: tuple[ElementwiseShare, ...]


@dataclass(frozen=True)
class Layer:
    """The operators of a layer in order, without attention's kernels, whose cost depends on pairs of tokens
    (`hexiopt/cost/executors`)."""

    operators: tuple[LayerOperator, ...]

    @cached_property
    def vectors(self) -> Split:
        """Parameters of all norms and biases."""
        return _sum(operator.vectors for operator in self.operators)

    @cached_property
    def params(self) -> Split:
        """All parameters."""
        return _sum((self.vectors, *(operator.weights for operator in self.operators)))

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
        products = [(row.after, weights) for row in self.operators if (weights := row.weights.on(shard))]
        elementwise = []
        for after, divided in product((False, True), repeat=2):
            rows = [row for row in self.operators if (row.after, row.divided) == (after, divided)]
            sums = (_sum(map(attrgetter(name), rows)).on(shard) for name in ElementwiseShare._fields[2:])
            elementwise.append(ElementwiseShare(after, divided, *sums))
        return LayerShare(tuple(products), tuple(elementwise))


def _sum(amounts: Iterable[Split]) -> Split:
    return Split(*map(sum, zip(_NONE, *amounts, strict=True)))


class LayerSizes(NamedTuple):
    """Widths of a decoder layer, and whether query, key and value projections, and those of the MLP, have biases."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    attention_bias: bool
    mlp_bias: bool


def decoder_layer(form: Form, sizes: LayerSizes) -> Layer:
    """A layer of self-attention and an MLP, with the norms of `form`.

    What it stores follows Korthikanti et al. (arXiv 2205.05198, section 4), without dropout: a norm stores its input, a
    statistic or two a vector, and its output, which the product after it reads; the activation stores its inputs and
    its output. A sum that reads the output of a norm after attention or MLP stores nothing.
    """
    hidden, heads, kv_heads, dim, ffn, bias, mlp_bias = sizes
    num_statistics = 2 if form.norm == "layer" else 1
    inward = 2 if form.gated_mlp else 1
    norm_vector = Split(hidden * form.norm_vectors)

    def norm(name: str, after: bool, products: int) -> LayerOperator:
        """A norm of the hidden states, whose output is read by `products` matrix products."""
        product_inputs = Split(hidden * products)
        return LayerOperator(
            name=name,
            after=after,
            vectors=norm_vector,
            moves=Split(c.NORM_PASSES * hidden),
            casts=product_inputs,
            stores=Split(hidden),
            stores_cast=Split(hidden * (products > 0)),
            statistics=Split(num_statistics),
            divided=True,
        )

    def inner_norm(name: str, size: int, split: Split) -> LayerOperator:
        """A norm of a projection's input, with weights for all `size` elements on every rank."""
        moves = Split(*(c.NORM_PASSES * n for n in split))
        weights = Split(form.norm_vectors * size)
        return LayerOperator(
            name=name, after=True, vectors=weights, moves=moves, stores=split, statistics=Split(num_statistics)
        )

    residual = LayerOperator(name="residual", after=True, moves=Split(_RESIDUAL_PASSES * hidden), divided=True)
    rows = [
        norm("norm", False, 2 if form.norms == 1 else 1),
        LayerOperator(
            name="query, key, value",
            weights=Split(heads=hidden * dim, kv_heads=2 * hidden * dim),
            vectors=Split(heads=bias * dim, kv_heads=2 * bias * dim),
        ),
    ]
    if form.qk_norm != "none":
        whole = form.qk_norm == "whole"
        size = {"plain": 0, "head": 2 * dim}.get(form.qk_norm, (heads + kv_heads) * dim)
        rows.append(
            LayerOperator(
                name="query and key norms",
                vectors=Split(form.qk_norm_vectors * size),
                stores=Split(heads=dim, kv_heads=dim),
                statistics=Split(2 * num_statistics) if whole else Split(heads=num_statistics, kv_heads=num_statistics),
            )
        )
    rows += [
        LayerOperator(name="rotary positions", moves=Split(heads=2 * dim, kv_heads=2 * dim)),
        LayerOperator(name="attention", after=True, casts=Split(heads=dim)),
    ]
    if form.inner_norms:
        rows.append(inner_norm("norm before projection", heads * dim, Split(heads=dim)))
    rows += [
        LayerOperator(
            name="output projection",
            after=True,
            weights=Split(heads=dim * hidden),
            vectors=Split((bias if form.output_bias is None else form.output_bias) * hidden),
        ),
        residual,
    ]
    rows += [norm("MLP norm", True, 1)] * (form.norms > 1) + [norm("output norm", True, 0)] * (form.norms - 2)
    rows += [
        LayerOperator(
            name="MLP inward",
            after=True,
            weights=Split(ffn=inward * hidden),
            vectors=Split(ffn=inward * mlp_bias),
        ),
        LayerOperator(
            name="activation",
            after=True,
            vectors=Split(form.activation_params),
            moves=Split(ffn=inward + 1),
            casts=Split(ffn=1),
            stores=Split(ffn=inward),
            stores_cast=Split(ffn=1),
        ),
    ]
    if form.inner_norms:
        rows.append(inner_norm("norm inside MLP", ffn, Split(ffn=1)))
    rows += [
        LayerOperator(name="MLP outward", after=True, weights=Split(ffn=hidden), vectors=Split(mlp_bias * hidden)),
        residual,
    ]
    return Layer(tuple(rows))
