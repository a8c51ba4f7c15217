"""Facts about a plan: what binds it, and that one cost model tells all of them."""

from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.report.explanation import explanation_tables, step_rows
from hexiopt.report.facts import PlanFacts
from hexiopt.report.page.html import report_html
from hexiopt.report.table import breakdown_table, in_short, plan_table, summary_table
from tests.hexiopt.report.pictures import SOLVER, Case, console_text


def test_what_binds_is_the_most_of_all(case: Case) -> None:
    _, plan, cost = case
    facts = PlanFacts(*case)
    stages = [stage for p in range(len(plan.pipelines)) for stage in facts.stages(p)]
    assert len(stages) == facts.num_stages
    assert facts.tightest.cost.excess_bytes == max(stage.cost.excess_bytes for stage in stages) == cost.excess_bytes
    assert cost.pipelines[facts.longest].end_s == max(pipeline.end_s for pipeline in cost.pipelines)
    ends_last = [stage for stage in stages if stage.pipeline == facts.longest]
    assert facts.slowest.compute_s == max(stage.compute_s for stage in ends_last)
    assert facts.slowest_message is None
    assert set(facts.unused_devices).isdisjoint(plan.devices())
    assert len(facts.unused_devices) + len(plan.devices()) == facts.problem.cluster.num_devices


def test_messages_slower_than_every_stage_are_told_as_such(small: Case) -> None:
    problem, plan, _ = small
    machines = tuple(m.replace(nic_bandwidth_bytes_per_s=1e6) for m in problem.cluster.machines)
    slow = replace(problem, cluster=replace(problem.cluster, machines=machines))
    facts = PlanFacts(slow, plan, PlanPricer(slow).price(plan))
    message = facts.slowest_message
    assert message is not None
    assert message.send_s is not None
    assert message.send_s > facts.slowest.compute_s
    ends = f"{message.number} and {message.number + 1}"
    assert f"the messages between stages {ends} take longest" in next(step_rows(facts))[2]
    assert dict(in_short(facts))["slowest"].startswith(f"messages of stages {message.name} and ")


def test_the_cost_model_of_the_caller_tells_all(mixed: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, plan, cost = mixed
    pricer = PlanPricer(problem)

    def refuse(*_: object) -> None:
        raise AssertionError("another cost model is made")

    monkeypatch.setattr(PlanPricer, "__init__", refuse)
    facts = PlanFacts(problem, plan, cost, SOLVER, pricer)
    for table in (plan_table(facts), summary_table(facts), breakdown_table(facts)):
        assert console_text(table)
    assert len(list(explanation_tables(facts, "a test"))) == 7
    assert report_html(facts)
    with pytest.raises(AssertionError, match="another"):
        breakdown_table(replace(facts, pricer=None))
