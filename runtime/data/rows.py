"""Documents in the rows of a dataset, read as a stream by Hugging Face's `datasets`."""

import logging
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from runtime.data.hub import check_hub
from runtime.data.texts import check_files, file_stamps

HUB = "hf://"
FORMATS = {".jsonl": "json", ".parquet": "parquet"}  # by the names of files, as `datasets` calls them


def is_rows(source: str) -> bool:
    """Whether a corpus is a dataset, rather than a text, a folder or a token file."""
    return source.startswith(HUB) or Path(source).suffix in FORMATS


class DatasetRows:
    """The texts in the `column` of a dataset.

    `source` is a file of JSON lines or of Parquet, or with wildcards several of them in the order of their names; or,
    after `hf://`, the name of a dataset of the Hugging Face Hub, of which `subset` (if it has several) and `split` are
    read. Raises InputError where there is no such file, or the package is missing.
    """

    def __init__(self, source: str, column: str = "text", split: str = "train", subset: str | None = None) -> None:
        self._source, self._column, self._split, self._subset = source, column, split, subset
        self.where: Path | str = source
        self._files = [] if source.startswith(HUB) else sorted(map(Path, glob(source)))
        if not self._files and not source.startswith(HUB):
            raise InputError(f"{source}: does not exist; check the path")
        if find_spec("datasets") is None:
            raise InputError(f"{source}: needs the package datasets; install hexiopt[datasets]")

    def check(self) -> None:
        """Raise InputError where the first row cannot be read."""
        if self._files:
            check_files(self._files, self.where)
        else:
            check_hub(self._source.removeprefix(HUB))
        if next(self.pieces(), None) is None:
            raise InputError(f"{self._source}: has no row; give a dataset with texts{self._keys()}")

    def stamps(self) -> list[Any]:
        """What changes when the texts do; what is on the Hub is taken to stay."""
        return [self._source, self._column, self._split, self._subset, file_stamps(self._files)]

    def blocks(self) -> Iterator[bytes | None]:
        """The bytes of all rows; after each, None. Raises InputError."""
        return (None if piece is None else piece.encode(errors="replace") for piece in self.pieces())

    def pieces(self) -> Iterator[str | None]:
        """The text of all rows; after each, None. Raises InputError where it cannot be read."""
        try:
            for row in self._load():
                yield self._text(row)
                yield None
        except InputError:
            raise
        except Exception as error:  # of any format and transport: they have no class in common
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            what = f"check the name{self._keys()}" if not self._files else "check that each line, or file, is whole"
            raise InputError(f"{self._source}: cannot be read ({why}); {what}") from None

    def _keys(self) -> str:
        """What else says which rows are read."""
        if self._files:
            return ""
        subset = "null" if self._subset is None else self._subset
        return f", train.data_split={self._split} and train.data_subset={subset}"

    def _load(self) -> Any:
        from datasets import load_dataset  # only here, as few have it

        for name in ("datasets", "huggingface_hub", "httpx", "httpx2"):  # log every attempt; the error says it all
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not self._files:
            return load_dataset(self._source.removeprefix(HUB), self._subset, split=self._split, streaming=True)
        files = {"train": [str(path) for path in self._files]}
        return load_dataset(FORMATS[Path(self._source).suffix], data_files=files, split="train", streaming=True)

    def _text(self, row: dict[str, Any]) -> str:
        text = row.get(self._column)
        if isinstance(text, str):
            return text
        columns = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
        raise InputError(
            f"train.text_column: {self._source} has no text in the column {self._column}; columns with text: {columns}"
        )
