"""The clusters in conf/cluster: readable, and composed as their sources say."""

from pathlib import Path

import pytest

from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict, read_cluster
from hexiopt.reading import Section
from tests.conftest import ROOT

CONF = ROOT / "conf" / "cluster"
SHIPPED = sorted(path for path in CONF.glob("*.yaml") if path.stem != "file")


def test_the_list_of_shipped_clusters() -> None:
    assert {path.stem for path in SHIPPED} >= {
        *("hexiscale_setting_1", "hexiscale_setting_2", "hexiscale_setting_3", "hexiscale_setting_3_readme"),
        *("homogeneous_2x8_a800_pcie", "homogeneous_4x8_a800_pcie", "hexiseq_testbed"),
        *(f"hexiseq_sim_{k}" for k in range(1, 6)),
        *("homogeneous_152_a100", "homogeneous_168_a100", "sailor_mit", "amp_heterogeneous"),
        *("small_mixed", "local_cpu", "synthetic"),
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_clusters_read(path: Path) -> None:
    cluster = read_cluster(path)
    assert cluster.name == path.stem
    assert path.read_text().startswith("# ")
    assert cluster_from_section(Section(cluster_to_dict(cluster), str(path))) == cluster
    assert cluster.network.bandwidth.shape == (len(cluster.machines),) * 2


@pytest.mark.parametrize(
    ("mixed", "homogeneous", "percent"),
    [
        ("hexiscale_setting_1", "homogeneous_2x8_a800_pcie", 1.36),
        ("hexiscale_setting_2", "homogeneous_2x8_a800_pcie", -1.59),
        ("hexiscale_setting_3", "homogeneous_4x8_a800_pcie", -9.23),
        ("hexiscale_setting_3_readme", "homogeneous_4x8_a800_pcie", -2.40),
    ],
)
def test_flops_against_the_homogeneous_partner(mixed: str, homogeneous: str, percent: float) -> None:
    ours = read_cluster(CONF / f"{mixed}.yaml").total_peak_flops("bf16")
    theirs = read_cluster(CONF / f"{homogeneous}.yaml").total_peak_flops("bf16")
    assert round((ours / theirs - 1) * 100, 2) == percent


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("hexiseq_sim_1", {"h100_80gb_sxm": 8, "a100_80gb_sxm": 16, "l40s": 8}),
        ("hexiseq_sim_4", {"h100_80gb_sxm": 48, "a100_80gb_sxm": 8}),
        ("hexiseq_sim_5", {"h100_80gb_sxm": 52, "a100_80gb_sxm": 4, "a800_80gb_sxm": 8}),
        ("homogeneous_152_a100", {"a100_80gb_sxm": 152}),
        ("homogeneous_168_a100", {"a100_80gb_sxm": 168}),
        ("amp_heterogeneous", {"v100_16gb_sxm": 12, "t4": 4}),
        ("sailor_mit", {"rtx_3090": 8, "rtx_2080": 24, "titan_rtx": 16}),
    ],
)
def test_composition(name: str, counts: dict[str, int]) -> None:
    cluster = read_cluster(CONF / f"{name}.yaml")
    gpu_counts: dict[str, int] = {}
    for machine in cluster.machines:
        gpu_counts[machine.gpu.name] = gpu_counts.get(machine.gpu.name, 0) + machine.num_gpus
    assert gpu_counts == counts
