"""How Hugging Face's files hold a model's parameters, by its type: under which names, several of ours in one tensor, or
the experts of a layer, which are one parameter here, in many. Our names are those of Llama."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from hexiopt.problem.kinds import Recurrent
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import (
    EMBEDDING,
    FINAL_NORM,
    INWARD,
    MLP,
    OUTWARD,
    SHARED,
    execution_of,
    layer_kinds,
    layer_prefix,
    whole_parts,
)
from runtime.mapping.parts import ParameterPart

_ALL = slice(None)
# Experts that are stacked: the columns of up after those of gate (Llama 4), or both in turns (gpt-oss).
_IN_HALVES, _IN_TURNS = "in halves", "in turns"


class _Fusion(NamedTuple):
    """A stored tensor of a layer, without `.weight` or `.bias`, and the parameters whose rows follow each other in it,
    or, `in_turns`, in each of the groups of the layer's recurrence."""

    name: str
    parameters: tuple[str, ...]
    in_turns: bool = False


class _TypeLayout(NamedTuple):
    """Of a type of models: the words of our names, one or several, that are others, of which the longest counts; stored
    tensors that hold several parameters; what gate (if there is one), up and down of an expert are called. Without such
    names those of all experts are stacked as they are here; a text: and transposed, the columns of gate and up in
    halves or in turns."""

    words: Mapping[str, str] = MappingProxyType({})
    fusions: tuple[_Fusion, ...] = ()
    experts: tuple[str, ...] | str = ("gate_proj", "up_proj", "down_proj")


def _of_recurrence(names: str) -> tuple[str, ...]:
    return tuple(f"recurrent.{name}" for name in names.split())


_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_AROUND = {**_AFTER, "post_attention_layernorm": "pre_feedforward_layernorm"}
_MAMBA = _of_recurrence("z_in v_in k_in q_in step_in"), _of_recurrence("v_conv k_conv q_conv")
_BAMBA = _Fusion("mamba.in_proj", _MAMBA[0]), _Fusion("mamba.conv1d", _MAMBA[1])
_SHARED_MLP = {"mlp": "shared_mlp", "mlp.shared_experts": "shared_mlp", "down_proj": "output_linear"}
_GRANITE_WORDS = {
    **_SHARED_MLP,
    "mlp.gate": "block_sparse_moe.router.layer",
    INWARD: "block_sparse_moe.input_linear.weight",
    OUTWARD: "block_sparse_moe.output_linear.weight",
}
_GRANITE_FUSIONS = tuple(
    _Fusion("shared_mlp.input_linear", (f"{name}.gate_proj", f"{name}.up_proj")) for name in (MLP, SHARED)
)
_GRANITE = _TypeLayout(_GRANITE_WORDS, _GRANITE_FUSIONS, experts=())
_LAYOUTS: Mapping[str, _TypeLayout] = {
    "gemma2": _TypeLayout(_AROUND),
    "gemma3_text": _TypeLayout(_AROUND),
    "olmo2": _TypeLayout(_AFTER),
    "olmo3": _TypeLayout(_AFTER),
    "mixtral": _TypeLayout({"mlp": "block_sparse_moe"}, experts=("w1", "w3", "w2")),
    "qwen2_moe": _TypeLayout({"shared_experts": "shared_expert"}),
    "gpt_oss": _TypeLayout({"gate": "router"}, experts=_IN_TURNS),
    "exaone4": _TypeLayout(_AFTER),
    "hyperclovax": _TypeLayout({"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"}),
    "flex_olmo": _TypeLayout(_AFTER),
    "vaultgemma": _TypeLayout({"post_attention_layernorm": "pre_feedforward_layernorm"}),
    "llama4_text": _TypeLayout(
        {"mlp": "feed_forward", "gate": "router", "shared_experts": "shared_expert"}, experts=_IN_HALVES
    ),
    "bamba": _TypeLayout(
        {
            "recurrent": "mamba",
            "mlp": "feed_forward",
            "post_attention_layernorm": "pre_ff_layernorm",
            FINAL_NORM: "model.final_layernorm.weight",
        },
        _BAMBA,
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoe_swa": _GRANITE._replace(
        words={
            **_SHARED_MLP,
            "mlp.gate": "block_sparse_moe.router",
            INWARD: "block_sparse_moe.experts.gate_up_proj",
            OUTWARD: "block_sparse_moe.experts.down_proj",
        }
    ),
    "granitemoehybrid": _GRANITE._replace(
        words={**_GRANITE_WORDS, "recurrent": "mamba"}, fusions=(*_BAMBA, *_GRANITE_FUSIONS)
    ),
    "nemotron_h": _TypeLayout(
        {
            **dict.fromkeys(("self_attn", "mlp", "recurrent"), "mixer"),
            "model": "backbone",
            "input_layernorm": "norm",
            EMBEDDING: "backbone.embeddings.weight",
            FINAL_NORM: "backbone.norm_f.weight",
        },
        (_Fusion("mixer.in_proj", _MAMBA[0]), _Fusion("mixer.conv1d", _MAMBA[1])),
        ("up_proj", "down_proj"),
    ),
    "qwen3_next": _TypeLayout(
        {"recurrent": "linear_attn", "shared_experts": "shared_expert"},
        (
            _Fusion("linear_attn.in_proj_qkvz", _of_recurrence("q_in k_in v_in z_in"), in_turns=True),
            _Fusion("linear_attn.in_proj_ba", _of_recurrence("write_in step_in"), in_turns=True),
            _Fusion("linear_attn.conv1d", _of_recurrence("q_conv k_conv v_conv")),
        ),
    ),
}
"""Of the types that differ from Llama."""
_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "iquestcoder": "LlamaForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}


