"""How much of what ranks exchange is hidden behind what they compute: from a trace of Chrome's format."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spans = Sequence[tuple[float, float]]  # (begin, end)


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds in which a rank exchanged with others, and those of them in which it also computed."""

    total_s: float = 0.0
    hidden_s: float = 0.0


def exchange_in(path: Path) -> ExchangeTime:
    """Of a rank's compressed trace. On a GPU exchanges are NCCL's kernels, and other kernels compute; on a CPU gloo's
    annotations and torch's operators."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    exchanges = [event for event in kernels if event["name"].startswith("nccl")]
    computing = [event for event in kernels if not event["name"].startswith("nccl")]
    if not kernels:
        exchanges = [event for event in events if event["name"].startswith("gloo:")]
        threads = {event["tid"] for event in exchanges}
        computing = [e for e in events if e["name"].startswith("aten::") and e["tid"] not in threads]
    spans, busy = _spans(exchanges), _spans(computing)
    return ExchangeTime(1e-6 * _length(spans), 1e-6 * _length(_common(spans, busy)))


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    """The union of the events' spans, in order, in µs."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _common(a: Spans, b: Spans) -> Spans:
    """What two unions have in common."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
