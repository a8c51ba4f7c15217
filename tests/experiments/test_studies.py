"""Studies: a contract for all of them on made-up measurements, some real searches, and the frame's parts."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from experiments.studies import NAMES, ablation, flashflex, homogeneous, rivals, scheduling, study
from experiments.studies.__main__ import main
from experiments.studies.frame import published, search
from experiments.studies.frame.figures import framed, relative_bars, row_bars
from experiments.studies.frame.long_contexts import ABLATION, JOINT, PAIRS, PARTNERS, SIMULATIONS, TESTBED
from experiments.studies.frame.rows import credited, time_to_s
from experiments.studies.frame.search import BOUND, GRACE_S, Isolated, Measured, SearchSpec, measure
from experiments.studies.frame.settings import OURS, QUICK, RIVALS, SETTINGS
from experiments.studies.frame.study import Scale, conditions, frame, measured, page_text
from experiments.studies.frame.words import change, hardware, markdown, share, span
from experiments.studies.sequence import joint, long_context
from hexiopt.files.problem_file import problem_sha256
from hexiopt.problem.space import SWITCHES
from solvers import registry
from tests.conftest import ROOT, STRESS
from tests.slow import slow_but

SCALE = Scale(quick=True, seeds=2, sizes=(16, 128))
QUIET = Console(quiet=True)


def made_up(spec: SearchSpec, step_time_s: float | None) -> Measured:
    """What a search could have measured."""
    about = {
        "machine": "2 cores",
        "date": "2026-01-01",
        "code": "c0de" * 16,
        "peak_gib": 0.5,
        "runtime_s": 1.0,
        "cpu_s": 2.0,
    }
    if spec.solver == BOUND:
        return {"status": "bound", "bound_s": 0.5, "reason": "", "trajectory": [], **about}
    if step_time_s is None:
        return {"status": "not_found", "bound_s": 0.0, "reason": "nothing fits", "trajectory": [], **about}
    workload = spec.problem.workload
    judged = {} if spec.judge is None else dict.fromkeys(("formulas_tokens_per_s", "rule_tokens_per_s"), 1e4)
    return {
        "status": "feasible",
        "bound_s": 0.4,
        "reason": "",
        "step_time_s": step_time_s,
        "tokens_per_s": workload.tokens / step_time_s,
        "mfu": 0.4 / step_time_s,
        "first_plan_s": 0.1,
        "trajectory": [(0.1, 2 * step_time_s), (0.3, step_time_s)],
        **judged,
        **(dict.fromkeys(("formulas_fit", "rule_fits"), 1.0) if judged else {}),
        **about,
    }


FOUND: dict[str, Callable[[int], float | None]] = {
    "every third has none": lambda k: None if k % 3 == 2 else 1.0 + k % 5 / 10,
    "none has a plan": lambda k: None,
}


@pytest.mark.parametrize(
    ("name", "found"),
    slow_but(
        [(name, [*FOUND][k % 3 == 2]) for k, name in enumerate(NAMES)],
        [(name, kind) for name in NAMES for kind in FOUND],
    ),
)
def test_every_study(name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page, figures and CSV are written; no claim, table or condition says NaN; every row names its search."""

    def answer(_name: str, specs: list[SearchSpec], *_: object, **__: object) -> dict[str, Measured]:
        return {spec.sha256: made_up(spec, FOUND[found](k)) for k, spec in enumerate(specs)}

    monkeypatch.setattr("experiments.studies.frame.study.measured", answer)
    own = study(name)
    done = own.run(SCALE, tmp_path, f"python -m experiments.studies {name}", QUIET)
    text = done.page.read_text(encoding="utf-8")
    assert text.splitlines()[1] == f"# {own.title}"
    assert own.question.endswith(("?", "."))
    assert own.question in text
    assert "python -m" not in own.question
    assert not re.search(r"\bnan\b|\binf\b|None\b|NaT", text)
    for figure in done.figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert f"]({figure.name})" in text
    for stated in ("TFLOPS", "GB/s between machines", "sequences of", "Time limits", "seeds 0", "2 cores", "c0dec0de"):
        assert stated in text, stated
    assert f"Command: `python -m experiments.studies {name}`" in text
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))
    rows = pd.read_csv(done.tables[0])
    assert len(rows) == len(own.specs(SCALE))
    assert rows["search_sha256"].notna().all()
    assert len(own.specs(Scale())) > len(rows)
    done.publish(tmp_path / "docs")
    assert (tmp_path / "docs" / f"{name}.md").read_text(encoding="utf-8") == text
    commands = [line for line in own.doc.splitlines() if line.startswith("python -m")]
    assert commands
    assert all(line.startswith(f"python -m experiments.studies {name} ") for line in commands)


