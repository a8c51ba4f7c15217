"""`hexiopt emulate`: predicted beside measured, and input that ends before any process starts."""

import csv
from pathlib import Path

import pytest

from experiments.reports.emulated import Emulated, emulated_csv, emulated_table
from tests.conftest import Run

SMALL = ("cluster=small_mixed", "model=tiny", "workload=small", "workload.global_batch=4", "solver.max_steps=40")


@pytest.mark.slow
def test_measures_plans_of_solvers(hexiopt: Run, tmp_path: Path) -> None:
    command = ("emulate", *SMALL, "constraints.num_stages=2", "constraints.num_pipelines=1", "hydra.run.dir=out")
    ran = hexiopt(*command, "emulate.solvers=[megatron]", "emulate.steps=1", "emulate.network=false")
    assert ran.code == 0, ran.err
    with (tmp_path / "out" / "emulation.csv").open(encoding="utf-8", newline="") as opened:
        rows = {row["plan"]: row for row in csv.DictReader(opened)}
    assert list(rows) == ["megatron"]
    for row in rows.values():
        assert float(row["measured_s"]) > 0.3 * float(row["predicted_s"])
        assert float(row["error"]) == pytest.approx(float(row["predicted_s"]) / float(row["measured_s"]) - 1)
    for name in ("emulation.png", "plan-megatron.json"):
        assert (tmp_path / "out" / name).exists()
    assert "links as they are" in " ".join(ran.out.split())
    assert "Over symmetric" in ran.out
    again = ("emulate", "plan=out/plan-megatron.json", "emulate.solvers=[]", "emulate.dilation=0.01")
    ran = hexiopt(*again, "emulate.steps=1", "emulate.network=false", "hydra.run.dir=again")
    assert ran.code == 0, ran.err
    with (tmp_path / "again" / "emulation.csv").open(encoding="utf-8", newline="") as opened:
        (row,) = csv.DictReader(opened)
    assert (row["plan"], row["predicted_s"]) == ("plan", rows["megatron"]["predicted_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("emulate.divisor=3",), "emulate.divisor: 3 does not divide"),
        (("model=olmoe_7b",), "emulate: model olmoe_7b: layers of kinds are not made narrower"),
        (("emulate.steps=0",), "emulate: steps: 0"),
        (("emulate.solvers=[random,random]",), "emulate.solvers: 'random' appears twice"),
        (("emulate.solvers=[]",), "emulate.solvers: [] names no solver"),
        (("workload.precision=fp16",), "fp16 cannot be trained"),
    ],
)
def test_bad_input_is_one_line(hexiopt: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    ran = hexiopt("emulate", *SMALL, *words, "hydra.run.dir=out")
    assert ran.code == 2
    assert ran.err.startswith("hexiopt: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not list(tmp_path.rglob("emulation*"))


def test_the_table_says_how_much_faster() -> None:
    rows = [Emulated("megatron", 2.2, (2.0, 1.9, 2.4), 0.0), Emulated("portfolio", 1.0, (1.0,), 0.01)]
    table = emulated_table(rows)
    cells = [list(map(str, column.cells)) for column in table.columns]
    assert cells[0] == ["portfolio", "megatron"]
    assert cells[3] == ["+0.0%", "+10.0%"]
    assert cells[-1] == ["2.00×", "1.00×"]
    (first, second) = csv.DictReader(emulated_csv(rows, 7.0).splitlines())
    assert (first["least_s"], first["most_s"], first["dilation"]) == ("1.9", "2.4", "7.0")
    assert second["late"] == "0.01"
