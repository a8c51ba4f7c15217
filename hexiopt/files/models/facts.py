"""How the types of Hugging Face are described: a row of facts, each fixed or stated by a key of `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, mul
from typing import Any, NoReturn, Protocol

from hexiopt.problem.architectures import DECODER

REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """A fact that a key of `config.json` states: the current name first, then the other names that transformers reads.

    Where the key is absent, the fact is `default`; `then` maps the value of a switch to the fact.
    """

    names: tuple[str, ...]
    default: Any = REQUIRED
    then: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Joint:
    """A fact that follows from two numbers that keys state, such as shared experts and their width; null counts 0."""

    keys: tuple[Key, Key]
    join: Callable[[int, int], int]


@dataclass(frozen=True)
class Mixers:
    """Which layers attend to all tokens, by default, and what the others do (`others`, a word of `depth.py`).

    A list under one of `lists` names what each layer does. Where that is absent: `switch` is a key that must be true
    for layers to differ; they do from the layer under `from_layer` on, or up to the one under `until_layer`. Of each
    `period` layers (one of `period_keys` may state it) the last attends fully, or with `first_is_full` the first;
    without a period none. `full_layers` is a key with the numbers of those that attend fully, `flags` one with a 1 for
    each layer that does not; with `inverse` such layers and periods are those that do not. `window` states the tokens
    of windows. `blocks`: each layer is a single part.
    """

    window: Key | None = None
    others: str = "window"
    lists: tuple[str, ...] = ("layer_types",)
    switch: str | None = None
    from_layer: str | None = None
    until_layer: str | None = None
    period: int | None = None
    period_keys: tuple[str, ...] = ()
    first_is_full: bool = False
    full_layers: str | None = None
    flags: str | None = None
    inverse: bool = False
    from_default: int = 28
    """The first layer that differs where the file does not state it: Qwen's."""
    last_is_full: bool = False
    """The last layer attends to all tokens, whatever a list says (Gemma 4)."""
    chunked: bool = False
    """Windows are chunks of the sequence (Llama 4)."""
    blocks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All keys that state it."""
        window = () if self.window is None else self.window.names
        single = (self.switch, self.from_layer, self.until_layer, self.full_layers, self.flags)
        return (*window, *self.lists, *self.period_keys, *(name for name in single if name is not None))


@dataclass(frozen=True)
class Placement:
    """Which layers have experts, by default all; the others have a dense MLP.

    `words` is a key that lists `sparse` or `dense` for each layer, `sparse_layers` and `dense_layers` are keys with
    numbers of layers. From the layer under `first` on (by default `first_default`), up to the one under `last`, every
    one of `step` layers, the last of them, has experts. `switch` is a key that must be true for any to have them.
    """

    words: str | None = None
    sparse_layers: str | None = None
    dense_layers: str | None = None
    first: str | None = None
    first_default: int = 0
    last: str | None = None
    step: str | None = None
    switch: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All keys that state it."""
        every = (self.switch, self.words, self.sparse_layers, self.dense_layers, self.first, self.last, self.step)
        return tuple(name for name in every if name is not None)


class ConfigFile(Protocol):
    """What a function of a row may read from the file: None, or the default, where the key is absent or null."""

    def size(self, name: str, default: int | None = None) -> int | None:
        """A whole number."""

    def number(self, name: str, default: float) -> float:
        """A number above 0."""

    def flag(self, name: str, default: bool) -> bool:
        """A switch."""

    def word(self, name: str) -> str | None:
        """A text; None also for what is none."""

    def inner(self, name: str) -> Mapping[str, Any]:
        """The mapping under a key; an empty one where it is absent."""

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Refuse the value of a key."""


Rule = Callable[[ConfigFile, dict[str, Any]], Any]
"""A function of the file and of the facts that stand before it in the row."""

Fact = Key | Joint | Rule | str | int | float | bool | None
Row = dict[str, Fact]


@dataclass(frozen=True)
class ModelType:
    """How a `model_type` is read: rows of facts, of the whole model and of the parts of its layers.

    `attention` has facts of attention that `facts` do not state, `full` those in which layers that attend to all tokens
    differ. Layers have experts by `placement` where `experts` are stated, and a recurrence by `mixers`. `extra` is the
    number of layers that predict further tokens, `extra_blocks` a key with the parts of one. `only` are keys that must
    have a value where they are stated, `ignores` keys that the type's model does not read. Weights `stored` in a narrow
    format by their makers are trained in another. `own_code` are beginnings of class names in the makers' code of this
    type. `notes` say what the price leaves out.
    """

    facts: Mapping[str, Fact]
    mixers: Mixers | None = None
    architecture: str = DECODER
    notes: tuple[str, ...] = ()
    attention: Mapping[str, Fact] = field(default_factory=dict)
    full: Mapping[str, Fact] = field(default_factory=dict)
    recurrent: Mapping[str, Fact] = field(default_factory=dict)
    experts: Mapping[str, Fact] = field(default_factory=dict)
    placement: Placement = Placement()
    beside_experts: bool = False
    """The dense MLP stands beside the experts, not in their place."""
    extra: Key | None = None
    extra_blocks: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    stored: str | None = None
    own_code: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of features that hold where the file does not state them."""
    per_layer: str | None = None
    """A key with the facts of attention in which single layers differ, by their number."""

    @cached_property
    def names(self) -> frozenset[str]:
        """All keys of `config.json` that the type reads by a row."""
        rows = (self.facts, self.attention, self.full, self.recurrent, self.experts)
        facts = [fact for row in rows for fact in row.values()] + [self.extra]
        keys = [fact for fact in facts if isinstance(fact, Key)]
        keys += [part for fact in facts if isinstance(fact, Joint) for part in fact.keys]
        single = (*self.placement.names, *(self.mixers.names if self.mixers else ()), *self.extra_blocks)
        single += () if self.per_layer is None else (self.per_layer,)
        return frozenset((*(name for key in keys for name in key.names), *single, *self.only, *self.ignores))


def key(*names: str, default: Any = REQUIRED) -> Key:
    """The fact under the first of `names` that the file has."""
    return Key(names, default)


def product(first: Key, second: Key) -> Joint:
    """The product of two numbers."""
    return Joint((first, second), mul)


def total(first: Key, second: Key) -> Joint:
    """The sum of two numbers."""
    return Joint((first, second), add)


def switch(name: str, default: bool, on: Any, off: Any) -> Key:
    """The fact `on` or `off` by a switch."""
    return Key((name,), default, {True: on, False: off})


def row(*bases: Mapping[str, Any], **facts: Fact) -> Row:
    """Merge the facts of `bases`: later ones override earlier ones, and `facts` override all."""
    return {name: fact for base in (*bases, facts) for name, fact in base.items()}


_USUAL_KEYS = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}


def usual(**defaults: Any) -> Row:
    """Facts under the keys that most types use for them, with their defaults."""
    return {field: key(_USUAL_KEYS[field], default=default) for field, default in defaults.items()}


LAYER_NORM_EPS = key("layer_norm_eps", default=1e-5)