@pytest.mark.slow
def test_real_searches_are_measured_once_and_again_where_code_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["joint", "--quick", "--seconds", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "4 searches to run" in said.err
    assert said.out.splitlines()[-2:] == [str(tmp_path / "joint" / f"joint.{end}") for end in ("png", "md")]
    rows = pd.read_csv(tmp_path / "joint" / "joint.csv").set_index("way")
    assert rows.at["joint", "bound_s"] <= rows.at["joint", "step_time_s"]
    assert list(rows["time_limit_s"]) == [1.0] * 4
    assert len(list((tmp_path / "searches" / "plans").glob("*.plan.json"))) == 3
    points = pd.read_csv(tmp_path / "joint" / "joint_points.csv")
    ends = points.groupby("search_sha256")["step_time_s"].min()
    assert set(ends) == set(rows["step_time_s"].dropna())
    before = (tmp_path / "joint" / "joint.md").read_bytes()
    monkeypatch.setattr(Isolated, "measure", lambda *_: pytest.fail("a search was run again"))
    assert main(command) == 0
    assert "0 searches to run, 4 known already" in capsys.readouterr().err
    assert (tmp_path / "joint" / "joint.md").read_bytes() == before
    monkeypatch.setattr(search, "code_sha256", lambda: "changed")
    assert main([*command, "--any-code"]) == 0
    capsys.readouterr()
    spec = study("joint").specs(Scale(quick=True, seconds=2.0))[0]
    monkeypatch.setattr(Isolated, "measure", lambda _, spec, __: made_up(spec, 3.0) | {"code": "changed"})
    again = measured("joint", [spec], tmp_path / "searches", QUIET)
    assert again[spec.sha256]["step_time_s"] == 3.0
    assert measured("joint", [spec], tmp_path / "searches", QUIET) == again


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if STRESS else NAMES[::5])
def test_every_study_measures_quickly(name: str, tmp_path: Path) -> None:
    assert main([name, "--quick", "--out", str(tmp_path)]) == 0
    rows = pd.read_csv(tmp_path / name / f"{name}.csv")
    assert (rows["step_time_s"].notna() | rows["reason"].notna() | (rows["status"] == "bound")).all()
    assert not (rows["bound_s"] > rows["step_time_s"] * (1 + 1e-9)).any() or name == "flashflex"


# ------------------------------------------------------------------------------- searches and their cache


def test_a_search_is_identified_by_all_that_goes_in() -> None:
    spec = OURS.search(QUICK[0].problem(Scale()), 1.0, {})
    others = [
        replace(spec, seed=1),
        replace(spec, time_limit_s=2.0),
        replace(spec, solver="random"),
        replace(spec, options={"defects": "none"}),
        replace(spec, pricer=flashflex.by_rule),
        replace(spec, judge=flashflex.judged),
        replace(spec, problem=QUICK[0].problem(Scale(inter_gb_per_s=0.5))),
    ]
    assert len({one.sha256 for one in (spec, *others)}) == len(others) + 1
    assert replace(spec, labels={"other": 1}).sha256 == spec.sha256


def test_a_refusal_is_a_measurement_and_a_bug_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = QUICK[0].problem(Scale())
    refused = measure(SearchSpec(problem, "flashflex", 0.1, {}, options={"defects": "none"}), tmp_path / "plan.json")
    assert refused["status"] == "refused"
    assert "defects" in refused["reason"]
    broken = SearchSpec(problem, "portfolio", 0.1, {"setting": "x"}, seed="x")  # type: ignore[arg-type]
    for _ in range(2):  # it is not kept, so that it is run again
        found = measured("test", [broken], tmp_path, QUIET)[broken.sha256]
        assert found["status"] == "failed"
        assert "TypeError" in found["reason"]
    assert not list((tmp_path / "joblib").rglob("output.pkl"))


def test_a_late_search_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "GRACE", 0.0)
    monkeypatch.setattr(search, "GRACE_S", 0.05)
    found = Isolated().measure(SearchSpec(QUICK[0].problem(Scale()), "random", GRACE_S, {}), tmp_path / "plan.json")
    assert found["status"] == "overran"
    assert found["runtime_s"] < GRACE_S


