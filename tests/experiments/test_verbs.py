"""What verbs write, and with which exit code they end."""

import csv
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import read_plan
from tests.conftest import Run
from tests.experiments.command_line import QUICK, RTX, STEPS, TINY, edit, planned, refusal
from tests.slow import slow_but


def test_plan_writes_its_files_and_says_where(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("plan", *TINY)
    assert (ran.code, ran.err) == (0, "")
    names = ["plan.json", "plan.png", "timeline.json", "report.html"]
    written = [Path(line) for line in ran.out.splitlines()[-4:]]
    assert [path.name for path in written] == names
    assert all(path.parts[0] == "outputs" and path.stat().st_size > 500 for path in written)
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    assert "tokens/s" in ran.out
    file = read_plan(written[0])
    cost = PlanPricer(file.problem).price(file.plan)
    assert violations(file.problem, file.plan, cost) == []
    stored = json.loads(written[0].read_text())
    assert stored["prediction"]["step_time_s"] == cost.step_time_s
    assert written[1].read_bytes()[:4] == b"\x89PNG"
    assert json.loads(written[2].read_text())["traceEvents"]
    assert "hexiopt plan cluster=small_mixed" in written[3].read_text()


def test_what_the_mix_gives_over_its_best_type_is_a_sentence(hexiopt: Run) -> None:
    ran = hexiopt("plan", *QUICK, "alone=true")
    assert ran.code == 0, ran.err
    match = re.fullmatch(
        r"Together the 6 GPUs process ([\d,]+) tokens/s, ([\d.]+) × as many as the ([24]) (rtx_\d+), the best of their "
        r"types, alone \(([\d,]+)\)\.",
        " ".join(ran.out.split("plan.json")[-1].split()),
    )
    assert match is not None, ran.out
    together, alone = (float(match[k].replace(",", "")) for k in (1, 5))
    assert float(match[2]) == pytest.approx(together / alone, abs=0.01)
    ran = hexiopt("plan", *QUICK, "alone=true", "constraints.exclude=[new]")
    assert "Together" not in ran.out, "one type has nothing to be compared with"


def test_a_folder_used_again_never_mixes_two_runs(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", *TINY, "hydra.run.dir=out").code == 0
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert hexiopt("plan", *QUICK, "hydra.run.dir=out", "report=false").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.txt", "plan.json"]


def test_a_plan_that_cannot_be_written_is_printed(
    hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("experiments.app.common.write_text", full)
    ran = hexiopt("plan", *QUICK, "hydra.run.dir=out")
    assert "plan.json: cannot be written (No space left on device); choose another hydra.run.dir" in refusal(ran)
    assert "tokens/s" in ran.out


def test_price_gives_the_same_price(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    ran = hexiopt("price", f"plan={path.relative_to(tmp_path)}", "hydra.run.dir=priced")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads((tmp_path / "priced" / "plan.json").read_text()) == json.loads(path.read_text())


def test_price_beyond_memory_exits_3(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    small = {name: {"usable_memory_gib": 0.3} for name in ("rtx_3090", "rtx_4090")}
    edit(path, lambda data: data["problem"]["cluster"].update(gpus=small))
    ran = hexiopt("price", f"plan={path}", "hydra.run.dir=priced")
    assert ran.code == 3
    assert ran.err.count("\n") == 1
    assert "GiB too much" in ran.err
    assert "does not fit" in ran.out


def test_price_says_whether_a_plan_leaves_memory_free(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    ran = hexiopt("price", f"plan={path}", "constraints.memory_headroom=0.05", "hydra.run.dir=priced")
    assert (ran.code, ran.err) == (0, "")
    assert "communicators and a reserve of 5%" in " ".join(ran.out.split())
    assert "leaves 5% of usable memory free" in " ".join(ran.out.split())
    data, priced = (json.loads(file.read_text()) for file in (path, tmp_path / "priced" / "plan.json"))
    assert priced["problem"]["space"] == data["problem"]["space"] | {"memory_headroom": 0.05}
    limits = [plan_data["prediction"]["memory_gib"]["old:0"]["limit"] for plan_data in (data, priced)]
    assert limits[1] == pytest.approx(0.95 * limits[0])
    message = refusal(hexiopt("price", f"plan={path}", "constraints.memory_headroom=0.6"))
    assert "constraints: memory_headroom: 0.6 is out of range; it must be at least 0 and at most 0.5" in message


def test_price_of_a_broken_plan_exits_2(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    edit(path, lambda data: data["pipelines"][0].update(num_micro_batches=1000))
    assert "the global batch is 256" in refusal(hexiopt("price", f"plan={path}", "hydra.run.dir=priced"))
    assert not (tmp_path / "priced").exists()


def test_price_refuses_overrides_of_the_problem(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    message = refusal(hexiopt("price", f"plan={path}", "constraints.max_tp=1"))
    assert "constraints.max_tp: price does not read it; hexiopt plan, compare, fit and others do" in message
    message = refusal(hexiopt("explain", f"plan={path}", "model=tiny"))
    assert "model=tiny: does not apply to a plan file, which holds its whole problem" in message


def test_explain_of_a_file_and_of_a_search(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    for ran in (hexiopt("explain", f"plan={path}"), hexiopt("explain", *STEPS)):
        assert (ran.code, ran.err) == (0, "")
        for word in (
            "rtx_3090: bf16 peak",
            "new: inside",
            "what binds",
            "gemm_backward_passes",
            "whitepaper",
        ):
            assert word in ran.out
    assert not (tmp_path / "outputs").exists(), "explain writes no files"


def test_a_replicated_interleaved_plan_is_priced_and_explained(hexiopt: Run, tmp_path: Path) -> None:
    """Two stages of two layer ranges, the first on two replicas, a recompute policy for each of its layers."""
    path = planned(hexiopt, tmp_path, "workload.global_batch=8")

    def weave(data: Any) -> None:
        replicas = [{"devices": ["old:0"], "samples": 3}, {"devices": ["old:1"], "samples": 1}]
        first = {"replicas": replicas, "layers": [[0, 1], [2, 3]], "recompute": ["none", "full"]}
        second = {"devices": ["new:0"], "layers": [[1, 2], [3, 4]], "recompute": "full"}
        pipeline = {"num_micro_batches": 2, "micro_batch_size": 4, "stages": [first, second]}
        data |= {"schedule": "interleaved", "sharding": {"stage": 1}, "pipelines": [pipeline]}

    ran = hexiopt("price", f"plan={edit(path, weave)}", "hydra.run.dir=priced")
    assert ran.code == 0, ran.err
    data = json.loads((tmp_path / "priced" / "plan.json").read_text())
    assert data["pipelines"][0]["stages"][0]["replicas"][0] == {"devices": ["old:0"], "samples": 3}
    memory = data["prediction"]["memory_gib"]
    assert set(memory) == {"old:0", "old:1", "new:0"}
    assert memory["old:0"]["activations"] > memory["old:1"]["activations"] > 0
    assert memory["old:0"]["weights"] == memory["old:1"]["weights"]
    ran = hexiopt("explain", f"plan={path}")
    assert ran.code == 0, ran.err
    assert "0·0.1" in ran.out
    assert "interleaved" in ran.out

    def break_it(data: Any) -> None:
        data["pipelines"][0] |= {"num_micro_batches": 1, "micro_batch_size": 8}
        data["problem_sha256"] = ""

    message = refusal(hexiopt("price", f"plan={edit(path, break_it)}"))
    assert "8 sequences into 3 + 1" in message


def test_explain_gives_every_coefficient_a_source() -> None:
    from hexiopt.numbers.coefficients import COEFFICIENTS
    from hexiopt.report.explanation import coefficient_rows

    rows = list(coefficient_rows())
    assert {name.upper() for name, _, _ in rows} == set(COEFFICIENTS)
    assert all(source for _, _, source in rows)


def test_an_old_name_is_told_in_one_line(hexiopt: Run) -> None:
    pytest.importorskip("pymetis")
    ran = hexiopt("plan", *QUICK, "solver=metis", "solver.max_steps=5")
    assert ran.code == 0
    assert ran.err == "hexiopt: solver: metis now means hexiscale; the old name goes soon\n"
    assert "hexiscale" in ran.out


@pytest.mark.parametrize("verb", slow_but(("emulate",), ("compare", "emulate")))
def test_a_solvers_options_hold_where_several_run(hexiopt: Run, verb: str) -> None:
    """Each named solver has the options that it takes: Espresso's money needs prices, which this cluster lacks."""
    command = (verb, *STEPS, f"{verb}.solvers=[random,espresso]", "workload.optimizer_sharding=1")
    ran = hexiopt(*command, "solver=espresso", "solver.objective=money", "solver.deadline_s=60")
    assert ran.code == (0 if verb == "compare" else 2)  # a comparison goes on with the others
    assert "price_per_hour" in " ".join((ran.out + ran.err).split())
    ran = hexiopt(*command, "solver=flashflex", "solver.defects=as_released")
    assert ran.code == 2
    assert ran.err == (
        "hexiopt: solver.defects: none of random, espresso accepts it; name one that does, or remove it\n"
    )


def test_compare_writes_a_row_a_solver(hexiopt: Run, tmp_path: Path) -> None:
    steps = ("solver.time_limit_s=59", "solver.max_steps=60")
    ran = hexiopt("compare", *TINY[:3], *steps, "compare.solvers=[random,local_search]", "hydra.run.dir=out")
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "out" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["solver"] for row in rows} == {"random", "local_search"}
    behind = [float(row["over_best"]) for row in rows]
    assert behind == sorted(behind), "the best comes first"
    assert behind[0] == 0
    assert all(float(row["lower_bound_s"]) <= float(row["step_time_s"]) for row in rows)
    with (tmp_path / "out" / "operators.csv").open() as file:
        operators = list(csv.DictReader(file))
    assert {row["solver"] for row in operators} == {"local_search"}  # `random` has none
    assert all(int(row["proposed"]) >= int(row["valid"]) >= int(row["accepted"]) for row in operators)


def test_no_plan_exits_3_with_the_shortfall(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(f"name: small\nmachines:\n  - {RTX}\n")
    file = ("cluster=file", "cluster.path=small.yaml", "model=llama2_70b", "solver.max_steps=40")
    for verb in ("plan", "explain"):
        ran = hexiopt(verb, *file, "solver=random")
        assert ran.code == 3
        assert ran.err.count("\n") == 1
        assert "GiB" in ran.err
    ran = hexiopt("compare", *file, "compare.solvers=[random,local_search]")
    assert ran.code == 3
    assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_columns_set_the_width_of_piped_tables(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("compare", *QUICK, "compare.solvers=[random,hexiscale]")
    wide = hexiopt(*command)
    monkeypatch.setenv("COLUMNS", "72")
    narrow = hexiopt(*command)
    assert wide.code == narrow.code == 0
    table = narrow.out.partition("out/comparison.csv")[0]
    assert max(map(len, table.splitlines())) <= 72 < max(map(len, wide.out.splitlines()))
    assert "…" not in table
