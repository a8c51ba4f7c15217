"""Tables on long contexts: held to their own CSV; sentences by made-up outcomes."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.tables import published
from experiments.tables.__main__ import LONG_CONTEXT
from experiments.tables.frame import run_tables
from experiments.tables.long_context import comparison, joint, layouts, pairs, scheduling
from experiments.tables.long_context.settings import (
    ABLATION,
    BASELINES,
    HEXISEQ,
    JOINT,
    PAIRS,
    PARTNERS,
    QUICK,
    SIMULATIONS,
    TESTBED,
    at_peak,
)
from experiments.tables.options import Options
from experiments.tables.task import Outcome

LIMITS = ("--sequence-s", "1", "--sequence-baseline-s", "4", "--joint-s", "1")
ARGUMENTS = ("--quick", *LIMITS, "--sizes", "16", "--out")
PAPER = published.sequence_ratios("simulations")
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all of them, made quickly."""
    out = tmp_path_factory.mktemp("long_context")
    assert run_tables(LONG_CONTEXT, None, [*ARGUMENTS, str(out)]) == 0
    return out


def read(made: Path, name: str) -> Rows:
    with (made / name / f"{name}.csv").open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def text(made: Path, name: str) -> str:
    return (made / name / f"{name}.md").read_text(encoding="utf-8")


def found(seconds: float | None) -> Outcome:
    status = "not_found" if seconds is None else "feasible"
    return Outcome(status, 1.0, 0.5, seconds, None if seconds is None else 1.0 / seconds)


def baselines(*seconds: float | None) -> dict[object, Outcome]:
    return {planner: found(s) for planner, s in zip(BASELINES, seconds, strict=True)}