def class_name(model_type: str) -> str:
    """The class of transformers that loads a type."""
    return _CLASSES.get(model_type) or f"{''.join(map(str.capitalize, model_type.split('_')))}ForCausalLM"


class StoredPiece(NamedTuple):
    """What of a parameter the stored tensor `name` of `shape` holds: its elements at `within` (all of them without),
    which are the `columns` of the tensor, perhaps transposed, and the `rows` of each of `turns` equal runs of rows."""

    name: str
    shape: tuple[int, ...]
    within: tuple[int | slice, ...] = ()
    columns: slice = _ALL
    is_transposed: bool = False
    rows: slice = _ALL
    turns: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the parameter."""
        return self == StoredPiece(self.name, self.shape)

    def of_stored(self, values: Tensor) -> Tensor:
        """The piece in the tensor, or in some experts of it: a view [turns, rows, ...]."""
        values = values[..., self.columns]
        return self._by_turn(values.mT if self.is_transposed else values)[:, self.rows]

    def of_parameter(self, values: Tensor, first: int = 0) -> Tensor:
        """The piece in the parameter, or in a part of it that begins with the expert `first`: likewise."""
        match self.within:
            case (int(expert), *others):
                return self._by_turn(values[expert - first, *others])
            case within:
                return self._by_turn(values[within])

    def _by_turn(self, values: Tensor) -> Tensor:
        return values.view(self.turns, len(values) // self.turns, *values.shape[1:])


class FileLayout:
    """Where each parameter of a model is in Hugging Face's files."""

    def __init__(self, model: ModelSpec) -> None:
        self._of_type = _LAYOUTS.get(execution_of(model).type, _TypeLayout())
        words = sorted(map(re.escape, self._of_type.words), key=len, reverse=True)
        self._words = re.compile(rf"\b(?:{'|'.join(words) or '(?!)'})\b")
        parts = {part.name: part for part in whole_parts(model)}
        pieces = {name: self._pieces_of(part) for name, part in parts.items()}
        for layer, kind in enumerate(layer_kinds(model)):
            groups = next((part.groups for part in kind.mixers if isinstance(part, Recurrent)), 1)
            for name, parameters, in_turns in self._of_type.fusions:
                for ending in (".weight", ".bias"):
                    names = [f"{layer_prefix(layer)}{parameter}{ending}" for parameter in parameters]
                    if names[0] in parts:
                        shapes, turns = [parts[name].shape for name in names], groups if in_turns else 1
                        stored = self._name(f"{layer_prefix(layer)}{name}{ending}")
                        shape, end = (sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0
                        for parameter, (count, *_) in zip(names, shapes, strict=True):
                            first, end = end, end + count // turns
                            pieces[parameter] = [StoredPiece(stored, shape, rows=slice(first, end), turns=turns)]
        self._pieces = pieces

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The stored tensors by name, in the order of our parameters."""
        return {piece.name: piece.shape for pieces in self._pieces.values() for piece in pieces}

    def name_of(self, parameter: str) -> str:
        """The name of the stored tensor that holds a parameter, or the first of several."""
        return self._pieces[parameter][0].name

    def read(self, part: ParameterPart, read: Callable[[str, tuple[slice, ...]], Tensor]) -> Tensor:
        """The values of a part [part.local_shape], where `read` gives a stored tensor, cut in its first dimensions."""
        pieces, cut = self._pieces[part.name], part.cut
        first = pieces[0]
        if first.is_whole:
            return read(first.name, cut)
        if not first.within:
            return first.of_stored(read(first.name, (_ALL,))).reshape(part.shape)[cut]
        values: Tensor | None = None
        for piece in pieces:
            experts = piece.within[0]
            if isinstance(experts, int) and not part.start <= experts < part.end:
                continue
            piece_values = piece.of_stored(read(piece.name, (_ALL,) if isinstance(experts, int) else cut))
            values = torch.empty(part.local_shape, dtype=piece_values.dtype) if values is None else values
            piece.of_parameter(values, part.start).copy_(piece_values)
        return torch.empty(part.local_shape) if values is None else values

    def stored_tensors(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors by name, each once all that it holds has come of the whole parameters."""
        coming, missing = dict[str, Tensor](), dict[str, int]()
        for parameter, values in parameters:
            for piece in self._pieces[parameter]:
                name = piece.name
                if piece.is_whole:
                    yield name, values
                    continue
                if name not in coming:
                    coming[name], missing[name] = values.new_empty(piece.shape), prod(piece.shape)
                place = piece.of_stored(coming[name])
                place.copy_(piece.of_parameter(values))
                missing[name] -= place.numel()
                if not missing[name]:
                    yield name, coming.pop(name)

    def _name(self, name: str) -> str:
        words = self._of_type.words
        return self._words.sub(lambda match: words[match[0]], name)

    def _pieces_of(self, part: ParameterPart) -> list[StoredPiece]:
        """Those of a parameter that is stored by itself."""
        name, experts = self._name(part.name), self._of_type.experts
        kind, is_bias = part.name.removesuffix("_bias"), part.name.endswith("_bias")
        if not kind.endswith((INWARD, OUTWARD)) or experts == ():
            return [StoredPiece(name, part.shape)]
        (count, rows, *columns), is_inward = part.shape, kind.endswith(INWARD)
        is_stacked = isinstance(experts, str)
        is_fused = is_inward and (is_stacked or len(experts) == 3)
        halves = [slice(0, rows // 2), slice(rows // 2, rows)] if is_fused else [_ALL]
        if is_stacked:
            turns = [slice(0, None, 2), slice(1, None, 2)] if is_fused and experts == _IN_TURNS else halves
            shape = count, *columns, rows
            return [
                StoredPiece(name, shape, (_ALL, half), turn, not is_bias)
                for half, turn in zip(halves, turns, strict=True)
            ]
        layer, ending = name.rpartition(".")[0], "bias" if is_bias else "weight"
        return [
            StoredPiece(f"{layer}.{expert}.{matrix}.{ending}", (rows // len(halves), *columns), (expert, half))
            for expert in range(count)
            for matrix, half in zip(experts[:-1] if is_inward else experts[-1:], halves, strict=True)
        ]
