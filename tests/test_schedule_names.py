"""Which files name a schedule: what others need to know of one, they ask it."""

import ast
from pathlib import Path

from hexiopt.schedules.registry import SCHEDULES, SPLIT_SCHEDULES

EVERY = (*SCHEDULES, *SPLIT_SCHEDULES)
ROOT = Path(__file__).parent.parent
CONSTANTS = {"GPIPE", "ONE_F_ONE_B", "INTERLEAVED", *(type(schedule).__name__ for schedule in EVERY)}
# Lines that name one, by part: may only shrink. Proofs say which they cover, the compiled cost model which it
# simulates, baselines which a published system runs.
MOST = {"hexiopt": 12, "solvers": 5, "solvers/baselines": 5}
NAMING_SOLVERS = {"proof", "baselines", "compiled"}


def lines_of(path: Path) -> set[int]:
    """The lines of a file whose code names a schedule: its constant, its class, or its name in files."""
    lines = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CONSTANTS:
                lines.add(node.lineno)
            case ast.Constant(value=str(text)) if text in {schedule.name for schedule in EVERY}:
                lines.add(node.lineno)
    return lines


def test_schedules_are_asked_not_named() -> None:
    counts = dict.fromkeys(MOST, 0)
    for path in (*(ROOT / "hexiopt").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")):
        part = path.relative_to(ROOT).parts
        count = len(lines_of(path))
        if count and part[:2] != ("hexiopt", "schedules"):
            assert part[0] == "hexiopt" or part[1] in NAMING_SOLVERS, f"{path}: ask the schedule"
            counts["/".join(part[:2]) if part[1] == "baselines" else part[0]] += count
    assert counts == MOST