def test_two_cores_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem, ran = QUICK[0].problem(Scale()), list[str]()
    specs = [SearchSpec(problem, solver, 1.0, {}) for solver in ("random", "portfolio", "hexiscale", "cp_sat", BOUND)]

    def note(_: object, spec: SearchSpec, __: Path) -> Measured:
        ran.append(spec.solver)
        return made_up(spec, 1.0)

    monkeypatch.setattr(Isolated, "measure", note)
    monkeypatch.setattr("experiments.studies.frame.study.usable_cores", lambda: 2)
    measured("test", specs, tmp_path, QUIET)
    assert (ran[:3], {*ran[3:]}) == (["portfolio", "cp_sat", BOUND], {"random", "hexiscale"})


# --------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--sizes", "12"], "12"),
        (["--seconds", "0"], "time limit"),
        (["--seeds", "-1"], "-1"),
        (["--quick", "--publish"], "--quick"),
        (["--only", "gpus"], "'='"),
        (["--limits", "cp_sat=x"], "time limit"),
        (["--only", "gpus=17"], "--only"),
        (["--only", "gpu=16"], "gpus"),
        (["--limits", "cp_sat=5"], "cp_sat"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduling", *arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hexiopt: ")
    assert said.count("\n") == 1
    assert word in said
    assert not (tmp_path / "out").exists()


def test_only_keeps_rows_by_label_and_those_that_reports_compare_with() -> None:
    specs = study("rivals").specs(Scale(only={"planner": ("AMP",), "setting": ("2*",)}, limits_s={"amp": 7.0}))
    assert [(s.labels["planner"], s.labels["model"]) for s in specs] == [
        (planner, model) for model in ("llama2_7b", "llama2_13b") for planner in ("ours", BOUND, "AMP")
    ]
    assert [s.time_limit_s for s in specs] == [20.0, 40.0, 7.0] * 2
    assert len(study("small_suite").specs(Scale(solvers=("random",), only={"problem": ("lab",)}))) == 1


# ------------------------------------------------------------------------------------------- settings


def test_settings_are_the_papers() -> None:
    assert len(SETTINGS) == 6
    for setting in SETTINGS:
        paper = published.setting_figures(setting.number, setting.model)
        mixed, partner = setting.problem(Scale()).cluster, setting.partner_problem(Scale()).cluster
        ratio = mixed.total_peak_flops("bf16") / partner.total_peak_flops("bf16")
        assert ratio == pytest.approx(paper["flops"], abs=1e-4 if setting.number in ("1", "2") else 0.05)
        assert setting.problem(Scale(inter_gb_per_s=0.5)).cluster.inter_bandwidth_bytes_per_s == 0.5e9
    assert published.setting_figures("4", "llama2_7b") == {}
    assert {planner.solver for planner in RIVALS} == set(registry.names(registry.baseline))
    assert {"", *SWITCHES} <= {" ".join(own.off) for own in ablation.SPACES.values()}


def test_long_settings_are_the_papers() -> None:
    assert (len(TESTBED), len(SIMULATIONS)) == (3 * 5, 3 * 2 * 4)
    assert {setting.global_batch for setting in (*TESTBED, *SIMULATIONS, *PAIRS, *ABLATION)} == {8}
    assert {setting.seq_len for setting in JOINT} == {131_072}
    for setting in PAIRS:
        problem = setting.problem(Scale())
        assert problem.space.sequence
        partner = setting.problem(Scale(), cluster=PARTNERS[setting.cluster])
        flops = [p.cluster.total_peak_flops("bf16") for p in (problem, partner)]
        assert flops[0] / flops[1] == pytest.approx(1.05, abs=0.01)


def test_speeds_by_peak_are_in_proportion_to_peaks() -> None:
    setting = replace(PAIRS[0], by_peak=True)
    problem, partner = setting.problem(Scale()), PARTNERS[setting.cluster]
    assert problem_sha256(problem) != problem_sha256(PAIRS[0].problem(Scale()))
    efficiencies = [gpu.efficiency for gpu in problem.cluster.types]
    assert len(efficiencies) == 2
    assert len({(e.gemm_max, e.attention_max, e.memory_max) for e in efficiencies}) == 1
    fills = [e.gemm_half_flops / gpu.flops_bf16 for e, gpu in zip(efficiencies, problem.cluster.types, strict=True)]
    assert fills[0] == pytest.approx(fills[1])
    assert setting.problem(Scale(), cluster=partner) == PAIRS[0].problem(Scale(), cluster=partner)


