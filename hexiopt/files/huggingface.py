"""Reads a Hugging Face `config.json` into a `ModelSpec`, with the defaults of transformers but without importing it.

A decoder whose layers are alike is read by its fields, whatever its type is called (`models/types.py`). Features that
are not modelled are refused by their names (`models/features.py`), and so are unknown keys, all of a file in one line.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.hub import CONFIG_FILE, hub_config, is_hub_name
from hexiopt.files.models.facts import REQUIRED, Fact, Key
from hexiopt.files.models.features import feature_of_type, features, vocabulary
from hexiopt.files.models.types import TYPES
from hexiopt.files.models.windows import attention_window, gpt_neo_alternates
from hexiopt.ledger import OFF, Ledger
from hexiopt.problem.form import Form
from hexiopt.problem.model import DECODER, MAX_NAME, MAX_NORM_EPS, MAX_ROPE_THETA, RANGES, ModelSpec
from hexiopt.reading import Section, read_mapping

_FORM = tuple(field.name for field in fields(Form))
_COUNTS = ("norms", "norm_vectors", "qk_norm_vectors", "activation_params", "extra_positions")
_WORDS = ("activation", "norm", "qk_norm", "positions")
_LM_HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")  # words in the names of classes
_MISSPELT = 0.88  # likeness from which an unknown key is taken for another one


def read_model(path: str | Path) -> ModelSpec:
    """The model of a `config.json`, of the folder with it, of a YAML file with the same keys, or of a name on the Hub.

    A model whose file states no name is named after the file, a `config.json` after its folder, and a model of the Hub
    by its name there. Raises InputError.
    """
    file = config_file(path)
    return model_from_config(Section(read_config(file), str(file)), name_of_file(path))


def read_config(file: str | Path) -> dict[str, Any]:
    """The mapping in the file of a model, in which Python may have written Infinity. Raises InputError."""
    return read_mapping(file, non_finite=True)


def config_file(path: str | Path) -> Path:
    """The file of a model: `path`, the `config.json` in the folder `path`, or the one of ORG/NAME on the Hub.

    Raises InputError where it cannot be had from the Hub.
    """
    if isinstance(path, str) and is_hub_name(path):
        return hub_config(path)
    path = Path(path)
    return path / CONFIG_FILE if path.is_dir() else path


def name_of_file(path: str | Path) -> str | None:
    """The name for a model whose file states none; None where the file's or folder's name is not usable."""
    if isinstance(path, str) and is_hub_name(path):
        return path
    file = config_file(path)
    name = file.absolute().parent.resolve().name if file.name == CONFIG_FILE else file.stem
    return name if _usable(name) else None


def _usable(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable() and len(name) <= MAX_NAME


def model_from_config(section: Section, name: str | None = None) -> ModelSpec:
    """The model that a `config.json` mapping describes. Raises InputError: one line with all its faults.

    Its name is the additional key `name`, else `_name_or_path`, else the argument `name`, else `model_type`.
    """
    config = section.values()
    refused, kind = features(config), config.get("model_type")
    faults = [f"{key}: {text}" for key, text in refused.items()]
    if kind is None:
        near = get_close_matches("model_type", [key for key in config if key != "model_type"], n=1)
        instead = f" in place of {near[0]}" if near else ""
        section.refuse_missing("model_type", f"state it, as llama{instead}; docs/models.md lists those that are read")
    if not isinstance(kind, str):
        section.fail("model_type", "is not text; write a word")
    if kind not in TYPES:
        raise _refusal(section.where, faults or [_why_unread(kind, config)])
    return _Reader(section.where, config, kind, refused).model(name, faults)


def _why_unread(kind: str, config: Mapping[str, Any]) -> str:
    feature = feature_of_type(kind, config)
    if feature is not None:
        return f"model_type: {quoted(kind)} has {feature}: not modelled; use a decoder whose layers are alike"
    hint = did_you_mean(kind, TYPES)
    hint = f"; {hint}" if hint.startswith("did you mean") else ""
    return (
        f"model_type: {quoted(kind)} is not known{hint}; if its layers are alike, describe them by their fields, as "
        f"model_type {DECODER} (docs/models.md)"
    )


def _refusal(where: str, faults: list[str]) -> InputError:
    """One line with all faults, each of which begins with its key."""
    return InputError(f"{where}{'.' if ': ' in where else ': '}{'; also '.join(dict.fromkeys(faults))}")


class _Reader:
    """Reads the `config.json` of a known type and collects its faults; a `ConfigFile` for the rules of a row."""

    def __init__(self, where: str, config: Mapping[str, Any], kind: str, refused: Mapping[str, str]) -> None:
        self._where = where
        self._config = config
        self._kind = kind
        self._type = TYPES[kind]
        self._ledger = Ledger(where, config, vocabulary(refused))
        self._section = Section(self._ledger, where)
        self._faults: list[str] = []
        self._notes: list[str] = []

    def model(self, name: str | None, faults: list[str]) -> ModelSpec:
        """The model. Raises InputError with `faults` and all other faults of the file."""
        self._faults += faults
        values: dict[str, Any] = {}
        for field, fact in self._type.facts.items():
            with self._collecting():
                values[field] = self._fact(field, fact, values)
        with self._collecting():
            self._derive(values)
        with self._collecting():
            values |= self._rope(values)
        before = len(self._faults)
        with self._collecting():
            values["attention_window"] = self._window(values)
        if "num_layers" not in values:  # a fault already, without which windows cannot be judged
            del self._faults[before:]
        model_name = self._name(name or self._kind)
        self._head()
        self._own_code()
        self._unread()
        if self._faults:
            raise _refusal(self._where, self._faults)
        architecture, form = self._type.architecture, None
        with self._section.building():
            if architecture == DECODER:
                form = Form(**{field: values.pop(field) for field in _FORM})
                if self._kind != DECODER:
                    self._notes.insert(0, f"model_type {self._kind} is read by its fields: {form.in_words()}")
            notes = (*self._notes, *self._type.notes)
            return ModelSpec(name=model_name, architecture=architecture, form=form, notes=notes, **values)

    # What the functions of a row ask

    def size(self, name: str, default: int | None = None) -> int | None:
        """A whole number; `default` where it is absent or null."""
        value: int | None = self._section.integer(name, at_least=0, at_most=RANGES["vocab_size"][1], default=None)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A number above 0; `default` where it is absent or null."""
        return _number(self._section, name, 1e6, default)

    def flag(self, name: str, default: bool) -> bool:
        """A switch; `default` where it is absent."""
        if name in self._section and self._section.raw(name, None) is None:
            self._section.fail(name, "is not true or false; write one of them")
        return bool(self._section.flag(name, default))

    def inner(self, name: str) -> Mapping[str, Any]:
        """The mapping under a key; an empty one where it is absent or null."""
        inner = self._section.raw(name, None)
        return {} if inner is None else self._section.section(name).values()

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise InputError for the value of a key."""
        self._section.fail(name, rule)

    # Facts

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Collect the InputError that the block raises, if any, as a fault of the file."""
        try:
            yield
        except InputError as error:
            self._faults.append(str(error).removeprefix(self._where).lstrip(":. "))

    def _fact(self, field: str, fact: Fact, values: dict[str, Any]) -> Any:
        if not isinstance(fact, Key):
            return fact(self, values) if callable(fact) else fact
        present = [name for name in fact.names if name in self._ledger]
        name = (*present, fact.names[0])[0]
        if len({repr(self._config[other]) for other in present}) > 1:
            raise InputError(f"{self._section.at(name)}: differs from {present[1]}, its other name; state one of them")
        if isinstance(fact.default, bool):
            switch = self.flag(name, fact.default)
            return switch if fact.then is None else fact.then[switch]
        value = self._value(field, name)
        if value is not None or (present and field in ("num_kv_heads", "attention_window")):
            return value
        if fact.default is REQUIRED or (present and field == "head_dim" and fact.default is not None):
            self._section.refuse_missing(name)
        return fact.default

    def _value(self, field: str, name: str) -> Any:
        """The value of the key `name`, read as `field` requires; None where it is absent or null."""
        if field in RANGES or field in _COUNTS:
            low, high = RANGES.get(field, (0, 1024))
            return self._section.integer(name, at_least=low, at_most=high, default=None)
        if field in _WORDS:
            return self._section.text(name, default=None)
        if field == "output_bias":
            return self._section.flag(name, None)
        most = MAX_NORM_EPS if field == "norm_eps" else MAX_ROPE_THETA
        return self._section.number(name, above=0, at_most=most, default=None)

    def _derive(self, values: dict[str, Any]) -> None:
        """Fill in the facts that follow from other facts, if those are known."""
        hidden_size, num_heads = values.get("hidden_size"), values.get("num_heads")
        if values.get("mlp_bias", False) is None:
            values["mlp_bias"] = values.get("attention_bias")
        if values.get("projected_embedding", 0) == hidden_size:
            values["projected_embedding"] = None
        if hidden_size is None or num_heads is None:
            return
        if values.get("num_kv_heads", 0) is None:
            values["num_kv_heads"] = num_heads
        if values.get("ffn_size", 0) is None:
            values["ffn_size"] = 4 * hidden_size
        if values.get("head_dim", 0) is None:
            if hidden_size % num_heads:
                also = ", or state head_dim" if isinstance(self._type.facts["head_dim"], Key) else ""
                wrong = f"{hidden_size} is not a multiple of {num_heads} heads"
                raise InputError(f"{self._key_of('hidden_size')}: {wrong}; change one{also}")
            values["head_dim"] = hidden_size // num_heads

    def _key_of(self, field: str) -> str:
        fact = self._type.facts[field]
        assert isinstance(fact, Key), field
        return (*(name for name in fact.names if name in self._config), fact.names[0])[0]

    def _name(self, default: str) -> Any:
        """The name of the model, by default `default`; `ModelSpec` checks it."""
        self._ledger.get("model_type")
        path = self._ledger.get("_name_or_path")
        return self._config["name"] if "name" in self._ledger else path if _usable(path) else default

    def _window(self, values: Mapping[str, Any]) -> int | None:
        window: int | None = values.get("attention_window")
        num_layers, windows = values.get("num_layers", 0), self._type.windows
        if self._kind == "gpt_neo":
            return window if gpt_neo_alternates(self._section, num_layers) else None
        if windows is not None:
            window = self._fact("attention_window", windows.key, {})
        elif "attention_window" in values:
            return window
        return attention_window(self._section, windows, window, num_layers, values.get("max_positions", 0))

    def _rope(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_theta` and `rope_type`, from the keys of transformers 5 or of earlier versions."""
        if not isinstance(self._type.facts.get("rope_theta"), Key) or "rope_theta" not in values:
            return {}
        theta, windows, out = values["rope_theta"], self._type.windows, dict[str, Any]()
        for holder in ("rope_parameters", "rope_scaling"):
            if self._section.raw(holder, None) in (None, {}):
                continue
            rope = self._section.section(holder)
            if any(isinstance(inner, dict) for inner in rope.values().values()):
                if windows is None or windows.period is None:
                    self._section.fail(holder, "differs by layer, which is not modelled; state one for all")
                rope = rope.section("full_attention")
            kind = rope.text("rope_type", default=None) or rope.text("type", default=None) or "default"
            out = {"rope_theta": _number(rope, "rope_theta", MAX_ROPE_THETA, theta), "rope_type": kind}
        return out

    # Keys

    def _head(self) -> None:
        """Note a head other than the LM head, which is priced in its place."""
        classes = self._config.get("architectures")
        names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
        others = [name for name in names if not any(word in name for word in _LM_HEADS)]
        if others:
            self._notes.append(f"architectures: {', '.join(others)} is priced with an LM head")

    def _own_code(self) -> None:
        """Refuse custom code of the model, unless transformers has adopted it under the same name."""
        classes = self._ledger.get("auto_map")
        if not classes:
            return
        stem = self._kind.replace("_", "").replace("-", "")
        names = list(classes.values()) if isinstance(classes, dict) else [classes]
        if all(isinstance(name, str) and name.rpartition(".")[2].lower().startswith(stem) for name in names):
            self._notes.append(f"auto_map: its own code is taken to be that of {self._kind} in transformers")
            return
        remedy = f"remove the key if its layers are those of {self._kind}"
        self._faults.append(f"auto_map: the model has its own code, of unknown shape; {remedy}")

    def _unread(self) -> None:
        """Refuse all unread keys at once. A key whose value means "off" passes, unless it looks misspelt."""
        keys = (fact for fact in self._type.facts.values() if isinstance(fact, Key))
        read_names = {"name", *(name for key in keys for name in key.names)}
        unread = [
            name
            for name in self._ledger.unread()
            if self._config[name] not in OFF or get_close_matches(name, read_names, n=1, cutoff=_MISSPELT)
            if not any(fault.startswith(f"{name}: ") for fault in self._faults)
        ]
        hints = [(name, did_you_mean(name, read_names)) for name in unread]
        near = {name: hint for name, hint in hints if hint.startswith("did you mean")}
        if len(unread) == 1:
            hint = f", {near[unread[0]]}" if near else ""
            self._faults.append(f"{unread[0]}: unknown key{hint}; remove it if it does not change the model's shape")
        elif unread:
            names = ", ".join(f"{name} ({near[name]})" if name in near else name for name in unread)
            self._faults.append(f"{names}: unknown keys; remove those that do not change the model's shape")


def _number(section: Section, key: str, at_most: float, default: float) -> float:
    """The number above 0 under `key`; `default` where it is absent or null."""
    value: float | None = section.number(key, above=0, at_most=at_most, default=None)
    return default if value is None else value
