"""Texts as people publish them: read right, or refused in a line that says what they are and what to run."""

from pathlib import Path
from typing import Any

import pytest

from hexiopt.discovery.machines import Discovery, Texts, discover
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.nodelist import expand
from hexiopt.reading import Section

CASES = Path(__file__).parents[2] / "cases"


def case(option: str, name: str, machine: str | None = None) -> Discovery:
    path = str(CASES / name)
    return discover("mine", Texts(**{option: path if machine is None else {machine: path}}))  # type: ignore[arg-type]


def gpus(discovery: Discovery) -> dict[str, int | None]:
    """The number of GPUs of each machine."""
    counts: dict[str, int | None] = {}
    for entry in discovery.cluster["machines"]:
        names = [f"{entry['name']}-{i}" for i in range(entry["count"])] if "count" in entry else expand(entry["name"])
        counts |= dict.fromkeys(names, entry["num_gpus"])
    return counts


def numbered_names(prefix: str, first: int, last: int) -> list[str]:
    return [f"{prefix}{k:03d}" for k in range(first, last + 1)]


def test_a_partition_summary_counts_nodes_by_their_list() -> None:
    campus = case("slurm", "sinfo_partition_summary/campus.txt")
    nodes = [*numbered_names("m", 17, 20), *numbered_names("m", 27, 44), *numbered_names("m", 14, 15)]
    assert gpus(campus) == dict.fromkeys(nodes, 2)
    assert sum(count or 0 for count in gpus(campus).values()) == 48
    assert expand(",".join(campus.without_gpus)) == ["m011", *numbered_names("m", 1, 10), "m012", "m013"]
    whole = gpus(case("slurm", "sinfo_partition_summary/campus_whole.txt"))
    assert sum(count or 0 for count in whole.values()) == 58
    assert (whole["m178"], whole["m171"], whole["m177"]) == (4, 2, 4)
    assert gpus(case("slurm", "sinfo_partition_summary/one_node.txt")) == {"ip-10-1-10-42": 8}
    wide = gpus(case("slurm", "sinfo_partition_summary/wide.txt"))
    assert wide == {f"o-0{k}": 4 for k in range(1, 7)}


def test_slurm_conf_inherits_defaults_and_skips_comments() -> None:
    default = case("slurm", "slurm_conf/default.conf")
    assert gpus(default) == {"t1": 1, "t3": 1}
    assert "titan names a series, not a product" in default.notes["t[1,3]"][0]
    commented = case("slurm", "slurm_conf/commented.conf")
    racks = [f"rack{r}n0{n}" for r in (1, 2) for n in (1, 2, 3)]
    visible = [f"v{k:02d}" for k in (*range(1, 9), 11)]
    assert gpus(commented) == {"g1": 8, **dict.fromkeys(racks, 4), **dict.fromkeys(visible, 2)}
    assert "a100 may be" in commented.notes["g1"][0]


def test_nodes_out_of_service_are_left_out_and_slices_are_said_to_be_slices() -> None:
    discovery = case("slurm", "scontrol_states/scontrol.txt")
    assert discovery.out_of_service == {"w-101": "IDLE+DRAIN", "g-2": "DOWN*+DRAIN+NOT_RESPONDING"}
    assert gpus(discovery) == {
        "g-1.rtx4000": 4,
        "g-1.quadro_rtx_8000": 2,
        "g-1.v100": 2,
        "g-3.a100_3g_20gb": 2,
        "g-3.a100_4g_20gb": 2,
        "g-4": 8,
    }
    by_name = {entry["name"]: entry["gpu"] for entry in discovery.cluster["machines"]}
    assert (by_name["g-1.quadro_rtx_8000"], by_name["g-4"]) == ("quadro_rtx_8000", "h100_80gb_sxm")
    assert "quadro_rtx_4000, rtx_4000_ada or rtx_pro_4000" in discovery.notes["g-1.rtx4000"][0]
    assert "no NVLink and no peer access" in discovery.notes["g-3.a100_3g_20gb"][1]


