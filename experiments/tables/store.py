"""What searches have measured, a file each, so that tables share them and an interrupted run goes on.

A record holds for the inputs of its search and for the code that the solver is made of: the syntax trees, without
docstrings, of all modules that it imports.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hexiopt
from experiments.tables.task import BOUND, Outcome, Task
from hexiopt.errors import InputError
from hexiopt.readers.plan_file import write_text
from solvers.registry import solver_class

_ROOT = Path(hexiopt.__file__).parent.parent
_FOLDERS = ("hexiopt", "solvers")


class Store:
    """Records in a folder. `any_code` takes those of other versions of the code, too."""

    def __init__(self, folder: Path, *, any_code: bool = False) -> None:
        """Raises InputError where the folder cannot be made."""
        self.folder, self._any_code = folder, any_code
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from None

    def plan_path(self, task: Task) -> Path:
        """Where the plan of a search stands."""
        return self.folder / f"{task.sha256[:16]}.plan.json"

    def load(self, task: Task) -> Outcome | None:
        """What was measured; None if nothing, or by other code."""
        try:
            data = json.loads(self._path(task).read_text(encoding="utf-8"))
            if data["task"] != task.sha256 or (data["code"] != code_sha256(task.solver) and not self._any_code):
                return None
            return Outcome.from_dict(data["outcome"])
        except (OSError, ValueError, KeyError, TypeError):  # not there, or from another version of this program
            return None

    def save(self, task: Task, outcome: Outcome) -> None:
        """Keep what was measured."""
        data = {
            "task": task.sha256,
            "what": str(task),
            "time_limit_s": task.time_limit_s,
            "code": code_sha256(task.solver),
            "outcome": outcome.to_dict(),
        }
        write_text(self._path(task), json.dumps(data, indent=1, allow_nan=False) + "\n")

    def _path(self, task: Task) -> Path:
        return self.folder / f"{task.sha256[:16]}.json"


@cache
def code_sha256(solver: str) -> str:
    """SHA-256 of the code that a solver is made of."""
    digest = hashlib.sha256()
    start = "hexiopt.bounds" if solver == BOUND else solver_class(solver).__module__
    for name in sorted(_closure(start)):
        path = _path_of(name)
        assert path is not None, "only modules of ours are in the closure"
        digest.update(f"{name}\n{_code(path)}\n".encode())
    return digest.hexdigest()


def _closure(start: str) -> set[str]:
    """The modules of ours that a module imports, anywhere, directly or not."""
    found, fresh = set[str](), [start]
    while fresh:
        name = fresh.pop()
        if name not in found:
            found.add(name)
            fresh += _imported(name)
    return found


@cache
def _imported(module: str) -> tuple[str, ...]:
    path = _path_of(module)
    assert path is not None, "a module of ours has a file"
    return tuple(name for name in _names(ast.parse(path.read_bytes())) if _path_of(name) is not None)


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _path_of(module: str) -> Path | None:
    """The file of a module of ours, else None."""
    if module.partition(".")[0] not in _FOLDERS:
        return None
    base = _ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _code(path: Path) -> str:
    """The syntax tree without docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
