"""Every file of conf/ composes, builds and plans."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict

from experiments.app import solver_config
from experiments.app.common import Job, config_names
from experiments.app.config import Config, ConstraintsConfig, SolverConfig, SpaceConfig, register
from experiments.app.configurations import named_cluster, named_model
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.solving.registry import parameters
from solvers import registry
from tests.conftest import ROOT, Run
from tests.slow import slow_but
from tests.solvers.every_solver.contract import ONE_OF_A_KIND

CLUSTERS = [name for name in config_names("cluster") if name != "file"]
MODELS = [name for name in config_names("model") if name != "hf"]
EXPERIMENTS = config_names("experiment")
STEPS = ("solver.max_steps=100", "bound.time_limit_s=0")


def job_of(tmp_path: Path, overrides: Sequence[str]) -> Job:
    register()
    solver_config.register()
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("config", list(overrides), return_hydra_config=True)
        choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    return Job("plan", config, tmp_path, choices, overrides, in_sweep=True)


def test_every_group_is_known_here() -> None:
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert groups - {"train"} == {"cluster", "model", "workload", "experiment"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_builds_a_problem(name: str) -> None:
    assert Problem(named_cluster(name), named_model("tiny"), Workload(precision="fp32")).cluster.name == name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_a_problem(name: str) -> None:
    problem = Problem(named_cluster("small_mixed"), named_model(name), Workload(seq_len=512))
    assert problem.model.name == name


@pytest.mark.parametrize("name", slow_but(CLUSTERS[:1], CLUSTERS))
def test_every_cluster_composes(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, [f"cluster={name}", "model=tiny", "workload.precision=fp32"])
    assert job.problem.cluster == named_cluster(name)


@pytest.mark.parametrize("name", slow_but(MODELS[:1], MODELS))
def test_every_model_composes(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, ["cluster=small_mixed", f"model={name}", "workload.seq_len=512"])
    assert job.problem.model == named_model(name)


@pytest.mark.parametrize("name", slow_but(ONE_OF_A_KIND, registry.names()))
def test_every_solver_is_configured_by_the_parameters_of_its_dataclass(tmp_path: Path, name: str) -> None:
    """And its defaults; oracles have more time."""
    config = job_of(tmp_path, [f"solver={name}"]).config.solver
    made = registry.solver_class(name)
    own = {one.name for one in parameters(made)}
    assert {one.name for one in fields(config)} == own | {one.name for one in fields(SolverConfig)}
    assert (config.name, config.options(), config.max_steps) == (name, {}, None)
    assert config.time_limit_s == (60.0 if made.capabilities.kind == "oracle" else SolverConfig.time_limit_s)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_by_the_command_in_its_header(hexiopt: Run, name: str) -> None:
    header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    line = next(line for line in header.splitlines() if line.startswith("#   hexiopt "))
    assert f"experiment={name}" in line
    ran = hexiopt(*line.split()[2:], "solver=local_search", *STEPS, "report=false")
    assert ran.code == 0, ran.err


def test_the_even_experiment_takes_every_freedom(tmp_path: Path) -> None:
    space = job_of(tmp_path, ["experiment=even"]).config.plan_space()
    freedoms = {name for name in SWITCHES if getattr(space, name)}
    assert not freedoms


def test_the_schema_has_the_defaults_of_the_library(tmp_path: Path) -> None:
    config = job_of(tmp_path, []).config
    assert config.workload.workload() == Workload()
    assert config.plan_space() == Space()
    stated = {field.name for field in (*fields(SpaceConfig), *fields(ConstraintsConfig))}
    assert stated == {field.name for field in fields(Space)} | {"preset"}  # which stands for several of them
