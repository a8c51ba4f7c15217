"""Reads a Hugging Face `config.json` into a `ModelSpec`, with the defaults of transformers but without importing it.

A decoder is read by its fields, whatever its type is called (`models/types.py`). Features that are not modelled are
refused by their names (`models/features.py`), and so are unknown keys, all of a file in one line.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.hub import CONFIG_FILE, hub_config, is_hub_name
from hexiopt.files.models.depth import gpt_neo_alternates
from hexiopt.files.models.execution import TRAINED
from hexiopt.files.models.fact_reader import FactReader, number
from hexiopt.files.models.facts import Key
from hexiopt.files.models.features import feature_of_type, features, vocabulary
from hexiopt.files.models.kind_words import layers_in_words
from hexiopt.files.models.layers import LayerSequence, layers_of
from hexiopt.files.models.types import TYPES
from hexiopt.files.models.written_kinds import written_layers
from hexiopt.ledger import OFF, Ledger
from hexiopt.problem.architectures import ARCHITECTURES, DECODER, MAX_NAME, MAX_ROPE_THETA, ROUTER_KEYS
from hexiopt.problem.form import Form
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section, read_mapping

_FORM = tuple(field.name for field in fields(Form))
_LM_HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")  # words in the names of classes
_OF_THE_FILE = (
    "name",
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "quantization_config",
    "auto_map",
)
"""Keys on how a file was made and weights are stored, which a trained model does not keep."""
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
    kind = config.get("model_type")
    refused = features(config, TYPES.get(kind) if isinstance(kind, str) else None)
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


def _is_of(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; whole numbers are numbers, true and false are none."""
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))


