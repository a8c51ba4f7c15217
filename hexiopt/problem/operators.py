"""A decoder layer as data: one row for each operator. Parameters, FLOPs, memory traffic and stored activations are sums
over these rows, so that another kind of layer is other rows. Parameters of a whole model are rows too, by who holds
them (`ParameterGroup`).

Amounts in a row are for one token (weights aside), by the dimension along which tensor parallelism splits them
(`Split`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from hexiopt.problem.kinds import LayerKind


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
    width of what products read, and `statistics` in FP32. What it does not store, its backward makes anew: `remakes`
    elements in the width of activations, and `remakes_exact` in FP32, all of a layer's at once. Sequence parallelism
    divides the tokens of `divided` operators. `after` marks operators after attention. The amounts of `routed`
    operators, weights aside, are for one of the copies of a token that go to an expert, and their weights have a part
    for each expert; those of `combined` ones are for a token whose copies come back to the rank.
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
    remakes: Split = _NONE
    remakes_exact: Split = _NONE
    divided: bool = False
    routed: bool = False
    combined: bool = False


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
    operators on copies of tokens that experts take, and on tokens whose copies come back; the number of element-wise
    kernels; what backwards make anew per token, in elements of the width of activations and of FP32; and what follows
    the last operator that does so."""

    products: tuple[Product, ...]
    elementwise: tuple[ElementwiseShare, ...]
    routed: ElementwiseShare
    combined: ElementwiseShare
    kernels: int
    remakes: int
    remakes_exact: int
    following: tuple[ElementwiseShare, ...]


@dataclass(frozen=True)
class Layer:
    """The operators of a layer in order, without attention's kernels, whose cost depends on pairs of tokens
    (`hexiopt/cost/executors`)."""

    operators: tuple[LayerOperator, ...]
    kind: LayerKind

    def shard(self, tp: int, vocab_size: int) -> Shard:
        """The share of the busiest rank if heads, columns and experts are split as evenly as whole ones allow.

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
            experts=ceil(experts.count / tp) if experts else 0,
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
        whole = [row for row in self.operators if not row.routed and not row.combined]
        products = [Product(row.after, weights, row.divided) for row in whole if (weights := row.weights.on(shard))]
        routed, combined = (
            _elementwise(list(filter(attrgetter(name), self.operators)), True, False, shard)
            for name in ("routed", "combined")
        )
        kernels = sum(row.moves != _NONE for row in self.operators)
        remakes, exact = (_sum(map(attrgetter(name), whole)).on(shard) for name in ("remakes", "remakes_exact"))
        end = max([at for at, row in enumerate(whole, 1) if row.remakes_exact != _NONE], default=len(whole))
        elementwise, following = _groups(whole, shard), _groups(whole[end:], shard)
        return LayerShare(tuple(products), elementwise, routed, combined, kernels, remakes, exact, following)


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


def _groups(rows: Sequence[LayerOperator], shard: Shard) -> tuple[ElementwiseShare, ...]:
    return tuple(
        _elementwise([row for row in rows if (row.after, row.divided) == (after, divided)], after, divided, shard)
        for after, divided in product((False, True), repeat=2)
    )


def _elementwise(rows: Sequence[LayerOperator], after: bool, divided: bool, shard: Shard) -> ElementwiseShare:
    sums = (_sum(map(attrgetter(name), rows)).on(shard) for name in ElementwiseShare._fields[2:])
    return ElementwiseShare(after, divided, *sums)


def _sum(amounts: Iterable[Split]) -> Split:
    return Split(*map(sum, zip(_NONE, *amounts, strict=True)))
