"""What each layer of a `config.json` does: how it mixes tokens, and whether it has experts."""

from collections.abc import Iterable, Sequence
from typing import Any

from hexiopt.checks import is_whole
from hexiopt.errors import InputError
from hexiopt.files.models.facts import Mixers, Placement
from hexiopt.problem.architectures import RANGES
from hexiopt.reading import Section

FULL, WINDOW, RECURRENT, BOTH = "full", "window", "recurrent", "both"
"""How a layer mixes tokens; BOTH is a recurrence beside full attention."""
DENSE, EXPERTS = "dense", "experts"
"""How a layer mixes channels; in models whose layers are single parts, also what a layer does instead of the above."""

_WORDS = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": WINDOW,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "hybrid": BOTH,
    "mlp": DENSE,
    "moe": EXPERTS,
}
_LETTERS = {"M": RECURRENT, "*": FULL, "-": DENSE, "E": EXPERTS}  # of NVIDIA's `hybrid_override_pattern`
_MOST_LAYERS = RANGES["num_layers"][1]


def mixing(section: Section, mixers: Mixers | None, num_layers: int | None) -> list[str]:
    """What each layer does, as words of this module; `num_layers` None: as many as a list names.

    Raises InputError for a word that layers of this type cannot have, and for a list of another length.
    """
    _see(section, () if mixers is None else mixers.names)
    known = {FULL} if mixers is None else {FULL, mixers.others}
    if mixers is not None and mixers.blocks:
        known |= {DENSE, EXPERTS}
    for name in ("layer_types",) if mixers is None else mixers.lists:
        words = _of_length(section, name, _words_under(section, name, known), num_layers)
        if words and mixers is not None and mixers.chunked and words != _by_rule(section, mixers, num_layers or 0):
            section.fail(name, "has chunks in other layers than rotary positions; state both for the same layers")
        if words:
            return [*words[:-1], FULL] if mixers is not None and mixers.last_is_full else words
    if num_layers is None:
        assert mixers is not None, "only lists give the number of layers"
        section.refuse_missing(mixers.lists[0])
    return [FULL] * num_layers if mixers is None else _by_rule(section, mixers, num_layers)


def _see(section: Section, names: Iterable[str]) -> None:
    """Count keys as read that others override."""
    for name in names:
        section.raw(name, None)


def blocks(section: Section, names: tuple[str, ...], default: list[str]) -> list[str]:
    """The parts under the first of `names` that the file has, by words or letters, as words of this module."""
    for name in names:
        words = _words_under(section, name, set(_LETTERS.values()))
        if words:
            return words
    return default


def _words_under(section: Section, name: str, known: set[str]) -> list[str]:
    """The words of a list, or of letters; empty where the key is absent or null. Raises InputError for unknown ones."""
    value = section.raw(name, None)
    if value is None:
        return []
    if isinstance(value, str):
        if not value or any(_LETTERS.get(letter) not in known for letter in value):
            section.fail(name, f"is not a pattern of {', '.join(_LETTERS)}; write one letter for each layer")
        return [_LETTERS[letter] for letter in value]
    possible = [word for word, meaning in _WORDS.items() if meaning in known]
    rule = f"is not modelled in this type; known: {', '.join(possible)}"
    return [_WORDS[word] for word in section.valid_items(name, lambda word: word in possible, rule)]


def _of_length(section: Section, name: str, words: list[Any], num_layers: int | None) -> list[Any]:
    if words and num_layers is not None and len(words) != num_layers:
        raise InputError(f"{section.at(name)}: {len(words)} entries for {num_layers} layers; state each")
    return words


def _by_rule(section: Section, mixers: Mixers, num_layers: int) -> list[str]:
    """What layers do where no list says it."""
    if mixers.switch is not None and not is_on(section, mixers.switch):
        return [FULL] * num_layers
    full = _full_layers(section, mixers, num_layers) | ({num_layers - 1} if mixers.last_is_full else set())
    return [FULL if (layer in full) is not mixers.inverse else mixers.others for layer in range(num_layers)]


