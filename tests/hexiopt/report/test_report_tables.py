"""Words, rows and tables of a report: complete for small plans, short for large ones, safe for any name."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from matplotlib.text import Text

from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import read_cluster
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.report.compared.comparison import comparison_table, restricted_bounds
from hexiopt.report.explanation import stage_rows, workload_rows
from hexiopt.report.facts import PlanFacts
from hexiopt.report.figure import plan_figure
from hexiopt.report.notes import notes, plan_notes, solver_notes
from hexiopt.report.page.html import report_html
from hexiopt.report.rows import identical_pipelines, plan_rows
from hexiopt.report.style import device_ranges, mix, place, seconds, stage_colour
from hexiopt.report.table import breakdown_table, plan_table, summary_table
from hexiopt.solving.result import Point, RestrictedBound, Result, Status
from hexiopt.study.solution import PlacedPlan, Solution
from tests.conftest import ROOT
from tests.hexiopt.report.pictures import SOLVER, Case, console_text

# ------------------------------------------------------------------------------------------------- words


def test_devices_are_written_as_ranges(small: Case, large: Case) -> None:
    assert device_ranges(small[0].cluster, (5, 0, 2, 3)) == ["new:0", "old:0-1,3"]
    assert place(small[0].cluster, (2, 3)) == "old:0-1 (rtx_3090)"
    cluster = large[0].cluster
    spec = cluster.machines[0].spec_name
    assert device_ranges(cluster, range(24)) == [f"{spec}-[0-2]:0-7"]
    assert device_ranges(cluster, range(17)) == [f"{spec}-[0-1]:0-7", f"{spec}-2:0"]
    assert place(cluster, (0, 1)) == f"{spec}-0:0-1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.45, "123.5 s"),
        (5.317, "5.32 s"),
        (0.9996, "1.00 s"),
        (0.0426, "42.6 ms"),
        (0.0009996, "1 ms"),
        (7e-6, "7 µs"),
        (0.0, "0 s"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert seconds(value) == text


def test_stage_shades_differ_and_belong_to_the_pipelines_hue() -> None:
    shades = [stage_colour(1, stage, 5) for stage in range(5)]
    assert len(set(shades)) == 5
    assert shades[0] == stage_colour(1, 0, 1) != stage_colour(2, 0, 1)
    assert mix("#000000", "#FFFFFF", 0.5) == "#808080"


# ------------------------------------------------------------------------------------------------- rows


def test_alike_pipelines_are_found(mixed: Case, large: Case) -> None:
    assert identical_pipelines(*mixed[:2]) == ((0,), (1,), (2,), (3,))
    groups = identical_pipelines(*large[:2])
    assert [len(group) for group in groups] == [107, 107, 106]
    assert sorted(index for group in groups for index in group) == list(range(320))


def test_the_slowest_stands_for_those_alike(large: Case) -> None:
    problem, plan, cost = large
    rows = plan_rows(PlanFacts(problem, plan, cost), group_above=10, max_pipelines=10, max_stages=32)
    for row in rows.pipelines:
        assert row.end_s == max(cost.pipelines[index].end_s for index in row.members)
    assert rows.num_left_out == 0
    assert rows.is_grouped


def test_what_does_not_fit_is_counted_and_the_longest_kept(mixed: Case) -> None:
    problem, plan, cost = mixed
    rows = plan_rows(PlanFacts(problem, plan, cost), group_above=1, max_pipelines=2, max_stages=32)
    assert len(rows.pipelines) == 2
    assert rows.num_left_out == 2
    longest = max(range(4), key=lambda index: cost.pipelines[index].end_s)
    assert longest in [row.number for row in rows.pipelines]
    assert "2 pipelines" in rows.note


# ------------------------------------------------------------------------------------------------- tables


def test_table_has_every_stage_with_its_devices(mixed: Case) -> None:
    problem, plan, cost = mixed
    text = console_text(plan_table(PlanFacts(problem, plan, cost), full=True))
    for p, pipeline in enumerate(plan.pipelines):
        assert f"pipeline {p} · {pipeline.num_micro_batches} × {pipeline.micro_batch_size} " in text
        for s, stage in enumerate(pipeline.stages):
            (line,) = (line for line in text.splitlines() if line.startswith(f"{p}·{s} "))
            assert place(problem.cluster, stage.devices) in line
            (first, end), priced_stage = stage.layers[0], cost.pipelines[p].stages[s]
            assert f"[{first}, {end}) {end - first:2d}" in line
            assert f"{priced_stage.memory.total / 2**30:.1f}/{priced_stage.limit_bytes / 2**30:.1f}" in line
    assert text.count("· longest") == 1
    assert "slowest" in text


def test_no_line_is_wider_than_the_console(case: Case) -> None:
    for width in (100, 120):
        for renderable in (plan_table(PlanFacts(*case)), summary_table(PlanFacts(*case, SOLVER))):
            assert max(len(line) for line in console_text(renderable, width).splitlines()) <= width


def test_large_plan_prints_on_a_screen(large: Case) -> None:
    facts = PlanFacts(*large, SOLVER)
    tables = (plan_table(facts), breakdown_table(facts), summary_table(facts))
    text = "".join(console_text(table) for table in tables)
    assert len(text.splitlines()) <= 48
    assert "×107" in text
    assert "5,120 of 10,240 used" in text


def test_full_and_overfull_memory_are_said(small: Case) -> None:
    problem, plan, _ = small
    stages = tuple(replace(stage, recompute=("none",)) for stage in plan.pipelines[0].stages)
    overfull = Plan((Pipeline(stages, 32),))
    cost = PlanPricer(problem).price(overfull)
    assert not cost.fits
    assert "+8.2 GiB" in console_text(plan_table(PlanFacts(problem, overfull, cost))).splitlines()[2]
    assert "does not fit: stage 0·0 (new:0-1)" in console_text(summary_table(PlanFacts(problem, overfull, cost)))


def test_layers_of_several_policies_are_counted(small: Case) -> None:
    problem, plan, _ = small
    stage = plan.pipelines[0].stages[0]
    n = stage.num_layers
    for smaller, quoted in (("full", f"2 full, {n - 2} none"), ("selective", f"2 select., {n - 2} none")):
        recompute = (smaller,) * 2 + ("none",) * (n - 2)
        stages = (replace(stage, recompute=recompute), *plan.pipelines[0].stages[1:])
        mixed = Plan((replace(plan.pipelines[0], stages=stages),))
        facts = PlanFacts(problem, mixed, PlanPricer(problem).price(mixed))
        assert quoted in console_text(plan_table(facts)).splitlines()[2]


def test_summary(mixed: Case) -> None:
    problem, plan, cost = mixed
    text = console_text(summary_table(PlanFacts(problem, plan, cost, SOLVER)))
    for word in (
        seconds(cost.step_time_s),
        f"{cost.mfu:.1%}",
        f"{cost.tokens_per_s:,.0f}",
        "31 of 32",
        "ZeRO-1",
    ):
        assert word in text
    assert "unused: m3080ti:7" in text
    assert "metis, seed 3" in text
    assert f"(gap {1 - 1.0 / cost.step_time_s:.1%})" in text


def test_the_precision_of_messages_is_shown(mixed: Case) -> None:
    """By `explain` and on the page always, in the summary where it is not that of training."""
    problem, plan, _ = mixed
    for precision, words in (("training", "training, 8,192 B per token"), ("fp8", "fp8, 4,224 B per token")):
        asked = replace(problem, workload=problem.workload.replace(message_precision=precision))
        facts = PlanFacts(asked, plan, PlanPricer(asked).price(plan))
        assert ("messages fp8" in console_text(summary_table(facts))) == (precision == "fp8")
        assert ("message_precision", words, "workload") in list(workload_rows(asked, plan))
        assert precision in report_html(facts).partition("message precision")[2][:40]
        assert any("quantisation" in time for _, time, _ in stage_rows(facts)) == (precision == "fp8")


def test_a_bound_of_part_of_the_space_is_shown_with_that_part(mixed: Case) -> None:
    problem, plan, cost = mixed
    bound_s, space = 0.9 * cost.step_time_s, "plans without the interleaved schedule"
    proved = f"Among {space}, none has a step shorter than {seconds(bound_s)} (gap 10.0%)."
    for solver in (SOLVER, SOLVER | {"lower_bound_s": 0.0}):
        solver = solver | {"own_lower_bound_s": bound_s, "own_gap": 0.1, "own_space": space}
        assert proved in " ".join(console_text(summary_table(PlanFacts(problem, plan, cost, solver))).split())
        assert proved in report_html(PlanFacts(problem, plan, cost, solver))
    priced_again = SOLVER | {"own_lower_bound_s": 2 * cost.step_time_s, "own_space": space}
    assert space not in console_text(summary_table(PlanFacts(problem, plan, cost, priced_again)))
    restricted = RestrictedBound(bound_s, space)
    result = Result("exact", Status.FEASIBLE, 0, 1.0, 5, plan, cost, restricted_bound=restricted)
    assert restricted_bounds([result]) == [f"exact: {proved}"]


def test_the_parts_of_a_step_add_up_as_they_are_written(case: Case) -> None:
    problem, plan, cost = case
    spent = PlanFacts(problem, plan, cost).step
    step, unit = seconds(cost.step_time_s).replace(",", "").split()
    assert {part.duration.split()[1] for part in spent.parts} == {unit}
    written = sum(Decimal(part.duration.replace(",", "").split()[0]) for part in spent.parts)
    assert written == Decimal(step)
    assert sum(Decimal(part.percent.rstrip("%")) for part in spent.parts) == 100
    text = console_text(breakdown_table(PlanFacts(problem, plan, cost)), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in spent.parts:
        (line,) = (line for line in text.splitlines() if line.startswith(part.name + " "))
        assert part.duration in line
        assert part.percent in line


@pytest.mark.parametrize("bound", [None, 0.0, -1.0, float("nan"), "soon", 1e9])
def test_unknown_or_stale_bounds_are_not_shown(mixed: Case, bound: Any) -> None:
    assert "bound" not in console_text(summary_table(PlanFacts(*mixed, SOLVER | {"lower_bound_s": bound})))


def test_names_are_not_markup(mixed: Case) -> None:
    problem, plan, cost = mixed
    named = replace(problem, cluster=replace(problem.cluster, name="[red]x[/red] [/]"))
    assert "[red]x[/red] [/]" in console_text(summary_table(PlanFacts(named, plan, cost)), color=True)


def test_a_sequence_stage_is_named_by_its_groups(ragged: Case) -> None:
    assert "seq 4+3" in console_text(plan_table(PlanFacts(*ragged)), 140)
    labels = {text.get_text() for text in plan_figure(PlanFacts(*ragged)).findobj(Text)}
    assert any("seq 4+3 on" in label for label in labels)
    assert "seq 4+3 · 20 layers" in " ".join(labels)
    problem, _, cost = ragged
    assert len(cost.pipelines[0].stages[0].copies) == 7
    assert "seq 4+3" in report_html(PlanFacts(*ragged))
    assert problem.cluster.num_devices == 16


def test_money_of_the_machines_that_the_plan_uses(small: Case) -> None:
    problem, plan, _ = small
    assert "price" not in console_text(summary_table(PlanFacts(*small)))
    prices = {"old": 3.0, "new": 2.0}
    machines = tuple(m.replace(price_per_hour=prices.get(m.name)) for m in problem.cluster.machines)
    for known, per_hour, beside in (
        (machines, 5.0, False),
        ((machines[0], *problem.cluster.machines[1:]), 2.0, True),
    ):
        priced_problem = problem.replace(cluster=problem.cluster.replace(machines=known))
        cost = PlanPricer(priced_problem).price(plan)
        ((_, money),) = PlanFacts(priced_problem, plan, cost).money
        step, tokens = (float(word.replace(",", "")) for word in money.split() if word[0].isdigit() and word != "1")
        assert step == pytest.approx(per_hour / 3600 * cost.step_time_s, rel=5e-3)
        assert tokens == pytest.approx(per_hour * 1e12 / cost.tokens_per_s / 3600, abs=0.5)
        assert money.endswith(" per trillion tokens" + " (without 1 machine of unknown price)" * beside)
        assert f"price: {money}" in console_text(summary_table(PlanFacts(priced_problem, plan, cost)))
        result = Result("made", Status.FEASIBLE, 0, 0.0, 1, plan=plan, cost=cost)
        assert f"price        {money}" in str(Solution.of(priced_problem, result))
        assert money in report_html(PlanFacts(priced_problem, plan, cost))


def test_notes_on_what_may_be_overlooked(small: Case) -> None:
    problem, plan, _ = small
    assert notes(problem) == []

    def note_of(**change: Any) -> str:
        changed_problem = problem.replace(**change)
        (note,) = notes(changed_problem)
        assert note in " ".join(
            console_text(
                summary_table(PlanFacts(changed_problem, plan, PlanPricer(changed_problem).price(plan)))
            ).split()
        )
        result = Solution.of(changed_problem, Result("made", Status.NOT_FOUND, 0, 0.0, 1, reason="none"))
        assert f"note {note}" in " ".join(str(result).split())
        return note

    fast = tuple(machine.replace(nic_bandwidth_bytes_per_s=200e9) for machine in problem.cluster.machines)
    assert "200 GB/s per network interface (new, old)" in note_of(cluster=problem.cluster.replace(machines=fast))
    assert "if it is in Gbit/s, state 25" in note_of(cluster=problem.cluster.replace(machines=fast))
    long = problem.workload.replace(seq_len=8192)
    assert "8,192 is beyond the 4,096 positions of llama2_7b (max_position_embeddings)" in note_of(workload=long)
    model = problem.model.replace(max_positions=2**20)
    long = long.replace(seq_len=32_768)
    assert "space.sequence=true may find a faster plan" in note_of(model=model, workload=long)
    assert notes(problem.replace(model=model, workload=long, space=problem.space.replace(sequence=True))) == []
    assert notes(problem.replace(model=model, workload=long.replace(seq_len=32_767))) == []


def fill_memory(case: Case, share: float, headroom: float = 0.0) -> Case:
    """The case on GPUs of whose memory the plan fills `share` on the fullest device; plans must leave `headroom`."""
    problem, plan, cost = case
    p, s = cost.binding_stage()
    needed = cost.pipelines[p].stages[s].memory.total / share
    machines = tuple(
        machine.replace(gpu=replace(machine.gpu, process_memory_bytes=needed)) for machine in problem.cluster.machines
    )
    cluster, space = problem.cluster.replace(machines=machines), problem.space.replace(memory_headroom=headroom)
    filled_problem = problem.replace(cluster=cluster, space=space)
    return filled_problem, plan, PlanPricer(filled_problem).price(plan)


def test_a_plan_that_fills_memory_beyond_what_any_measured_run_left_says_so(small: Case) -> None:
    assert plan_notes(PlanFacts(*fill_memory(small, 0.98))) == []
    problem, plan, cost = full = fill_memory(small, 0.997)
    (note,) = plan_notes(PlanFacts(*full))
    assert note.startswith("99.7% of the memory of new:0-1 is predicted to be taken")
    assert "constraints.memory_headroom=0.06" in note
    assert notes(problem) == [], "of the problem alone there is nothing to say"
    assert note in " ".join(console_text(summary_table(PlanFacts(*full))).split())
    assert note in report_html(PlanFacts(*full))
    result = Result("made", Status.FEASIBLE, 0, 0.0, 1, plan, cost)
    assert Solution.of(problem, result).notes == (note,)
    assert f"note {note}" in " ".join(str(Solution.of(problem, result)).split())
    assert max(map(len, str(Solution.of(problem, result)).splitlines())) <= 120
    # With a headroom the limit is lower, and full to that limit is no note; nor is a plan that does not fit at all.
    assert plan_notes(PlanFacts(*fill_memory(small, 0.93, headroom=0.06))) == []
    assert not fill_memory(small, 1.01)[2].fits
    assert plan_notes(PlanFacts(*fill_memory(small, 1.01))) == []


def test_a_step_of_layers_shorter_than_in_any_measured_run_says_so(small: Case) -> None:
    """The same plan of a model a quarter as wide, whose layers are a few per cent as long."""
    problem, plan, _ = small
    model = problem.model.replace(hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1376)
    narrow = problem.replace(model=model, workload=problem.workload.replace(seq_len=512))
    (note,) = plan_notes(PlanFacts(narrow, plan, PlanPricer(narrow).price(plan)))
    expected = (
        "layers take 0.2 ms forward, less than in any run that prices were compared with (1.3 ms); the host may bind"
    )
    assert note == expected
    assert plan_notes(PlanFacts(*small)) == []


def test_notes_that_a_plan_file_records_are_shown(small: Case) -> None:
    solver = SOLVER | {"notes": ["not read: --odd", 7, "x" * 10_000]}
    assert solver_notes(solver)[0] == "not read: --odd"
    assert [len(note) for note in solver_notes(solver)] == [15, 500], "texts alone, and none without end"
    assert "note: not read: --odd" in console_text(summary_table(PlanFacts(*small, solver)))
    assert "<p>not read: --odd</p>" in report_html(PlanFacts(*small, solver))
    assert PlacedPlan.of(small[0], small[1], solver).notes[0] == "not read: --odd"
    for nothing in ({}, SOLVER, {"notes": "text"}, {"notes": {"a": 1}}):
        assert solver_notes(nothing) == []


def test_no_shipped_cluster_has_an_implausible_rate(small: Case) -> None:
    for path in sorted((ROOT / "conf" / "cluster").glob("*.yaml")):
        if path.stem != "file":
            workload = small[0].workload.replace(precision="fp32")
            problem = small[0].replace(cluster=read_cluster(path), workload=workload)
            assert not any("Gbit" in note for note in notes(problem)), path


def test_tables_hold_at_eighty_columns(case: Case) -> None:
    problem, plan, _ = case
    for renderable in (
        plan_table(PlanFacts(*case), full=True),
        plan_table(PlanFacts(*case)),
        summary_table(PlanFacts(*case, SOLVER)),
        breakdown_table(PlanFacts(*case)),
    ):
        assert max(len(line) for line in console_text(renderable, 80).splitlines()) <= 80
    text = console_text(plan_table(PlanFacts(*case), full=True), 80)
    for word in ("Stage", "Devices", "TP", "Layers", "Recomp.", "F+B", "Busy", "Send", "Memory", "Binds"):
        assert word in text.splitlines()[0].split()
    wide = [line.split() for line in console_text(plan_table(PlanFacts(*case), full=True), 300).splitlines()]
    for row in (line for line in wide if "·" in line[0]):
        numbers = [word for word in row if word.replace(".", "").replace("/", "").replace(",", "").isdigit()]
        assert [word for word in numbers if word not in text.split()] == [], "no number is cut"
    if len(plan.devices()) <= 64:
        for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
            assert all(name in text for name in device_ranges(problem.cluster, stage.devices) if len(name) <= 9)


def test_a_comparison_holds_at_eighty_columns(mixed: Case) -> None:
    _, plan, cost = mixed
    ends = (Point(59.9, 1, cost.step_time_s),)
    result = Result("megatron", Status.FEASIBLE, 0, 59.9, 12_345, plan, cost, 0.5, ends)
    worse = replace(result, solver="portfolio", cost=replace(cost, step_time_s=1.5 * cost.step_time_s))
    table = comparison_table([result, worse])
    wide, narrow = console_text(table, 120), console_text(table, 80)
    assert max(len(line) for line in narrow.splitlines()) <= 80
    assert "…" not in narrow
    assert sorted(narrow.split()) == sorted(wide.split()), "nothing is cut"
    assert wide.splitlines()[0].split()[:3] == ["Solver", "Step", "time"]
