"""The portfolio is never behind its floor, and prices it whatever the clock says."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from hexiopt.cost.cost import violations
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.solving import MAX_TIME_LIMIT_S, Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.frame.solver import offer_partition
from solvers.frame.starts import whole_grids
from solvers.heuristics.local_search import own_grids
from solvers.portfolio import Portfolio
from solvers.registry import make_solver
from tests.conftest import ROOT
from tests.solvers.problems import easy

MODELS = ROOT / "conf" / "model"
# Names, GPUs, how many in a machine, how many machines; of five types, in machines of all sizes.
FLEET = (
    ("a100_40gb_sxm", 8, 3),
    ("a100_80gb_pcie", 4, 2),
    ("l40s", 8, 2),
    ("l40s", 6, 1),
    ("rtx_4090", 7, 1),
    ("a100_40gb_pcie", 8, 1),
)


def irregular() -> Cluster:
    """69 GPUs on a slow network."""
    machines = [
        {"name": f"m{k}", "gpu": gpu, "num_gpus": gpus, "count": count, "intra_bandwidth_gb_per_s": 60 / (k + 1)}
        for k, (gpu, gpus, count) in enumerate(FLEET)
    ]
    network = {"bandwidth_gb_per_s": 3, "latency_us": 20}
    return cluster_from_section(Section({"name": "irregular", "inter_machine": network, "machines": machines}, "x"))


@cache
def problem() -> Problem:
    model = replace(read_model(MODELS / "llama_30b.yaml"), num_layers=12)
    return Problem(irregular(), model, Workload(global_batch=256, seq_len=4096))


@cache
def floor_s() -> float:
    """The best of all grids."""
    search = Search("floor", problem(), Budget(3600.0), 0)
    completer = PlanCompleter(search.pricer)
    for grid in itertools.chain(whole_grids(problem()), own_grids(problem(), completer)):
        offer_partition(search, completer, grid, search.best_s)
    return search.best_s


@pytest.fixture
def time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a day after the one before."""
    monkeypatch.setattr(Search, "clock", staticmethod(itertools.count(0.0, 86_400.0).__next__))


@pytest.mark.slow
def test_never_behind_grids() -> None:
    result = make_solver("portfolio").solve(problem(), Budget(3600.0, 180))
    assert result.objective <= floor_s() < float("inf")


@pytest.mark.usefixtures("time_is_over")
def test_a_plan_even_without_time() -> None:
    """Of the first candidates that fit."""
    result = make_solver("portfolio").solve(problem(), Budget(1.0))
    assert result.plan is not None, result.reason
    assert result.objective <= 2 * floor_s()


@pytest.mark.usefixtures("time_is_over")
def test_a_listener_ends_even_that() -> None:
    result = Portfolio().solve(problem(), Budget(1.0), on_progress=lambda progress: False)
    assert result.steps == 0


def test_the_longest_time_limit_is_no_error() -> None:
    """30 days are more milliseconds than an operating system waits at once."""
    result = Portfolio().solve(
        problem(), Budget(MAX_TIME_LIMIT_S), on_progress=lambda told: told.best_s == float("inf")
    )
    assert result.plan is not None


@pytest.mark.slow
def test_a_plan_for_a_large_fleet_in_few_steps() -> None:
    """960 GPUs of five types, where the portfolio once found none in 10 s; 45.4 s is what equal pipelines reach."""
    fleet = read_cluster(ROOT / "conf" / "cluster" / "fleet.yaml")
    model, workload = read_model(MODELS / "llama3_70b.yaml"), Workload(global_batch=2048, seq_len=8192)
    large = Problem(fleet, model, workload, Space(exclude=("v100",)))
    result = make_solver("portfolio").solve(large, Budget(3600.0, 150))
    assert result.objective < 45.4
    assert result.plan is not None
    assert violations(large, result.plan, result.cost) == []


@pytest.mark.parametrize("steps", [1, 5, 60])
def test_no_more_steps_than_there_are(steps: int) -> None:
    assert make_solver("portfolio").solve(easy(), Budget(3600.0, steps)).steps <= steps


def test_a_proved_gap_ends_the_search() -> None:
    whole = make_solver("portfolio").solve(easy(), Budget(3600.0, 80))
    gap = (whole.objective - whole.bound_s) / whole.objective
    assert gap > 0.02
    soon = make_solver("portfolio", gap=min(0.95, gap + 0.05)).solve(easy(), Budget(3600.0, 80))
    assert soon.steps < whole.steps
    assert soon.objective * (1 - gap - 0.05) <= soon.bound_s


@pytest.mark.parametrize("gap", [-0.1, 1.0, True, "half"])
def test_a_gap_is_a_fraction(gap: object) -> None:
    with pytest.raises(InputError, match=r"solver\.gap: .* state a fraction from 0 to below 1"):
        Portfolio(gap=gap)


def test_a_joint_search_is_not_behind_one_without_layouts_of_half_its_steps() -> None:
    """Its first half is that search."""
    problem, steps = easy(), Budget(600.0, max_steps=400)
    layouts = problem.replace(
        workload=problem.workload.replace(sequence_parallel=True), space=problem.space.replace(sequence=True)
    )
    joint, alone = Search("joint", layouts, steps, 3), Search("alone", problem, steps.part(0.5), 3)
    for run in (joint, alone):
        Portfolio().find(run)
    assert alone.plan is not None
    assert joint.best_s <= alone.best_s
