"""What the contracts of imports in pyproject.toml (`lint-imports`) cannot say: which packages laws import, where tests
stand, that names are unique, and that the front door leads everywhere."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from experiments.app.verbs import VERBS as COMMANDS
from experiments.app.verbs import module_of

ROOT = Path(__file__).parent.parent
FOLDERS = ("hexiopt", "solvers", "runtime", "conf", "experiments")
LAW_PACKAGES = {"numpy", "scipy", "yaml"}
FURTHER = {
    **{path: {"numba"} for path in ("hexiopt/bounds/box_stages.py", "hexiopt/bounds/kernel.py")},
    "hexiopt/cost/clock/events.py": {"numba"},
    "hexiopt/frame.py": {"pandas"},
    "hexiopt/files/hub.py": {"huggingface_hub"},
    "hexiopt/exports/shell/scripts.py": {"tree_sitter", "tree_sitter_bash"},
}
REPORT_PACKAGES = LAW_PACKAGES | {"rich", "matplotlib", "jinja2"}
FRONT = ("report", "study", "plot", "testing")  # what people see


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names.append(node.module or "")
            names += (f"{node.module}.{name.name}" for name in node.names)
    return tuple(names)


@cache
def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_laws_import_only_numpy_scipy_and_yaml() -> None:
    """And numba, where a recursion is compiled, and pandas, where a table becomes one of its own."""
    for path in files("hexiopt"):
        further = FURTHER.get(path.relative_to(ROOT).as_posix(), set())
        packages = REPORT_PACKAGES if is_front(path) else LAW_PACKAGES | further
        for name in imports(path):
            top = name.partition(".")[0]
            known = top in packages or top == "hexiopt" or top in sys.stdlib_module_names
            assert known, f"{path} imports {name}"


def is_front(path: Path) -> bool:
    """Whether a file is of what people see, rather than a law."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] == "hexiopt" and parts[1] in FRONT


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_no_circle_of_imports() -> None:
    modules = {module(path): path for folder in FOLDERS for path in files(folder)}
    graph = {name: {target for target in imports(path) if target in modules} - {name} for name, path in modules.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(modules)  # a circle raises CycleError and names it


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    from solvers.registry import make_solver\n")
    assert "solvers.registry" in list(imports(path))


def test_test_files_have_names_of_their_own() -> None:
    """Outside packages, pytest imports a test file by its name alone, so that two of one name hide each other."""
    names = [path.name for path in files("tests") if path.name.startswith("test_")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", ["hexiopt", "solvers", "runtime"])
def test_tests_stand_in_folders_of_what_they_test(folder: str) -> None:
    """But `every_solver`, the contract that all of `solvers` keeps."""
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in files(f"tests/{folder}")}
    assert {path for path in folders if not (ROOT / path).is_dir()} <= {"solvers/every_solver"}


# ------------------------------------------------------------------------------ names


def test_public_class_names_are_unique() -> None:
    """A name means one thing in the whole project, so that a reader need not look at the imports."""
    where: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in files(folder):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where.setdefault(node.name, []).append(module(path))
    shared = {name: places for name, places in where.items() if len(places) > 1}
    assert not shared


def test_positions_of_stages_are_made_by_one_function() -> None:
    """What a programme depends on beside the schedule is known in one place."""
    made = {module(path) for folder in FOLDERS for path in files(folder) if "StagePosition(" in path.read_text("utf-8")}
    assert made == {"hexiopt.schedules.schedule"}


# ------------------------------------------------------------------------------ the front door

VERBS = {  # of the command line, with the functions of `import hexiopt` that they are
    "plan": {"solve", "lower_bound"},
    "compare": {"compare", "solver"},
    "fit": {"fit", "verdict"},
    "page": {"solve", "verdict", "what_if", "lower_bound"},
    "whatif": {"what_if"},
    "price": {"price"},
    "replan": {"replan"},
    "train": {"solve", "replan"},
    "emulate": {"solve", "solver"},
    "export": {"export", "price"},
    "import": {"import_plan", "price", "solve"},
    "explain": {"solve", "price"},
    "collect": {"read_sweep"},
}
UNREACHED = {  # modules of hexiopt, or parts of it, that only the command line uses, and for what
    "hexiopt.discovery": "discover",
    "hexiopt.exports.presets": "space.preset",
    "hexiopt.files.cluster_yaml": "discover and profile",
    "hexiopt.files.link_files": "profile",
    "hexiopt.report.compared.sweep": "collect",
    "hexiopt.report.explanation": "explain",
    "hexiopt.report.trace": "plan: timeline.json",
    "hexiopt.report.page": "plan: report.html",
    "hexiopt.study.replan.report": "replan",
    "hexiopt.testing": "tests of other packages",
}
NO_VERBS = {"validate", "calibrate", "profile", "discover"}  # of which hexiopt has no function


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_verb_of_the_command_line_is_one_of_hexiopt(verb: str) -> None:
    """It, or what it imports of `experiments`, names the function as one of `hexiopt`."""
    modules = {module(path): path for path in files("experiments")}
    seen, left = set[str](), [module_of(verb)]
    while left:
        name = left.pop()
        if name in modules and name not in seen:
            seen.add(name)
            left += imports(modules[name])
    used = set()
    for name in seen:
        used |= {target.removeprefix("hexiopt.") for target in imports(modules[name]) if target.count(".") == 1}
        for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hx":
                used.add(node.attr)
    assert VERBS[verb] <= used
    assert set(VERBS) | NO_VERBS == set(COMMANDS)


def test_every_module_of_hexiopt_is_reached_from_its_front_door() -> None:
    """By imports, late ones and those by a module's name among them, or only the command line uses it."""
    modules = {module(path): path for path in files("hexiopt")}
    packages = {name.removesuffix(".__init__") for name in modules if name.endswith(".__init__")}
    seen, left = set[str](), ["hexiopt.__init__", "hexiopt.__main__"]
    while left:
        name = left.pop()
        name = f"{name}.__init__" if name in packages else name
        if name in modules and name not in seen:
            seen.add(name)
            text = modules[name].read_text(encoding="utf-8")
            left += imports(modules[name])
            left += re.findall(r"hexiopt(?:\.\w+)+", text)
    unreached = {name for name in modules if name not in seen and not name.endswith("__init__")}
    known = {name: [part for part in UNREACHED if f"{name}.".startswith(f"{part}.")] for name in unreached}
    assert not [name for name, parts in known.items() if not parts]
    assert {part for parts in known.values() for part in parts} == set(UNREACHED)