def test_balance_is_the_mean_speed_over_the_least() -> None:
    alike = PAIRS[0].problem(Scale(), cluster="homogeneous_152_a100")
    assert long_context.balance(alike) == pytest.approx(1.0)
    assert 1.05 < long_context.balance(SIMULATIONS[0].problem(Scale())) < 2.0


def test_scheduling_has_the_papers_sizes_between_those_asked_for() -> None:
    assert scheduling.sizes(Scale(sizes=(16, 10_240))) == [16, 128, 1024, 10_240]
    assert scheduling.sizes(Scale(sizes=(16,))) == [16]
    assert [scheduling.limit_s(n) for n in (16, 128, 256, 1024, 10_240)] == [0.9, 0.9, 9.0, 9.0, 110.0]


# --------------------------------------------------------------------------- what reports compute and say


@pytest.mark.parametrize(
    ("ratios", "word"),
    [([1.2, 1.8], "better"), ([1.6, 2.0], "is where the paper says"), ([1.6, 2.6], "worse")],
)
def test_verdicts_compare_with_the_paper(ratios: list[float], word: str) -> None:
    said = published.verdict("AMP", ratios, "rivals")
    assert word in said
    assert f"{ratios[0]:.2f} to {ratios[1]:.2f} ×" in said
    assert "1.5 to 2.4 ×" in said


def reported(name: str, step_times_s: Callable[[dict[str, Any]], float | None], scale: Scale = SCALE) -> list[str]:
    """The claims of a study, step times given by a search's labels."""
    own = study(name)
    specs = own.specs(scale)
    found = {spec.sha256: made_up(spec, step_times_s({**spec.labels, "seed": spec.seed})) for spec in specs}
    return [claim for part in own.report(frame(specs, found), scale) for claim in part.claims]


def test_rival_claims_name_who_beats_ours_and_who_has_no_plan() -> None:
    times_s: dict[str, float | None] = {"ours": 10.0, "Sailor": 9.0, "FSDP": None}
    said = reported("rivals", lambda labels: times_s.get(labels["planner"], 20.0))
    setting = QUICK[0].label
    assert [line for line in said if "beats ours" in line] == [
        f"Sailor beats ours at setting {setting}: its step takes 10.00% less."
    ]
    assert f"FSDP has no plan at {setting}." in said
    assert sum("is where the paper says: ours is 2.00 ×" in line for line in said) == len(rivals._COMPARED) == 3


def test_homogeneous_claims_name_baselines_that_beat_the_paper() -> None:
    ratio = pd.Series({"a": 0.9, "b": 0.7, "c": math.nan})
    fastest = pd.Series({"a": "Megatron-LM, homogeneous", "b": "Galvatron, homogeneous", "c": "FSDP, homogeneous"})
    priced, paper = pd.Series({"a": 0.3, "b": 0.5, "c": 0.5}), pd.Series({"a": 0.38, "b": 0.39, "c": math.nan})
    said = homogeneous.claims(ratio, fastest, priced, paper)
    assert "0.80 × on average and 0.90 × at most" in said[0]
    assert said[1].startswith("Galvatron does better here than the paper says at setting b")
    assert "MFU of 30.0% to 50.0%" in said[2]
    nothing = homogeneous.claims(ratio * math.nan, fastest, priced, paper)
    assert nothing == ["No setting has both a plan of ours and one of a baseline."]


def test_convergence_compares_seed_by_seed() -> None:
    times_s = {"random partition": (4.0, 2.0), "HexiScale's partition": (2.0, 4.0), "our portfolio": (2.0, 1.0)}
    said = reported("convergence", lambda labels: times_s[labels["planner"]][labels["seed"]])
    assert "HexiScale's partition is 1.00 × as fast" in said[0]
    assert "our portfolio is 2.00 × as fast" in said[1]
    assert said[2:] == [
        f"HexiScale's partition stays behind random partition in 1 of 2 runs of setting {QUICK[0].label}."
    ]