# ------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("table", LONG_CONTEXT, ids=lambda table: table.name)
def test_a_table_states_its_conditions_and_has_a_picture(made: Path, table: object) -> None:
    name = table.name  # type: ignore[attr-defined]
    assert (made / name / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    said = text(made, name)
    assert f"`python -m experiments.tables.long_context.{name} --quick" in said
    for stated in ("TFLOPS", "GB/s between machines", "sequences of", "seeds 0", "Time limits"):
        assert stated in said
    assert all(row["search_sha256"] for row in read(made, name))


def test_ratios_are_those_of_the_step_times(made: Path) -> None:
    rows = read(made, "testbed")
    assert [row["planner"] for row in rows] == [planner.label for planner in (HEXISEQ, *BASELINES)]
    simulated = read(made, "simulations")
    assert rows == simulated[: len(rows)]  # of the same tiny setting
    assert [row["speeds"] for row in simulated] == ["calibrated"] * len(rows) + ["by peak"] * len(rows)
    assert [row["time_limit_s"] for row in rows] == ["1.0", *["4.0"] * len(BASELINES)]
    ours_s = float(rows[0]["step_time_s"])
    for row in rows:
        assert float(row["lower_bound_s"]) <= float(row["step_time_s"])
        assert float(row["ours_over_it"]) == pytest.approx(float(row["step_time_s"]) / ours_s, rel=1e-12)
    best = min(float(row["step_time_s"]) for row in rows[1:]) / ours_s
    assert f"ours is {best:.2f} × as fast on average" in text(made, "testbed")


def test_a_pair_compares_two_clusters(made: Path) -> None:
    rows = read(made, "pairs")
    mixed, *there = (row for row in rows if row["speeds"] == "calibrated")
    assert [row["speeds"] for row in rows].count("by peak") == 1 + len(there)
    assert mixed["cluster"] == QUICK[0].cluster
    assert {row["cluster"] for row in there} == {PARTNERS[QUICK[0].cluster]}
    assert [row["time_limit_s"] for row in (mixed, *there)] == ["1.0", "1.0", *["4.0"] * len(BASELINES)]
    best = min(float(row["step_time_s"]) for row in there[1:]) / float(mixed["step_time_s"])
    assert f"Mixed clusters reach {best:.3f} × of the best baseline" in text(made, "pairs")


def test_a_variant_counts_with_every_plan_inside_it(made: Path) -> None:
    rows = {row["variant"]: row for row in read(made, "layouts")}
    assert list(rows) == [variant.label for variant in layouts.VARIANTS]
    seconds = {label: float(row["step_time_s"]) for label, row in rows.items()}
    assert seconds["all of them uneven"] == min(seconds.values())
    for label, row in rows.items():
        assert float(row["over_even"]) == pytest.approx(seconds["nothing uneven"] / seconds[label], rel=1e-12)


def test_joint_gains_are_those_of_the_step_times(made: Path) -> None:
    rows = {row["way"]: row for row in read(made, "joint")}
    joint_s = float(rows["joint"]["step_time_s"])
    assert float(rows["joint"]["lower_bound_s"]) <= joint_s
    for row in rows.values():
        assert float(row["joint_over_it"]) == pytest.approx(float(row["step_time_s"]) / joint_s, rel=1e-12)


# ---------------------------------------------------------------------------- its parts


def test_settings_are_the_papers() -> None:
    assert len(TESTBED) == 3 * 5
    assert len(SIMULATIONS) == 3 * 2 * 4
    assert {setting.global_batch for setting in (*TESTBED, *SIMULATIONS, *PAIRS, *ABLATION)} == {8}
    assert {setting.seq_len for setting in JOINT} == {131_072}
    for setting in PAIRS:
        problem = setting.problem(Options())
        assert problem.space.sequence
        partner = setting.problem(Options(), cluster=PARTNERS[setting.cluster])
        flops = [p.cluster.total_peak_flops("bf16") for p in (problem, partner)]
        assert flops[0] / flops[1] == pytest.approx(1.05, abs=0.01)


def test_sentences_compare_with_the_paper_and_say_what_is_possible() -> None:
    ours, slow = found(10.0), found(None)
    one = comparison.Comparison(SIMULATIONS[0], ours, baselines(15.0, 12.0, None), 8.0, 1.2)  # type: ignore[arg-type]
    two = comparison.Comparison(SIMULATIONS[1], ours, baselines(14.0, 16.0, 18.0), 5.0, 1.3)  # type: ignore[arg-type]
    alone = comparison.Comparison(SIMULATIONS[2], ours, baselines(None, None, None), 5.0, 1.2)  # type: ignore[arg-type]
    none = comparison.Comparison(SIMULATIONS[3], slow, baselines(14.0, 16.0, 18.0), 5.0, 1.3)  # type: ignore[arg-type]
    said = comparison.sentences([one, two, alone, none], PAPER)
    assert "1.30 × as fast on average, 1.40 × at most" in said[0]
    assert f"{PAPER.mean:g} × on average" in said[0]
    assert said[1].startswith("The baselines do better here than the paper says")
    assert f"{(1.2 + 1.3 + 1.2 + 1.3) / 4:.2f} ×" in said[1]
    assert f"no planner could be more than {(1.2 / 0.8 + 1.4 / 0.5) / 2:.2f} ×" in said[2]
    assert f"No baseline has a plan at {SIMULATIONS[2].label}; ours has." in said
    assert f"Ours has no plan at {SIMULATIONS[3].label}." in said
    assert len(comparison.sentences([none], PAPER)) == 1
    (peak,) = comparison.peak_sentences([one, two, alone, none])
    assert f"1.30 × as fast as the best baseline on average and 1.40 × at most ({SIMULATIONS[1].label})" in peak
    assert comparison.peak_sentences([alone, none]) == []


def test_balance_is_the_mean_speed_over_the_least() -> None:
    problem = SIMULATIONS[0].problem(Options())
    alike = PAIRS[0].problem(Options(), cluster="homogeneous_152_a100")
    assert comparison.balance(alike) == pytest.approx(1.0)
    assert 1.05 < comparison.balance(problem) < 2.0


def test_pairs_say_who_stays_behind() -> None:
    behind = pairs.Pair(PAIRS[0], found(10.0), baselines(9.0, 12.0, 11.0), 1.05, found(9.0), 8.0)  # type: ignore[arg-type]
    before = pairs.Pair(PAIRS[1], found(10.0), baselines(10.5, 12.0, 11.0), 1.05, found(9.0), 8.0)  # type: ignore[arg-type]
    said = pairs.sentences([behind, before])
    assert "0.900 to 1.050 ×" in said[0]
    assert said[1:] == [f"At {PAIRS[0].label} the mixed cluster stays 10.0% behind Ring Attention."]
    assert behind.possible == 9.0 / 8.0
    said = pairs.sentences([replace(behind, bound_s=9.5)])
    assert said[-1] == "No plan on a mixed cluster can: the bound of all plans leaves 0.95 × at most."
    assert pairs.peak_sentences([behind, before])[0].endswith("would reach 0.900 to 1.050 ×.")


def test_speeds_by_peak_are_in_proportion_to_peaks() -> None:
    (setting,) = at_peak(PAIRS[:1])
    problem = setting.problem(Options())
    assert setting.speeds == "by peak"
    assert problem.sha256 != PAIRS[0].problem(Options()).sha256
    efficiencies = [gpu.efficiency for gpu in problem.cluster.types]
    assert len(efficiencies) == 2
    assert len({(e.gemm_max, e.attention_max, e.memory_max) for e in efficiencies}) == 1
    fills = [e.gemm_half_flops / gpu.flops_bf16 for e, gpu in zip(efficiencies, problem.cluster.types, strict=True)]
    assert fills[0] == pytest.approx(fills[1])
    partner = PARTNERS[setting.cluster]
    assert setting.problem(Options(), cluster=partner) == PAIRS[0].problem(Options(), cluster=partner)


def test_joint_sentences_count_who_wins() -> None:
    def made_up(pipelines: float | None, sequences: float | None, together: float | None, k: int) -> joint.Joint:
        runs: Mapping[joint.Way, Outcome] = dict(
            zip(joint.WAYS, map(found, (pipelines, sequences, together)), strict=True)
        )
        return joint.Joint(JOINT[k], dict(runs), 5.0)

    said = joint.sentences([made_up(12.0, 11.0, 10.0, 0), made_up(9.0, None, 10.0, 1), made_up(9.0, 9.0, None, 2)])
    assert said[0].startswith(f"Joint plans beat both others on 1 of 3 clusters: {JOINT[0].place} by 10.0%")
    assert f"At {JOINT[1].label} the joint search ends 11.1% behind the better single one." in said
    assert f"{JOINT[2].label} has no joint plan." in said


def test_scheduling_has_the_papers_sizes_between_those_asked_for() -> None:
    assert scheduling.sizes(Options(sizes=(16, 10_240))) == (16, 128, 1024, 10_240)
    assert scheduling.sizes(Options(sizes=(16,))) == (16,)
    assert [scheduling.limit_s(n) for n in (16, 128, 256, 1024, 10_240)] == [0.9, 0.9, 9.0, 9.0, 110.0]
    size = scheduling.Size(128, {HEXISEQ: found(2.0)} | dict(zip(BASELINES, map(found, (3.0, None, 4.0)), strict=True)))
    (said,) = scheduling.sentences([size])
    assert (
        said == f"128 GPUs: a plan in 1.00 s ({published.HEXISEQ_SOURCE}: 9 s), 1.50 × as fast as the best baseline's."
    )
