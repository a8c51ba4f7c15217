"""Folders import each other only along the arrows: hexiopt ← solvers, runtime ← experiments. So do hexiopt's parts."""

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
FOLDERS = ("hexiopt", "solvers", "runtime", "conf", "experiments", "tests")
ALLOWED = {
    "hexiopt": {"hexiopt"},
    "solvers": {"hexiopt", "solvers"},
    "runtime": {"hexiopt", "runtime"},
    "conf": set(),
    "experiments": {"hexiopt", "solvers", "runtime", "conf", "experiments"},
}
# Each folder of solvers imports itself and those before it; `registry`, which names solvers, only `core`.
SOLVERS = (
    "core",
    "completion",
    "compiled",
    "frame",
    "heuristics",
    "proof",
    "loop",
    "sequence",
    "portfolio",
    "exact",
)
NO_BASELINE_USES = {"portfolio", "exact", "registry"}
LAW_PACKAGES = {"numpy", "scipy", "yaml"}
FURTHER = {
    **{path: {"numba"} for path in ("hexiopt/bounds/box_stages.py", "hexiopt/bounds/kernel.py")},
    "hexiopt/cost/clock/events.py": {"numba"},
    "hexiopt/frame.py": {"pandas"},
    "hexiopt/files/hub.py": {"huggingface_hub"},
    "hexiopt/exports/shell/scripts.py": {"tree_sitter", "tree_sitter_bash"},
}
REPORT_PACKAGES = LAW_PACKAGES | {"rich", "matplotlib", "jinja2"}
FRONT = ("report", "study", "plot", "testing")  # what people see: no law, and no solver, imports it

# Parts of hexiopt, lowest first: each imports only itself and what stands before it.
PARTS = (
    *(
        "errors",
        "checks",
        "ledger",
        "own_packages",
        "value",
        "frame",
        "units",
        "cores",
        "memo",
        "reading",
        "numbers",
        "schedules",
        "problem",
        "plan",
    ),
    *("simulation", "cost.executors", "cost", "bounds", "solving"),
    *("files", "discovery", "exports", *FRONT, "command", "__main__"),
)
EXCEPTIONS: set[tuple[str, str]] = set()  # (module, what it imports from further up): may only shrink


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found.append(node.module or "")
            found += (f"{node.module}.{name.name}" for name in node.names)
    return tuple(found)


@cache
def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_import_along_the_arrows(folder: str) -> None:
    for path in files(folder):
        for name in imports(path):
            top = name.partition(".")[0]
            assert top not in FOLDERS or top in ALLOWED[folder], f"{path} imports {name}"


@pytest.mark.parametrize("part", [*SOLVERS, "baselines", "registry"])
def test_solvers_import_along_the_arrows(part: str) -> None:
    order = [*SOLVERS, "baselines", "registry"]
    parts = {path.stem if path.is_file() else path.name for path in (ROOT / "solvers").iterdir()}
    assert parts - {"__init__", "__pycache__"} == set(order)
    allowed = set(SOLVERS[: SOLVERS.index(part)]) if part in SOLVERS else set(SOLVERS)
    allowed = {"core"} if part == "registry" else allowed - (NO_BASELINE_USES if part == "baselines" else set())
    for path in files("solvers"):
        if path.relative_to(ROOT / "solvers").parts[0].removesuffix(".py") == part:
            for name in imports(path):
                top, _, rest = name.partition(".")
                used = rest.partition(".")[0]
                assert top != "solvers" or used in {"", part, *allowed}, f"{path} imports {name}"


def part(name: str) -> str:
    """Of a module of hexiopt, the part that it belongs to."""
    inside = name.removeprefix("hexiopt.")
    found = max((each for each in PARTS if inside == each or inside.startswith(f"{each}.")), key=len, default="")
    assert found, f"{name} is in no part of hexiopt; put it into one, or add the part to PARTS"
    return found


