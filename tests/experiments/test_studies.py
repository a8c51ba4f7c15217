"""Studies: a contract for all of them on made-up measurements, some real searches, and the frame's parts."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from experiments.reports.validation import Errors
from experiments.studies import SOURCES
from experiments.studies.__main__ import faults, main
from experiments.studies.cases import flashflex
from experiments.studies.frame import published
from experiments.studies.frame.long_contexts import ABLATION, JOINT, PAIRS, PARTNERS, SIMULATIONS, TESTBED
from experiments.studies.frame.page import run
from experiments.studies.frame.planners import OURS, RIVALS
from experiments.studies.frame.rows import credited
from experiments.studies.frame.search import FOLDER, SearchSpec, measured
from experiments.studies.frame.settings import SETTINGS, TINY
from experiments.validation.runs import Runs
from hexiopt.files.problem_file import problem_sha256
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES
from hexiopt.study.workers import JobProcesses
from solvers import registry
from tests.conftest import ROOT, STRESS
from tests.experiments.made_up import Labels, claims_of, run_made_up
from tests.slow import slow_but

NAMES = tuple(name for name in SOURCES if name != "validation")  # which asks no search


def every_third_has_none() -> Callable[[Labels], float | None]:
    seen: dict[str, int] = {}

    def step_s(labels: Labels) -> float | None:
        k = seen.setdefault(str(sorted(labels.items())), len(seen))
        return None if k % 3 == 2 else 1.0 + k % 5 / 10

    return step_s


FOUND: dict[str, Callable[[], Callable[[Labels], float | None]]] = {
    "every third has none": every_third_has_none,
    "none has a plan": lambda: lambda _: None,
}


@pytest.mark.parametrize(
    ("name", "outcome"),
    slow_but(
        [(name, [*FOUND][k % 3 == 2]) for k, name in enumerate(NAMES)],
        [(name, kind) for name in NAMES for kind in FOUND],
    ),
)
def test_every_study(name: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page and figures are whole; no claim, table or condition says NaN; every row names its search."""
    page = run_made_up(name, monkeypatch, tmp_path, FOUND[outcome]())
    text = page.text
    assert text.splitlines()[0].startswith(f"<!-- Written by python -m experiments.studies {name}: ")
    assert text.splitlines()[1].startswith("# ")
    question = text.split("\n\n")[1]
    assert question.endswith(("?", ".", ":"))
    assert not re.search(r"\bnan\b|\binf\b|None\b|NaT", text)
    assert page.figures
    for file, figure in page.figures.items():
        assert figure.startswith(b"\x89PNG")
        assert f"]({file})" in text
    for stated in ("TFLOPS", "GB/s between machines", "sequences of", "Time limits", "seeds 0", "2 cores", "c0dec0de"):
        assert stated in text, stated
    assert text.count("\n## Conditions\n") == 1
    assert text.endswith(f"- Command: `python -m experiments.studies {name}`\n")
    assert "\n\n\n" not in text
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))
    assert list(page.rows["key"]) == [spec.job.key for spec in page.specs]
    assert page.rows["key"].is_unique


