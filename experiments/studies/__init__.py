"""Studies: each answers one question by searches. `python -m experiments.studies NAME` runs its file and writes a page.

A study is a file `NN_name.py` in jupytext's percent format, to be read, run and changed as a notebook too. Searches are
jobs of a sweep (`hexiopt.study.jobs`), kept by a hash of what determines them.
"""

from pathlib import Path

SOURCES = {path.stem.partition("_")[2]: path for path in sorted(Path(__file__).parent.glob("[0-9]*_*.py"))}
"""The file of each study by its name, in their order."""
