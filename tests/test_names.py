"""Names say what a value is and what a function does, in the words of the field: `python -m tests.test_names` counts.

A function is a verb, or the noun that it returns. A participle alone (`fitted`, `priced`) is neither. Words that only
point (`own`, `found`, `one`) name no variable: what was found, whose own? `solvers/` is not covered yet.
"""

import ast
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from hexiopt.ledger import words

ROOT = Path(__file__).parent.parent
# The parts of hexiopt: folders and files.
HEXIOPT = (
    *("__init__", "__main__", "checks", "command", "cores", "errors", "frame", "ledger", "memo", "own_packages"),
    *("plot", "reading", "testing", "units", "value"),
    *("bounds", "cost", "discovery", "exports", "files", "numbers", "plan", "problem", "report", "schedules"),
    *("simulation", "solving", "study"),
)
PARTS = (*(f"hexiopt/{name}" for name in HEXIOPT), "runtime", "experiments")
BANNED = words("""
    alike asked beside crowded each found given gone hop kept made one own room said sharers site stated taken taking
    those told ways
""")
BANNED_IN_TESTS = words("found kept one own said")
PUBLIC = {("hexiopt/study/solution.py", "found")}  # part of the public interface, so that it stays
# Functions called by a bare participle all the same, by package.
PARTICIPLES = {
    "hexiopt": words("found quoted sharded"),  # public; a word that messages quote; a property of a row
    "runtime": words(""),
    "experiments": words("chosen credited framed judged measured paired predicted"),  # what cells of studies call
}
MOST_PARTICIPLES = 0.03  # of the names of functions of hexiopt
IRREGULAR = words("""
    born built chosen done drawn found given gone held kept known left lost made meant said seen sent shown spent spelt
    taken thrown told understood written
""")
NOUNS = words("bed deepspeed feed heed need red seed shed speed")  # which only look like participles


def files(part: str) -> list[Path]:
    path = ROOT / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that a file gives to functions, arguments, variables and fields, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def functions(part: str) -> set[str]:
    """The distinct names of the functions in a part, without leading underscores; special methods left out."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files(part)]
    defined = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name.strip("_") for name in defined if not name.startswith("__")}


def is_participle(word: str) -> bool:
    return (word.endswith("ed") and word not in NOUNS) or word in IRREGULAR


def begins_or_ends_with_participle(name: str) -> bool:
    """Whether a function is called by a participle, such as `fitted`, `shown_rows` or `devices_used`."""
    parts = name.split("_")
    return parts[0] not in ("is", "has") and (is_participle(parts[0]) or is_participle(parts[-1]))


def is_bare_participle(name: str) -> bool:
    """Whether a function is called by a participle and nothing that it describes, such as `fitted` or `clipped_to`."""
    parts = name.split("_")
    return is_participle(parts[0]) and (len(parts) == 1 or parts[1] in ("at", "by", "in", "of", "on", "to", "within"))


def pointing_names(part: str, banned: Container[str] = BANNED) -> list[str]:
    """Where the names of a part are words that only point, as `file:line: name`."""
    places = []
    for path in files(part):
        for name, line in names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.strip("_") in banned and (relative(path), name) not in PUBLIC:
                places.append(f"{relative(path)}:{line}: {name}")
    return places


def test_names_of_functions_arguments_variables_and_fields_are_seen() -> None:
    tree = ast.parse("class C:\n    made: int\ndef told(own):\n    found, *kept = (one for one in own)")
    assert {name for name, _ in names(tree)} == words("made told own found kept one")


@pytest.mark.parametrize("part", PARTS)
def test_no_name_only_points(part: str) -> None:
    assert pointing_names(part) == []


def test_no_name_of_tests_only_points() -> None:
    assert pointing_names("tests", BANNED_IN_TESTS) == []


@pytest.mark.parametrize("package", PARTICIPLES)
def test_functions_are_verbs_or_nouns(package: str) -> None:
    assert set(filter(is_bare_participle, functions(package))) == PARTICIPLES[package]


def test_few_functions_are_called_by_participles() -> None:
    every = functions("hexiopt")
    called_by_participles = sorted(filter(begins_or_ends_with_participle, every))
    assert len(called_by_participles) <= MOST_PARTICIPLES * len(every), called_by_participles


def test_parts_are_all_of_hexiopt() -> None:
    """So that a new folder is held to the rules from its beginning."""
    inside = {path.name.removesuffix(".py") for path in (ROOT / "hexiopt").iterdir()}
    parts = inside - {"__pycache__", "py.typed"}
    assert parts == set(HEXIOPT)


@pytest.mark.parametrize(
    ("name", "bare"),
    [("fitted", True), ("clipped_to", True), ("fitted_constants", False), ("seed", False), ("read", False)],
)
def test_a_participle_is_told_from_a_noun(name: str, bare: bool) -> None:
    assert is_bare_participle(name) == bare


def main() -> None:
    """Print, by part, the names of functions, those with participles, and the names that only point."""
    total = Counter[str]()
    for part in PARTS:
        counts = Counter(functions=len(functions(part)), pointing=len(pointing_names(part)))
        counts["participles"] = sum(map(begins_or_ends_with_participle, functions(part)))
        total += counts
        print(f"{part:20} {counts['functions']:5} functions {counts['participles']:4} {counts['pointing']:4}")
    share = total["participles"] / total["functions"]
    print(f"{'all':20} {total['functions']:5} functions {total['participles']:4} ({share:.1%}) {total['pointing']:4}")


if __name__ == "__main__":
    main()
