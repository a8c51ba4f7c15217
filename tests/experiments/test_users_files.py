"""Clusters and models of users' files, and what overrides change of them."""

from pathlib import Path

import pytest

from experiments.app.common import overlay
from hexiopt.errors import InputError
from hexiopt.readers.plan_file import read_plan
from tests.conftest import ROOT, Run
from tests.experiments.command_line import RTX, planned


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
