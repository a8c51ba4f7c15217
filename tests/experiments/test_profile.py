"""`hexiopt profile` for real on this CPU, with two processes, and a plan on what it writes."""

import json
import re
from pathlib import Path

import pytest

from hexiopt.files.cluster_file import read_cluster
from hexiopt.reading import read_mapping
from tests.conftest import Run
from tests.slow import slow_but

pytest.importorskip("torch")

BASE = """\
name: ours
inter_machine: {bandwidth_gb_per_s: 1, latency_us: 50}
machines:
  - {name: here, gpu: null, num_gpus: 2, intra_bandwidth_gb_per_s: null, intra_latency_us: null}
  - {name: there, gpu: cpu, num_gpus: 1}
"""


@pytest.mark.slow
def test_a_machine_is_measured_and_planned_on(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    ran = hexiopt(
        "profile",
        "profile.seconds=0.02",
        "profile.processes=2",
        "profile.base=base.yaml",
        "profile.machine=here",
        "hydra.run.dir=out",
    )
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-2:] == ["out/cluster.yaml", "out/profile.json"]
    assert "here:0 to here:1" in ran.out
    cluster = read_cluster(tmp_path / "out" / "cluster.yaml")
    here, there = cluster.machines
    assert here.gpu == there.gpu
    assert here.gpu.source.startswith("measured by hexiopt profile")
    assert 1e6 < here.intra_bandwidth_bytes_per_s < 1e14
    points = read_mapping(tmp_path / "out" / "profile.json")
    assert {device["index"] for device in points["devices"]} == {0, 1}
    kinds = {point["what"] for point in points["points"]}
    assert kinds >= {"launch", "gemm", "attention", "stream", "adam", "peak_bf16", "message", "all_gather"}
    assert json.dumps(points)
    ran = hexiopt(
        "plan",
        "cluster=file",
        "cluster.path=out/cluster.yaml",
        "model=tiny",
        "workload=small",
        "solver=random",
        "solver.max_steps=20",
        "bound.time_limit_s=0",
        "report=false",
    )
    assert ran.code == 0, ran.err


BAD = [
    (["profile.seconds=0"], r"profile: seconds: 0\.0 is out of range"),
    (["profile.seconds=601"], r"profile: seconds: 601\.0 is out of range"),
    (["profile.processes=0"], r"profile: processes: 0 is out of range"),
    (["profile.precision=fp8"], r"profile: precision: 'fp8' is not known"),
    (["profile.name="], r"profile\.name: '' is not a name"),
    (["profile.base=none.yaml"], r"none\.yaml: the file does not exist"),
    (["profile.base=bad.yaml"], r"bad\.yaml: machines\[0\]\.gpu: 'rtx_309' is not a known GPU"),
    (["profile.machine=a b"], r"profile\.machine: 'a b' is not a name"),
    (["profile.base=base.yaml", "profile.machine=elsewhere"], r"profile\.base: has no machine 'elsewhere'"),
]


@pytest.mark.parametrize(("overrides", "message"), slow_but(BAD[::3], BAD))
def test_bad_input_is_a_line_and_writes_nothing(
    hexiopt: Run, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "bad.yaml").write_text(BASE.replace("gpu: null", "gpu: rtx_309"))
    ran = hexiopt("profile", *overrides, "hydra.run.dir=out")
    assert ran.code == 2, ran.err
    assert re.search(message, ran.err), ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_torchrun_says_how_many_processes(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ran = hexiopt("profile", "profile.processes=2", "hydra.run.dir=out")
    assert ran.code == 2
    assert "--nproc-per-node" in ran.err
