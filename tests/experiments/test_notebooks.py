"""The notebooks are as their sources say, read well where nothing runs them, and run from top to bottom."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jupytext", reason="needs the extra notebooks")
import nbformat
from jupyter_client.manager import start_new_kernel

from tests import notebooks
from tests.conftest import STRESS

LARGEST_BYTES = 400_000
OF_A_MACHINE = r"/(?:work|home|root|tmp|usr|Users)/|\b20\d\d-\d\d-\d\d[ T]\d\d:|site-packages"
FEW_STEPS = """
import hexiopt.solving

_check = hexiopt.solving.Budget.__post_init__


def _check_and_cap(budget):
    _check(budget)
    if budget.max_steps is not None:
        object.__setattr__(budget, "max_steps", min(budget.max_steps, 16))


hexiopt.solving.Budget.__post_init__ = _check_and_cap
"""  # what a notebook shows of plans is another matter: `make notebooks` searches as long as it says
SOURCES = pytest.mark.parametrize("source", notebooks.SOURCES, ids=lambda source: source.stem)


def shipped_notebook(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(notebooks.published_path(source), as_version=4)  # type: ignore[no-untyped-call]


def test_every_notebook_has_both_files() -> None:
    made = {path.stem for path in notebooks.FOLDER.glob("*.ipynb")}
    assert made == {source.stem for source in notebooks.SOURCES}
    assert len(made) >= 7


@SOURCES
def test_outputs_belong_to_the_source(source: Path) -> None:
    wanted, notebook = notebooks.read(source), shipped_notebook(source)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in wanted.cells
    ], f"run make notebooks NOTEBOOKS={source.stem[:2]}"


@SOURCES
def test_it_reads_well_without_running(source: Path) -> None:
    path = notebooks.published_path(source)
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= LARGEST_BYTES
    words = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(OF_A_MACHINE, words), re.search(OF_A_MACHINE, words)
    cells = shipped_notebook(source).cells
    assert cells[0].source.startswith("# ")
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    prose = sum(len(cell.source) for cell in cells if cell.cell_type == "markdown")
    assert prose >= 1000


@SOURCES
def test_it_is_written_on_the_public_interface(source: Path) -> None:
    """hexiopt is the only package of the project that a notebook imports, beside studies that it shows."""
    imported = set(re.findall(r"^\s*(?:import|from) ([\w.]+)", source.read_text(encoding="utf-8"), re.MULTILINE))
    ours = {name for name in imported if name.partition(".")[0] in {"solvers", "runtime", "experiments", "tests"}}
    assert "hexiopt" in imported
    assert all(name.startswith("experiments.studies.") for name in ours), ours
    assert re.findall(r"^import hexiopt.*$|^from hexiopt.*$", source.read_text(encoding="utf-8"), re.MULTILINE) == [
        "import hexiopt as hx"
    ]


# `make notebooks` has run each as it is now: `test_outputs_belong_to_the_source`.
@pytest.mark.slow
@pytest.mark.parametrize("source", notebooks.SOURCES[:: 1 if STRESS else 3], ids=lambda source: source.stem)
def test_it_runs(source: Path, tmp_path: Path) -> None:
    if source.stem.startswith("06"):
        pytest.importorskip("torch")
    pytest.importorskip("pymetis")
    result = notebooks.execute(source, tmp_path, FEW_STEPS)
    pictures = [
        [
            output
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        for notebook in (result, shipped_notebook(source))
    ]
    assert len(pictures[0]) == len(pictures[1]) > 0


@pytest.mark.slow
def test_the_stop_button_returns_the_best_so_far() -> None:
    """A kernel is interrupted, as the button does, once the progress line has a plan; the cell ends with that plan."""
    manager, client = start_new_kernel()
    try:
        asked = client.execute(
            "import hexiopt as hx\n"
            "problem = hx.Problem(cluster=hx.cluster('hexiscale_setting_2'), model=hx.model('llama2_7b'))\n"
            "print(hx.solve(problem, time_limit_s=3600).status.value)"
        )
        printed, interrupted = {"stdout": "", "stderr": ""}, False
        while True:
            message = client.get_iopub_msg(timeout=120)
            kind, content = message["msg_type"], message["content"]
            assert kind != "error", content
            if kind == "stream":
                printed[content["name"]] += content["text"]
            if not interrupted and "best" in printed["stderr"]:
                interrupted = True
                manager.interrupt_kernel()
            if (
                kind == "status"
                and content["execution_state"] == "idle"
                and message["parent_header"]["msg_id"] == asked
            ):
                break
        assert interrupted
        assert printed["stdout"] == "feasible\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
