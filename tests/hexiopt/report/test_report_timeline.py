"""The trace of a plan: every event once, in time, and cut where there are too many."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.report.facts import PlanFacts
from hexiopt.report.trace import timeline_events
from tests.hexiopt.report.conftest import CONF
from tests.hexiopt.report.pictures import Case


def test_trace_is_valid_and_ends_with_the_step(case: Case) -> None:
    _, plan, cost = case
    trace = json.loads(json.dumps(timeline_events(PlanFacts(*case)), allow_nan=False))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(cost.step_time_s * 1e6, rel=1e-9)
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    assert len(trace["traceEvents"]) <= 200_000
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    for event in slices:
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert ("process_name", event["pid"], 0) in names
    whole = {"forward", "backward", "optimizer"} | ({"gradient_sync"} if len(plan.pipelines) > 1 else set())
    assert whole <= {event["cat"] for event in slices}


def test_weights_gathered_after_the_optimizer_are_named(mixed: Case, small: Case) -> None:
    assert [Sharding(stage).gathers_weights for stage in range(4)] == [False, True, True, False]
    shared, alone = PlanFacts(*mixed), PlanFacts(*small)
    assert shared.last_phase == "optimizer and weight all-gather"
    assert replace(shared, plan=replace(shared.plan, sharding=Sharding())).last_phase == "optimizer"
    assert replace(alone, plan=replace(alone.plan, sharding=Sharding(1))).last_phase == "optimizer"


def test_trace_has_every_micro_batch_once(mixed: Case) -> None:
    problem, plan, cost = mixed
    events = timeline_events(PlanFacts(problem, plan, cost))["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"].split(":")[0]): e["tid"] for e in events if e["name"] == "thread_name"}
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages)):
            for kind in ("forward", "backward"):
                batches = [
                    e["args"]["micro_batch"]
                    for e in events
                    if e["ph"] == "X" and (e["pid"], e["tid"], e["cat"]) == (p, lanes[p, f"stage {s}"], kind)
                ]
                assert sorted(batches) == list(range(pipeline.num_micro_batches))


@pytest.mark.parametrize("name", ["mixed", "woven"])
def test_slices_of_a_thread_do_not_overlap(name: str, request: pytest.FixtureRequest) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in timeline_events(PlanFacts(*request.getfixturevalue(name)))["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))


def test_too_many_events_are_cut_and_said(large: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexiopt.report.trace.MAX_EVENTS", 150)
    trace = timeline_events(PlanFacts(*large))
    assert len(trace["traceEvents"]) <= 150
    other_data = trace["otherData"]
    assert (other_data["num_pipelines"], other_data["num_pipelines_shown"]) == (320, 2)
    assert other_data["num_pipelines_left_out"] == 320 - other_data["num_pipelines_alike"] == 106
    assert "represents 107 equal ones" in json.dumps(trace)


def test_a_pipeline_that_alone_is_too_long_is_one_event_a_stage(small: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexiopt.report.trace.MAX_EVENTS", 100)
    events = timeline_events(PlanFacts(*small))["traceEvents"]
    assert len(events) <= 100
    assert sum(event["name"] == "32 micro-batches" for event in events) == 3


def test_tied_embeddings_are_synchronised_in_one_pipeline() -> None:
    """First and last stage hold the matrix of GPT-2 together: what the price charges for it is drawn."""
    stages = (Stage.of((0, 1), 0, 12), Stage.of((2, 3), 12, 24))
    plan = Plan((Pipeline(stages, 32),))
    model = read_model(CONF / "model/gpt2_345m.yaml")
    problem = Problem(read_cluster(CONF / "cluster/small_mixed.yaml"), model, Workload(32, 1024))
    cost = PlanPricer(problem).price(plan)
    assert cost.gradient_sync_s > 0.0
    ends_s = [
        (event["ts"] + event["dur"]) * 1e-6
        for event in timeline_events(PlanFacts(problem, plan, cost))["traceEvents"]
        if event.get("cat") == "gradient_sync"
    ]
    assert ends_s == pytest.approx([cost.pipeline_s + cost.gradient_sync_s] * 2)
