"""How the types of Hugging Face are described: a row of facts, each fixed or stated by a key of `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from hexiopt.problem.model import DECODER

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
class Windows:
    """Which layers attend to a window: those that `layer_types` names; where that is absent, all, none, or by a period.

    `switch` is a key that must be true for layers to have windows; `from_layer` is a key with the first such layer. Of
    each `period` layers (one of `period_keys` may state it) the last attends fully, or with `first_is_full` the first.
    """

    key: Key
    switch: str | None = None
    from_layer: str | None = None
    period: int | None = None
    period_keys: tuple[str, ...] = ()
    first_is_full: bool = False


class ConfigFile(Protocol):
    """What a function of a row may read from the file: None, or the default, where the key is absent or null."""

    def size(self, name: str, default: int | None = None) -> int | None:
        """A whole number."""

    def number(self, name: str, default: float) -> float:
        """A number above 0."""

    def flag(self, name: str, default: bool) -> bool:
        """A switch."""

    def inner(self, name: str) -> Mapping[str, Any]:
        """The mapping under a key; an empty one where it is absent."""

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Refuse the value of a key."""


Rule = Callable[[ConfigFile, dict[str, Any]], Any]
"""A function of the file and of the facts that stand before it in the row."""

Fact = Key | Rule | str | int | float | bool | None
Row = dict[str, Fact]


@dataclass(frozen=True)
class ModelType:
    """How a `model_type` is read. `notes` say what the price leaves out."""

    facts: Mapping[str, Fact]
    windows: Windows | None = None
    architecture: str = DECODER
    notes: tuple[str, ...] = ()


def key(*names: str, default: Any = REQUIRED) -> Key:
    """The fact under the first of `names` that the file has."""
    return Key(names, default)


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
