"""The golden files: read, compared and written."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hexiopt.files.problem_file import problem_sha256
from tests.golden import outcome

HERE = Path(__file__).parent
PRICES, PLANS, BAD_INPUT = HERE / "prices.json.gz", HERE / "plans.json", HERE / "bad_input" / "files.json"
TOLERANCE = 1e-12
Data = dict[str, Any]


def read(path: Path) -> Any:
    """The content of a golden file."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def write(path: Path, data: Any) -> None:
    """Write a golden file, the same bytes for the same content."""
    if path.suffix == ".gz":
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def problem_data(golden: Data, number: int) -> Data:
    """A problem of `prices.json.gz` in full: several share a measured profile, which stands there once."""
    data: Data = json.loads(json.dumps(golden["problems"][number]["problem"]))
    if isinstance(data["cluster"].get("profile"), int):
        data["cluster"]["profile"] = golden["profiles"][data["cluster"]["profile"]]
    return data


def prices(golden: Data, fresh: bool = False) -> Iterator[Data]:
    """The outcome of every plan now, with the hash of its problem; by models of their own if `fresh`."""
    problems = [outcome.problem_of(problem_data(golden, k)) for k in range(len(golden["problems"]))]
    models: dict[tuple[int, str], Any] = {}
    for entry in golden["plans"]:
        key = entry["problem"], entry["framework"]
        if fresh or key not in models:
            models[key] = outcome.pricer(problems[key[0]], key[1])
        plan_outcome = outcome.price(models[key], entry["plan"])
        yield {"problem_sha256": problem_sha256(problems[key[0]]), **plan_outcome}


def plans(golden: Data, solver: str, names: Iterable[str] | None = None) -> dict[str, Data]:
    """What a solver finds now for the problems of some `names`, by default for each that it has an outcome for."""
    return {
        name: outcome.solve(solver, outcome.problem_of(golden["problems"][name]), golden["max_steps"], golden["seed"])
        for name in (golden["solvers"][solver] if names is None else names)
    }


def differences(before: Any, after: Any, where: str = "", scale: float = 0.0) -> Iterator[str]:
    """Lines `where: before → after` for all that differs; numbers by more than 1e-12 of themselves or of `scale`.

    Seconds differ by more than 1e-12 of the step: small ones are differences of large ones.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        step_s = before.get("step_time_s", scale)
        for key in before | after:
            at = f"{where}.{key}" if where else key
            yield from differences(before.get(key), after.get(key), at, step_s if key.endswith("_s") else 0.0)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for k, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}[{k}]", scale)
    elif _is_number(before) and _is_number(after):
        if abs(after - before) > TOLERANCE * max(abs(before), abs(after), scale):
            yield f"{where}: {before!r} → {after!r} ({after / before - 1 if before else after:+.1e})"
    elif before != after:
        yield f"{where}: {before!r} → {after!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Bring a golden file up to date by `change`; its inputs stay."""
    golden = read(path)
    change(golden)
    write(path, golden)