def test_a_space_is_credited_with_every_plan_inside_it() -> None:
    found = pd.DataFrame({"s": dict.fromkeys(ablation.SPACES, 10.0)})
    found.loc["no replicated stages"], found.loc[ablation.NONE] = math.nan, 9.0
    best = credited(found, ablation.INSIDE)["s"]
    assert best[ablation.UNSHARDED] == best["no replicated stages"] == 9.0
    assert best["1F1B only"] == 10.0  # the plan of 9 s may have another schedule
    assert best["one policy a stage"] == 9.0
    both = ablation.PlanSpace(("replicas",), "1f1b")
    assert both.holds(ablation.PlanSpace(SWITCHES, "1f1b"))
    assert not both.holds(ablation.PlanSpace(SWITCHES))
    assert ablation.PlanSpace(("recompute_per_layer",)).holds(ablation.PlanSpace(("recompute_per_stage",)))
    assert list(credited(found.loc[[ablation.UNSHARDED, ablation.NONE]], ablation.INSIDE).index) == [
        ablation.UNSHARDED,
        ablation.NONE,
    ]


def test_ablation_claims_say_what_is_lost_and_where_the_search_stopped() -> None:
    times_s = {ablation.UNSHARDED: 10.5, "equal layers in a pipeline": 12.0, ablation.NONE: 15.0}
    said = reported("ablation", lambda labels: times_s.get(labels["space"], 10.0))
    assert said[0] == "Without any asymmetry a step takes 50.0% longer."
    assert said[1] == "The most expensive single loss is “equal layers in a pipeline”: 20.0% on average."
    assert "“equal layers" not in said[2]
    assert "“1F1B only”" in said[2]
    assert f"At setting {QUICK[0].label} the search of the whole space stops 5.0% above the best known plan" in said[3]


def test_long_context_claims_compare_with_the_paper_and_say_what_is_possible() -> None:
    nan = math.nan
    own = pd.DataFrame(
        {
            "ours": [1.0, 1.0, 1.0, nan],
            "best": ["USP", "Ulysses", nan, "USP"],
            "ratio": [1.2, 1.4, nan, nan],
            "gap": [0.2, 0.5, 0.5, nan],
            "balance": [1.2, 1.3, 1.2, 1.3],
        },
        index=["a", "b", "c", "d"],
    )
    said = long_context.claims(own, {"mean": 1.36, "most": 1.72})
    assert "1.30 × as fast on average, 1.40 × at most (b), 1.20 × at least (a)" in said[0]
    assert said[1].startswith("The baselines do better here than the paper says")
    assert "1.25 ×" in said[1]
    assert f"no planner could be more than {(1.2 / 0.8 + 1.4 / 0.5) / 2:.2f} ×" in said[2]
    assert said[3:] == ["Ours has no plan at d.", "No baseline has a plan at c; ours has."]
    assert len(long_context.claims(own.loc[["d"]], {"mean": 1.0, "most": 2.0})) == 1


def test_pairs_say_who_stays_behind() -> None:
    own = pd.DataFrame({"ratio": [0.9, 1.05], "best": ["USP", "USP"], "possible": [1.2, 1.3]}, index=["a", "b"])
    said = long_context.pair_claims(own)
    assert "0.900 to 1.050 ×" in said[0]
    assert said[1:] == ["At a the mixed cluster stays 10.0% behind USP."]
    said = long_context.pair_claims(own.assign(possible=[0.9, 0.95]))
    assert said[-1] == "No plan on a mixed cluster can: the bound of all plans leaves 0.95 × at most."


def test_joint_claims_count_who_wins() -> None:
    together = pd.Series({"a": 1 / 10, "b": 1 / 10, "c": math.nan})
    single = pd.Series({"a": 1 / 11, "b": 1 / 9, "c": 1 / 9})
    said = joint.claims(together, single, pd.Series({"a": "A", "b": "B", "c": "C"}))
    assert said == [
        "Joint plans beat both others on 1 of 3 clusters: A by 10.0%.",
        "At b the joint search ends 11.1% behind the better single one.",
        "c has no joint plan.",
    ]


def test_scheduling_claims_stand_beside_the_papers_times() -> None:
    times_s = {"ours": 2.0, "Ring Attention": 3.0, "USP": 4.0}
    said = reported("scheduling", lambda labels: times_s.get(labels["planner"]), replace(SCALE, sizes=(128,)))
    assert said == [f"128 GPUs: a plan in 1.00 s ({published.HEXISEQ}: 9 s), 1.50 × as fast as the best baseline's."]


# ----------------------------------------------------------------------------------- words and figures