def test_parts_of_hexiopt_import_what_stands_before_them() -> None:
    modules = {module(path): path for path in files("hexiopt")}
    upward = set()
    for name, path in modules.items():
        if name == "hexiopt.__init__":
            continue
        for found in {found for found in imports(path) if found in modules} - {name}:
            if PARTS.index(part(found)) > PARTS.index(part(name)):
                upward.add((name, found))
    assert upward == EXCEPTIONS


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


def test_no_law_imports_what_people_see() -> None:
    front = tuple(f"hexiopt.{name}" for name in FRONT)
    for path in files("hexiopt") + files("solvers"):
        if not is_front(path) and path != ROOT / "hexiopt" / "__init__.py":
            assert not any(name.startswith(front) for name in imports(path)), path


def test_only_the_runtime_imports_torch() -> None:
    """And `experiments/lab`, which measures with it, and `experiments/stock`, which compares it with torch's parts."""
    users = {ROOT / "experiments" / name for name in ("lab", "stock")}
    for folder in ("hexiopt", "solvers", "experiments"):
        for path in files(folder):
            uses = any(name.partition(".")[0] == "torch" for name in imports(path))
            assert not uses or users & set(path.parents), path


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_no_circle_of_imports() -> None:
    modules = {module(path): path for folder in ALLOWED for path in files(folder)}
    graph = {name: {found for found in imports(path) if found in modules} - {name} for name, path in modules.items()}
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
    assert {own for own in folders if not (ROOT / own).is_dir()} <= {"solvers/every_solver"}


# ------------------------------------------------------------------------------ inside the runtime

RUNTIME = {  # what the modules of each sub-folder may import; "" stands for those of runtime/ itself
    "": set(),
    "mapping": set(),
    "data": {""},
    "model": {"", "mapping"},
    "parallel": {"", "mapping", "model"},
    "state": {"", "mapping", "parallel"},
    "training": {"", "mapping", "data", "model", "parallel", "state"},
    "launch": {"", "mapping", "parallel", "state", "training"},
}


def runtime_folder(module: str) -> str:
    """The sub-folder of a module of the runtime, "" if it has none."""
    name = module.split(".")[1]
    return name if (ROOT / "runtime" / name).is_dir() else ""


@pytest.mark.parametrize("path", files("runtime"), ids=module)
def test_the_runtime_imports_along_its_arrows(path: Path) -> None:
    own = runtime_folder(module(path))
    for name in imports(path):
        if name.startswith("runtime."):
            assert runtime_folder(name) in RUNTIME[own] | {own}, f"{path} imports {name}"


def test_the_runtimes_arrows_point_one_way() -> None:
    folders = {path.name for path in (ROOT / "runtime").iterdir() if list(path.glob("*.py"))}
    assert set(TopologicalSorter(RUNTIME).static_order()) == set(RUNTIME) == folders | {""}


# ------------------------------------------------------------------------------ names


def test_public_class_names_are_unique() -> None:
    """A name means one thing in the whole project, so that a reader need not look at the imports."""
    where: dict[str, list[str]] = {}
    for folder in ALLOWED:
        for path in files(folder):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where.setdefault(node.name, []).append(module(path))
    shared = {name: found for name, found in where.items() if len(found) > 1}
    assert not shared


def test_positions_of_stages_are_made_by_one_function() -> None:
    """What a programme depends on beside the schedule is known in one place."""
    made = {module(path) for folder in ALLOWED for path in files(folder) if "StagePosition(" in path.read_text("utf-8")}
    assert made == {"hexiopt.schedules.schedule"}


# ------------------------------------------------------------------------------ the front door

VERBS = {  # of the command line, with the functions of `import hexiopt` that they are
    "plan": {"solve", "lower_bound"},
    "compare": {"compare", "solver"},
    "fit": {"fit"},
    "page": {"solve", "fit", "what_if", "lower_bound"},
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
        used |= {one.removeprefix("hexiopt.") for one in imports(modules[name]) if one.count(".") == 1}
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
