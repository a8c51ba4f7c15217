"""What has changed in a cluster: slow devices cost what their speed says, in every form; machines are added."""

import json
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from hexiopt.study.replan.changes import change, relaxations, speeds_in_run, with_machines
from hexiopt.study.replan.survivors import mend
from tests.models import TINY
from tests.solvers.brute_force import best_plan
from tests.solvers.problems import BATCH_OF_4, SMALL_SPACE, cluster

GPUS = cluster(("a", "fast", 2), ("b", "slow", 4), network_gb_per_s=1.0)
PROBLEM = Problem(GPUS, TINY, BATCH_OF_4, SMALL_SPACE)
LAYERS = TINY.num_layers


def before() -> hx.PlacedPlan:
    pipelines = [Pipeline((Stage.of(devices, 0, LAYERS),), n) for devices, n in (((0, 1), 2), ((2, 3), 1), ((4, 5), 1))]
    return hx.PlacedPlan.of(PROBLEM, Plan(tuple(pipelines), sharding=Sharding(1)))


def test_a_slow_device_takes_its_share_longer_alone_and_in_its_group() -> None:
    slow = PROBLEM.replace(cluster=GPUS.with_speeds({"b:1": 0.5}))
    slow_model, old_model = StageModel(slow), StageModel(PROBLEM)
    for devices, ratio in (((2,), 1.0), ((3,), 2.0)):
        now_s, before_s = (sum(model.layer_s(model.tp_group(devices), 1, "none")) for model in (slow_model, old_model))
        assert now_s == pytest.approx(ratio * before_s)
    pair = [sum(slow_model.layer_s(slow_model.tp_group(devices), 1, "none")) for devices in ((2, 3), (4, 5))]
    assert pair[0] > pair[1] == pytest.approx(sum(old_model.layer_s(old_model.tp_group((4, 5)), 1, "none")))


def test_a_slow_machine_is_of_a_slow_type() -> None:
    slow = GPUS.with_speeds({"b": 0.5, "b:1": 0.5})
    assert slow.machines[1].is_uniform
    assert [gpu.name for gpu in slow.types] == ["fast", "slow@0.5"]
    assert slow.with_speeds({"b": 1.0}) == GPUS
    mixed = slow.with_speeds({"b:3": 0.25})
    assert mixed.speeds == {"b:0": 0.5, "b:1": 0.5, "b:2": 0.5, "b:3": 0.25}
    for changed_cluster in (slow, mixed):
        assert cluster_from_section(Section(cluster_to_dict(changed_cluster), "written")) == changed_cluster
    assert cluster_to_dict(GPUS).keys() == cluster_to_dict(slow).keys() - {"slow"}


@pytest.mark.parametrize("solver", ["portfolio", "hexiscale", "local_search", "hexiseq"])
def test_solvers_plan_around_a_slow_device(solver: str) -> None:
    space = SMALL_SPACE.replace(sequence=solver == "hexiseq")
    small = cluster(("a", "fast", 1), ("b", "slow", 2), network_gb_per_s=1.0)
    problem = Problem(small.with_speeds({"b:0": 0.02}), TINY, BATCH_OF_4, space)
    plan = hx.solve(problem, solver, max_steps=60, time_limit_s=600, progress=False).found()
    assert hx.check(problem, plan) == []


def test_the_best_of_all_plans_is_not_that_of_equal_devices() -> None:
    small = cluster(("a", "fast", 1), ("b", "slow", 2), network_gb_per_s=1.0)
    best_s = {}
    for name in ("b:0", "b:1"):
        problem = Problem(small.with_speeds({name: 0.3}), TINY, BATCH_OF_4, SMALL_SPACE)
        _, best_s[name] = best_plan(problem)
        assert hx.lower_bound(problem, 1.0) <= best_s[name]
    assert best_s["b:0"] == pytest.approx(best_s["b:1"])


@pytest.mark.parametrize(
    ("slow", "message"),
    [
        ({"b:9": 0.5}, "slow: 'b:9' is out of range; b has 4 device"),
        ({"q": 0.5}, "slow: 'q' is not a machine of the cluster"),
        ({"b:1": 0}, "slow: b:1: 0 is out of range"),
        ({"b:1": 2}, "slow: b:1: 2 is out of range"),
        ({"b:1": "much"}, "slow: b:1: 'much' is not a number"),
        ({"b:1": 1.0}, "nothing has changed"),
    ],
)
def test_bad_speeds_are_one_line(slow: dict[str, Any], message: str) -> None:
    with pytest.raises(hx.InputError, match=message):
        change(before(), PROBLEM, slow=slow)


def test_machines_are_added_by_list_mapping_and_file(tmp_path: Path) -> None:
    entry = {"name": "c", "gpu": "slow", "num_gpus": 2, "intra_bandwidth_gb_per_s": 25, "count": 2}
    (tmp_path / "more.yaml").write_text(f"machines: [{json.dumps(entry)}]\n")
    new_machine = {"name": "d", "gpu": "new", "num_gpus": 1, "nic_bandwidth_gb_per_s": 3}
    listed = with_machines(GPUS, [entry])
    assert [machine.name for machine in listed.machines] == ["a", "b", "c-0", "c-1"]
    assert listed.machines[2].nic_bandwidth_bytes_per_s == GPUS.inter_bandwidth_bytes_per_s
    assert listed.machines[2].gpu == GPUS.machines[1].gpu
    assert with_machines(GPUS, {"machines": [entry]}) == with_machines(GPUS, tmp_path / "more.yaml") == listed
    types = {"new": {"tflops": 10, "memory_gib": 8, "hbm_gb_per_s": 100}}
    assert with_machines(GPUS, {"machines": [new_machine], "gpus": types}).machines[-1].nic_bandwidth_bytes_per_s == 3e9
    for added, message in (
        ([{**entry, "name": "a"}], "'a' is a machine of the cluster already"),
        ([new_machine], "'new' is not a known GPU"),
    ):
        with pytest.raises(hx.InputError, match=message):
            with_machines(GPUS, added)
    new = hx.replan(before(), added=[entry], max_steps=40, time_limit_s=600)
    assert new.replacements[0].moving_s == 0.0
    assert new.best.plan.problem.cluster == listed