def test_one_box_of_several_types_asks_for_no_network() -> None:
    paths = {"nvidia_smi": "rig.csv", "topology": "rig_topo.txt"}
    texts = Texts(**{option: {"": str(CASES / "seven_gpu_rig" / name)} for option, name in paths.items()})
    discovery = discover("rig", texts)
    types = {entry["name"]: (entry["gpu"], entry["num_gpus"]) for entry in discovery.cluster["machines"]}
    assert types == {
        "local.rtx_4090": ("rtx_4090", 2),
        "local.rtx_5090": ("rtx_5090", 2),
        "local.rtx_a6000": ("rtx_a6000", 1),
        "local.rtx_3090": ("rtx_3090", 2),
    }
    assert "inter_machine" not in discovery.cluster
    assert len(discovery.cluster["links"]) == 6
    (pair,) = [entry for entry in discovery.cluster["machines"] if entry["gpu"] == "rtx_3090"]
    assert pair["intra_bandwidth_gb_per_s"] == 56.25  # half of the datasheet's 112.5 GB/s both ways
    plain = case("nvidia_smi", "seven_gpu_rig/rig_noheader.csv", "")
    assert {entry["name"]: (entry["gpu"], entry["num_gpus"]) for entry in plain.cluster["machines"]} == types


def fill_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: fill_nulls(inner) for key, inner in value.items()}
    return [fill_nulls(inner) for inner in value] if isinstance(value, list) else 10 if value is None else value


def test_the_file_of_a_box_is_a_cluster_once_its_links_are_stated() -> None:
    """No interface limits the links: each has its own rate also when all others carry as much."""
    texts = Texts(nvidia_smi={"": str(CASES / "seven_gpu_rig/rig.csv")})
    cluster = cluster_from_section(Section(fill_nulls(discover("rig", texts).cluster), "cluster.yaml"))
    assert {machine.nic_bandwidth_bytes_per_s for machine in cluster.machines} == {3 * 10e9}
    assert cluster.is_linked


def test_unequal_counts_are_no_obstacle() -> None:
    texts = Texts(
        nvidia_smi={"localhost": str(CASES / "four_plus_one/ada.csv")},
        hostfile=str(CASES / "four_plus_one/hostfile"),
    )
    big, small = discover("five", texts).cluster["machines"]
    assert (big["gpu"], big["num_gpus"]) == ("rtx_6000_ada", 4)
    assert (small["gpu"], small["num_gpus"]) == (None, 1)


def test_other_texts_that_are_read() -> None:
    gres = case("slurm", "other_texts/gres.conf")
    assert gpus(gres) == {f"node0{k}": 4 for k in range(1, 5)} | {"node05": 6, "node06": 6}
    assert any("line 4 (1 × v100), which names no node" in remark for remark in gres.remarks)
    hosts = case("hostfile", "other_texts/flagscale_hostfile")
    assert gpus(hosts) == {"10.0.0.1": 8, "10.0.0.2": 8}
    assert "a800_80gb_sxm" in hosts.notes["10.0.0.1"][0]
    assert "C550 is not in the catalogue" in hosts.notes["10.0.0.2"][0]
    (node,) = case("kubernetes", "other_texts/kubectl_describe.txt").cluster["machines"]
    assert (node["name"], node["gpu"], node["num_gpus"]) == ("node1", "v100_32gb_sxm", 8)
    (amd,) = case("topology", "other_texts/rocm_showtopo.txt", "").cluster["machines"]
    assert (amd["gpu"], amd["num_gpus"], amd["intra_bandwidth_gb_per_s"]) == (None, 4, None)
    joined = case("topology", "other_texts/topo_columns_run_together.txt", "")
    assert joined.cluster["machines"][0]["num_gpus"] == 4
    assert joined.notes["local"][1] == "pairs of GPUs: NV12 6×"


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        (
            "slurm",
            "sinfo_plain.txt",
            "is a table of sinfo without the column GRES; write it with sinfo -N -o '%N %G %t'",
        ),
        ("nvidia_smi", "nvidia_smi_table.txt", "is the table of nvidia-smi, .*; run nvidia-smi --query-gpu="),
        ("slurm", "kubectl_describe.txt", "is the output of kubectl describe; give it as discover.kubernetes"),
        ("nvidia_smi", "rocm_showtopo.txt", "is rocm-smi --showtopo; give it as discover.topology"),
        ("hostfile", "gres.conf", "is gres.conf; give it as discover.slurm"),
        ("kubernetes", "flagscale_hostfile", "is a hostfile; give it as discover.hostfile"),
    ],
)
def test_other_texts_are_called_what_they_are(option: str, name: str, message: str) -> None:
    machine = "" if option == "nvidia_smi" else None
    with pytest.raises(InputError, match=message):
        case(option, f"other_texts/{name}", machine)
