"""Generates the reference of the Python API, two pages of `docs/`, from docstrings, and the table of baselines from
their published spaces: `python -m tests.api_reference`.

`tests/hexiopt/study/test_reference.py` checks that the pages are current and that every public name is described.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hexiopt
from hexiopt import plot, testing
from solvers.registry import names
from tests.solvers.baselines.published_space import markdown_table
from tests.solvers.baselines.published_spaces import SPACES

DOCS = Path(__file__).parent.parent / "docs"
CALLS, OBJECTS = DOCS / "api.md", DOCS / "api_objects.md"
HEADS = {
    CALLS: """# Reference

`make reference` generates this page from docstrings; [another](api_objects.md) has the objects that functions return,
plots and contracts, and [a third](python.md) examples. All seconds are of one training step, except where a name says
otherwise. Bad input raises `hexiopt.InputError`, a `ValueError` with a one-line message.
""",
    OBJECTS: """# Reference of results and plots

What the functions of the [reference](api.md) return, what draws it, and what judges a stranger's solver; `make
reference` generates this page from docstrings.
""",
}
# In the order in which one meets them; a test sees that none is missing.
PARTS = {
    "State a problem": ("cluster", "model", "Cluster", "ModelSpec", "Workload", "Lora", "Space", "Problem"),
    "Find and judge a plan": (
        "solve",
        "solver",
        "solvers",
        "load_plan",
        "load_problem",
        "price",
        "check",
        "lower_bound",
    ),
    "Compare and sweep": ("compare", "sweep", "read_sweep", "read_training"),
    "Ask before buying or when the cluster changes": ("verdict", "fit", "what_if", "replan"),
    "Other systems": ("export", "import_plan"),
}
RESULTS = {
    "Plans and their prices": ("Solution", "PlacedPlan", "PlanCost", "Plan"),
    "Tables": ("Frame", "Comparison", "Sweep", "SolverCatalogue", "SolverInfo"),
    "Answers": ("Verdict", "Fit", "WhatIf", "Replanning", "Replacement", "TrainedRun", "Exported", "InputError"),
}


def pages() -> dict[Path, str]:
    """Both pages."""
    objects = [HEADS[OBJECTS], *_sections(RESULTS)]
    calls = [HEADS[CALLS], *_sections(PARTS)]
    for title, module in (("Plots", plot), ("Contracts", testing)):
        objects += [f"## {title}: `{module.__name__}`\n", f"{_doc(module)}\n"]
        for name in module.__all__:
            objects += _entry(f"{module.__name__}.{name}", getattr(module, name))
    return {page: "\n".join(lines).rstrip() + "\n" for page, lines in ((CALLS, calls), (OBJECTS, objects))}


def _sections(parts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for title, entries in parts.items():
        yield f"## {title}\n"
        for name in entries:
            yield from _entry(f"hexiopt.{name}", getattr(hexiopt, name))


def members(made: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of ours states or inherits from ours, in the order of the code."""
    seen = set[str]()
    for kind in made.__mro__:
        if not kind.__module__.startswith("hexiopt"):
            continue
        for name, member in vars(kind).items():
            if name.startswith("_") or name in seen:
                continue
            is_method = isinstance(member, FunctionType | classmethod | property) or hasattr(member, "attrname")
            if is_method:
                seen.add(name)
                yield name, member


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if not isinstance(value, type):
        yield f"```python\n{_signature(name.rpartition('.')[2], value)}\n```\n"
    elif is_dataclass(value):
        yield f"```python\n{_signature(value.__name__, value)}\n```\n"
    yield f"{_doc(value)}\n"
    if isinstance(value, type):
        bullets = [f"- {_member(member_name, member)}" for member_name, member in members(value)]
        if bullets:
            yield "\n".join(bullets) + "\n"


def _member(name: str, member: Any) -> str:
    function = getattr(member, "__func__", None) or getattr(member, "fget", None) or getattr(member, "func", member)
    called = "" if function is not member and not isinstance(member, classmethod) else "(...)"
    summary = " ".join(_doc(function).partition("\n\n")[0].split())
    return f"`{name}{called}`: {summary[:1].lower() + summary[1:] if summary[1:2].islower() else summary}"


def _signature(name: str, value: Any) -> str:
    """With types as they are written in the code, one parameter a line where it is long."""
    signature = inspect.signature(value)
    parameters = [str(parameter) for parameter in signature.parameters.values() if parameter.name != "self"]
    kinds = [parameter.kind for parameter in signature.parameters.values() if parameter.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    back = signature.return_annotation
    arrow = "" if back is inspect.Signature.empty or isinstance(value, type) else f" -> {_annotation_text(back)}"
    parameters, arrow = list(map(_short, parameters)), _short(arrow)
    text = f"{name}({', '.join(parameters)}){arrow}"
    return text if len(text) <= 100 else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){arrow}"


def _short(text: str) -> str:
    """Names without their modules."""
    text = text.replace("<factory>", "...").replace("'Axes | None'", "Axes | None")
    return re.sub(r"\b(?:hexiopt|collections|pathlib|typing|matplotlib)(?:\.\w+)*\.(\w+)", r"\1", text)


def _annotation_text(annotation: Any) -> str:
    return inspect.formatannotation(annotation).strip("'")


def _doc(value: ModuleType | type | Any) -> str:
    return (inspect.getdoc(value) or "").strip()


BASELINES = DOCS / "baselines.md"


def baselines_page() -> str:
    """The page on baselines, its table written from their spaces."""
    spaces = {name: SPACES[name] for name in names(lambda able: able.kind == "baseline")}
    lines = BASELINES.read_text(encoding="utf-8").splitlines()
    row_numbers = [k for k, line in enumerate(lines) if line.startswith("| ")]
    table = markdown_table(spaces).splitlines()
    return "\n".join([*lines[: row_numbers[0]], *table, *lines[row_numbers[-1] + 1 :]]) + "\n"


if __name__ == "__main__":
    for path, text in {**pages(), BASELINES: baselines_page()}.items():
        path.write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)
