"""The operators of each kind of layer: rows of counts for a norm, and for each part of a layer."""

from dataclasses import dataclass, replace
from typing import assert_never

from hexiopt.numbers import coefficients as c
from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.operators import Layer, LayerOperator, Split

_RESIDUAL_PASSES = (c.LAYER_HIDDEN_PASSES - 2 * c.NORM_PASSES) // 2  # of each of two residual adds
_NUMBER = 2  # statistics that a number of 64 bits takes as much as


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
        rows = self._latent(part) if part.kv_rank else [self._projection(part)]
        if part.qk_norm != "none":
            values = Split(heads=part.qk_dim, kv_heads=part.qk_dim)
            of_heads = Split(heads=self.statistics, kv_heads=self.statistics)
            size = {"plain": Split(), "head": Split(2 * part.qk_dim)}.get(part.qk_norm, values)
            rows.append(
                LayerOperator(
                    name="query and key norms",
                    vectors=size.times(part.qk_norm_vectors),
                    stores=values,
                    statistics=Split(2 * self.statistics) if part.qk_norm == "whole" else of_heads,
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
            rows.append(self.inner_norm("norm before projection", part.heads * part.v_dim, Split(heads=part.v_dim)))
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
                name="recurrent inward",
                weights=scanned.times(self.hidden),
                vectors=scanned.times(part.bias),
                stores=scanned,
            ),
            LayerOperator(
                name="convolution", vectors=mixed.times(part.conv + part.conv_bias), moves=mixed.times(2), remakes=mixed
            ),
            # Decay and step of a head, and where there is no delta rule its direct path.
            LayerOperator(
                name="scan",
                after=True,
                vectors=Split(state_heads=2 if part.delta else 3),
                remakes_exact=Split(state_heads=part.scan_elements),
            ),
        ]
        if part.norm:
            weights = Split(part.value_dim) if part.delta else value
            gated = LayerOperator(
                name="gated norm",
                after=True,
                vectors=weights.times(self.form.norm_vectors),
                moves=value.times(c.NORM_PASSES + 1),
                # With a statistic of each head, or of each group.
                remakes_exact=Split(state_heads=part.value_dim + part.delta, state_groups=not part.delta),
            )
            rows.append(gated)
        outward = LayerOperator(
            name="recurrent outward",
            after=True,
            weights=value.times(self.hidden),
            vectors=Split(part.bias * self.hidden),
            casts=value,
            stores=value,
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
        """Router, projection to the experts' width, experts, sums of what these make, projection back, shared columns.

        The router stores scores, normalised weights of what is chosen and their sum; the exchange stores where each
        copy of a token goes and comes from, before it leaves and once it came. Such numbers have 64 bits.
        """
        width, inward = part.width(self.hidden), 2 if part.gated else 1
        router = LayerOperator(
            name="router",
            after=True,
            divided=True,
            weights=Split(self.hidden * part.count),
            vectors=Split(
                part.router_bias * part.count + part.router_vectors * self.hidden + part.expert_scales * part.count
            ),
            statistics=Split(part.count + (_NUMBER + 1) * part.top_k + 1),
        )
        rows = [router]
        latent = LayerOperator(
            name="latent inward",
            after=True,
            divided=True,
            weights=Split(self.hidden * part.latent),
            vectors=Split(part.latent_bias * part.latent),
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
                statistics=Split(2 * _NUMBER),
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
            ),
            # What each expert made of a token, unless what it reads was weighted; and its weight.
            LayerOperator(
                name="sum over experts",
                after=True,
                combined=True,
                stores=Split((width * (not part.scales_input) + 1) * part.top_k),
                statistics=Split(2 * _NUMBER * part.top_k),
            ),
        ]
        if part.latent:
            bias = Split(part.latent_bias * self.hidden)
            rows.append(replace(latent, name="latent outward", vectors=bias, stores_cast=Split(part.latent)))
        if part.shared:
            rows += self.columns("shared experts", part.gated, part.shared_bias, Split(shared=1), self.hidden)
        if part.shared_gate:
            gate = LayerOperator(
                name="gate of shared experts",
                after=True,
                divided=True,
                weights=Split(self.hidden),
                stores=Split(self.hidden + 1),
            )
            rows.append(gate)
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
