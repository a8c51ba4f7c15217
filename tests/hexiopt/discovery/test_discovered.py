"""From texts to a cluster: what is known stands there, what is not is null, and null is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.discovery.machines import Discovery, Texts, discover
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.cluster_yaml import cluster_text, unknowns
from hexiopt.reading import Section, parse
from tests.hexiopt.discovery.texts import (
    A100,
    A100_TOPOLOGY,
    DGX,
    DGX_TOPOLOGY,
    GB200_MACHINE,
    GB200_TOPOLOGY,
    HOSTFILE,
    LAB,
    LAB_TOPOLOGY,
    SCONTROL,
    SCONTROL_ONE_LINE,
    SINFO,
)


def discover_texts(folder: Path, **texts: Any) -> Discovery:
    """The discovery from texts by option: a text, or texts by machine."""
    paths: dict[str, Any] = {}
    for option, text in texts.items():
        by_machine = text if isinstance(text, dict) else {"": text}
        for machine, content in by_machine.items():
            (folder / f"{option}-{machine}").write_text(content)
        written = {machine: str(folder / f"{option}-{machine}") for machine in by_machine}
        paths[option] = written if option in ("nvidia_smi", "topology") else written[""]
    return discover("mine", Texts(**paths))


def machines(discovery: Discovery) -> dict[str, Any]:
    return {entry["name"]: entry for entry in discovery.cluster["machines"]}


def test_a_bridge_at_its_datasheets_rate_and_pcie(tmp_path: Path) -> None:
    discovery = discover_texts(tmp_path, nvidia_smi=LAB, topology=LAB_TOPOLOGY)
    assert machines(discovery) == {
        "local": {
            "name": "local",
            "gpu": "rtx_3090",
            "num_gpus": 4,
            "intra_bandwidth_gb_per_s": None,
            "intra_latency_us": None,
            "intra_links": [{"between": [0, 1], "bandwidth_gb_per_s": 56.25}],  # 4 NVLinks of 14.0625 GB/s
        }
    }
    assert "inter_machine" not in discovery.cluster
    assert any("PCIe 4 x16" in note for note in discovery.notes["local"])


def test_nvlinks_of_one_number_are_the_usual_rate(tmp_path: Path) -> None:
    (entry,) = discover_texts(tmp_path, nvidia_smi={"d": A100}, topology=A100_TOPOLOGY).cluster["machines"]
    assert entry["intra_bandwidth_gb_per_s"] == 300.0  # 12 NVLinks of 25 GB/s and direction
    assert "intra_links" not in entry
    assert entry["network_interfaces"] is None


def test_a_cube_mesh_has_a_rate_where_it_has_links(tmp_path: Path) -> None:
    (entry,) = discover_texts(tmp_path, nvidia_smi=DGX, topology=DGX_TOPOLOGY).cluster["machines"]
    assert entry["intra_bandwidth_gb_per_s"] is None
    rates = {tuple(link["between"]): link["bandwidth_gb_per_s"] for link in entry["intra_links"]}
    assert len(rates) == 16
    assert (rates[0, 1], rates[0, 3]) == (25.0, 50.0)
    assert "network_interfaces" not in entry


def test_a_machine_of_several_types_is_a_part_for_each(tmp_path: Path) -> None:
    discovery = discover_texts(tmp_path, slurm=SCONTROL)
    entries = machines(discovery)
    assert list(entries) == ["gpu01", "gpu02.tesla", "gpu02.t4"]
    assert (entries["gpu02.tesla"]["gpu"], entries["gpu02.t4"]["gpu"]) == (None, "t4")
    assert "intra_latency_us" not in entries["gpu02.t4"]
    assert discovery.without_gpus == ("login",)
    assert discovery.cluster["links"] == [
        {"between": ["gpu02.tesla", "gpu02.t4"], "bandwidth_gb_per_s": None, "latency_us": None}
    ]


def test_a_topology_of_mixed_types_counts_each_part_from_zero(tmp_path: Path) -> None:
    mixed = LAB.replace("NVIDIA GeForce RTX 3090, 00000000:17:00.0, 0, 24576", "Tesla T4, 00000000:17:00.0, 0, 15360")
    topology = LAB_TOPOLOGY.replace("NV4", "PHB").replace("\tPHB\t X \t16", "\tNV4\t X \t16")
    topology = topology.replace(" X \tPHB\t16", " X \tNV4\t16")
    entries = machines(discover_texts(tmp_path, nvidia_smi=mixed, topology=topology))
    assert entries["local.t4"] == {"name": "local.t4", "gpu": "t4", "num_gpus": 1}
    assert entries["local.rtx_3090"]["intra_links"] == [{"between": [1, 2], "bandwidth_gb_per_s": 56.25}]


def test_alike_machines_are_counted_where_their_names_say_so(tmp_path: Path) -> None:
    discovery = discover_texts(tmp_path, slurm=SCONTROL_ONE_LINE)
    (entry,) = discovery.cluster["machines"]
    assert (entry["name"], entry["count"], entry["gpu"]) == ("d", 2, None)
    assert "a100_40gb_pcie, a100_40gb_sxm, a100_80gb_pcie or a100_80gb_sxm" in discovery.notes["d"][0]
    names = [entry["name"] for entry in discover_texts(tmp_path, slurm=SINFO).cluster["machines"]]
    assert names == ["gpu[01-02]", "gpu03"]
    for lines in ("d-0 gpu:t4:2\nd-1 gpu:t4:4\n", "d-1 gpu:t4:2\nd-2 gpu:t4:2\n", "d-0 gpu:2\nd-1 gpu:2\nd gpu:2\n"):
        assert all("count" not in entry for entry in discover_texts(tmp_path, slurm=lines).cluster["machines"])


def test_a_hostfile_alone_leaves_almost_all_open(tmp_path: Path) -> None:
    discovery = discover_texts(tmp_path, hostfile=HOSTFILE)
    assert [(m["name"], m["num_gpus"]) for m in discovery.cluster["machines"]] == [
        ("a", 8),
        ("b", 4),
        ("c", 2),
        ("10.0.0.7", None),
    ]
    assert set(unknowns(discovery.cluster)) >= {
        ("between machines", "inter_machine.bandwidth_gb_per_s"),
        ("a", "gpu"),
        ("10.0.0.7", "num_gpus"),
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"nvidia_smi": {"a": LAB}, "hostfile": "a slots=8\n"}, "a: has 4 by nvidia-smi, 8 by the hostfile"),
        ({"slurm": "a gpu:8\n", "topology": {"a": LAB_TOPOLOGY}}, "a: has 4 by the topology, 8 by Slurm"),
        ({"nvidia_smi": LAB, "hostfile": "a\nb\n"}, "discover.nvidia_smi: .* one of 2 machines; state which"),
        ({"nvidia_smi": {"a b": LAB}}, "discover.nvidia_smi: 'a b' is not a name"),
        ({"slurm": "a gpu:t4:2,gpu:a10:2\n", "topology": LAB_TOPOLOGY}, "no text states which GPU has which"),
        ({"slurm": "a gpu:t4:2,gpu:a10:2\na.t4 gpu:1\n"}, "a.t4: is a machine and a part of another"),
        ({"slurm": "cpu (null)\n"}, "no text names a GPU"),
        ({"slurm": f"{90 * 'n'}[1-7000]x gpu:8\n"}, "larger than 1 MiB"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, texts: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_text(discover_texts(tmp_path, **texts).cluster, [], {})


CASES: list[dict[str, Any]] = [
    {"nvidia_smi": LAB, "topology": LAB_TOPOLOGY},
    {"nvidia_smi": {"d": A100}, "topology": {"d": A100_TOPOLOGY}, "hostfile": HOSTFILE.replace("slots=8", "slots=1")},
    {"nvidia_smi": DGX, "topology": DGX_TOPOLOGY},
    {"slurm": SCONTROL},
    {"slurm": SCONTROL_ONE_LINE},
    {"slurm": SINFO, "hostfile": HOSTFILE},
]
KNOWN = {"gpu": "t4", "num_gpus": 4, "network_interfaces": 2}


def fill_nulls(value: Any, key: str = "") -> Any:
    """With a value in place of each null."""
    if isinstance(value, dict):
        return {name: fill_nulls(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill_nulls(inner) for inner in value]
    return KNOWN.get(key, 1.5) if value is None else value


@pytest.mark.parametrize("texts", CASES)
def test_the_file_is_a_cluster_once_its_nulls_are_filled(tmp_path: Path, texts: dict[str, Any]) -> None:
    discovery = discover_texts(tmp_path, **texts)
    written = cluster_text(discovery.cluster, ["A head."], discovery.notes)
    data = parse(written, "cluster.yaml", as_json=False)
    assert data == discovery.cluster
    with pytest.raises(InputError, match=r"(is|are) unknown \(null\).*hexiopt profile"):
        cluster_from_section(Section(data, "cluster.yaml"))
    cluster_from_section(Section(fill_nulls(data), "cluster.yaml"))


LIKE = "".join(
    f"NodeName={name}\n   AvailableFeatures={features}\n   Gres=gpu:{gres}\n   State=IDLE\n"
    for name, features, gres in (
        ("d-0", "ib,new", "nvidia_a100:4"),
        ("d-1", "ib,new", "nvidia_a100:4"),
        ("d-2", "ib,new", "nvidia_a100:4"),
        ("old", "ib", "nvidia_a100:4"),
        ("x", "(null)", "4"),
        ("y", "(null)", "4"),
    )
)


def test_what_is_read_on_one_node_stands_for_its_kind(tmp_path: Path) -> None:
    """Equal GRES and features, of which one says something; two that say something differently stay by themselves."""
    plain = {node: entry["gpu"] for node, entry in machines(discover_texts(tmp_path, slurm=LIKE)).items()}
    assert plain == {"d": None, "old": None, "x": None, "y": None}
    texts = {"nvidia_smi": {"d-1": A100, "x": A100}, "topology": {"d-1": A100_TOPOLOGY}}
    discovery = discover_texts(tmp_path, slurm=LIKE, **texts)
    entries = machines(discovery)
    assert {node: entry["gpu"] for node, entry in entries.items()} == {
        "d": "a100_80gb_sxm",
        "old": None,
        "x": "a100_80gb_sxm",
        "y": None,
    }
    assert (entries["d"]["count"], entries["d"]["intra_bandwidth_gb_per_s"]) == (3, 300.0)
    assert "read on d-1 for all nodes of equal GPUs and features" in discovery.notes["d"]
    both = {"nvidia_smi": {"d-0": A100, "d-1": A100}}
    assert {node: entry["gpu"] for node, entry in machines(discover_texts(tmp_path, slurm=LIKE, **both)).items()} == {
        "d-[0-1]": "a100_80gb_sxm",
        "d-2": None,
        "old": None,
        "x": None,
        "y": None,
    }


def test_a_fabric_is_not_read_on_another_node(tmp_path: Path) -> None:
    header, *rows = A100.splitlines()
    fabric = [header + ", fabric.clusterUuid, fabric.cliqueId", *(row + ", 1-2-3, 7" for row in rows)]
    entries = machines(discover_texts(tmp_path, slurm=LIKE, nvidia_smi={"d-1": "\n".join(fabric) + "\n"}))
    assert (entries["d"]["num_gpus"], entries["d"]["count"]) == (4, 3)


def test_all_nulls_are_named_at_once() -> None:
    machine = {"name": "a", "gpu": None, "num_gpus": 2, "intra_bandwidth_gb_per_s": None}
    data = {"name": "m", "inter_machine": {"bandwidth_gb_per_s": None}, "machines": [machine, machine | {"name": "b"}]}
    with pytest.raises(InputError) as caught:
        cluster_from_section(Section(data, "my.yaml"))
    assert str(caught.value) == (
        "my.yaml: 5 values are unknown (null); state them, or measure them with 'hexiopt profile': "
        "inter_machine.bandwidth_gb_per_s, machines[*].gpu (2 times), machines[*].intra_bandwidth_gb_per_s (2 times)"
    )


def test_a_null_is_refused_with_key_and_machine() -> None:
    links = [{"between": ["a", "b"], "bandwidth_gb_per_s": None}]
    machine = {"name": "a", "gpu": "t4", "num_gpus": 2, "intra_bandwidth_gb_per_s": 1}
    for entry, key in (
        ({**machine, "gpu": None}, "gpu"),
        ({**machine, "intra_bandwidth_gb_per_s": None}, "intra_bandwidth_gb_per_s"),
        ({**machine, "intra_latency_us": None}, "intra_latency_us"),
        (
            {**machine, "intra_links": [{"between": [0, 1], "bandwidth_gb_per_s": None}]},
            "intra_links[0].bandwidth_gb_per_s",
        ),
    ):
        with pytest.raises(InputError) as caught:
            cluster_from_section(Section({"name": "x", "machines": [entry]}, "my.yaml"))
        assert str(caught.value) == (
            f"my.yaml: machines[0].{key}: is unknown (null) for machine 'a'; "
            "state it, or measure it with 'hexiopt profile'"
        )
    both = {"name": "x", "inter_machine": {"bandwidth_gb_per_s": 1}, "machines": [machine, {**machine, "name": "b"}]}
    with pytest.raises(InputError, match=r"links\[0\].bandwidth_gb_per_s: .*for the link of 'a' and 'b'; .*profile"):
        cluster_from_section(Section({**both, "links": links}, "my.yaml"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.floats(1e-9, 1e9), st.booleans())
def test_what_is_written_reads_back(name: str, number: float, flag: bool) -> None:
    data = {"name": name, "machines": [{"name": name, "x": [number, flag, None]}], "gpus": {name: {"y": number}}}
    written = cluster_text(data, [name], {name: (name,)})
    assert parse(written, "cluster.yaml", as_json=False) == data


def test_what_nccl_tests_measured_stands_over_a_datasheet(tmp_path: Path) -> None:
    text = "".join(
        f"{size:12d} {size // 4:12d} float none -1 {1e6 * (2e-5 + moved / 2.31e11):.4f} 1.0 "
        f"{moved / (2e-5 + moved / 2.31e11) / 1e9:.6f} 0\n"
        for size in (2**20, 2**26, 2**30)
        for moved in (size * 7 / 8,)
    )
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    (tmp_path / "nccl.txt").write_text(text)
    texts = Texts(hostfile=str(tmp_path / "hosts"), nccl_tests={"a": str(tmp_path / "nccl.txt")})
    discovery = discover("ours", texts)
    a, b = discovery.cluster["machines"]
    assert a["intra_bandwidth_gb_per_s"] == pytest.approx(231, rel=1e-3)
    assert b["intra_bandwidth_gb_per_s"] is None
    assert any("nccl-tests" in note for note in discovery.notes["a"])


def test_machines_on_one_nvlink_fabric_are_one_machine(tmp_path: Path) -> None:
    names = [f"tray-{k}" for k in range(18)]
    alone = GB200_MACHINE.replace("8ee5b8b0-3f0a-4a53-8f2c-9a9c5e1d7a11", "00000000-0000-0000-0000-000000000000")
    discovery = discover_texts(
        tmp_path,
        nvidia_smi=dict.fromkeys(names, GB200_MACHINE) | {"alone": alone},
        topology=dict.fromkeys(names, GB200_TOPOLOGY),
    )
    rack = machines(discovery)["tray-0"]
    assert (rack["gpu"], rack["num_gpus"], rack["intra_bandwidth_gb_per_s"]) == ("gb200", 72, 900.0)
    assert machines(discovery).keys() == {"tray-0", "alone"}
    assert machines(discovery)["alone"]["num_gpus"] == 4
    assert any("one NVLink fabric of 18 machines" in note for note in discovery.notes["tray-0"])


def test_machines_on_one_nvlink_fabric_must_be_alike(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a and b: are on one NVLink fabric and differ"):
        discover_texts(tmp_path, nvidia_smi={"a": GB200_MACHINE, "b": GB200_MACHINE}, topology={"a": GB200_TOPOLOGY})