def is_on(section: Section, switch: str) -> bool:
    """Whether a switch is on; it is off where it is absent. Raises InputError."""
    if switch in section and section.raw(switch, None) is None:
        section.fail(switch, "is not true or false; write one of them")
    return bool(section.flag(switch, False))


def _full_layers(section: Section, mixers: Mixers, num_layers: int) -> set[int]:
    """The layers that attend fully, as stated by keys other than lists of words."""
    if mixers.full_layers is not None:
        return set(_numbers(section, mixers.full_layers, num_layers) or ())
    if mixers.flags is not None and section.raw(mixers.flags, None):
        flags = section.valid_items(mixers.flags, lambda flag: flag in (0, 1), "is not 0 or 1; write one of them")
        return {layer for layer, flag in enumerate(_of_length(section, mixers.flags, flags, num_layers)) if not flag}
    first = 0 if mixers.from_layer is None else _layer(section, mixers.from_layer, mixers.from_default)
    end = num_layers if mixers.until_layer is None else _layer(section, mixers.until_layer, mixers.from_default)
    outside = {layer for layer in range(num_layers) if not first <= layer < end}
    period = _period(section, mixers)
    if not period:
        return outside
    last = 0 if mixers.first_is_full else period - 1
    return outside | {layer for layer in range(num_layers) if layer % period == last}


def _period(section: Section, mixers: Mixers) -> int | None:
    period = mixers.period
    for name in mixers.period_keys:
        value = section.raw(name, None)
        if isinstance(value, str) and value.endswith("G") and set(value[:-1]) == {"L"}:  # as LLLG
            value = len(value)
        if value is not None and (not is_whole(value) or value < 0):
            section.fail(name, "is not a number of layers; state one above 0")
        period = value or period
    return period


def _layer(section: Section, name: str, default: int) -> int:
    value: int | None = section.integer(name, at_least=0, at_most=_MOST_LAYERS, default=None)
    return default if value is None else value


def _numbers(section: Section, name: str | None, num_layers: int) -> list[int] | None:
    """The numbers of layers under a key; None where it is absent or null."""
    if name is None or section.raw(name, None) is None:
        return None
    rule = f"is not the number of a layer; state one from 0 to {num_layers - 1}"
    return section.valid_items(name, lambda number: is_whole(number) and 0 <= number < num_layers, rule)


def placing(section: Section, placement: Placement, num_layers: int) -> list[str]:
    """EXPERTS or DENSE for each layer. Raises InputError where a key does not fit the number of layers."""
    _see(section, placement.names)
    if placement.switch is not None and not is_on(section, placement.switch):
        return [DENSE] * num_layers
    if placement.words is not None and section.raw(placement.words, None):
        words = section.valid_items(
            placement.words, lambda word: word in ("dense", "sparse"), "is not known; write dense or sparse"
        )
        words = _of_length(section, placement.words, words, num_layers)
        return [EXPERTS if word == "sparse" else DENSE for word in words]
    numbers = _numbers(section, placement.sparse_layers, num_layers)
    sparse = _sparse_by_rule(section, placement, num_layers) if numbers is None else numbers
    without = _numbers(section, placement.dense_layers, num_layers) or ()
    return [EXPERTS if layer in sparse and layer not in without else DENSE for layer in range(num_layers)]


def _sparse_by_rule(section: Section, placement: Placement, num_layers: int) -> Sequence[int]:
    first, end, step = placement.first_default, num_layers, 1
    if placement.first is not None:
        first = _layer(section, placement.first, first)
    if placement.last is not None:
        last = section.integer(placement.last, at_least=-1, at_most=_MOST_LAYERS, default=None)
        end = num_layers if last in (None, -1) else last + 1
    if placement.step is not None:
        step = section.integer(placement.step, at_least=1, at_most=_MOST_LAYERS, default=None) or 1
    return [layer for layer in range(first, min(end, num_layers)) if (layer + 1) % step == 0]


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
