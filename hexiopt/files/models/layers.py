"""The layers of a `config.json` by depth: the parts of each, or that the fields of the model alone describe them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hexiopt.errors import InputError
from hexiopt.files.models.depth import BOTH, DENSE, EXPERTS, FULL, RECURRENT, WINDOW, blocks, is_on, mixing, placing
from hexiopt.files.models.fact_reader import FactReader
from hexiopt.files.models.facts import Fact, ModelType
from hexiopt.problem.kinds import Attention, Channels, Dense, Experts, LayerKind, Mixer, Recurrent


class LayerSequence(NamedTuple):
    """The kinds of layers by depth, and of those that predict further tokens; `window` is that of equal dense layers,
    which need no kinds."""

    kinds: tuple[LayerKind, ...] = ()
    extra: tuple[LayerKind, ...] = ()
    window: int | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that follow from the kinds: those of the first attention, the widest columns."""
        attention = next((kind.attention for kind in self.kinds if kind.attention is not None), None)
        widths = [part.ffn_size for kind in self.kinds for part in kind.channels]
        out: dict[str, Any] = {"num_layers": len(self.kinds)} if self.kinds else {}
        if attention is not None:
            out |= {"num_heads": attention.heads, "num_kv_heads": attention.kv_heads, "head_dim": attention.qk_dim}
        return out | ({"ffn_size": max(widths)} if widths else {})


class _Rows(NamedTuple):
    """The fields that the rows of a type state of the parts of layers."""

    attention: dict[str, Any]
    full: dict[str, Any]
    recurrent: dict[str, Any]
    experts: dict[str, Any]


class _Words(NamedTuple):
    """What each layer does with tokens and with channels, and the tokens of its windows."""

    mixers: list[str]
    channels: list[str]
    window: int | None

    def equal(self) -> bool:
        """Whether all layers attend alike and have an MLP."""
        return len(set(self.mixers)) == 1 and self.mixers[0] in (FULL, WINDOW) and set(self.channels) == {DENSE}


def layers_of(reader: FactReader, kind: ModelType, values: Mapping[str, Any]) -> LayerSequence:
    """The layers of a file of type `kind` whose facts are `values`. Raises InputError.

    Faults of rows are collected; with them the answer has no kinds.
    """
    rows = _Rows(*(_row(reader, facts, values) for facts in (kind.attention, kind.full, kind.recurrent, kind.experts)))
    num_extra = 0 if kind.extra is None else reader.fact("", kind.extra, {}, part=True)
    further_blocks = blocks(reader.section, kind.extra_blocks, [FULL, EXPERTS]) if kind.extra_blocks else []
    extra = further_blocks if num_extra else []
    words = _words(reader, kind, values, bool(rows.experts.get("count")))
    plain = words.equal() and not (rows.attention or kind.full or num_extra) and kind.per_layer is None
    if reader.faults or plain:
        return LayerSequence(window=words.window if WINDOW in words.mixers else None)
    with reader.section.building():
        parts = _parts(kind, values, rows, words, {*words.mixers, *words.channels, *extra})
        norms = 1 if kind.mixers is not None and kind.mixers.blocks else values["norms"]
        by_layer = _by_layer(reader, kind, len(words.mixers))
        kinds = tuple(
            _differing(_layer(parts, (mixer, *_channels(kind, channel)), norms), by_layer.get(layer, {}))
            for layer, (mixer, channel) in enumerate(zip(words.mixers, words.channels, strict=True))
        )
        further = _layer(parts, tuple(extra), len(extra)) if extra else _last_attending(kinds)
        return LayerSequence(kinds, (further,) * num_extra)


def _parts(
    kind: ModelType, values: Mapping[str, Any], rows: _Rows, words: _Words, used: set[str]
) -> dict[str, Mixer | Channels]:
    """The part that each of the `used` words stands for."""
    base = Attention(**_attention(values) | rows.attention)
    differ = {name: value for name, value in rows.full.items() if value is not None}
    parts: dict[str, Mixer | Channels] = {FULL: replace(base, **differ)}
    if WINDOW in used:
        parts[WINDOW] = replace(base, window=words.window, chunked=kind.mixers is not None and kind.mixers.chunked)
    if RECURRENT in used or BOTH in used:
        parts[RECURRENT] = Recurrent(**rows.recurrent)
    if DENSE in used or kind.beside_experts:
        gated = values.get("gated_mlp", True)
        parts[DENSE] = Dense(ffn_size=values["ffn_size"], gated=gated, bias=values["mlp_bias"])
    if EXPERTS in used:
        parts[EXPERTS] = Experts(**rows.experts)
    return parts


