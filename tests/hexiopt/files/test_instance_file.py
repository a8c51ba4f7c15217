"""Problem files: read back as they were, with the rates of all pairs of devices, and refused in one line."""

import json
from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.files.instance_file import MAX_RATED_DEVICES
from tests.conftest import ROOT

PROBLEM = hx.Problem(
    hx.cluster("campus"), hx.model("llama2_13b"), hx.Workload(global_batch=64, seq_len=1024), hx.Space(num_pipelines=2)
)


def test_a_problem_reads_back(tmp_path: Path) -> None:
    PROBLEM.save(tmp_path / "problem.json")
    assert hx.load_problem(tmp_path / "problem.json") == PROBLEM


def test_pairs_of_devices_have_the_rates_of_the_network(tmp_path: Path) -> None:
    """Two RTX 4090 bridged inside a machine, and a machine with a slower interface behind a slow link."""
    machines = [
        {"name": "a", "gpu": "rtx_4090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 12, "intra_latency_us": 7},
        {"name": "b", "gpu": "rtx_3090", "num_gpus": 1, "nic_bandwidth_gb_per_s": 1.25},
    ]
    link = {"from": "a", "to": "b", "bandwidth_gb_per_s": 0.5, "latency_us": 900}
    network = {"bandwidth_gb_per_s": 12.5, "latency_us": 20}
    cluster = hx.cluster({"name": "odd", "inter_machine": network, "machines": machines, "links": [link]})
    hx.Problem(cluster, hx.model("tiny"), hx.Workload(16, 256)).save(tmp_path / "p.json")
    devices = json.loads((tmp_path / "p.json").read_text())["devices"]
    assert devices["names"] == ["a:0", "a:1", "b:0"]
    assert devices["gpus"] == ["rtx_4090", "rtx_4090", "rtx_3090"]
    assert devices["bandwidth_gb_per_s"] == [[None, 12, 0.5], [12, None, 0.5], [1.25, 1.25, None]]
    for row, wanted in zip(devices["latency_us"], [[None, 7, 900], [7, None, 900], [20, 20, None]], strict=True):
        assert row == [None if us is None else pytest.approx(us) for us in wanted]


def test_a_large_cluster_has_no_table_of_rates(tmp_path: Path) -> None:
    cluster = hx.Cluster.of({"h100_80gb_sxm": MAX_RATED_DEVICES + 8}, 50.0)
    large = hx.Problem(cluster, hx.model("llama2_7b"), hx.Workload(4096))
    large.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["devices"] is None
    assert hx.load_problem(tmp_path / "p.json") == large


def test_a_plan_file_has_its_problem(tmp_path: Path) -> None:
    problem = hx.Problem(hx.Cluster.of({"rtx_4090": 2}), hx.model("tiny"), hx.Workload(8, 128))
    hx.solve(problem, "random", 60, max_steps=2, progress=False).found().save(tmp_path / "plan.json")
    assert hx.load_problem(tmp_path / "plan.json") == problem


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "is neither hexiopt.problem nor hexiopt.plan"),
        ("version", 2, "this program reads version 1"),
        ("problem_sha256", "0" * 64, "remove it if the change is meant"),
        ("more", 1, "more: unknown key"),
    ],
)
def test_refusals(key: str, value: object, message: str, tmp_path: Path) -> None:
    PROBLEM.save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps({**json.loads((tmp_path / "p.json").read_text()), key: value}))
    with pytest.raises(hx.InputError, match=message) as refused:
        hx.load_problem(tmp_path / "p.json")
    assert "p.json" in str(refused.value)


def test_where_it_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(hx.InputError, match="cannot be written"):
        PROBLEM.save(tmp_path / "none" / "p.json")


def keys(value: object) -> set[str]:
    """All keys of nested mappings, but those that are names of devices."""
    if isinstance(value, dict):
        return {key for key in value if ":" not in key} | {key for part in value.values() for key in keys(part)}
    return {key for part in value for key in keys(part)} if isinstance(value, list) else set()


def test_the_page_names_every_key_of_both_files(tmp_path: Path) -> None:
    """But for those of a model, which are of config.json."""
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    solved = hx.solve(PROBLEM, "random", 60, max_steps=2, progress=False).found()
    PROBLEM.save(tmp_path / "p.json")
    for data in (solved.to_dict(), json.loads((tmp_path / "p.json").read_text())):
        del data["problem"]["model"], data["problem"]["cluster"]["gpus"]
        missing = {key for key in keys(data) if f"`{key}`" not in page and f'"{key}"' not in page}
        assert not missing
