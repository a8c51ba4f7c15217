"""The papers' tables: made on tiny settings and held to their own CSV; sentences by made-up outcomes."""

import csv
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean

import pytest
from rich.console import Console

from experiments.tables import homogeneous, published, rivals, running, store
from experiments.tables.__main__ import PIPELINES as TABLES
from experiments.tables.ablation import NONE, VARIANTS, WHOLE, Ablation, Variant
from experiments.tables.figures import framed, relative_bars, row_bars
from experiments.tables.frame import run_tables
from experiments.tables.names import HOMOGENEOUS, OURS, RIVALS
from experiments.tables.publish import publish, replaced
from experiments.tables.running import run_all
from experiments.tables.settings import QUICK, SETTINGS, one_model_each
from experiments.tables.store import Store
from experiments.tables.task import Outcome, Task, fastest, perform
from hexiopt.problem.space import SWITCHES
from solvers import registry

ARGUMENTS = ("--quick", "--ours-s", "0.5", "--rival-s", "0.5", "--scaling-s", "3", "--sizes", "16", "--out")
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all tables, made quickly."""
    pytest.importorskip("pymetis")
    out = tmp_path_factory.mktemp("tables")
    assert run_tables(TABLES, None, [*ARGUMENTS, str(out)]) == 0
    return out


def read(made: Path, name: str, file: str | None = None) -> Rows:
    with (made / name / f"{file or name}.csv").open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def found(seconds: float | None, *trajectory: tuple[float, float], mfu: float | None = None) -> Outcome:
    status = "not_found" if seconds is None else "feasible"
    return Outcome(status, 1.0, 0.5, seconds, None if seconds is None else 1.0 / seconds, mfu, trajectory)


# ------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_states_its_conditions_and_has_a_picture(made: Path, table: object) -> None:
    name = table.name  # type: ignore[attr-defined]
    picture = (made / name / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    text = (made / name / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"## {table.title}\n")  # type: ignore[attr-defined]
    for stated in (
        "TFLOPS",
        "GiB",
        "GB/s between machines",
        "sequences of",
        "seeds 0",
        "cores",
        "Time limits",
        "code ",
    ):
        assert stated in text, stated
    assert f"`python -m {table.package}.{name} --quick" in text  # type: ignore[attr-defined]
    for line in text.splitlines():  # every row of a Markdown table has as many cells as its head
        assert not line.startswith("|") or line.endswith("|")
    assert all(row["search_sha256"] for row in read(made, name))


def test_homogeneous_ratios_are_those_of_the_step_times(made: Path) -> None:
    rows = read(made, "homogeneous")
    (mixed,) = [row for row in rows if row["cluster"] == QUICK[0].cluster]
    assert [row["planner"] for row in rows if row is not mixed] == [p.label for p in (OURS, *HOMOGENEOUS)]
    for row in rows:
        if row["step_time_s"]:
            ratio = float(row["step_time_s"]) / float(mixed["step_time_s"])
            assert float(row["ours_over_it"]) == pytest.approx(ratio, rel=1e-12)
    best = min(float(row["step_time_s"]) for row in rows[2:] if row["step_time_s"]) / float(mixed["step_time_s"])
    text = (made / "homogeneous" / "homogeneous.md").read_text(encoding="utf-8")
    assert f"ours reaches {best:.2f} × on average and {best:.2f} × at most" in text


def test_rivals_ratios_are_those_of_the_step_times(made: Path) -> None:
    rows = read(made, "rivals")
    assert {planner.solver for planner in RIVALS} == set(registry.names(registry.baseline))
    assert [row["planner"] for row in rows] == [planner.label for planner in (OURS, *RIVALS)]
    ours_s = float(rows[0]["step_time_s"])
    text = (made / "rivals" / "rivals.md").read_text(encoding="utf-8")
    for row in rows:
        assert float(row["lower_bound_s"]) <= float(row["step_time_s"] or math.inf)
        if not row["step_time_s"]:
            assert row["reason"]
            continue
        ratio = float(row["step_time_s"]) / ours_s
        assert float(row["ours_over_it"]) == pytest.approx(ratio, rel=1e-12)
        assert (f"{row['planner']} beats ours" in text) == (ratio < 1.0)


def test_convergence_ends_where_its_points_end(made: Path) -> None:
    rows, points = read(made, "convergence"), read(made, "convergence", "convergence_points")
    assert len(rows) == 6  # three solvers, two seeds
    end = {(row["solver"], row["seed"]): row["step_time_s"] for row in rows}
    for (solver, seed), step_time_s in end.items():
        own = [float(point["step_time_s"]) for point in points if (point["solver"], point["seed"]) == (solver, seed)]
        assert own == sorted(own, reverse=True)
        assert (not own and not step_time_s) or own[-1] == float(step_time_s)
    for row in rows:
        random_s = end["random", row["seed"]]
        if random_s and row["step_time_s"]:
            ratio = float(random_s) / float(row["step_time_s"])
            assert float(row["over_random"]) == pytest.approx(ratio, rel=1e-12)
            assert bool(row["catches_up_s"]) == (ratio >= 1.0)


def test_scaling_has_every_solver_with_its_gap(made: Path) -> None:
    rows = read(made, "scaling")
    assert [row["solver"] for row in rows] == list(registry.names(registry.for_any_problem))
    assert {row["gpus"] for row in rows} == {"16"}
    assert any(row["step_time_s"] for row in rows)
    for row in rows:
        if row["step_time_s"]:
            gap = 1 - float(row["lower_bound_s"]) / float(row["step_time_s"])
            assert float(row["gap"]) == pytest.approx(gap, rel=1e-12)
            assert 0.0 <= gap < 1.0
            assert float(row["first_plan_s"]) <= float(row["settled_s"])
        else:
            assert row["reason"]


def test_ablation_costs_are_those_of_the_step_times(made: Path) -> None:
    rows = read(made, "ablation")
    assert [row["off"] for row in rows] == ["", *SWITCHES, "", " ".join(SWITCHES)]
    whole_s = float(rows[0]["step_time_s"])
    assert whole_s == min(float(row["found_step_time_s"] or math.inf) for row in rows)
    text = (made / "ablation" / "ablation.md").read_text(encoding="utf-8")
    for row in rows:
        assert (f"no plan found in “{row['variant']}”" in text) == (not row["step_time_s"])
        if not row["step_time_s"]:
            assert row["reason"]
            assert not row["found_step_time_s"] + row["cost"]
            continue
        assert float(row["step_time_s"]) <= float(row["found_step_time_s"] or math.inf)
        assert float(row["cost"]) == pytest.approx(float(row["step_time_s"]) / whole_s - 1, abs=1e-12)


def test_a_second_run_searches_nothing_and_says_the_same(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.suffix in (".csv", ".md")}
    monkeypatch.setattr(running, "_start", lambda *_: pytest.fail("a search was run again"))
    assert run_tables(TABLES, None, [*ARGUMENTS, str(made)]) == 0
    assert before == {path: path.read_bytes() for path in before}


# ---------------------------------------------------------------------------- its parts


def test_records_hold_for_their_inputs_and_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, kept = OURS.task(QUICK[0].problem(None), 1.0), Store(tmp_path)
    assert kept.load(task) is None
    outcome = found(2.0, (0.1, 3.0), (0.2, 2.0), mfu=0.3)
    kept.save(task, outcome)
    assert kept.load(task) == outcome
    for other in (replace(task, seed=1), replace(task, time_limit_s=2.0), replace(task, solver="random")):
        assert kept.load(other) is None
    assert kept.load(OURS.task(QUICK[0].problem(0.5), 1.0)) is None
    monkeypatch.setattr(store, "code_sha256", lambda solver: "changed")
    assert kept.load(task) is None
    assert Store(tmp_path, any_code=True).load(task) == outcome
    next(tmp_path.glob("*.json")).write_text("{")
    assert Store(tmp_path, any_code=True).load(task) is None


def test_the_code_of_a_solver_is_what_it_imports() -> None:
    amp, random = store._closure("solvers.baselines.amp"), store._closure("solvers.heuristics.random_partition")
    assert {"solvers.baselines.amp", "hexiopt.cost.model", "solvers.core.search"} <= amp
    assert "hexiopt.cost.model" in random
    assert not any(name.startswith("solvers.baselines") for name in random)
    assert store.code_sha256("amp") != store.code_sha256("random")


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    texts = ('"""One."""\ndef f():\n    """Two."""\n    return 1\n', "def f():  # three\n    return 1\n")
    paths = [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"]
    for path, text in zip(paths, (*texts, "def f():\n    return 2\n"), strict=True):
        path.write_text(text)
    assert store._code(paths[0]) == store._code(paths[1]) != store._code(paths[2])


def test_a_refusal_is_an_outcome_and_a_bug_a_failure(tmp_path: Path) -> None:
    problem = QUICK[0].problem(None)
    refused = perform(Task(problem, "flashflex", 0.1, options=(("defects", "none"),)))
    assert refused.status == "refused"
    assert "defects" in refused.reason
    broken = Task(problem, "portfolio", 0.1, seed="x")  # type: ignore[arg-type]
    console = Console(quiet=True)
    assert run_all("test", [broken], Store(tmp_path), console)[broken].status == "failed"
    assert not list(tmp_path.iterdir())  # so that it is run again


def test_a_late_search_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.0)
    monkeypatch.setattr(running, "_GRACE_S", 0.0)
    task = Task(QUICK[0].problem(None), "random", 30.0)
    outcome = run_all("test", [task], Store(tmp_path), Console(quiet=True))[task]
    assert outcome.status == "overran"
    assert outcome.runtime_s < 15.0


def test_settings_are_the_papers() -> None:
    assert len(SETTINGS) == 6
    for setting in SETTINGS:
        paper = published.measured(setting.number, setting.model)
        assert paper is not None
        mixed, partner = setting.problem(None).cluster, setting.partner_problem(None).cluster
        ratio = mixed.total_peak_flops("bf16") / partner.total_peak_flops("bf16")
        assert ratio == pytest.approx(paper.flops_ratio, abs=1e-4 if setting.number in ("1", "2") else 0.05)
        assert setting.problem(0.5).cluster.inter_bandwidth_bytes_per_s == 0.5e9
    assert [(s.number, s.model) for s in one_model_each(SETTINGS)] == [
        ("1", "llama2_7b"),
        ("2", "llama2_7b"),
        ("3", "llama_30b"),
    ]
    assert [s.number for s in one_model_each(SETTINGS[5:])] == ["3_readme"]


@pytest.mark.parametrize(
    ("ratios", "word"),
    [([1.2, 1.8], "better"), ([1.6, 2.0], "is where the paper says"), ([1.6, 2.6], "worse")],
)
def test_verdicts_compare_with_the_paper(ratios: list[float], word: str) -> None:
    said = published.verdict("AMP", ratios, published.Range(1.5, 2.4))
    assert word in said
    assert f"{ratios[0]:.2f} to {ratios[1]:.2f} ×" in said
    assert "1.5 to 2.4 ×" in said


def test_an_outcome_is_compared_where_there_are_plans() -> None:
    fast, slow, none = found(4.0), found(5.0), found(None)
    assert fast.over(slow) == 1.25
    assert fast.over(none) is none.over(fast) is None
    assert slow.gap(4.0) == pytest.approx(0.2)
    assert none.gap(4.0) is None
    assert fastest({"slow": slow, "none": none, "fast": fast}) == ("fast", fast)
    assert fastest({"none": none, "other": none})[0] == "none"


def test_bars_are_relative_to_their_unit_and_say_where_there_is_no_plan() -> None:
    one, two, none = found(4.0), found(2.0), found(None)
    _, (ax,) = framed(6.0, 4.0, "title", "below")
    relative_bars(ax, ["a", "b", "c"], {"own": [two, one, none], "other": [none, two, none]}, [one, none, none])
    assert [bar.get_height() for bar in ax.patches] == [2.0, 0.5, 0.0, 0.0, 1.0, 0.0]
    labels = [text.get_text() for text in ax.texts]
    assert labels == ["2.00", "0.50", "no\nplan", "no\nplan", "1.00", "no\nplan"]
    assert {text.get_rotation() for text in ax.texts} == {0.0}
    _, (ax,) = framed(6.0, 4.0, "title", "below")
    relative_bars(ax, ["a"] * 20, {"own": [one] * 20, "other": [none] * 20}, [one] * 20)
    assert {text.get_rotation() for text in ax.texts} == {90.0}
    assert {text.get_text() for text in ax.texts} == {"1.00", "no plan"}


def test_rows_of_bars_stand_from_the_top() -> None:
    _, (ax,) = framed(6.0, 4.0, "title", "below")
    row_bars(ax, ["first", "second"], {"a": [0.1, None], "b": [-0.2, 0.3]})
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([10.0, 0.0, -20.0, 30.0])
    assert [text.get_text() for text in ax.texts] == ["10.0", "no plan", "-20.0", "30.0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["second", "first"]
    first, second = (bar.get_y() for bar in ax.patches[:2])
    assert first > second


def test_homogeneous_sentences_name_baselines_that_beat_the_paper() -> None:
    def comparison(seconds: Mapping[str, float | None], mfu: float) -> homogeneous.Comparison:
        baselines = {planner: found(seconds[planner.label], mfu=mfu) for planner in HOMOGENEOUS}
        return homogeneous.Comparison(SETTINGS[0], found(10.0, mfu=0.3), baselines, 1.0136, found(9.0))

    weak = comparison({"Megatron-LM": 9.0, "Galvatron": None, "FSDP": 12.0}, 0.3)
    strong = comparison({"Megatron-LM": 8.0, "Galvatron": 7.0, "FSDP": None}, 0.5)
    assert weak.best[0].label == "Megatron-LM"
    assert strong.ratio == pytest.approx(0.7)
    said = homogeneous.sentences([weak, strong])
    assert f"{fmean([0.9, 0.7]):.2f} × on average and 0.90 × at most" in said[0]
    assert len(said) == 3
    assert said[1].startswith("Galvatron does better here than the paper says")
    assert "MFU" in said[2]
    nothing = comparison(dict.fromkeys((planner.label for planner in HOMOGENEOUS), None), 0.3)
    assert homogeneous.sentences([nothing]) == ["No setting has both a plan of ours and one of a baseline."]


def test_rival_sentences_name_who_beats_ours() -> None:
    outcomes = {planner: found(20.0) for planner in RIVALS}
    outcomes[RIVALS[5]] = found(9.0)
    outcomes[RIVALS[-1]] = found(None)
    said = rivals.sentences([rivals.Comparison(SETTINGS[0], found(10.0), outcomes, 5.0)])
    assert [line for line in said if "beats ours" in line] == [
        f"Sailor beats ours at setting {SETTINGS[0].label}: its step takes 10.00% less."
    ]
    assert f"FSDP has no plan at {SETTINGS[0].label}." in said
    assert sum("is where the paper says" in line for line in said) == len(published.compared_rivals())
    assert geometric_mean(rivals._ratios(RIVALS[0], [rivals.Comparison(SETTINGS[0], found(10.0), outcomes, 5.0)])) == 2


def test_a_space_counts_with_every_plan_inside_it() -> None:
    runs = {variant: found(10.0) for variant in VARIANTS}
    runs[VARIANTS[1]], runs[NONE] = found(None), found(9.0)
    ablation = Ablation(SETTINGS[0], runs)
    assert ablation.best_s(WHOLE) == ablation.best_s(VARIANTS[1]) == 9.0
    one_schedule = next(variant for variant in VARIANTS if variant.schedule == "1f1b")
    assert ablation.cost(one_schedule) == pytest.approx(10 / 9 - 1)  # the plan of 9 s may have another schedule
    assert Variant("both", ("replicas",), "1f1b").holds(Variant("less", SWITCHES, "1f1b"))


def test_publishing_replaces_a_section_and_nothing_else(tmp_path: Path) -> None:
    page = "# Measured\n\ntext\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(page, encoding="utf-8")
    (tmp_path / "made.png").write_bytes(b"picture")
    publish("made", "## Made\n", tmp_path / "made.png", tmp_path / "docs")
    assert (tmp_path / "docs" / "results.md").read_text(encoding="utf-8") == replaced(page, "made", "## Made\n")
    assert (tmp_path / "docs" / "made.png").read_bytes() == b"picture"
    once = replaced(page, "rivals", "## Rivals\n\nold | \\1\n")
    assert once.startswith(page)
    both = replaced(once, "scaling", "## Scaling\n")
    twice = replaced(both, "rivals", "## Rivals\n\nnew\n")
    assert "old" not in twice
    assert twice.count("## Rivals") == twice.count("## Scaling") == 1
    assert replaced(twice, "rivals", "## Rivals\n\nnew\n") == twice


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--sizes", "12"], "12"),
        (["--scale", "0"], "time limit"),
        (["--seeds", "-1"], "-1"),
        (["--quick", "--publish"], "--quick"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tables(TABLES, None, [*arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hexiopt: ")
    assert said.count("\n") == 1
    assert word in said
    assert not (tmp_path / "out").exists()
