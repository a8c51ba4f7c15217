"""Every file of conf/ composes, builds and plans."""

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from experiments.app.common import config_names
from experiments.app.config import ConstraintsConfig, SolverConfig, SpaceConfig
from experiments.app.configurations import named_cluster, named_model
from experiments.app.verbs import VERBS
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.solving.registry import parameters
from solvers import registry
from tests.conftest import ROOT, Run
from tests.experiments.command_line import job_of
from tests.slow import slow_but
from tests.solvers.every_solver.contract import ONE_OF_A_KIND

CLUSTERS = [name for name in config_names("cluster") if name != "file"]
MODELS = [name for name in config_names("model") if name != "hf"]
EXPERIMENTS = config_names("experiment")
STEPS = ("solver.max_steps=100", "bound.time_limit_s=0")
SHORT = ("workload.seq_len=131072",)
LESS = {"hexiseq_simulations": (*SHORT, "model=gpt_13b"), "hexiseq_pairs": SHORT}
"""Of experiments that are sweeps, what leaves few jobs."""


def headers(group: str, name: str) -> list[list[str]]:
    """The commands in the header of a configuration, without `hexiopt`."""
    lines = (ROOT / "conf" / group / f"{name}.yaml").read_text().splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("#   hexiopt ")]
    assert all(f"{group}={name}" in words for words in commands)
    return commands


def header(group: str, name: str) -> list[str]:
    return headers(group, name)[0]


def test_every_group_is_known_here() -> None:
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert groups == {"cluster", "model", "workload", "experiment", "sweep", "hydra"}
    assert config_names("") == sorted(VERBS), "a primary configuration a verb"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_builds_a_problem(name: str) -> None:
    assert Problem(named_cluster(name), named_model("tiny"), Workload(precision="fp32")).cluster.name == name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_a_problem(name: str) -> None:
    problem = Problem(named_cluster("small_mixed"), named_model(name), Workload(seq_len=512))
    assert problem.model.name == name


@pytest.mark.parametrize("name", slow_but(CLUSTERS[:1], CLUSTERS))
def test_every_cluster_composes(name: str) -> None:
    job = job_of("plan", [f"cluster={name}", "model=tiny", "workload.precision=fp32"])
    assert job.problem.cluster == named_cluster(name)


@pytest.mark.parametrize("name", slow_but(MODELS[:1], MODELS))
def test_every_model_composes(name: str) -> None:
    job = job_of("plan", ["cluster=small_mixed", f"model={name}", "workload.seq_len=512"])
    assert job.problem.model == named_model(name)


@pytest.mark.parametrize("name", slow_but(ONE_OF_A_KIND, registry.names()))
def test_every_solver_is_configured_by_the_parameters_of_its_dataclass(name: str) -> None:
    """And its defaults; oracles have more time."""
    config = job_of("plan", [f"solver={name}"]).config.solver
    made = registry.solver_class(name)
    names = {parameter.name for parameter in parameters(made)}
    assert {field.name for field in fields(config)} == names | {field.name for field in fields(SolverConfig)}
    assert (config.name, config.options(), config.max_steps) == (name, {}, None)
    assert config.time_limit_s == (60.0 if made.capabilities.kind == "oracle" else SolverConfig.time_limit_s)


@pytest.mark.parametrize("name", slow_but(("even",), EXPERIMENTS))
def test_every_experiment_runs_by_the_command_in_its_header(hexiopt: Run, name: str) -> None:
    ran = hexiopt(*header("experiment", name), *LESS.get(name, ()), "solver=local_search", *STEPS, "report=false")
    assert ran.code == 0, ran.err
    assert (" jobs done" in ran.out) == (name in LESS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_by_its_commands(hexiopt: Run, name: str) -> None:
    for words in headers("experiment", name):
        ran = hexiopt(*(word for word in words if word != "-m" and "," not in word), "--cfg", "job")
        assert ran.code == 0, ran.err


@pytest.mark.slow
def test_seeds_are_a_sweep(hexiopt: Run) -> None:
    ran = hexiopt(*header("sweep", "seeds"), "solver=random", "solver.max_steps=5", "bound.time_limit_s=0")
    assert ran.code == 0, ran.err
    assert "10 of 10 jobs done" in ran.out


@pytest.mark.slow
def test_optuna_draws_parameters(hexiopt: Run) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ran = hexiopt(*header("sweep", "optuna"), "hydra.sweeper.n_trials=3", "solver.max_steps=20", "hydra.sweep.dir=out")
    assert ran.code == 0, ran.err
    assert "3 of 3 jobs done" in ran.out
    drawn = [json.loads(path.read_text())["overrides"] for path in Path("out").glob("*/status.json")]
    assert len({word for words in drawn for word in words if word.startswith("solver.hot=")}) == 3


def test_slurm_runs_each_job_of_the_seeds(hexiopt: Run) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    ran = hexiopt("plan", "sweep=[seeds,slurm]", "cluster=small_mixed", "model=tiny", "--cfg", "hydra")
    assert ran.code == 0, ran.err
    for line in ("mode: MULTIRUN", "seed: range(10)", "timeout_min: 60", "name: plan"):
        assert line in ran.out


def test_the_even_experiment_takes_every_freedom() -> None:
    space = job_of("plan", ["experiment=even"]).config.plan_space()
    freedoms = {name for name in SWITCHES if getattr(space, name)}
    assert not freedoms


def test_the_schema_has_the_defaults_of_the_library() -> None:
    config = job_of("plan", []).config
    assert config.workload.workload() == Workload()
    assert config.plan_space() == Space()
    stated = {field.name for field in (*fields(SpaceConfig), *fields(ConstraintsConfig))}
    assert stated == {field.name for field in fields(Space)} | {"preset"}  # which stands for several of them
