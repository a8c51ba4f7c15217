"""Micro-batches in flight that stages state: plans, files, checks, and what makes no claim about them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

import hexiopt as hx
from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import write_program
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import EXECUTOR, TRAINERS
from hexiopt.files.plan_file import on_problem, plan_file_to_dict, plan_from_section, plan_to_dict, read_plan
from hexiopt.files.problem_file import problem_sha256, space_to_dict
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.report.explanation import stage_rows
from hexiopt.report.facts import PlanFacts
from hexiopt.report.notes import plan_notes
from hexiopt.report.rows import identical_pipelines
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from hexiopt.solving import Budget
from hexiopt.study.replan.survivors import _share_batch
from solvers.proof.gaps import is_provable
from solvers.registry import make_solver
from tests.hexiopt.cost.test_cost import PROBLEM as BASE
from tests.solvers import problems
from tests.strategies import problems_with_depths

DEPTHS = replace(BASE, space=Space(depth=True))
COUNT = BASE.workload.global_batch


def plan_of(*depths: int | None, schedule: Schedule = ONE_F_ONE_B, **choices: Any) -> Plan:
    """Stages of one device each, of equally many layers but for the last."""
    each = BASE.model.num_layers // len(depths)
    ends = [*range(0, each * len(depths), each), BASE.model.num_layers]
    stages = [replace(Stage.of((s,), ends[s], ends[s + 1]), in_flight=depth) for s, depth in enumerate(depths)]
    return Plan((Pipeline(tuple(stages), COUNT),), schedule, **choices)


def test_the_switch_allows_other_depths_than_the_schedules() -> None:
    deeper = plan_of(4, 1)
    assert check(DEPTHS, deeper) == []
    [violation] = check(BASE, deeper)
    assert violation.rule == "space.depth"
    assert violation.text == (
        "stage 0 of pipeline 0 has 4 micro-batches in flight; the 1f1b schedule has another number; allow others with "
        "space.depth=true"
    )
    assert check(BASE, plan_of(2, 1)) == check(BASE, plan_of(2, None)) == [], "those of 1F1B are no others"
    assert list(plan_of(4, 1).other_depths()) == [(0, 0)]
    assert list(plan_of(2, 1).other_depths()) == list(plan_of(None, None).other_depths()) == []


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda: plan_of(0, 1), r"the stage: in_flight: 0 .*1"),
        (lambda: plan_of(True, 1), "the stage: in_flight: True"),
        (lambda: plan_of(1.5, 1), r"the stage: in_flight: 1\.5"),  # type: ignore[arg-type]
        (lambda: plan_of(COUNT + 1, 1), f"stage 0 may have {COUNT + 1} of {COUNT} micro-batches in flight"),
        (lambda: plan_of(None, 3), "stage 0 has 2 micro-batches in flight, stage 1 waits for 3"),
        (lambda: plan_of(3, 1, schedule=GPIPE), "in_flight under the gpipe schedule; take 1f1b or zb"),
        (lambda: plan_of(3, 1, schedule=INTERLEAVED), "in_flight under the interleaved schedule; take 1f1b or zb"),
        (lambda: plan_of(3, 1, sharding=Sharding(2)), "ZeRO-2 over stages that state in_flight; leave it out"),
        (lambda: plan_of(3, 1, sharding=Sharding(3)), "ZeRO-3 over stages that state in_flight; leave it out"),
    ],
)
def test_what_breaks_a_rule_is_refused_in_a_line(made: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        made()


@given(problems_with_depths())
def test_plans_come_back_from_files(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    data = plan_to_dict(plan, problem.cluster)
    assert plan_from_section(Section(json.loads(json.dumps(data)), "plan"), problem.cluster) == plan
    stages = [stage for pipeline in data["pipelines"] for stage in pipeline["stages"]]
    stated = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    assert [stage.get("in_flight") for stage in stages] == [stage.in_flight for stage in stated]
    assert all("in_flight" not in stage for stage in stages if stage.get("in_flight") is None)
    assert check(problem, plan) == []


def test_files_without_depths_are_what_they_were(tmp_path: Any) -> None:
    """Their problems keep their hash, too; of a problem with the switch it is another."""
    assert "depth" not in space_to_dict(Space())
    assert space_to_dict(Space(depth=True))["depth"] is True
    assert problem_sha256(BASE) != problem_sha256(DEPTHS)
    plan = plan_of(4, 1, schedule=SPLIT_SCHEDULES[0])
    problem = replace(DEPTHS, workload=replace(DEPTHS.workload, schedule="zb"))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_file_to_dict(problem, plan, PlanPricer(problem).price(plan), {})))
    read = read_plan(path)
    assert (read.problem, read.plan) == (problem, plan)
    path.write_text(path.read_text().replace('"in_flight": 4', '"in_flight": "many"'))
    with pytest.raises(InputError, match=r"in_flight: 'many'"):
        read_plan(path)


def test_fewer_micro_batches_leave_no_more_in_flight() -> None:
    """Where a plan moves to a smaller batch, and where pipelines share a batch anew."""
    plan = plan_of(COUNT, COUNT - 1)
    half = replace(DEPTHS, workload=replace(DEPTHS.workload, global_batch=COUNT // 2))
    [pipeline] = on_problem(plan, DEPTHS, half).pipelines
    assert (pipeline.depths, pipeline.num_micro_batches) == ((COUNT // 2, COUNT // 2), COUNT // 2)
    assert check(half, Plan((pipeline,))) == []
    shared = _share_batch(plan.pipelines, [1.0], 2)
    assert shared is not None
    assert shared[0].depths == (2, 2)
    assert plan.pipelines[0].with_micro_batches(2 * COUNT).depths == plan.pipelines[0].depths


def test_nothing_is_proved_of_other_depths() -> None:
    """No oracle speaks of them, and no proof: bounds do."""
    easy = problems.easy()
    usual, model = PlanPricer(easy), PlanPricer(replace(easy, space=replace(easy.space, depth=True)))
    assert is_provable(usual)
    assert not is_provable(model)
    assert compute_bound_s(model) < lower_bound_s(model, 5.0)
    for name in ("exact", "cp_sat", "sequence_exact"):
        problem = replace(DEPTHS, space=Space(depth=True, sequence=name == "sequence_exact"))
        with pytest.raises(InputError, match=r"proves nothing about stages of other depths .*space\.depth=false"):
            make_solver(name).solve(problem, Budget(1.0))


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_only_our_executor_is_given_such_plans(name: str) -> None:
    """Others refuse in a line that says how to plan again; their presets leave depths out."""
    problem = Problem(hx.Cluster.of({"rtx_4090": 2}), hx.model("llama2_7b"), Workload(4), Space(depth=True))
    stages = [replace(Stage.of((s,), 16 * s, 16 * s + 16), in_flight=n) for s, n in enumerate((3, 1))]
    plan, trainer = Plan((Pipeline(tuple(stages), 4),)), TRAINERS[name]
    if name == EXECUTOR:
        assert write_program(problem, plan, trainer).devices == (0, 1)
        return
    if trainer.unsuitable(problem) is None:
        with pytest.raises(InputError) as caught:
            write_program(problem, plan, trainer)
        assert str(caught.value) == (
            f"export.format: {name} cannot express the plan: stage 0 of pipeline 0 has 3 micro-batches in flight, as "
            f"the schedule has not; plan again with space.preset={name}, which sets space.depth=false"
        )
        with pytest.raises(InputError, match=r"space\.depth: true does not go with space\.preset"):
            restrict(problem, trainer)
    assert trainer.preset(problem)["space.depth"] == (False,)


def test_reports_say_where_depths_are_others() -> None:
    plan = plan_of(5, 1)
    facts = PlanFacts(DEPTHS, plan, PlanPricer(DEPTHS).price(plan))
    assert "micro-batches in flight, where the 1f1b schedule has others: 5 in 0·0" in plan_notes(facts)
    first, second = [memory for _, _, memory in stage_rows(facts)]
    assert first.endswith("; 5 micro-batches in flight")
    assert "in flight" not in second
    usual = plan_of(2, 1)
    facts = PlanFacts(DEPTHS, usual, PlanPricer(DEPTHS).price(usual))
    assert not any("in flight" in text for text in (*plan_notes(facts), *(row[2] for row in stage_rows(facts))))


def test_pipelines_of_other_depths_are_not_the_same_row() -> None:
    def pipeline(first: int, depth: int) -> Pipeline:
        half = BASE.model.num_layers // 2
        stages = Stage.of((first,), 0, half), Stage.of((first + 2,), half, BASE.model.num_layers)
        return Pipeline((replace(stages[0], in_flight=depth), stages[1]), COUNT // 2)

    assert identical_pipelines(DEPTHS, Plan((pipeline(0, 3), pipeline(1, 3)))) == ((0, 1),)
    assert identical_pipelines(DEPTHS, Plan((pipeline(0, 3), pipeline(1, 2)))) == ((0,), (1,))
