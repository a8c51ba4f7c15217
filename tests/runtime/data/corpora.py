"""Token files for tests."""

from pathlib import Path
from typing import Any

import numpy as np


def token_file(folder: Path, tokens: Any, dtype: Any = np.uint16) -> Path:
    path = folder / "tokens.npy"
    np.save(path, np.asarray(tokens, dtype=dtype))
    return path


def position_file(folder: Path, num_tokens: int) -> Path:
    """A token file whose tokens say where they stand."""
    return token_file(folder, np.arange(num_tokens), np.int64)