def test_a_broken_claim_is_told_and_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours is slower than every rival, by the clock of a full run; random partitions, then, are no slower."""
    slow = run_made_up("rivals", monkeypatch, tmp_path, lambda labels: 1.0 + is_ours(labels), quick=False)
    claims = ["No rival's plan is faster than ours.", "Mixed clusters come near homogeneous ones of like FLOPS."]
    claims.append("The portfolio is ahead of random partitions.")
    lines = faults("rivals", slow)
    assert [line.rpartition(": ")[2] for line in lines] == claims
    assert all(line.startswith("rivals: no longer holds: 01_rivals.py, cell ") for line in lines)
    assert "flashflex.png" in slow.figures  # cells after it are run
    fast = run_made_up("rivals", monkeypatch, tmp_path / "fast", lambda labels: 2.0 - is_ours(labels), quick=False)
    assert faults("rivals", fast) == []
    monkeypatch.setattr(
        "experiments.studies.__main__.run", lambda source, _: {"rivals": slow}.get(source.stem[3:], fast)
    )
    docs, out = tmp_path / "docs", tmp_path / "out"
    monkeypatch.setattr("experiments.studies.__main__.DOCS", docs)
    monkeypatch.setenv("QUICK", "")
    monkeypatch.setenv(FOLDER, "")  # which main sets
    assert main(["rivals", "ablation", "--publish", "--out", str(out)]) == 1
    told = [f"hexiopt: {line}" for line in ("rivals (study 1 of 2)", *lines, "ablation (study 2 of 2)")]
    assert capsys.readouterr().err.splitlines()[-5:] == told
    assert sorted(path.name for path in docs.iterdir()) == sorted(["ablation.md", *fast.figures])
    assert (docs / "ablation.md").read_text() == fast.text
    assert (out / "rivals" / "rivals.md").read_text() == slow.text


def test_a_study_that_cannot_go_on_is_told_and_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "01_sample.py"
    cells = ["from experiments.studies.frame.page import show\nshow(notes='begun')", "1 / 0", "undefined"]
    source.write_text("\n\n".join(f"# %%\n{cell}" for cell in cells))
    page = run(source, "COMMAND")
    assert faults("sample", page) == ["sample: 01_sample.py, cell 1, line 1: ZeroDivisionError: division by zero"]
    assert "begun" in page.text
    monkeypatch.setenv("HEXIOPT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(source, "COMMAND")


def is_ours(labels: Labels) -> bool:
    return labels["solver"] == OURS.solver


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "rivals"])
def test_claims_are_checked_where_a_study_is_not_quick(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its assertions can be computed, and a quick study asks for less."""
    whole = run_made_up(name, monkeypatch, tmp_path, lambda _: 1.0, quick=False)
    assert len(whole.specs) > len(run_made_up(name, monkeypatch, tmp_path, lambda _: 1.0).specs)


def test_a_study_shows_what_its_cells_show(tmp_path: Path) -> None:
    source = tmp_path / "01_sample.py"
    source.write_text(
        "# %% [markdown]\n# # A title\n#\n# A question?\n\n# %%\nimport pandas as pd\n"
        "from experiments.studies.frame.figures import framed\nfrom experiments.studies.frame.page import show\n"
        "print('not on the page')\nfigure, _ = framed('a', 'b')\n"
        "show({'Heading': pd.DataFrame({'x': ['1']}, index=['a'])}, ['it is 1.'], figure, 'Notes.')\n\n"
        "# %%\nassert figure is None\n\n# %% [markdown]\n# ## A part\n\n# %%\n"
        "show(figure=figure, name='other')\n"
    )
    page = run(source, "COMMAND")
    assert page.text == (
        "<!-- Written by COMMAND: change the study, not this page. -->\n# A title\n\nA question?\n\n"
        "![A title](sample.png)\n\n**Heading**\n\n| index | x |\n| --- | --: |\n| a | 1 |\n\n- It is 1.\n\n"
        "Notes.\n\n## A part\n\n![A part](other.png)\n"
    )
    assert sorted(page.figures) == ["other.png", "sample.png"]
    assert page.broken == ["no longer holds: 01_sample.py, cell 2: assert figure is None"]


