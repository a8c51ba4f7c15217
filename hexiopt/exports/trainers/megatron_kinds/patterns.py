"""Patterns over layers: Megatron-LM's lists of ones and zeros, as `([0]*3+[1]*58)`, and its letters of hybrid models.

A list is an expression of lists of whole numbers, sums and multiples (`moe_freq_type` of
`megatron/training/arguments.py`). In `--hybrid-layer-pattern` a letter is a block of one part, `|` ends a virtual
stage, and behind each `/` stand the blocks of a layer that predicts a further token
(`megatron/core/models/hybrid/hybrid_layer_allocation.py`).
"""

import ast
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NoReturn

from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Mixer, Recurrent

_MOST = 10_000  # layers of a pattern
_LONGEST_PERIOD = 12

Fail = Callable[[str], NoReturn]


def pattern_text(ones: Iterable[bool]) -> str:
    """A list of ones and zeros, by its period or else by its runs."""
    values = [int(value) for value in ones]
    period = next(
        (
            n
            for n in range(2, _LONGEST_PERIOD + 1)
            if len(values) % n == 0 and len(values) > n and values == values[:n] * (len(values) // n)
        ),
        None,
    )
    if period is None or len(set(values)) == 1:
        return f"({_runs(values)})"
    return f"({_runs(values[:period])})*{len(values) // period}"


def _runs(values: Sequence[int]) -> str:
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return "+".join(f"[{value}]*{count}" if count > 1 else f"[{value}]" for value, count in runs)


def read_pattern(text: str, num_layers: int, every: Callable[[int, int], bool], fail: Fail) -> list[bool]:
    """Whether each layer is one of a pattern: a list of `num_layers` values, or a whole number n, for which `every(l,
    n)` says so of layer l. `fail` raises InputError for other texts."""
    if text.isdecimal() and 0 < int(text) <= _MOST:
        return [every(layer, int(text)) for layer in range(num_layers)]
    try:
        values = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        fail(f"{text!r} is no list such as ([0]*3+[1]*58), and no whole number; write one")
    if not isinstance(values, list) or set(values) - {0, 1}:
        fail(f"{text!r} is no list of ones and zeros; write one for every layer")
    if len(values) != num_layers:
        fail(f"{text!r} is for {len(values)} layers, the model has {num_layers}; write one number for each")
    return [bool(value) for value in values]


def _value(node: ast.expr) -> list[int] | int:
    """The value of an expression of lists, sums and multiples. Raises ValueError for any other."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            values = [_value(element) for element in elements]
            if len(values) > _MOST or not all(isinstance(value, int) for value in values):
                raise ValueError("a list of other things than numbers")
            return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= _MOST:
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= _MOST:
                return first * second
    raise ValueError("no expression of lists")


def letters_of(kind: LayerKind) -> str:
    """The blocks that a layer is in a hybrid model, each of one part."""
    return "".join(_letter(part) for part in kind.parts)


def _letter(part: Mixer | Dense | Experts) -> str:
    match part:
        case Attention():
            return "+" if part.kv_rank else "*"
        case Recurrent():
            return "G" if part.delta else "M"
        case Dense():
            return "-"
        case Experts():
            return "E"


def hybrid_text(layers: Sequence[LayerKind], extra: Sequence[LayerKind], parts: Sequence[int]) -> str:
    """The pattern of a hybrid model whose virtual stages hold `parts` layers each."""
    letters, segments, first = [letters_of(kind) for kind in layers], [], 0
    for count in parts:
        segments.append("".join(letters[first : first + count]))
        first += count
    return "/".join(["|".join(segments), *map(letters_of, extra)])


def read_hybrid(text: str, fail: Fail) -> tuple[list[str], list[str]]:
    """The blocks of each virtual stage of a pattern, and of each layer for a further token.

    `fail` raises InputError for texts that are no pattern, and for blocks that are not modelled.
    """
    main, *further = text.split("/")
    segments = main.split("|")
    known = set("M*-E+G")
    if others := set(main.replace("|", "")) - known | set("".join(further)) - known:
        fail(f"{text!r} has {min(others)!r}; blocks of M, G, *, +, - and E are modelled")
    if "" in segments:
        fail(f"{text!r} has a stage without layers, which is not modelled; give each at least one")
    if len(set(further)) > 1:
        fail(f"{text!r} predicts further tokens by other blocks than the first; make them equal")
    return segments, [blocks for blocks in further if blocks]
