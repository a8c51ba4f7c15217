"""Measured over predicted values of validated runs, by kind: the rows of `hexiopt/numbers/errors.yaml`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.validation.memory import process_ratios
from experiments.validation.metrics import step_time_s
from experiments.validation.predict import Case
from experiments.validation.score import group_by
from hexiopt.cost.cost import Cost
from hexiopt.files.plan_file import write_text
from hexiopt.numbers.errors import LEAST, MANY_TOKENS, Evidence
from hexiopt.reading import Section, read_mapping
from hexiopt.report.evidence import kind_of

_HEAD = f"""# Measured over predicted values of published runs: the intervals of hexiopt fit. Written by
#   hexiopt validate data=FILE validate.errors=hexiopt/numbers/errors.yaml
# with each FILE below. Kinds are told by what is trained, and whether micro-batches have {MANY_TOKENS:,} tokens.
"""


def write_errors(path: Path, data: Path, priced: Sequence[tuple[Case, Cost]]) -> None:
    """Replace the rows of the runs in `data` in the file `path`: one of each kind of `LEAST` runs or more.

    Raises InputError where the file is not one of such rows.
    """
    name = data.as_posix()
    old = Section(read_mapping(path), str(path)).items("kinds") if path.exists() else []
    rows = [row for row in old if row["data"] != name]
    for (kind, many), pairs in group_by(priced, _key).items():
        if kind is not None and len(pairs) >= LEAST:
            rows.append(_row(kind, many, name, pairs))
    rows.sort(key=lambda row: (row["kind"], not row["many_tokens"], row["data"]))
    write_text(path, _HEAD + yaml.safe_dump({"kinds": rows}, sort_keys=False, width=120, default_flow_style=None))


def held_out_lines(priced: Sequence[tuple[Case, Cost]]) -> Iterator[str]:
    """How many runs of each kind lie in the interval of speeds that the others give, a line each: those of other
    sources, or of other models where all are of one source. Where fewer than `LEAST` are left, it is their range."""
    for (kind, many), pairs in group_by(priced, _key).items():
        for what, name in _HELD_OUT.items():
            groups = [[_speed(pair) for pair in group] for group in group_by(pairs, name).values()]
            if kind is not None and len(groups) > 1:
                within = sum(_within(kind, many, groups, k) for k in range(len(groups)))
                tokens = f"{'at least' if many else 'fewer than'} {MANY_TOKENS:,} tokens"
                yield f"{kind}, {tokens}: {within} of {len(pairs)} runs within the interval of runs of other {what}"
                break


_HELD_OUT: dict[str, Callable[[tuple[Case, Cost]], str]] = {
    "sources": lambda pair: pair[0].row.source,
    "models": lambda pair: pair[0].row.model_name,
}


def _within(kind: str, many: bool, groups: Sequence[Sequence[float]], held: int) -> int:
    """The number of runs of a group within the interval of the other groups."""
    others = sorted(speed for k, group in enumerate(groups) if k != held for speed in group)
    known = len(others) >= LEAST
    low, high = Evidence(kind, many, "", (), tuple(others), ()).interval if known else (others[0], others[-1])
    return sum(low <= speed <= high for speed in groups[held])


def _speed(pair: tuple[Case, Cost]) -> float:
    """Measured over predicted."""
    case, cost = pair
    return round(cost.step_time_s / step_time_s(case), 3)


def _key(pair: tuple[Case, Cost]) -> tuple[str | None, bool]:
    case, _ = pair
    tokens = case.problem.workload.seq_len * case.plan.pipelines[0].micro_batch_size
    return kind_of(case.problem), tokens >= MANY_TOKENS


def _row(kind: str, many: bool, data: str, pairs: Sequence[tuple[Case, Cost]]) -> dict[str, Any]:
    speed = sorted(map(_speed, pairs))
    memory = sorted(round(1.0 / ratio, 3) for case, cost in pairs for ratio in process_ratios(case, cost))
    gpus = sorted({gpu.name for case, _ in pairs for gpu in case.problem.cluster.types})
    return {"kind": kind, "many_tokens": many, "data": data, "gpus": gpus, "speed": speed, "memory": memory}
