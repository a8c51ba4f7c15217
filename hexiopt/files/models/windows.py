"""Which layers of a `config.json` attend to a window only."""

from typing import Any

from hexiopt.checks import is_whole
from hexiopt.errors import InputError
from hexiopt.files.models.facts import Windows
from hexiopt.problem.model import RANGES
from hexiopt.reading import Section

_FIRST_OF_QWEN = 28  # the first layer with a window, where the file does not state it


def attention_window(
    section: Section, windows: Windows | None, window: int | None, num_layers: int, max_positions: int
) -> int | None:
    """The attention window of all layers in tokens: `window`, or None where they attend fully.

    Windows and full attention are the same where `max_positions` does not exceed the window. Raises InputError for a
    mixture of both that matters.
    """
    kinds = _layer_types(section, num_layers)
    if windows is None:
        if "sliding_attention" in kinds:
            section.fail("layer_types", "has windows, but layers of this type have full attention alone; state that")
        return None
    on = windows.switch is None or _is_on(section, windows.switch)
    full = _full_layers(section, windows, num_layers)
    full = kinds.count("full_attention") if kinds else full
    if not on or window is None or full == num_layers:
        return None
    if full and window < max_positions:
        key = "layer_types" if kinds else windows.from_layer or windows.key.names[0]
        raise InputError(
            f"{section.at(key)}: alternating windows ({num_layers - full} of {num_layers} layers attend to "
            f"{window:,} tokens, the others to all): not modelled; for sequences of at most {window} tokens, which all "
            f"layers read whole, state {windows.key.names[0]} null"
        )
    return window


def _is_on(section: Section, switch: str) -> bool:
    if switch in section and section.raw(switch, None) is None:
        section.fail(switch, "is not true or false; write one of them")
    return bool(section.flag(switch, False))


def _full_layers(section: Section, windows: Windows, num_layers: int) -> int:
    """The number of layers that attend fully, as stated by keys other than `layer_types`."""
    if windows.from_layer is not None:
        at_most = RANGES["num_layers"][1]
        first = section.integer(windows.from_layer, at_least=0, at_most=at_most, default=None)
        return min(_FIRST_OF_QWEN if first is None else int(first), num_layers)
    period = windows.period
    for name in windows.period_keys:
        value = section.raw(name, None)
        if isinstance(value, str) and value.endswith("G") and set(value[:-1]) == {"L"}:  # as LLLG
            value = len(value)
        if value is not None and (not is_whole(value) or value < 0):
            section.fail(name, "is not a number of layers; state one above 0")
        period = value or period
    if period is None:
        return 0
    return -(-num_layers // period) if windows.first_is_full else num_layers // period


def _layer_types(section: Section, num_layers: int) -> list[str]:
    """The kinds in `layer_types`; empty where the key is absent or null."""
    if section.raw("layer_types", None) is None:
        return []
    kinds_read = ("full_attention", "sliding_attention")
    kinds = section.valid_items(
        "layer_types", lambda kind: kind in kinds_read, f"is not modelled; known: {', '.join(kinds_read)}"
    )
    if len(kinds) != num_layers:
        raise InputError(f"{section.at('layer_types')}: {len(kinds)} entries for {num_layers} layers; state each")
    return [str(kind) for kind in kinds]


def gpt_neo_alternates(section: Section, num_layers: int) -> bool:
    """Whether GPT-Neo's layers are global, local, global, ... (True) or all global (False). Raises InputError."""
    kinds: list[Any] = ["global", "local"] * 12
    key, attention_types = "attention_layers", section.raw("attention_types", None)
    if section.raw(key, None) is not None:
        kinds = section.items(key)
    elif attention_types is not None:
        key = "attention_types"
        kinds = []
        for item in section.items(key):
            if not _is_repeat(item):
                section.fail(key, 'is not a list of [["global", "local"], repeats]; write it so')
            kinds += list(item[0]) * item[1]
            if len(kinds) > num_layers:
                break
    if kinds == (["global", "local"] * num_layers)[:num_layers]:
        return num_layers > 1
    if kinds == ["global"] * num_layers:
        return False
    raise InputError(
        f"{section.at(key)}: must give {num_layers} layers, all global or alternately global and local; no other order "
        "is modelled"
    )


def _is_repeat(item: Any) -> bool:
    """Whether `item` is GPT-Neo's [[kinds], repeats] and has no more layers than a model may have."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    kinds, repeats = item
    if not isinstance(kinds, list | tuple) or not kinds or not is_whole(repeats):
        return False
    return bool(0 < len(kinds) * repeats <= RANGES["num_layers"][1])
