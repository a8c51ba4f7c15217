"""The notebooks of experiments/notebooks: executes them and writes each with its outputs beside its source.

python -m tests.notebooks            # all of them, as `make notebooks`
python -m tests.notebooks 01 05      # those whose names begin so
python -m tests.notebooks --prose    # executes none: where only the prose has changed, outputs are kept
"""

import base64
import os
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "experiments" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
LONGEST_S = 900.0  # of a cell, on a machine as busy as may be
_LANGUAGE = {"codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "name": "python"}


def read(source: Path) -> NotebookNode:
    """The notebook of a text in jupytext's percent format, its cells numbered, without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    for k, cell in enumerate(notebook.cells):
        cell.id = f"cell-{k}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = NotebookNode({"kernelspec": kernel, "language_info": _LANGUAGE})
    return notebook


def execute(source: Path, folder: Path, first: str = "") -> NotebookNode:
    """The notebook, run from top to bottom in `folder` with this Python, after the Python text `first`, which it does
    not show. Raises nbclient's CellExecutionError."""
    notebook = read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": str(folder / ".ipython")}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=LONGEST_S,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    with client.setup_kernel(env=environment):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
    del notebook.cells[0]
    notebook.metadata["language_info"] = NotebookNode(_LANGUAGE)  # the kernel states versions, which change
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_shrink_picture(output) for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def _shrink_picture(output: NotebookNode) -> NotebookNode:
    """An output with its picture in a palette, which takes a third of the space. Progress on stderr is not kept."""
    picture = output.get("data", {}).get("image/png")
    if picture is not None:
        small = BytesIO()
        drawn = Image.open(BytesIO(base64.b64decode(picture))).convert("RGB")
        drawn.quantize(256, Image.Quantize.MAXCOVERAGE).save(small, "PNG", optimize=True)
        output.data["image/png"] = base64.b64encode(small.getvalue()).decode()
    return output


def published_path(source: Path) -> Path:
    """Where the notebook stands with its outputs."""
    return source.with_suffix(".ipynb")


def reword(source: Path) -> NotebookNode:
    """The notebook with the outputs that it has been published with. Raises ValueError where its code has changed."""
    notebook, old = read(source), nbformat.read(published_path(source), as_version=4)  # type: ignore[no-untyped-call]
    code, old_code = ([cell for cell in version.cells if cell.cell_type == "code"] for version in (notebook, old))
    if [cell.source for cell in code] != [cell.source for cell in old_code]:
        raise ValueError(f"{source.name}: its code has changed; execute it")
    for cell, before in zip(code, old_code, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return notebook


def main(names: list[str]) -> None:
    """Execute the notebooks whose names begin with one of `names`; all without."""
    if names == ["--prose"]:
        for notebook, path in [(reword(source), published_path(source)) for source in SOURCES]:
            nbformat.write(notebook, path)
        return
    for source in SOURCES:
        if names and not source.name.startswith(tuple(names)):
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(source, Path(folder))
        nbformat.write(notebook, published_path(source))
        size = published_path(source).stat().st_size / 1e3
        print(f"{source.name}: {time.monotonic() - began_s:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
