"""Documents in text files, one a file, read in pieces."""

import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hexiopt.errors import InputError
from runtime.data.tokens import BLOCK, TOKEN_SUFFIX, reading

# Characters tokenised as one text, up to the end of a line after them.
PIECE = 2**16
# The default corpus: Python's own sources, without what is installed beside them, and without tests, some of which
# are no UTF-8 on purpose.
LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class TextFiles:
    """A text file, or all files below a folder in the order of their paths, without hidden ones, token files and links
    to folders; by default the source code of Python's standard library. Raises InputError where there are none."""

    def __init__(self, source: Path | None) -> None:
        self.where: Path | str = source or LIBRARY
        if source is None:
            self.paths = _below(LIBRARY, suffix=".py", without=NOT_LIBRARY)
            return
        root = Path(os.path.abspath(source))
        with reading(root):
            self.paths = _below(root) if root.is_dir() else [root]

    def check(self) -> None:
        """Raise InputError where a file cannot be read, or all are empty."""
        check_files(self.paths, self.where)

    def stamps(self) -> list[Any]:
        """What changes when the texts do: their names, sizes and times. Raises InputError."""
        return file_stamps(self.paths)

    def blocks(self) -> Iterator[bytes | None]:
        """The bytes of all files; after each document, None. Raises InputError."""
        for path in self.paths:
            with reading(path), path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block
            yield None

    def pieces(self) -> Iterator[str | None]:
        """The text of all files, cut at ends of lines where they have such; what is not UTF-8 becomes U+FFFD. After
        each document, None. Raises InputError."""
        for path in self.paths:
            with reading(path), path.open(encoding="utf-8", errors="replace", newline="") as file:
                while piece := file.read(PIECE) + file.readline(PIECE):
                    yield piece
            yield None


def check_files(paths: list[Path], where: Path | str) -> None:
    """Raise InputError where a file cannot be read, or all are empty."""
    for path in paths:
        with reading(path), path.open("rb"):
            pass
    if not any(size for _, size, _ in file_stamps(paths)):
        raise InputError(f"{where}: is empty; give a text of one sequence at least (workload.seq_len)")


def file_stamps(paths: list[Path]) -> list[Any]:
    """Names, sizes and times of files. Raises InputError where one is none."""
    stamps = []
    for path in paths:
        with reading(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: is not a regular file; take it out of the corpus")
        stamps.append([str(path), status.st_size, status.st_mtime_ns])
    return stamps


def _below(folder: Path, suffix: str = "", without: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `folder` whose names end in `suffix`, outside folders of the names `without`."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    paths = []
    with reading(folder):
        for parent, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
            paths += [
                Path(parent, name)
                for name in names
                if name.endswith(suffix) and not name.startswith(".") and not name.endswith(TOKEN_SUFFIX)
            ]
    if not paths:
        raise InputError(f"{folder}: the folder has no {suffix or 'text'} file; choose another corpus")
    return sorted(paths)
