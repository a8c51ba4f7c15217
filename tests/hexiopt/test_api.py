"""The front door: a tiny problem solved, priced, checked and bounded by `import hexiopt` alone."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import hexiopt
from hexiopt.files.cluster_file import cluster_to_dict
from hexiopt.plan.check import Violation
from hexiopt.solving import Budget
from hexiopt.solving.registry import solver_targets
from hexiopt.study.solution import Solution
from solvers.registry import BUILT_IN, make_solver
from tests.conftest import ROOT
from tests.solvers.stranger import install

CLUSTER = ROOT / "conf" / "cluster" / "small_mixed.yaml"
MODEL = ROOT / "conf" / "model" / "tiny.yaml"
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "rich", "numba", "ortools", "solvers")
ALL = (*HEAVY, "numpy", "scipy", "yaml", "hexiopt.study", "hexiopt.cost")

LONG_S = 600.0  # so that steps end the search, not the clock


@pytest.fixture(scope="module")
def problem() -> hexiopt.Problem:
    return hexiopt.Problem(
        hexiopt.cluster(CLUSTER), hexiopt.model(str(MODEL)), hexiopt.Workload(global_batch=16, seq_len=256)
    )


@pytest.fixture(scope="module")
def result(problem: hexiopt.Problem) -> Solution:
    return hexiopt.solve(problem, "local_search", LONG_S, max_steps=40, seed=3)


def test_every_name_is_found_where_type_checkers_find_it() -> None:
    homes = {}
    for node in ast.walk(ast.parse(Path(hexiopt.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.names[0].asname is not None:
            homes |= {alias.name: node.module for alias in node.names}
    assert sorted(homes) == hexiopt.__all__
    for name, module in homes.items():
        assert getattr(hexiopt, name) is getattr(import_module(str(module)), name)
        assert name in dir(hexiopt)
    with pytest.raises(AttributeError, match="no attribute 'prize'"):
        hexiopt.prize  # noqa: B018


def test_the_import_alone_loads_nothing_heavy() -> None:
    code = f"import sys, hexiopt; print([name for name in {ALL!r} if name in sys.modules])"
    code += f"; hexiopt.solve; print([name for name in {ALL!r} if name in sys.modules])"
    lines = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = lines.stdout.splitlines()
    assert before == "[]"
    assert "hexiopt.study" in after
    assert not [name for name in HEAVY if f"'{name}'" in after], after


def test_a_plan_is_solved_priced_checked_and_bounded(problem: hexiopt.Problem, result: Solution) -> None:
    assert result.plan is not None
    assert result.cost is not None
    cost = hexiopt.price(problem, result.plan)
    assert cost.step_time_s == pytest.approx(result.cost.step_time_s, rel=1e-12)
    assert hexiopt.check(problem, result.plan) == []
    at_once, longer = hexiopt.lower_bound(problem, 0), hexiopt.lower_bound(problem, 2.0)
    assert 0.0 < at_once <= longer <= cost.step_time_s


def test_it_solves_as_the_registry_does(problem: hexiopt.Problem, result: Solution) -> None:
    again = make_solver("local_search").solve(problem, Budget(LONG_S, 40), seed=3)
    assert again.plan == result.plan


def test_every_solver_of_ours_is_found() -> None:
    assert set(BUILT_IN) <= set(hexiopt.solvers())


def test_shipped_clusters_and_models_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert hexiopt.cluster("small_mixed") == hexiopt.cluster(CLUSTER)
    assert hexiopt.model("tiny") == hexiopt.model(str(MODEL))
    assert hexiopt.cluster("hexiscale_setting_2").num_devices == 32
    for read, name, message in (
        (hexiopt.cluster, "smal_mixed", "cluster: 'smal_mixed' is neither a shipped cluster nor a file; did you mean"),
        (hexiopt.model, "llama2_7", "model: 'llama2_7' is neither a shipped model nor a file; did you mean"),
        (hexiopt.model, "hf", "model: 'hf' is neither a shipped model nor a file; "),
    ):
        with pytest.raises(hexiopt.InputError, match=re.escape(message)):
            read(name)
    (tmp_path / "tiny").write_text("{}", encoding="utf-8")
    assert hexiopt.model("tiny") == hexiopt.model(MODEL)
    with pytest.raises(hexiopt.InputError, match="model_type: is missing"):
        hexiopt.model(Path("tiny"))


def test_an_old_name_of_a_solver_is_that_of_the_new_one(problem: hexiopt.Problem) -> None:
    pytest.importorskip("pymetis")
    with pytest.warns(FutureWarning, match="metis now means hexiscale") as warned:
        result = hexiopt.solve(problem, "metis", LONG_S, max_steps=3)
    assert result.solver == "hexiscale"
    assert [Path(warning.filename).name for warning in warned] == ["test_api.py"]


def test_a_result_is_saved_and_its_file_is_priced(problem: hexiopt.Problem, result: Solution, tmp_path: Path) -> None:
    plan = result.found()
    plan.save(tmp_path / "plan.json")
    read = hexiopt.load_plan(tmp_path / "plan.json")
    assert (read, read.problem, read.solver["seed"]) == (plan, problem, 3)
    assert hexiopt.price(problem, read) == read.cost == result.cost
    assert hexiopt.check(problem, read) == []
    with pytest.raises(hexiopt.InputError, match="cannot be written"):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_mappings_are_read_like_files(problem: hexiopt.Problem) -> None:
    assert hexiopt.cluster(cluster_to_dict(problem.cluster)) == problem.cluster
    assert hexiopt.model(problem.model.to_dict()) == problem.model


def test_a_plan_that_breaks_a_rule_has_no_price(problem: hexiopt.Problem, result: Solution) -> None:
    assert result.plan is not None
    larger = replace(problem, workload=replace(problem.workload, global_batch=17))
    assert [broken.rule for broken in hexiopt.check(larger, result.plan)] == ["batch"]
    with pytest.raises(hexiopt.InputError, match="plan: breaks the rule batch: "):
        hexiopt.price(larger, result.plan)


def test_a_plan_beyond_memory_is_priced_and_named(problem: hexiopt.Problem, result: Solution) -> None:
    assert result.plan is not None
    wide = problem.model.to_dict() | {"hidden_size": 16_384, "intermediate_size": 65_536}
    large = replace(problem, model=hexiopt.model(wide))
    assert not hexiopt.price(large, result.plan).fits
    violations = hexiopt.check(large, result.plan)
    assert violations
    assert all(isinstance(broken, Violation) and broken.rule == "memory" for broken in violations)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"solver": "portfoli"}, "solver: 'portfoli' is not known; did you mean portfolio?"),
        ({"solver": None}, "solver: None is not a name and has no name and no capabilities and no solve; "),
        ({"speed": 3}, "solver.speed: portfolio does not take it; "),
        ({"time_limit_s": 0}, "time_limit_s: 0 is out of range; "),
        ({"max_steps": 1.5}, "max_steps: 1.5 is out of range; "),
        ({"seed": -1}, "seed: -1 is out of range; "),
        ({"seed": "x"}, "seed: 'x' is not a number; "),
    ],
)
def test_wrong_requests_are_one_line(problem: hexiopt.Problem, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(hexiopt.InputError, match=f"^{re.escape(message)}"):
        hexiopt.solve(problem, **stated)


@pytest.mark.parametrize(
    "kind", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "GPT2Config", "GPTNeoXConfig", "OPTConfig"]
)
def test_a_configuration_of_transformers_is_a_model(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)()
    config.save_pretrained(tmp_path)
    assert hexiopt.model(tmp_path) == hexiopt.model(str(tmp_path / "config.json"))
    assert hexiopt.model(config).replace(name=tmp_path.name) == hexiopt.model(tmp_path), "a folder names its model"
    assert hexiopt.model(config) == hexiopt.model(config.to_dict())
    assert hexiopt.model(hexiopt.model(config)) == hexiopt.model(config)


def test_a_cluster_by_hand() -> None:
    cluster = hexiopt.Cluster.of({"a100_80gb_sxm": 8, "rtx_4090": 20}, inter_gb_per_s=5)
    sizes = {machine.name: machine.num_gpus for machine in cluster.machines}
    assert sizes == {"a100_80gb_sxm": 8, "rtx_4090-0": 8, "rtx_4090-1": 8, "rtx_4090-rest": 4}
    assert {machine.nic_bandwidth_bytes_per_s for machine in cluster.machines} == {5e9}
    assert [cluster.machines[m].intra_bandwidth_bytes_per_s for m in (0, 1)] == [300e9, 12e9]  # as usual for the types
    assert hexiopt.cluster(cluster_to_dict(cluster)) == cluster
    pairs = hexiopt.Cluster.of({"t4": 4}, 1, intra_gb_per_s=3, gpus_per_machine=2, name="pairs")
    assert [(m.num_gpus, m.intra_bandwidth_bytes_per_s) for m in pairs.machines] == [(2, 3e9)] * 2


@pytest.mark.parametrize(
    ("gpus", "stated", "message"),
    [
        ({"a10o": 3}, {}, "cluster: gpus: 'a10o' is not a known GPU; did you mean a10"),
        ({"t4": 16}, {}, "cluster: inter_gb_per_s: is missing for 2 machines"),
        ({"t4": 0}, {}, "cluster: gpus: t4: 0 is out of range"),
        ({}, {}, "cluster by_hand: machines: [] is empty"),
        ("t4", {}, "cluster: gpus: 't4' is not a mapping"),
        ({"t4": 8}, {"inter_gb_per_s": -1}, "cluster: inter_gb_per_s: -1 is out of range"),
        ({"t4": 8}, {"gpus_per_machine": 0}, "cluster: gpus_per_machine: 0 is out of range"),
    ],
)
def test_wrong_clusters_by_hand_are_one_line(gpus: Any, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(hexiopt.InputError, match=f"^{re.escape(message)}"):
        hexiopt.Cluster.of(gpus, **stated)


def test_wrong_sources_are_one_line(problem: hexiopt.Problem) -> None:
    source: Any = 3
    with pytest.raises(hexiopt.InputError, match="cluster: 3 is not a mapping"):
        hexiopt.cluster(source)
    with pytest.raises(hexiopt.InputError, match=r"nowhere\.yaml: the file does not exist"):
        hexiopt.model("nowhere.yaml")
    with pytest.raises(hexiopt.InputError, match="time_limit_s: -1 is out of range"):
        hexiopt.lower_bound(problem, -1)


def test_a_package_cannot_take_the_name_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch, tmp_path / "site", "corsair", "class Portfolio: ...", portfolio="Portfolio", a_rival="Portfolio"
    )
    assert solver_targets()["portfolio"] == BUILT_IN["portfolio"]
    assert solver_targets()["a_rival"] == "corsair:Portfolio"


def test_each_solver_says_in_one_line_what_it_is() -> None:
    descriptions = {name: info.description for name, info in hexiopt.solvers().items() if name in BUILT_IN}
    assert len(set(descriptions.values())) == len(BUILT_IN)
    for name, text in descriptions.items():
        assert len(text) <= 110, name
        assert "\n" not in text, name
        assert text.endswith("."), name
        assert not re.search(r"\bsteps?\b|\bruns?\b", text), f"{name}: what it does in a step is not what it is"