class _Reader:
    """Reads the `config.json` of a known type and collects its faults."""

    def __init__(self, where: str, config: Mapping[str, Any], kind: str, refused: Mapping[str, str]) -> None:
        self._where = where
        self._config = config
        self._kind = kind
        self._type = TYPES[kind]
        self._ledger = Ledger(where, config, vocabulary(refused, self._type.names))
        self._facts = FactReader(where, self._ledger)
        self._section = self._facts.section
        self._notes: list[str] = []

    def model(self, name: str | None, faults: list[str]) -> ModelSpec:
        """The model. Raises InputError with `faults` and all other faults of the file."""
        self._facts.faults += faults
        collecting = self._facts.collecting
        written = written_layers(self._section) if self._kind == DECODER else LayerSequence()
        follows = {field: value for field, value in written.fields().items() if field not in self._ledger}
        values = self._facts.row(dict(self._type.facts) | follows, {})
        with collecting():
            self._derive(values)
        with collecting():
            values |= self._rope(values)
        before = len(self._facts.faults)
        layers = written._replace(window=values.get("attention_window"))
        if not written.kinds:
            with collecting():
                layers = self._layers(values)
        if "num_layers" not in values:  # a fault already, without which layers cannot be judged
            del self._facts.faults[before:]
        model_name = self._name(name or self._kind)
        with collecting():
            values["router"] = self._router(layers)
            values["config"] = self._trained_config(layers, values.get("rope_type"))
        self._head()
        self._own_code()
        self._check_fixed()
        self._unread()
        if self._facts.faults:
            raise _refusal(self._where, self._facts.faults)
        with self._section.building():
            return self._build(model_name, values, layers)

    def _layers(self, values: dict[str, Any]) -> LayerSequence:
        if self._kind == "gpt_neo":
            alternates = gpt_neo_alternates(self._section, values.get("num_layers", 0))
            return LayerSequence(window=values.get("attention_window") if alternates else None)
        form = ARCHITECTURES[self._type.architecture].form
        layers = layers_of(self._facts, self._type, values if form is None else form.to_dict() | values)
        return layers._replace(window=values.get("attention_window")) if self._kind == DECODER else layers

    def _build(self, name: str, values: dict[str, Any], layers: LayerSequence) -> ModelSpec:
        architecture, form = self._type.architecture, None
        if layers.kinds and architecture != DECODER:
            architecture, form = DECODER, ARCHITECTURES[architecture].form
            values.pop("projected_embedding", None)
        elif architecture == DECODER:
            form = Form(**{field: values.pop(field) for field in _FORM})
        values |= {"attention_window": layers.window, "layers": layers.kinds, "extra_layers": layers.extra}
        if self._kind != DECODER:
            values |= layers.fields()
        notes = [*self._notes, *self._type.notes]
        model = ModelSpec(name=name, architecture=architecture, form=form, **values)
        if form is not None and self._kind != DECODER:
            words = layers_in_words(model.layers, model.extra_layers) or form.in_words()
            notes.insert(0, f"model_type {self._kind} is read by its fields: {words}")
        return model.replace(notes=tuple(notes))

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

    def _rope(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_theta` and `rope_type`, from the keys of transformers 5 or of earlier versions."""
        if not isinstance(self._type.facts.get("rope_theta"), Key) or "rope_theta" not in values:
            return {}
        theta, mixers, out = values["rope_theta"], self._type.mixers, dict[str, Any]()
        for holder in ("rope_parameters", "rope_scaling"):
            if self._section.raw(holder, None) in (None, {}):
                continue
            rope = self._section.section(holder)
            if any(isinstance(inner, dict) for inner in rope.values().values()):
                if mixers is None or mixers.window is None or mixers.switch is not None:
                    self._section.fail(holder, "differs by layer, which is not modelled; state one for all")
                rope = rope.section("full_attention")
            kind = rope.text("rope_type", default=None) or rope.text("type", default=None) or "default"
            out = {"rope_theta": number(rope, "rope_theta", MAX_ROPE_THETA, theta), "rope_type": kind}
        return out

    def _router(self, layers: LayerSequence) -> tuple[tuple[str, Any], ...]:
        """How the router scores, as the file says it; values that are of another kind are passed over."""
        if not any(kind.experts is not None for kind in layers.kinds):
            return ()
        stated_values = self._ledger.get("router", {}) if self._kind == DECODER else self._config
        if not isinstance(stated_values, Mapping):
            self._section.fail("router", "is no mapping; state its keys, or leave it out")
        pairs = [(key, stated_values.get(key)) for key in ROUTER_KEYS]
        return tuple((key, value) for key, value in pairs if _is_of(value, ROUTER_KEYS[key]))

    def _trained_config(self, layers: LayerSequence, rope_type: str | None) -> str:
        """What training reads of the file itself, in JSON; nothing where fields say it all, or the type is not
        trained."""
        config: Any = {}
        if self._kind == DECODER:
            config = self._ledger.get("config", {})
            if not isinstance(config, Mapping):
                self._section.fail("config", "is no mapping; state the keys of a config.json, or leave it out")
        elif self._kind in TRAINED and (layers.kinds or self._type.architecture == DECODER):
            config = {name: value for name, value in self._config.items() if name not in _OF_THE_FILE}
        elif self._kind in TRAINED and rope_type not in (None, "default"):
            held = self._config.get("rope_parameters") or self._config.get("rope_scaling")
            config = {"rope_scaling": held}
        return json.dumps(config) if config else ""

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
        stems = (self._kind.replace("_", "").replace("-", ""), *self._type.own_code)
        names = list(classes.values()) if isinstance(classes, dict) else [classes]
        if all(isinstance(name, str) and name.rpartition(".")[2].lower().startswith(stems) for name in names):
            self._notes.append(f"auto_map: its own code is taken to be that of {self._kind} in transformers")
            return
        remedy = f"remove the key if its layers are those of {self._kind}"
        self._facts.faults.append(f"auto_map: the model has its own code, of unknown shape; {remedy}")

    def _check_fixed(self) -> None:
        """Refuse values of keys that may have one value only, and note weights stored in a narrow format."""
        for name, value in self._type.only.items():
            raw = self._ledger.get(name)
            items = raw if isinstance(raw, list) else [raw]
            if any(item is not None and item != value for item in items):
                self._facts.faults.append(f"{name}: {quoted(raw)} is not modelled; only {json.dumps(value)} is")
        for name in self._type.ignores:
            self._ledger.get(name)
        stored = self._config.get("quantization_config")
        if isinstance(stored, dict) and self._type.stored and stored.get("quant_method") == self._type.stored:
            self._notes.append(
                f"quantization_config: its makers store weights in {self._type.stored}; they are trained and priced in "
                "the workload's precision"
            )

    def _unread(self) -> None:
        """Refuse all unread keys at once. A key whose value means "off" passes, unless it looks misspelt."""
        read_names = {"name", *self._type.names}
        unread = [
            name
            for name in self._ledger.unread()
            if self._config[name] not in OFF or get_close_matches(name, read_names, n=1, cutoff=_MISSPELT)
            if not any(fault.startswith(f"{name}: ") for fault in self._facts.faults)
        ]
        hints = [(name, did_you_mean(name, read_names)) for name in unread]
        near = {name: hint for name, hint in hints if hint.startswith("did you mean")}
        if len(unread) == 1:
            hint = f", {near[unread[0]]}" if near else ""
            rule = f"unknown key{hint}; remove it if it does not change the model's shape"
            self._facts.faults.append(f"{unread[0]}: {rule}")
        elif unread:
            names = ", ".join(f"{name} ({near[name]})" if name in near else name for name in unread)
            self._facts.faults.append(f"{names}: unknown keys; remove those that do not change the model's shape")
