"""Devices are the matter of one file, the backends of torch.distributed that of another: no other names them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {"torch.cuda": "runtime/device.py", "nccl": "runtime/network.py", "gloo": "runtime/network.py"}


def names(tree: ast.AST) -> Iterator[str]:
    """Dotted names, imports and texts of a module, in lower case; not its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node).lower()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            yield from (f"{module}.{name.name}".strip(".").lower() for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value.lower()


@pytest.mark.parametrize("word", WORDS)
def test_no_other_file_of_the_runtime_names(word: str) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "runtime").rglob("*.py")
        if any(word in name for name in names(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert files == {WORDS[word]}


@pytest.mark.parametrize(
    "line",
    ["import torch.cuda", "from torch import cuda", "torch.cuda.synchronize()", "f('nccl')", "def f(): 'nccl', 1"],
)
def test_every_way_of_naming_is_seen(line: str) -> None:
    assert any(word in name for word in WORDS for name in names(ast.parse(line)))


def test_what_a_docstring_says_does_not_count() -> None:
    assert not any("nccl" in name for name in names(ast.parse("def f():\n    'As NCCL does.'\n    return 1")))
