"""Clusters and models of users' files, and what overrides change of them."""

import json
from pathlib import Path

import pytest

from experiments.app.common import overlay
from hexiopt.errors import InputError
from hexiopt.files.plan_file import read_plan
from tests.conftest import ROOT, Run
from tests.experiments.command_line import RTX, TINY, planned, refusal


def test_a_users_cluster_under_overrides(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        f"name: '${{oc.env:HOME}}'\ninter_machine: {{bandwidth_gb_per_s: 10}}\nmachines:\n  - {RTX}\n"
        "  - {name: b, gpu: rtx_4090, num_gpus: 1}\n"
    )
    path = planned(
        hexiopt,
        tmp_path,
        "cluster=file",
        "cluster.path=conf/mine.yaml",
        "cluster.inter_machine.bandwidth_gb_per_s=0.625",
        "+cluster.inter_machine.latency_us=70",
        "cluster.machines.0.num_gpus=4",
        "+cluster.links=[{between:[a,b],bandwidth_gb_per_s:0.5}]",
    )
    cluster = read_plan(path).problem.cluster
    assert cluster.name == "${oc.env:HOME}", "a file is data"
    assert [machine.num_gpus for machine in cluster.machines] == [4, 1]
    assert cluster.inter_bandwidth_bytes_per_s == 0.625e9
    assert cluster.inter_latency_s == pytest.approx(70e-6)
    assert cluster.links[0].bandwidth_bytes_per_s == 0.5e9


def test_a_named_cluster_under_overrides(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(
        hexiopt, tmp_path, "cluster.inter_machine.bandwidth_gb_per_s=0.625", "constraints.exclude=[old:0,new]"
    )
    problem = read_plan(path).problem
    assert problem.cluster.inter_bandwidth_bytes_per_s == 0.625e9
    assert len(problem.usable_devices) == 3


def test_a_users_model(hexiopt: Run, tmp_path: Path) -> None:
    config = str(ROOT / "experiments" / "data" / "config.json")
    path = planned(hexiopt, tmp_path, "model=hf", f"model.path={config}", "model.num_hidden_layers=8")
    assert read_plan(path).problem.model.num_layers == 8


def test_overlay_merges_mappings_and_list_items() -> None:
    assert overlay({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    assert overlay([{"a": 1}, 2], {"0": {"a": 5}}) == [{"a": 5}, 2]
    assert overlay({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}
    with pytest.raises(InputError, match="not an index"):
        overlay([1], {"1": 2})


_MINE = f"name: mine\ninter_machine: {{bandwidth_gb_per_s: 10}}\nmachines:\n  - {RTX}\n"


def test_files_and_folders_are_given_like_names(hexiopt: Run, tmp_path: Path) -> None:
    config = json.loads((ROOT / "experiments" / "data" / "config.json").read_text())
    config.pop("_name_or_path", None)
    checkpoint = tmp_path / "it's a llama"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.json").write_text(json.dumps(config))
    (tmp_path / "mine.yaml").write_text(_MINE)
    for model, name in (("own.json", "own"), ("it's a llama", "it's a llama"), ("./it's a llama/config.json", None)):
        overrides = ("cluster=mine.yaml", f"model={model}", "workload.seq_len=512", "workload.global_batch=8")
        problem = read_plan(planned(hexiopt, tmp_path, *overrides, "model.num_hidden_layers=2")).problem
        assert (problem.cluster.name, problem.model.name) == ("mine", name or "it's a llama")
        assert problem.model.num_layers == 2, "overrides apply to the file"


def test_a_sweep_over_files(hexiopt: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(_MINE.replace("name: mine", f"name: {name}"))
    ran = hexiopt("plan", "-m", *TINY, "cluster=one.yaml,two.yaml", "hydra.sweep.dir=sweep")
    assert ran.code == 0, ran.err
    plans = sorted((tmp_path / "sweep").rglob("plan.json"))
    assert [read_plan(path).problem.cluster.name for path in plans] == ["one", "two"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster=nope.yaml", "cluster=nope.yaml: the file 'nope.yaml' does not exist; check the path"),
        ("model=some/where/else", "model=some/where/else: the file 'some/where/else' does not exist; check the path"),
        ("model=bare", "bare/config.json: the file does not exist"),
        ("cluster=mine.yaml,small_mixed", "sweep over names or over files"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(hexiopt: Run, tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "mine.yaml").write_text(_MINE)
    assert message in refusal(hexiopt("plan", *TINY, override))


def test_a_profile_is_looked_for_beside_its_cluster_file(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(f"{_MINE}profile: none.json\n")
    assert "profile: sub/none.json: the file does not exist" in refusal(hexiopt("plan", *TINY, "cluster=sub/mine.yaml"))
    message = refusal(hexiopt("plan", *TINY, "cluster=sub/mine.yaml", "cluster.profile=mine.json"))
    assert "profile: mine.json: the file does not exist" in message
