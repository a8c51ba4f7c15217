"""Plan files: round trips, the fixed format, refusals, and writing whole or not at all."""

import copy
import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import (
    PlanFile,
    plan_file_to_dict,
    plan_from_section,
    plan_to_dict,
    read_plan,
    solver_to_dict,
    write_plan,
    write_text,
)
from hexiopt.plan.parallelism import Replica, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving.result import Result, Status
from tests.models import TOY
from tests.strategies import LAB, format_plans, problems_with_plans, roomy_problems_with_plans

MODEL = TOY
PROBLEM = Problem(LAB, MODEL, Workload(precision="fp16", global_batch=8, seq_len=100))
PLAN = Plan(
    (
        Pipeline((Stage.of((0, 1), 0, 3, "full"), Stage.of((4,), 3, 4)), 3, 2),
        Pipeline((Stage.of((7,), 0, 4),), 2, 1),
    )
)
COST = PlanPricer(PROBLEM).price(PLAN)
SOLVER = {"name": "test", "seed": 3}


def whole() -> dict[str, Any]:
    """The example as it stands in a file."""
    return json.loads(json.dumps(plan_file_to_dict(PROBLEM, PLAN, COST, SOLVER)))  # type: ignore[no-any-return]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def read(path: Path, data: Any) -> PlanFile:
    path.write_text(json.dumps(data))
    return read_plan(path)


# ------------------------------------------------------------------ round trips


@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_random_plans_come_back(pair: tuple[Problem, Plan], tmp_path_factory: pytest.TempPathFactory) -> None:
    problem, plan = pair
    path = tmp_path_factory.getbasetemp() / "plan.json"
    cost = PlanPricer(problem).price(plan)
    write_plan(path, problem, plan, cost, SOLVER)
    placed_plan = read_plan(path)
    assert (placed_plan.problem, placed_plan.plan, placed_plan.solver) == (problem, plan, SOLVER)
    assert PlanPricer(placed_plan.problem).price(placed_plan.plan) == cost
    memory = json.loads(path.read_text())["prediction"]["memory_gib"]
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        for stage, stage_cost in zip(pipeline.stages, priced.stages, strict=True):
            for replica, executor in zip(stage.parallelism.replicas, stage_cost.executors, strict=True):
                rows = [memory.pop(problem.cluster.device_name(device)) for device in replica.devices]
                assert [row["total"] * 2**30 for row in rows] == pytest.approx([executor.memory.total] * len(rows))
    assert not memory


@given(plan=format_plans(LAB))
def test_every_feature_of_the_format_comes_back(plan: Plan) -> None:
    data = json.loads(json.dumps(plan_to_dict(plan, LAB)))
    assert plan_from_section(Section(data, "plan.json"), LAB) == plan


def test_features_in_the_words_of_the_format() -> None:
    """Written by hand after the format's description."""
    data = {
        "schedule": "1f1b",
        "sharding": {"stage": 1, "groups": [["a:0", "v-0:0", "a:2"], ["a:1", "v-1:1", "a:3"]]},
        "pipelines": [
            {
                "num_micro_batches": 20,
                "micro_batch_size": 3,
                "stages": [
                    {
                        "replicas": [{"devices": ["a:0"], "samples": 2}, {"devices": ["a:1"], "samples": 1}],
                        "layers": [[0, 1]],
                    },
                    {"devices": ["v-0:0", "v-1:1"], "heads": [3, 1], "layers": [1, 2], "recompute": ["full"]},
                    {
                        "sequence": {
                            "groups": [{"devices": ["a:2", "a:3"], "tokens": [60, 40], "heads": [2, 2]}],
                            "order": "zigzag",
                        },
                        "layers": [2, 4],
                        "recompute": ["none", "selective"],
                    },
                ],
            }
        ],
    }
    plan = plan_from_section(Section(data, "plan.json"), LAB)
    assert plan == Plan(
        (
            Pipeline(
                (
                    Stage.of_replicas((Replica((0,), 2), Replica((1,), 1)), ((0, 1),), ("none",)),
                    Stage(TensorParallel((4, 7), (3, 1)), ((1, 2),), ("full",)),
                    Stage(
                        SequenceParallel((SequenceGroup((2, 3), (60, 40), (2, 2)),), "zigzag"),
                        ((2, 4),),
                        ("none", "selective"),
                    ),
                ),
                20,
                3,
            ),
        ),
        ONE_F_ONE_B,
        Sharding(1, ((0, 4, 2), (1, 7, 3))),
    )


