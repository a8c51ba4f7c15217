"""A training run as a table and a picture, with validation or without."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from experiments.reports.training import draw_training, training_table
from runtime.training.session import TrainedStep, ValidatedStep

STEPS = [TrainedStep(k, 5.0 - 0.1 * k, 1.0, 0.5, 1000.0, 0.1) for k in range(1, 21)]
VALIDATED = [ValidatedStep(10, 4.25), ValidatedStep(20, 3.125)]


def table_text(validated: list[ValidatedStep]) -> str:
    console = Console(width=80, file=StringIO(), record=True)
    console.print(training_table(STEPS, validated, 0.25, "the plan's GPUs"))
    return console.export_text()


def test_a_table() -> None:
    assert "4.2500 → 3.1250 nats per token" in table_text(VALIDATED)
    assert "validation" not in table_text([])
    assert "4.9000 → 3.0000 nats per token" in table_text([])


@pytest.mark.parametrize("num_steps", [1, 20])
def test_a_picture(num_steps: int, tmp_path: Path) -> None:
    pictures = []
    for k, validated in enumerate(([], VALIDATED[:1], VALIDATED)):
        path = tmp_path / f"{k}.png"
        draw_training(STEPS[:num_steps], validated, path)
        pictures.append(path.read_bytes())
    assert len(set(pictures)) == 3
