"""The study of mixtures of experts: its drawn clusters, its planners' problems and what it claims."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.studies.cases.mixtures import (
    CLUSTERS,
    MODELS,
    by_columns,
    draw_cluster,
    in_flagscale,
    memory_bytes,
    places,
    state_bytes,
)
from experiments.studies.frame.planners import OURS
from experiments.studies.frame.search import BOUND
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.shipped import read_shipped
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.experiments.made_up import run_made_up


@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_clusters_are_shipped_as_they_were_drawn(seed: int) -> None:
    assert read_shipped("cluster", f"drawn_{seed}") == draw_cluster(seed)
    assert len({machine["gpu"] for machine in draw_cluster(seed)["machines"]}) == 4


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The names of the study's cells, run quickly on made-up measurements."""
    return run_made_up("mixtures", monkeypatch, tmp_path, lambda _: 1.0).names


@pytest.mark.slow
def test_every_cluster_has_every_model_and_every_planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = run_made_up("mixtures", monkeypatch, tmp_path, lambda _: 1.0, quick=False)
    specs = page.specs
    columns, flagscale, too_large = (page.names[name] for name in ("COLUMNS", "FLAGSCALE", "too_large"))
    assert all(spec.cpu_time for spec in specs)
    compared = [spec.labels for spec in specs if spec.labels["part"] == "compared"]
    searched = {(labels["cluster"], labels["model"]) for labels in compared}
    assert len(searched) + len(too_large()) == len(CLUSTERS) * len(MODELS) == len(places())
    assert {cluster for cluster, _ in searched} == {cluster.name for cluster in CLUSTERS}
    assert {model for _, model in searched} == set(MODELS)
    per_planner = pd.Series([labels["planner"] for labels in compared]).value_counts()
    assert per_planner.pop(columns.label) == len(searched) - len(CLUSTERS)  # one model has no experts
    assert set(per_planner) == {len(searched)}
    assert {OURS.label, BOUND, flagscale.label} < set(per_planner.index)
    planned = [spec for spec in specs if spec.labels["part"] == "planned"]
    assert {spec.problem.cluster.num_devices for spec in planned} == {1024}
    assert len({spec.max_steps for spec in planned}) == 1
    assert planned[0].problem.model.layers == ()  # what others are compared with


def test_what_is_not_searched_has_no_plan(study: dict[str, Any]) -> None:
    """Its states alone are more than the memory of all GPUs."""
    problem = places()["campus", "deepseek_v3"]
    assert state_bytes(problem) == 16 * problem.model.num_params > memory_bytes(problem)
    assert any("`deepseek_v3` fits on `campus`: its states take 9,999 GiB" in claim for claim in study["too_large"]())


def test_flagscales_space_has_tp_degrees_by_stage_and_all_else_even() -> None:
    problem = CLUSTERS[0].problem("qwen3_30b_a3b")
    flagscale_problem = in_flagscale(problem)
    assert flagscale_problem.model == problem.model
    assert flagscale_problem.space.uneven_tp
    assert flagscale_problem.space.uneven_layers
    assert not flagscale_problem.space.uneven_structure
    assert not flagscale_problem.space.replicas
    assert flagscale_problem.workload.schedule == "1f1b"


def test_columns_have_one_replica_and_prices_of_their_own() -> None:
    problem = CLUSTERS[0].problem("qwen3_30b_a3b")
    stage = Stage(TensorParallel(tuple(range(24, 32))), ((0, problem.model.num_layers),), ("full",))
    plan = Plan((Pipeline((stage,), 32, 8),), ONE_F_ONE_B, Sharding(1))
    whole, cut = PlanPricer(problem).with_degrees(plan), by_columns(problem).with_degrees(plan)
    degrees = [priced_plan.pipelines[0].stages[0].parallelism for priced_plan in (whole, cut)]
    assert [degree.degree for degree in degrees if isinstance(degree, TensorParallel)] == [1, 8]
    assert by_columns(problem).price(plan).step_time_s != PlanPricer(problem).price(cut).step_time_s


def over(**rows: list[float]) -> pd.DataFrame:
    return pd.DataFrame(rows, index=pd.MultiIndex.from_tuples([("a", "x"), ("b", "x")])).T


def test_claims_name_who_is_ahead(study: dict[str, Any]) -> None:
    assert study["claims"](over(Metis=[1.5, 0.96], slow=[2.0, 2.0], none=[float("nan")] * 2)) == [
        "Metis: 1.20 × our step time (geometric mean of 2: 0.96 to 1.50); ahead of ours in 1, most for `x` on `b`: its "
        "step takes 4.0% less.",
        "slow: 2.00 × our step time (geometric mean of 2: 2.00).",
    ]


def test_planning_stands_beside_its_aims(study: dict[str, Any]) -> None:
    planning_claims = study["planning_claims"]

    def rows(**columns: Any) -> pd.DataFrame:
        return pd.DataFrame({"model": ["dense", "a", "b"], **columns})

    claims = planning_claims(rows(first_plan_s=[0.5, 1.0, 1.5], cpu_s=[10.0, 11.0, 13.0]))
    assert claims == [
        "1,024 GPUs: the first plan comes within 1.50 s of CPU time (aim 2 s); the search takes 1.10 to 1.30 × the CPU "
        "time of that of the dense model (aim at most 1.2 ×)."
    ]
    assert planning_claims(rows(first_plan_s=[float("nan")] * 3, cpu_s=[1.0] * 3)) == []