def test_layer_ranges_in_the_words_of_the_format() -> None:
    stages = [
        {"devices": ["a:0"], "layers": [[0, 1], [2, 3]]},
        {"devices": ["a:1"], "layers": [[1, 2], [3, 4]], "recompute": "full"},
    ]
    pipeline = {"num_micro_batches": 4, "micro_batch_size": 1, "stages": stages}
    plan = plan_from_section(Section({"schedule": "interleaved", "pipelines": [pipeline]}, "plan.json"), LAB)
    first, second = TensorParallel((0,)), TensorParallel((1,))
    whole = Pipeline((Stage(first, ((0, 1), (2, 3))), Stage(second, ((1, 2), (3, 4)), ("full",))), 4)
    assert plan == Plan((whole,), INTERLEAVED)


# ------------------------------------------------------------------ the format


def test_the_file_says_all_that_the_format_promises() -> None:
    data = whole()
    assert (data["format"], data["version"]) == ("hexiopt.plan", 1)
    assert set(data) == {
        *("format", "version", "problem", "problem_sha256", "schedule", "sharding", "pipelines"),
        *("prediction", "solver"),
    }
    text = json.dumps(data["problem"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert data["problem_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert {"cluster", "model", "workload", "cost_model"} <= set(data["problem"])
    assert set(data["problem"]["cost_model"]) == {"version", "calibration_sha256"}
    assert data["schedule"] == "1f1b"
    assert data["sharding"] == {"stage": 0}
    assert data["pipelines"][0] == {
        "num_micro_batches": 3,
        "micro_batch_size": 2,
        "stages": [
            {"devices": ["a:0", "a:1"], "layers": [0, 3], "recompute": "full"},
            {"devices": ["v-0:0"], "layers": [3, 4], "recompute": "none"},
        ],
    }


def test_the_prediction_is_the_cost() -> None:
    prediction = whole()["prediction"]
    assert set(prediction) == {"step_time_s", "tokens_per_s", "mfu", "breakdown_s", "memory_gib"}
    assert prediction["step_time_s"] == COST.step_time_s
    assert prediction["tokens_per_s"] == COST.tokens_per_s
    assert prediction["mfu"] == COST.mfu
    assert set(prediction["breakdown_s"]) == {"pipeline", "gradient_sync", "optimizer"}
    assert sum(prediction["breakdown_s"].values()) == pytest.approx(COST.step_time_s)
    memory = prediction["memory_gib"]
    assert set(memory) == {"a:0", "a:1", "v-0:0", "v-1:1"}
    tensors = {"weights", "gradients", "master", "optimizer", "activations", "logits", "buffers"}
    parts = tensors | {"communicators", "reserve"}
    for row in memory.values():
        assert set(row) == parts | {"limit", "total"}
        assert sum(row[part] for part in parts) == pytest.approx(row["total"])
        assert all(value >= 0 for value in row.values())
    stage = COST.pipelines[0].stages[0]
    assert memory["a:1"]["total"] * 2**30 == pytest.approx(stage.memory.total)
    assert memory["v-0:0"]["limit"] == pytest.approx(PROBLEM.cluster.gpu_of(4).usable_memory_bytes / 2**30)


def test_the_solver_says_how_good_the_plan_is() -> None:
    bound_s = lower_bound_s(PlanPricer(PROBLEM))
    result = Result("metis", Status.FEASIBLE, 7, 1.5, 42, PLAN, COST, bound_s)
    assert solver_to_dict(result) == {
        "name": "metis",
        "seed": 7,
        "status": "feasible",
        "runtime_s": 1.5,
        "steps": 42,
        "lower_bound_s": bound_s,
        "gap": (COST.step_time_s - bound_s) / COST.step_time_s,
    }


def test_results_without_a_plan() -> None:
    nothing = Result("metis", Status.NOT_FOUND, 0, 1.0, 2)
    assert math.isinf(nothing.objective)
    assert nothing.gap == 1.0
    with pytest.raises(AssertionError):
        Result("metis", Status.FEASIBLE, 0, 1.0, 2)
    with pytest.raises(AssertionError):
        Result("metis", Status.INFEASIBLE, 0, 1.0, 2, PLAN, COST)


# ------------------------------------------------------------------ refusals


def change(data: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """`data` with the value at `keys` replaced, or removed where it is `...`."""
    data = copy.deepcopy(data)
    here = data
    for key in keys[:-1]:
        here = here[key]
    if value is ...:
        del here[keys[-1]]
    else:
        here[keys[-1]] = value
    return data


STAGE = ("pipelines", 0, "stages", 0)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("format",), ..., "format: is missing"),
        (("version",), ..., "version: is missing"),
        (("problem",), ..., "problem: is missing"),
        (("problem_sha256",), 5, "problem_sha256: 5 is not text"),
        (("schedule",), "1f2b", "schedule: '1f2b' is not known; did you mean 1f1b"),
        (("sharding",), {"stage": 4}, "sharding.stage: 4 is out of range"),
        (("sharding",), {"groups": [["a:9"]]}, "out of range"),
        (("pipelines",), {}, "pipelines: .* is not a list"),
        (("pipelines", 0, "num_micro_batches"), 0, r"pipelines\[0\].num_micro_batches: 0 is out of range"),
        (("pipelines", 0, "micro_batch_size"), 1.5, "not a whole number"),
        (("pipelines", 0, "micro_batches"), 1, "micro_batches: unknown key"),
        ((*STAGE, "replicas"), [], "states devices and replicas"),
        ((*STAGE,), {"replicas": [], "layers": [0, 3]}, "replicas"),
        ((*STAGE,), {"sequence": {"groups": []}, "layers": [0, 3]}, "groups"),
        ((*STAGE, "layers"), [[0, 1], 2], "is not a whole number"),
        ((*STAGE, "heads"), [4], r"pipelines\[0\].stages\[0\]: the stage has 2 devices and heads \(4,\); state one"),
        ((*STAGE, "recompute"), None, "null"),
        ((*STAGE, "colour"), "red", "colour: unknown key"),
        (("prediction",), 5, "prediction: 5 is not a mapping"),
        (("solver",), [], "solver: .* is not a mapping"),
        (("comment",), "mine", "comment: unknown key"),
    ],
)
def test_refused(path: Path, keys: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(path, change(whole(), keys, value))
    assert str(path) in str(caught.value)


def test_a_file_without_prediction_solver_and_hash_is_read(path: Path) -> None:
    data = whole()
    for key in ("prediction", "solver", "problem_sha256"):
        del data[key]
    assert read(path, data) == PlanFile(PROBLEM, PLAN, {})


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    """Any one value of the plan replaced: read again as a plan, or InputError."""
    damaged = copy.deepcopy(
        {key: value for key, value in whole().items() if key in ("schedule", "sharding", "pipelines")}
    )
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
    here: Any = damaged
    while True:
        key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else list(range(len(here)))))
        if not isinstance(here[key], dict | list) or not here[key] or data.draw(st.integers(0, 2)) == 0:
            break
        here = here[key]
    here[key] = data.draw(values)
    try:
        plan = plan_from_section(Section(damaged, "plan.json"), LAB)
    except InputError:
        return
    assert plan_from_section(Section(plan_to_dict(plan, LAB), "again"), LAB) == plan


# ------------------------------------------------------------------ writing


def test_a_failing_write_leaves_no_file(path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert os.listdir(path.parent) == []


def test_a_failing_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(path, PROBLEM, PLAN, COST, SOLVER)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_plan(path, PROBLEM, PLAN, COST, {"name": "other"})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_numbers_that_json_lacks_are_not_written(path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_plan(path, PROBLEM, PLAN, replace(COST, mfu=math.nan), SOLVER)
    assert os.listdir(path.parent) == []


def test_a_written_plan_replaces_the_old_one_and_can_be_read_by_all(path: Path) -> None:
    path.write_text("old")
    write_plan(path, PROBLEM, PLAN, COST, SOLVER)
    assert read_plan(path) == PlanFile(PROBLEM, PLAN, SOLVER)
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.read_text().endswith("}\n")
