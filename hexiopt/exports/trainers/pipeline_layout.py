"""Megatron-Core's `--pipeline-model-parallel-layout`: E embedding, t decoder layer, m layer that predicts a further
token, L loss, stages divided by |.

`x*N` and `(...)*N` repeat, commas are ignored (`megatron/core/transformer/pipeline_parallel_layer_layout.py`).
"""

import re
from collections.abc import Sequence

from hexiopt.errors import InputError

_MOST = 100_000  # characters of an expanded layout


def layout_text(parts: Sequence[int], further: int = 0) -> str:
    """The layout of virtual stages that hold `parts` layers each, in the order of the model, the last one also
    `further` layers that predict further tokens."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in parts]
    return f"E{'|'.join(stages)}{'m' * further}L"


def read_layout(text: str, where: str, further: int = 0) -> list[int]:
    """The number of layers of each virtual stage, of which the last also holds `further` ones for further tokens.

    Raises InputError for no layout, for a stage without a layer, and for other layers for further tokens.
    """
    stages = _expand(text.replace(",", "").replace(" ", ""), where).split("|")
    whole = "".join(stages)
    if set(whole) - set("EtLm"):
        raise InputError(
            f"{where}: {text!r} has {min(set(whole) - set('EtLm'))!r}; a layout is made of E, t, m, L and |"
        )
    if not whole.startswith("E") or not whole.endswith("L") or whole.count("E") != 1 or whole.count("L") != 1:
        raise InputError(f"{where}: {text!r} must begin with its one E and end with its one L")
    counts = [stage.count("t") for stage in stages]
    if 0 in counts:
        what = f"{where}: {text!r} has no decoder layer in part {counts.index(0)}"
        raise InputError(f"{what}; stages without layers are not modelled, so give each at least one")
    if not stages[-1].endswith(f"t{'m' * further}L") or whole.count("m") != further:
        what = f"{where}: {text!r} has {whole.count('m')} m, for {further} layers that predict further tokens"
        raise InputError(f"{what}; put as many before L, behind the last t")
    return counts


def _expand(text: str, where: str) -> str:
    """`text` without repeats."""
    inner = re.compile(r"\(([^()]*)\)(?:\*(\d{1,4}))?")
    while match := inner.search(text):
        text = text[: match.start()] + _repeat(match[1]) * int(match[2] or 1) + text[match.end() :]
        if len(text) > _MOST:
            raise InputError(f"{where}: the layout is longer than {_MOST} parts; shorten it")
    return _repeat(text)


def _repeat(text: str) -> str:
    return re.sub(r"(.)\*(\d{1,4})", lambda match: match[1] * int(match[2]), text)