def _row(reader: FactReader, facts: Mapping[str, Fact], values: Mapping[str, Any]) -> dict[str, Any]:
    out = reader.row(facts, dict(values), part=True)
    return {name: out[name] for name in facts if name in out}


def _words(reader: FactReader, kind: ModelType, values: Mapping[str, Any], has_experts: bool) -> _Words:
    section, mixers = reader.section, kind.mixers
    words: list[str] = mixing(section, mixers, values.get("num_layers", 0))
    window: Any = None
    if mixers is not None and mixers.window is not None:
        on = mixers.switch is None or is_on(section, mixers.switch)
        window = reader.fact("attention_window", mixers.window, {}) if on else None
        if window is None and mixers.chunked and WINDOW in words:
            raise InputError(f"{section.at(mixers.window.names[0])}: is null; state the tokens of a chunk")
        if window is None or not on:
            words = [FULL if word == WINDOW else word for word in words]
    placed = placing(section, kind.placement, len(words)) if kind.experts else []
    if mixers is not None and mixers.blocks:
        return _Words(words, [""] * len(words), window)
    channels = placed if has_experts else [DENSE] * len(words)
    if set(words) == {FULL, WINDOW} and not kind.full and window >= values.get("max_positions", 0):
        words = [WINDOW] * len(words)  # no sequence of the model exceeds the window
    return _Words(words, channels, window)


def _attention(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of attention that facts of the model state."""
    bias, output_bias = values["attention_bias"], values.get("output_bias")
    return {
        "heads": values["num_heads"],
        "kv_heads": values["num_kv_heads"],
        "qk_dim": values["head_dim"],
        "v_dim": values["head_dim"],
        "bias": bias,
        "output_bias": bias if output_bias is None else output_bias,
        "qk_norm": values.get("qk_norm", "none"),
        "qk_norm_vectors": values.get("qk_norm_vectors", 1),
    }


def _channels(kind: ModelType, channel: str) -> tuple[str, ...]:
    return (DENSE, EXPERTS) if channel == EXPERTS and kind.beside_experts else (channel,)


def _layer(parts: Mapping[str, Mixer | Channels], words: tuple[str, ...], norms: int) -> LayerKind:
    """The layer that has the parts of `words`."""
    names = [name for word in words if word for name in ((FULL, RECURRENT) if word == BOTH else (word,))]
    of_layer = [parts[name] for name in names]
    mixers: list[Mixer] = [part for part in of_layer if isinstance(part, Attention | Recurrent)]
    channels: list[Channels] = [part for part in of_layer if isinstance(part, Dense | Experts)]
    return LayerKind(tuple(mixers), tuple(channels), norms)


_FIELDS_OF = {"head_dim": ("qk_dim", "v_dim"), "num_key_value_heads": ("kv_heads",)}
"""The fields of attention that a key states of a single layer."""


def _by_layer(reader: FactReader, kind: ModelType, num_layers: int) -> dict[int, dict[str, int]]:
    """The fields of attention in which single layers differ, by their number. Raises InputError."""
    section, out = reader.section, dict[int, dict[str, int]]()
    if kind.per_layer is None or section.raw(kind.per_layer, None) is None:
        return out
    by_number = section.section(kind.per_layer)
    for name in by_number.keys():  # noqa: SIM118, a section is no mapping
        if not name.isdecimal() or int(name) >= num_layers:
            raise InputError(f"{by_number.at(name)}: is not a layer; number them from 0 to {num_layers - 1}")
        layer = by_number.section(name)
        values = {key: layer.integer(key, at_least=1, at_most=2**16, default=None) for key in _FIELDS_OF}
        layer.finish()
        fields = {field: values[key] for key, names in _FIELDS_OF.items() for field in names}
        out[int(name)] = {field: value for field, value in fields.items() if value is not None}
    return out


def _differing(layer: LayerKind, fields: Mapping[str, Any]) -> LayerKind:
    """The layer with other values of `fields` of its attention."""
    if not fields:
        return layer
    mixers = (replace(part, **fields) if isinstance(part, Attention) else part for part in layer.mixers)
    return replace(layer, mixers=tuple(mixers))


def _last_attending(kinds: tuple[LayerKind, ...]) -> LayerKind:
    return next((kind for kind in reversed(kinds) if kind.attention is not None), kinds[-1])