@pytest.mark.slow
def test_real_searches_are_measured_once_and_again_where_code_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICK", "")  # which main sets
    command = ["ablation", "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    captured = capsys.readouterr()
    counts = [f"{count} of {count} searches to run" for count in (10, 2, 6)]
    assert [line.removeprefix("hexiopt: ").partition(",")[0] for line in captured.err.splitlines()[1:]] == counts
    assert captured.out.splitlines() == [str(tmp_path / "ablation" / "ablation.md")]
    assert len(list((tmp_path / "searches").glob("*/plan.json"))) == 18
    statuses = [json.loads(path.read_text()) for path in (tmp_path / "searches").glob("*/status.json")]
    assert {status["measured"]["status"] for status in statuses} == {"feasible"}
    for status in statuses:
        assert status["measured"]["cpu_s"] > 0
        assert 0.01 < status["measured"]["peak_gib"] < 8
    before = (tmp_path / "ablation" / "ablation.md").read_bytes()
    monkeypatch.setattr(JobProcesses, "run", lambda _: pytest.fail("a search was run again"))
    assert main(command) == 0
    again = capsys.readouterr().err
    assert all(f"0 of {count} searches to run" in again for count in (10, 2, 6))
    assert (tmp_path / "ablation" / "ablation.md").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv(FOLDER, str(tmp_path / "searches"))
    monkeypatch.setattr("experiments.studies.frame.search.code_sha256", lambda: "changed")
    waiting: list[str | None] = []
    monkeypatch.setattr("experiments.studies.frame.search.run_jobs", lambda *_, code, **__: waiting.append(code))
    run(SOURCES["ablation"], "")
    changed = capsys.readouterr().err
    assert all(count in changed for count in counts)
    assert waiting == ["changed"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if STRESS else NAMES[::4])
def test_every_study_measures_quickly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv(FOLDER, str(tmp_path / "searches"))
    page = run(SOURCES[name], "")
    rows = page.rows
    assert faults(name, page) == []
    assert (rows["step_time_s"].notna() | (rows["reason"] != "") | (rows["status"] == "bound")).all()
    of_ours = ~rows["key"].isin([spec.job.key for spec in page.specs if spec.pricer is not None])
    assert not (of_ours & (rows["bound_s"] > rows["step_time_s"] * (1 + 1e-9))).any()


def test_owners_of_two_cards_ask_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = run_made_up("unequal_cards", monkeypatch, tmp_path, lambda _: 1.0)
    assert faults("unequal_cards", page) == []
    cases = page.names["cases"]
    assert (cases["tokens_per_s"] > 0).all()
    assert len(re.findall(r"\| [\d,]+ \(U[012] L[012]\)", page.text)) == len(cases) == 2
    assert list(cases["table"]) == ["U2 L2", "U2 L2"], "19, 16, 22 and 16 GB, on two cards of 12"
    assert not cases["behind"].any()
    assert not re.search(r"\bnan\b|None\b", page.text)
    numbers = page.names["agreement"](cases).astype(int)
    assert list(numbers.sum(axis=1)) == [2, 2]


def test_validation_has_the_errors_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every eighth run; each table has numbers, and a page that is not quick makes claims."""
    monkeypatch.setenv("QUICK", "1")
    page = run(SOURCES["validation"], "")
    assert faults("validation", page) == []
    assert not re.search(r"\bnan\b|\binf\b|None\b", page.text)
    dense = page.names["dense"]
    assert 50 < len(dense.priced) < len(dense.rows) == 55
    assert "| mosaicml/llm-foundry | A100 bf16 |" in page.text
    assert "| `hopper_gemm_max` | 0.6703 |" in page.text
    assert [*page.figures] == ["validation.png"]
    monkeypatch.setenv("QUICK", "")
    monkeypatch.setattr(Runs, "errors", lambda *_, **__: [Errors("all", "a100 sxm", 9, 50.0, 50.0, 50.0, 0.0, 0.5)])
    monkeypatch.setattr(page.names["Runs"], "of", lambda *_, **__: dense)
    assert any("Runs on A100" in line for line in faults("validation", run(SOURCES["validation"], "")))


# ------------------------------------------------------------------------------------------- searches


def test_a_search_is_identified_by_all_that_goes_in() -> None:
    spec = OURS.search(TINY[0].problem(), 1.0, {})
    others = [
        replace(spec, seed=1),
        replace(spec, time_limit_s=2.0),
        replace(spec, solver="random"),
        replace(spec, options={"defects": "none"}),
        replace(spec, pricer=flashflex.by_rule),
        replace(spec, judge=flashflex.judged),
        replace(spec, cpu_time=True),
        replace(spec, problem=TINY[0].problem(inter_gb_per_s=0.5)),
    ]
    assert len({search.job.key for search in (spec, *others)}) == len(others) + 1
    assert replace(spec, labels={"other": 1}).job.key == spec.job.key


def test_a_refusal_is_a_measurement_and_a_bug_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    problem = TINY[0].problem()
    refused = SearchSpec(problem, "flashflex", 0.1, {"k": 0}, options={"defects": "none"})
    broken = SearchSpec(problem, "random", 5.0, {"k": 1}, max_steps=3, judge=fail)
    rows = measured([refused, broken])
    assert list(rows["status"]) == ["refused", "failed"]
    assert "defects" in rows["reason"][0]
    assert rows["reason"][1] == "unexpected RuntimeError: no judgement"
    assert [spec.job.is_done(tmp_path) for spec in (refused, broken)] == [True, False]


def fail(problem: Problem, plan: object) -> dict[str, float]:
    raise RuntimeError("no judgement")


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--quick", "--publish"], "--quick"), (["--out", "/dev/null/x"], "cannot be made")]
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUICK", FOLDER):
        monkeypatch.setenv(name, "1")  # which main changes
    assert main(["replan", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hexiopt: ")
    assert word in line


# ------------------------------------------------------------------------------------------- settings


def test_settings_are_the_papers() -> None:
    assert len(SETTINGS) == 6
    for setting in SETTINGS:
        paper = published.setting_figures(setting.number, setting.model)
        mixed, partner = setting.problem().cluster, setting.partner_problem().cluster
        ratio = mixed.total_peak_flops("bf16") / partner.total_peak_flops("bf16")
        assert ratio == pytest.approx(paper["flops"], abs=1e-4 if setting.number in ("1", "2") else 0.05)
        assert setting.problem(inter_gb_per_s=0.5).cluster.inter_bandwidth_bytes_per_s == 0.5e9
    assert published.setting_figures("4", "llama2_7b") == {}
    assert {planner.solver for planner in RIVALS} == set(registry.names(registry.baseline))


def test_long_settings_are_the_papers() -> None:
    assert (len(TESTBED), len(SIMULATIONS)) == (3 * 5, 3 * 2 * 4)
    assert {setting.global_batch for setting in (*TESTBED, *SIMULATIONS, *PAIRS, *ABLATION)} == {8}
    assert {setting.seq_len for setting in JOINT} == {131_072}
    for setting in PAIRS:
        problem = setting.problem()
        assert problem.space.sequence
        partner = setting.problem(cluster=PARTNERS[setting.cluster])
        flops = [p.cluster.total_peak_flops("bf16") for p in (problem, partner)]
        assert flops[0] / flops[1] == pytest.approx(1.05, abs=0.01)


def test_speeds_by_peak_are_in_proportion_to_peaks() -> None:
    setting = replace(PAIRS[0], by_peak=True)
    problem, partner = setting.problem(), PARTNERS[setting.cluster]
    assert problem_sha256(problem) != problem_sha256(PAIRS[0].problem())
    efficiencies = [gpu.efficiency for gpu in problem.cluster.types]
    assert len(efficiencies) == 2
    assert len({(e.gemm_max, e.attention_max, e.memory_max) for e in efficiencies}) == 1
    fills = [e.gemm_half_flops / gpu.flops_bf16 for e, gpu in zip(efficiencies, problem.cluster.types, strict=True)]
    assert fills[0] == pytest.approx(fills[1])
    assert setting.problem(cluster=partner) == PAIRS[0].problem(cluster=partner)


Study = Callable[..., dict[str, Any]]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Study:
    """The names of a study's cells, run quickly; step times are all 1 s or as its labels say."""

    def names(name: str, step_time_s: Callable[[Labels], float | None] = lambda _: 1.0) -> dict[str, Any]:
        page = run_made_up(name, monkeypatch, tmp_path, step_time_s)
        return {**page.names, "claimed": claims_of(page)}

    return names


def test_balance_is_the_mean_speed_over_the_least(study: Study) -> None:
    balance = study("long_context")["balance"]
    alike = PAIRS[0].problem(cluster="homogeneous_152_a100")
    assert balance(alike) == pytest.approx(1.0)
    assert 1.05 < balance(SIMULATIONS[0].problem()) < 2.0


def test_scheduling_has_limits_by_size(study: Study) -> None:
    names = study("long_context")
    assert names["SIZES"] == [16]
    assert [names["limit_s"](n) for n in (16, 128, 256, 1024, 10_240)] == [0.9, 0.9, 9.0, 9.0, 110.0]


# --------------------------------------------------------------------------- what reports compute and say


@pytest.mark.parametrize(
    ("ratios", "word"),
    [([1.2, 1.8], "better"), ([1.6, 2.0], "is where the paper says"), ([1.6, 2.6], "worse")],
)
def test_verdicts_compare_with_the_paper(ratios: list[float], word: str) -> None:
    verdict = published.verdict("AMP", ratios, "rivals")
    assert word in verdict
    assert f"{ratios[0]:.2f} to {ratios[1]:.2f} ×" in verdict
    assert "1.5 to 2.4 ×" in verdict


def test_rival_claims_name_who_beats_ours_and_who_has_no_plan(study: Study) -> None:
    times_s: dict[str, float | None] = {"ours": 10.0, "Sailor": 9.0, "FSDP": None}
    names = study("rivals", lambda labels: times_s.get(labels.get("planner", ""), 20.0))
    claims, setting = names["claimed"], TINY[0].label
    assert [line for line in claims if "beats ours" in line] == [
        f"Sailor beats ours at setting {setting}: its step takes 10.00% less."
    ]
    assert f"FSDP has no plan at {setting}." in claims
    assert sum("is where the paper says: ours is 2.00 ×" in line for line in claims) == len(names["_COMPARED"]) == 3


def test_homogeneous_claims_name_baselines_that_beat_the_paper(study: Study) -> None:
    claims = study("rivals")["homogeneous_claims"]
    ratio = pd.Series({"a": 0.9, "b": 0.7, "c": math.nan})
    fastest = pd.Series({"a": "Megatron-LM, homogeneous", "b": "Galvatron, homogeneous", "c": "FSDP, homogeneous"})
    priced, paper = pd.Series({"a": 0.3, "b": 0.5, "c": 0.5}), pd.Series({"a": 0.38, "b": 0.39, "c": math.nan})
    sentences = claims(ratio, fastest, priced, paper)
    assert "0.80 × on average and 0.90 × at most" in sentences[0]
    assert sentences[1].startswith("Galvatron does better here than the paper says at setting b")
    assert "MFU of 30.0% to 50.0%" in sentences[2]
    nothing = claims(ratio * math.nan, fastest, priced, paper)
    assert nothing == ["No setting has both a plan of ours and one of a baseline."]


def test_convergence_compares_seed_by_seed(study: Study) -> None:
    times_s = {"random partition": (4.0, 2.0), "HexiScale's partition": (2.0, 4.0), "our portfolio": (2.0, 1.0)}
    lines = study("rivals", lambda labels: times_s.get(labels.get("planner", ""), (1.0, 1.0))[int(labels["seed"])])
    claims = [line for line in lines["claimed"] if "andom partition" in line]
    assert "HexiScale's partition is 1.00 × as fast" in claims[0]
    assert "our portfolio is 2.00 × as fast" in claims[1]
    assert claims[2:] == [
        f"HexiScale's partition stays behind random partition in 1 of 2 runs of setting {TINY[0].label}."
    ]


def test_a_space_is_credited_with_every_plan_inside_it(study: Study) -> None:
    ablation = SimpleNamespace(**study("ablation"))
    assert {"", *SWITCHES} <= {" ".join(space.off) for space in ablation.SPACES.values()}
    times = pd.DataFrame({"s": dict.fromkeys(ablation.SPACES, 10.0)})
    times.loc["no replicated stages"], times.loc[ablation.NONE] = math.nan, 9.0
    best = credited(times, ablation.INSIDE)["s"]
    assert best[ablation.WHOLE] == best["no replicated stages"] == 9.0
    assert best["1F1B only"] == 10.0  # the plan of 9 s may have another schedule
    assert best["one policy a stage"] == 9.0
    both = ablation.PlanSpace(("replicas",), "1f1b")
    assert both.holds(ablation.PlanSpace(SWITCHES, "1f1b"))
    assert not both.holds(ablation.PlanSpace(SWITCHES))
    assert ablation.PlanSpace(("recompute_per_layer",)).holds(ablation.PlanSpace(("recompute_per_stage",)))
    assert list(credited(times.loc[[ablation.WHOLE, ablation.NONE]], ablation.INSIDE).index) == [
        ablation.WHOLE,
        ablation.NONE,
    ]


def test_ablation_claims_say_what_is_lost_and_where_the_search_stopped(study: Study) -> None:
    times_s = {"the whole plan space": 10.5, "equal layers in a pipeline": 12.0, "none of them (all off)": 15.0}
    claims = study("ablation", lambda labels: times_s.get(labels.get("space", ""), 10.0))["claimed"]
    assert claims[0] == "Without any asymmetry a step takes 50.0% longer."
    assert claims[1] == "The most expensive single loss is “equal layers in a pipeline”: 20.0% on average."
    assert "“equal layers" not in claims[2]
    assert "“1F1B only”" in claims[2]
    assert f"At setting {TINY[0].label} the search of the whole space stops 5.0% above the best known plan" in claims[3]


def test_long_context_claims_compare_with_the_paper_and_say_what_is_possible(study: Study) -> None:
    claims = study("long_context")["contest_claims"]
    nan = math.nan
    table = pd.DataFrame(
        {
            "ours": [1.0, 1.0, 1.0, nan],
            "best": ["USP", "Ulysses", nan, "USP"],
            "ratio": [1.2, 1.4, nan, nan],
            "gap": [0.2, 0.5, 0.5, nan],
            "balance": [1.2, 1.3, 1.2, 1.3],
        },
        index=["a", "b", "c", "d"],
    )
    sentences = claims(table, {"mean": 1.36, "most": 1.72})
    assert "1.30 × as fast on average, 1.40 × at most (b), 1.20 × at least (a)" in sentences[0]
    assert sentences[1].startswith("The baselines do better here than the paper says")
    assert "1.25 ×" in sentences[1]
    assert f"no planner could be more than {(1.2 / 0.8 + 1.4 / 0.5) / 2:.2f} ×" in sentences[2]
    assert sentences[3:] == ["Ours has no plan at d.", "No baseline has a plan at c; ours has."]
    assert len(claims(table.loc[["d"]], {"mean": 1.0, "most": 2.0})) == 1


def test_pairs_say_who_stays_behind(study: Study) -> None:
    pair_claims = study("long_context")["pair_claims"]
    table = pd.DataFrame({"ratio": [0.9, 1.05], "best": ["USP", "USP"], "possible": [1.2, 1.3]}, index=["a", "b"])
    sentences = pair_claims(table)
    assert "0.900 to 1.050 ×" in sentences[0]
    assert sentences[1:] == ["At a the mixed cluster stays 10.0% behind USP."]
    sentences = pair_claims(table.assign(possible=[0.9, 0.95]))
    assert sentences[-1] == "No plan on a mixed cluster can: the bound of all plans leaves 0.95 × at most."


def test_joint_claims_count_who_wins(study: Study) -> None:
    together = pd.Series({"a": 1 / 10, "b": 1 / 10, "c": math.nan})
    single = pd.Series({"a": 1 / 11, "b": 1 / 9, "c": 1 / 9})
    claims = study("long_context")["joint_claims"](together, single, pd.Series({"a": "A", "b": "B", "c": "C"}))
    assert claims == [
        "Joint plans beat both others on 1 of 3 clusters: A by 10.0%.",
        "At b the joint search ends 11.1% behind the better single one.",
        "c has no joint plan.",
    ]


def test_scheduling_claims_stand_beside_the_papers_times(study: Study) -> None:
    rows = pd.DataFrame({"gpus": 128, "planner": ["ours", "Ring Attention"], "step_time_s": [2.0, 3.0]})
    claims = study("long_context")["scheduling_claims"](
        rows.assign(runtime_s=1.0, time_limit_s=9.0), pd.Series({128: 9.0})
    )
    assert claims == [f"128 GPUs: a plan in 1.00 s ({published.HEXISEQ}: 9 s), 1.50 × as fast as the best baseline's."]


# ---------------------------------------------------------------------------------------- published pages


def test_published_pages_are_whole_short_and_linked() -> None:
    docs = ROOT / "docs" / "results"
    index = (docs / "index.md").read_text(encoding="utf-8")
    for name, source in SOURCES.items():
        text = (docs / f"{name}.md").read_text(encoding="utf-8")
        prose = source.read_text(encoding="utf-8").partition("\n\n# %%")[0].splitlines()[1:]
        title, *question = (line.removeprefix("#").removeprefix(" ") for line in prose)
        assert re.match(rf"<!-- Written by python -m experiments\.studies {name} --publish( --any-code)?: ", text)
        assert " ".join(f"\n{title} {' '.join(question)}".split()) in " ".join(text.split())
        assert "\n- Measured 20" in text
        assert f"]({name}.md)" in index
    for page in docs.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        prose = [line for line in text.partition("\n## Conditions\n")[0].splitlines() if not line.startswith("|")]
        assert len(" ".join(prose).split()) <= 3500, page
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (docs / target).is_file(), f"{page.name}: {target}"
