"""Kinds of pipelines, which fold a plan of any size into a screen, and a plan in ten lines."""

import pytest

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.report.facts import PlanFacts
from hexiopt.report.rows import chain, pipeline_kinds
from hexiopt.report.table import breakdown_table, in_short, kinds_table, plan_table, short_table, summary_table
from tests.hexiopt.report.pictures import console_text
from tests.models import TINY


@pytest.fixture(scope="module")
def irregular() -> tuple[Problem, Plan, Cost]:
    """64 pipelines over 256 GPUs of two types, with more kinds than a table shows."""
    cluster = Cluster.of({"rtx_4090": 128, "rtx_3090": 128}, inter_gb_per_s=5)
    problem = Problem(cluster, TINY, Workload(global_batch=256, seq_len=128))
    pipelines = []
    for k in range(64):
        new, old = tuple(range(2 * k, 2 * k + 2)), tuple(range(128 + 2 * k, 130 + 2 * k))
        ways = [
            [new, old],
            [new[:1], old],
            [new, old[:1]],
            [new[:1], old[:1]],
            [old, new],
            [old[:1], new],
            [old, new[:1]],
            [old[:1], new[:1]],
            [new],
            [old],
            [new[:1], new[1:], old],
            [new[:1], new[1:], old[:1], old[1:]],
        ]
        groups = ways[k % 12 if k < 60 else 0]
        ends = [4 * s // len(groups) for s in range(len(groups) + 1)]
        stages = tuple(Stage.of(group, ends[s], ends[s + 1]) for s, group in enumerate(groups))
        pipelines.append(Pipeline(stages, 4))
    plan = Plan(tuple(pipelines))
    return problem, plan, PlanPricer(problem).price(plan)


def test_every_pipeline_is_of_one_kind(irregular: tuple[Problem, Plan, Cost]) -> None:
    _, plan, cost = irregular
    kinds = pipeline_kinds(PlanFacts(*irregular))
    assert len(kinds) == 12
    assert sorted(p for kind in kinds for p in kind.members) == list(range(64))
    assert sum(kind.num_gpus for kind in kinds) == len(plan.devices())
    for kind in kinds:
        assert kind.end_s == max(cost.pipelines[p].end_s for p in kind.members)
        assert kind.sequences == (4, 4)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_large_plan_fits_a_screen_and_leaves_nothing_out(irregular: tuple[Problem, Plan, Cost], width: int) -> None:
    facts = PlanFacts(*irregular)
    tables = (plan_table(facts), breakdown_table(facts), summary_table(facts))
    lines = [line for table in tables for line in console_text(table, width).splitlines()]
    assert len(lines) <= 48
    assert max(map(len, lines)) <= width
    text = console_text(kinds_table(facts), width)
    assert text.splitlines()[0].strip() == "64 pipelines of 12 kinds"
    shown = [line.split() for line in text.splitlines() if len(line.split()) > 2 and line.split()[1] == "×"]
    assert sum(int(words[0]) for words in shown) == 64
    assert sum(int(words[2]) for words in shown) == len(facts.plan.devices())
    assert "of 2 other kinds" in text
    assert text.count("longest") == 1
    full = console_text(plan_table(facts, full=True), width)
    assert all(f"{stage.name} " in full for p in range(64) for stage in facts.stages(p))


def test_runs_of_like_stages_are_counted() -> None:
    assert chain(["a", "a", "b", "a"]) == "2 × a → b → a"
    assert chain(["a", "b"] * 4) == "a → b → a → b → a → 3 stages more"


def test_a_plan_in_ten_lines(irregular: tuple[Problem, Plan, Cost]) -> None:
    problem, plan, cost = irregular
    facts = PlanFacts(problem, plan, cost, {"lower_bound_s": 0.5 * cost.step_time_s})
    rows = dict(in_short(facts))
    assert list(rows) == ["problem", "step", "lower bound", "plan", "time", "slowest", "memory", "unused"]
    assert rows["lower bound"].endswith(f"(gap 50.0%) of {problem.plans_in_words}")
    assert rows["plan"].startswith("64 pipelines of 12 kinds")
    text = console_text(short_table(facts), 80)
    assert len(text.splitlines()) <= 10
    assert max(map(len, text.splitlines())) <= 80
