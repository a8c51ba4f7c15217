"""Kinds of layers as `ModelSpec.to_dict` writes them, for models that are described by their fields."""

from dataclasses import MISSING, fields
from typing import Any

from hexiopt.checks import is_whole
from hexiopt.errors import InputError
from hexiopt.files.models.layers import LayerSequence
from hexiopt.problem.kinds import PARTS, Attention, Channels, Dense, Experts, LayerKind, Mixer, Part, Recurrent
from hexiopt.reading import Section

KEYS = ("layer_kinds", "layer_pattern", "extra_layer_kinds")


def written_layers(section: Section) -> LayerSequence:
    """The layers under `layer_kinds` (a mapping each), in the order of `layer_pattern` (a number of a kind for each
    layer), and those under `extra_layer_kinds`.

    Without `layer_kinds` there are none. Raises InputError.
    """
    if section.raw("layer_kinds", None) is None:
        for name in KEYS[1:]:
            if section.raw(name, None):
                section.fail(name, "stands beside layer_kinds; state them, or leave it out")
        return LayerSequence()
    kinds = [_kind(inner) for inner in section.sections("layer_kinds")]
    if not kinds:
        section.fail("layer_kinds", "has no kind; state one, or leave it out")
    rule = f"is not the number of a kind; state one from 0 to {len(kinds) - 1}"
    pattern = section.valid_items("layer_pattern", lambda item: is_whole(item) and 0 <= item < len(kinds), rule)
    if not pattern:
        section.fail("layer_pattern", "has no layer; state the number of a kind for each")
    extra = section.sections("extra_layer_kinds", optional=True)
    return LayerSequence(tuple(kinds[number] for number in pattern), tuple(map(_kind, extra)))


def _kind(section: Section) -> LayerKind:
    parts = [_part(inner) for inner in section.sections("parts")]
    norms = section.integer("norms", at_least=1, at_most=8, default=2)
    section.finish()
    mixers: list[Mixer] = [part for part in parts if isinstance(part, Attention | Recurrent)]
    channels: list[Channels] = [part for part in parts if isinstance(part, Dense | Experts)]
    with section.building():
        return LayerKind(tuple(mixers), tuple(channels), norms)


def _part(section: Section) -> Part:
    kind = PARTS[section.text("part", choices=PARTS)]
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in section:
            values[field.name] = section.raw(field.name, None)
            if values[field.name] is None and field.default is not None:
                raise InputError(f"{section.at(field.name)}: is null; state a value, or leave the key out")
        elif field.default is MISSING:
            section.refuse_missing(field.name)
    section.finish()
    with section.building():
        return kind(**values)