def test_words() -> None:
    assert [change(ratio, 2) for ratio in (1.0136, 0.9841, math.nan)] == ["+1.36%", "−1.59%", ""]
    assert [share(value) for value in (0.1236, -1e-9, math.nan)] == ["12.4%", "0.0%", ""]
    assert span([0.5, math.nan, 0.25], ".2f") == "0.25 to 0.50"
    assert span([0.5, 0.501], ".2f") == "0.50"
    assert time_to_s([(1.0, 5.0), (2.0, 3.0)], 3.5) == 2.0
    assert math.isnan(time_to_s([], 3.5))
    table = pd.DataFrame({"n": ["1,000", "no plan"], "×": ["**1.20 ×**", ""], "who": ["a|b", "1"]}, index=["x", "y"])
    lines = markdown(table.rename_axis("setting")).splitlines()
    assert lines == [
        "| setting | n | × | who |",
        "| --- | --: | --: | --- |",
        "| x | 1,000 | **1.20 ×** | a\\|b |",
        "| y | no plan |  | 1 |",
    ]


def test_a_page_has_no_empty_parts() -> None:
    own = study("layouts")
    specs = own.specs(SCALE)
    rows = frame(specs, {spec.sha256: made_up(spec, 1.0) for spec in specs})
    stated = conditions(specs, rows, "the command")
    text = page_text(own, own.report(rows, SCALE), ["layouts.png"], stated, "the command")
    assert "\n\n\n" not in text
    assert text.count("\n## ") == 1
    assert stated[-1] == "Command: `the command`"


def test_conditions_have_one_line_for_a_cluster_and_its_variants() -> None:
    cluster = SETTINGS[0].problem(Scale()).cluster
    slower = SETTINGS[0].problem(Scale(inter_gb_per_s=0.5)).cluster
    [line] = hardware([cluster, slower, cluster], "bf16")
    assert line.startswith(f"`{cluster.name}`: 1 × (8 × rtx_3080_ti: 56.9 TFLOPS, 12 GiB, 20 GB/s inside)")
    assert "; 5 GB/s between machines; " in line
    assert line.endswith("TFLOPS; and 1 variant of it")
    many = hardware([replace(cluster, name=str(number)) for number in range(20)], "bf16")
    assert (len(many), many[-1]) == (13, "and 8 more clusters like these")


def test_bars_are_labelled_and_say_where_there_is_no_plan() -> None:
    ratios = pd.DataFrame({"own": [2.0, 1.0, math.nan], "other": [math.nan, 0.5, 1.0]}, index=["a", "b", "c"])
    _, (ax,) = framed("title", "below")
    relative_bars(ax, ratios)
    assert [bar.get_height() for bar in ax.patches] == [2.0, 1.0, 0.0, 0.0, 0.5, 1.0]
    assert [text.get_text() for text in ax.texts] == ["2.00", "1.00", "no\nplan", "no\nplan", "0.50", "1.00"]
    assert {text.get_rotation() for text in ax.texts} == {0.0}
    _, (ax,) = framed("title", "below")
    relative_bars(ax, pd.concat([ratios] * 7))
    assert {text.get_rotation() for text in ax.texts} == {90.0}


def test_rows_of_bars_stand_from_the_top() -> None:
    _, (ax,) = framed("title", "below")
    row_bars(ax, pd.DataFrame({"a": [0.1, math.nan], "b": [-0.2, 0.3]}, index=["first", "second"]))
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([10.0, 0.0, -20.0, 30.0])
    assert [text.get_text() for text in ax.texts] == ["10.0", "no plan", "-20.0", "30.0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["second", "first"]
    first, second = (bar.get_y() for bar in ax.patches[:2])
    assert first > second


# ---------------------------------------------------------------------------------------- published pages


def test_published_pages_are_whole_short_and_linked() -> None:
    docs = ROOT / "docs" / "results"
    index = (docs / "index.md").read_text(encoding="utf-8")
    for name in NAMES:
        own, text = study(name), (docs / f"{name}.md").read_text(encoding="utf-8")
        assert re.match(rf"<!-- Written by python -m experiments\.studies {name} --publish( --any-code)?: ", text)
        assert f"\n# {own.title}\n\n{own.question}\n" in text
        assert "\n- Measured 20" in text
        assert f"]({name}.md)" in index
    for page in docs.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(text.split()) <= 4000, page
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (docs / target).is_file(), f"{page.name}: {target}"