def metrics(folder: Path, speeds: dict[str, float], clock: float = 1e4) -> Path:
    """What a run on a slower kind of device, where some are slower still, writes."""
    plan, lines = (
        before(),
        [{"event": "step", "step": 1, "loss": 1, "norm": 1, "seconds": 1, "tokens_per_s": 1, "mfu": 0}],
    )
    for pipeline, priced in zip(plan.pipelines, plan.cost.pipelines, strict=True):
        seconds = sum(s for pair in priced.stages[0].executors[0].chunk_s for s in pair)
        for device in pipeline.stages[0].devices:
            name = GPUS.device_name(device)
            lines.append({"event": "rank", "device": name, "micro_batch_s": clock * seconds / speeds.get(name, 1.0)})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_says_who_is_slow(tmp_path: Path) -> None:
    run = metrics(tmp_path / "run", {"b:2": 0.6, "b:3": 0.6, "b:0": 1.02})
    assert speeds_in_run(before(), run) == {"b:2": 0.6, "b:3": 0.6}
    assert speeds_in_run(before(), run / "metrics.jsonl") == {"b:2": 0.6, "b:3": 0.6}
    new = hx.replan(before(), slow=run, max_steps=40, time_limit_s=600)
    assert new.best.plan.problem.cluster.speeds == {"b:2": 0.6, "b:3": 0.6}
    with pytest.raises(hx.InputError, match="measured no slow device; nothing has changed"):
        change(before(), PROBLEM, slow=metrics(tmp_path / "even", {}))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "rank"}\n')
    with pytest.raises(hx.InputError, match="cannot be read as a run's metrics"):
        change(before(), PROBLEM, slow=run)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "checkpoint", "step": 3}\n')
    with pytest.raises(hx.InputError, match="measured no devices"):
        change(before(), PROBLEM, slow=run)


def test_broken_pipelines_go_on_without_what_was_lost() -> None:
    less = PROBLEM.replace(space=SMALL_SPACE.replace(exclude=("a:1", "b:2", "b:3")))
    plan = mend(before(), PlanPricer(less))
    assert plan is not None
    assert [pipeline.stages[0].devices for pipeline in plan.pipelines] == [(0,), (2, 3)]
    assert hx.check(less, plan) == []
    assert mend(before(), PlanPricer(PROBLEM)) is None
    long = Plan((Pipeline((Stage.of((2,), 0, 1), Stage.of((3,), 1, 2), Stage.of((4,), 2, LAYERS)), 4),))
    chain = hx.PlacedPlan.of(PROBLEM, long)
    rest = mend(chain, PlanPricer(PROBLEM.replace(space=SMALL_SPACE.replace(exclude=("b:1",)))))
    assert rest is not None
    assert [stage.devices for stage in rest.pipelines[0].stages] == [(2,), (4,)]
    assert rest.pipelines[0].num_layers == LAYERS


def test_constraints_on_the_shape_are_lifted_fewest_first_and_no_others() -> None:
    space = SMALL_SPACE.replace(num_pipelines=3, max_tp=2, exclude=("a",), memory_headroom=0.1)
    relaxed_spaces = relaxations(space)
    assert [dropped for _, dropped in relaxed_spaces] == [(), ("num_pipelines",), ("num_pipelines", "max_tp")]
    assert [
        (relaxed_space.num_pipelines, relaxed_space.num_stages, relaxed_space.max_tp)
        for relaxed_space, _ in relaxed_spaces
    ] == [
        (3, None, 2),
        (None, None, 2),
        (None, None, None),
    ]
    assert all(
        (relaxed_space.exclude, relaxed_space.memory_headroom) == (("a",), 0.1) for relaxed_space, _ in relaxed_spaces
    )
    assert relaxations(SMALL_SPACE) == [(SMALL_SPACE, ())]
    assert [dropped for _, dropped in relaxations(SMALL_SPACE.replace(max_tp=1))] == [(), ("max_tp",)]


def test_the_api_plans_again_without_what_the_old_plan_was_asked_for() -> None:
    asked = PROBLEM.replace(space=SMALL_SPACE.replace(num_pipelines=3, num_stages=1))
    old = hx.PlacedPlan.of(asked, before())
    lost = ["a:1", "b:0", "b:1", "b:2"]
    with pytest.raises(hx.InputError, match=r"3 pipelines .* or for any number: constraints\.num_pipelines=null"):
        hx.replan(old, lost=lost, max_steps=20, time_limit_s=600)
    lifted = asked.replace(space=asked.space.replace(num_pipelines=None, num_stages=None))
    new = hx.replan(old, lifted, lost=lost, max_steps=20, time_limit_s=600)
    assert set(new.best.plan.devices()) <= {0, 5}
    assert (new.restart_s, new.checkpoint_gb_per_s) == (120.0, 2.0)
    assert "120 s more, and a machine reads a checkpoint at 2 GB/s" in str(new)
