"""`hexiopt discover`: files in, a cluster file out, and what it leaves open is refused elsewhere by name."""

import re
from pathlib import Path

import pytest

from hexiopt.reading import read_mapping
from tests.conftest import Run
from tests.hexiopt.discovery.texts import A100, A100_TOPOLOGY, LAB, SCONTROL


def test_discover_writes_a_cluster_file_that_plan_reads_once_it_is_whole(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "nodes.txt").write_text(SCONTROL)
    (tmp_path / "lab.csv").write_text(LAB)
    (tmp_path / "a100.csv").write_text(A100)
    (tmp_path / "a100.topo").write_text(A100_TOPOLOGY)
    ran = hexiopt(
        "discover",
        "discover.slurm=nodes.txt",
        "discover.nvidia_smi={lab-1.example: lab.csv, a: a100.csv}",
        "discover.topology={a: a100.topo}",
        "discover.name=ours",
        "hydra.run.dir=out",
    )
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == "out/cluster.yaml"
    assert "torchrun" in ran.out
    assert "Left out, without GPUs: login" in ran.out
    data = read_mapping(tmp_path / "out" / "cluster.yaml")
    assert data["name"] == "ours"
    names = [machine["name"] for machine in data["machines"]]
    assert names == ["gpu01", "gpu02.tesla", "gpu02.t4", "lab-1.example", "a"]
    ran = hexiopt("plan", "cluster=file", "cluster.path=out/cluster.yaml", "model=tiny")
    assert ran.code == 2
    assert "values are unknown (null)" in ran.err
    assert "inter_machine.bandwidth_gb_per_s, inter_machine.latency_us, machines[*]." in ran.err
    assert "hexiopt profile" in ran.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "discover: no input is given"),
        (["discover.slurm=none.txt"], "none.txt: the file does not exist"),
        (["discover.hostfile=bad"], "bad, line 2: 'x' is not a number of slots"),
        (["discover.nvidia_smi=[a.csv]"], "discover.nvidia_smi: .* is neither a path nor a mapping"),
        (["discover.topology={a: 3}"], "discover.topology: .* is neither a path nor a mapping"),
        (["discover.name=''"], "discover.name: '' is not a name"),
        (["discover.nodes=a"], "discover.nodes: unknown key"),
    ],
)
def test_bad_input_is_a_line_and_writes_nothing(
    hexiopt: Run, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "bad").write_text("a slots=8\nb slots=x\n")
    ran = hexiopt("discover", *overrides, "hydra.run.dir=out")
    assert ran.code == 2
    assert re.search(message, ran.err), ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
