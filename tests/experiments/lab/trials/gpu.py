"""The GPU of tests that need one: others see none (`tests/conftest.py`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.version.cuda is not None and bool(list(Path("/dev").glob("nvidia[0-9]*")))
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


@pytest.fixture(scope="module")
def first_gpu() -> Iterator[None]:
    """Processes that are started meanwhile see the first GPU, if there is one; this one must not use it."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_GPU:
            patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        yield
