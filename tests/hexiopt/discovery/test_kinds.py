"""Kinds of text: each is recognised, read by its header, and what it states beside is noted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.discovery.inventory import Inventory
from hexiopt.discovery.kinds import read
from hexiopt.discovery.machines import Discovery, Texts, discover
from hexiopt.discovery.smi import SmiGpu
from hexiopt.errors import InputError

MIB = 2**20


def product_counts(inventory: Inventory) -> dict[str, Any]:
    """Products and counts of the nodes in service."""
    return {
        name: tuple((group.product, group.count) for group in node.gpus)
        for name, node in inventory.nodes.items()
        if node.outage is None
    }


# Tables of sinfo

GRES = st.sampled_from([(None, 8), ("a100", 4), ("v100-32gb", 2), None, ("h100", 1)])
NAMES = st.one_of(st.from_regex(r"[a-z]{1,3}[0-9]{1,3}", fullmatch=True), st.from_regex(r"[1-9][0-9]?", fullmatch=True))
FILLERS = {"AVAIL": "up", "TIMELIMIT": "2-00:00:00", "MEMORY": "191000+", "CPUS": "80+", "AVAIL_FEATURES": "ib,new"}
COLUMNS = ["NODELIST", "GRES", "NODES", "STATE", "PARTITION", *FILLERS]


@given(
    st.dictionaries(NAMES, st.tuples(GRES, st.sampled_from(["idle", "mix", "alloc", "drain", "down*"])), min_size=1),
    st.permutations(COLUMNS),
    st.integers(0, len(COLUMNS) - 2),
    st.integers(1, 3),
)
def test_a_table_is_read_by_its_header_whatever_its_columns(
    tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, Any], order: list[str], dropped: int, partitions: int
) -> None:
    columns = [name for k, name in enumerate(order) if name in ("NODELIST", "GRES") or k >= dropped]
    rows = [columns]
    for partition in range(partitions):
        for name, (gres, state) in nodes.items():
            text = "(null)" if gres is None else f"gpu:{gres[0] + ':' if gres[0] else ''}{gres[1]}(S:0-1)"
            cells = {"NODELIST": name, "GRES": text, "NODES": "1", "STATE": state, "PARTITION": f"p{partition}*"}
            rows.append([{**FILLERS, **cells}[column] for column in columns])
    path = tmp_path_factory.mktemp("sinfo") / "text"
    path.write_text("\n".join(" ".join(row) for row in rows) + "\n")
    out = {"drain", "down*"} if "STATE" in columns else set()
    expected = {name: (gres,) if gres else () for name, (gres, state) in nodes.items() if state not in out}
    assert product_counts(read("slurm", str(path))) == expected


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("NODELIST GRES\n17 gpu:8\n18 gpu:8\n", {"17": ((None, 8),), "18": ((None, 8),)}),
        ("HOSTNAMES STATE GRES\na idle gpu:t4:1\nb drng gpu:t4:1\n", {"a": (("t4", 1),)}),
        ("PARTITION GRES NODES NODELIST\np gpu:2 2 a[1-2]\nempty (null) 0\n", {"a1": ((None, 2),), "a2": ((None, 2),)}),
        (
            "NODELIST GRES REASON\na gpu:a10:2 bad fan since May\nb gpu:a10:2 none\n",
            {"a": (("a10", 2),), "b": (("a10", 2),)},
        ),
        (
            "NODELIST            GRES                \nab                  gpu:a100:8          \n",
            {"ab": (("a100", 8),)},
        ),
        ("a gpu:a100:8(S:0-1)\nb (null)\n", {"a": (("a100", 8),), "b": ()}),
        ("idle gpu:2 a\nmix gpu:2 b\ndown* gpu:2 c\n", {"a": ((None, 2),), "b": ((None, 2),)}),
        ("a gpu:rtx4000:4(S:0),gpu:v100:2,shard:8\n", {"a": (("rtx4000", 4), ("v100", 2))}),
        ("NODELIST NOVEL GRES PARTITION\na x gpu:2 p\n", {"a": ((None, 2),)}),
        ("NODELIST|GRES|REASON\na|gpu:t4:2(S:0-1)|none at all\nb|(null)|none\n", {"a": (("t4", 2),), "b": ()}),
        ("[me@login ~]$ sinfo -o '%N %G'\nNODELIST GRES\na gpu:2\n", {"a": ((None, 2),)}),
        ("Fri Nov 27 17:00:00 2026\nNODELIST GRES\na gpu:2\n", {"a": ((None, 2),)}),
    ],
)
def test_tables_of_sinfo(write: Callable[[str], str], text: str, nodes: dict[str, Any]) -> None:
    assert product_counts(read("slurm", write(text))) == nodes


REFUSED = [
    ("PARTITION GRES NODES NODELIST\np gpu:2 3 a[1-2]\n", "lists 2 nodes, and its column NODES states 3"),
    ("PARTITION NODELIST\np a\n", "without the column GRES"),
    ("NODELIST GRES\na gpu:2\na gpu:4\nb gpu:x:y:z\n", r"line 3: 'a' appears above.*; also line 4: 'gpu:x:y:z' is not"),
    ("NODELIST GRES GRES\na gpu:2 gpu:2\n", "states the column GRES twice"),
    (f"{'NODELIST':20}{'GRES':20}\n{'a':20}{'gpu:nvidia_a100-sxm4':20}\n", "'gpu:nvidia_a100-sxm4' fills its column"),
    (f"{'NODELIST':>10} {'GRES':>8} STATE\n{'a':>10} gpu:a100 idle\n", "'gpu:a100' fills its column and may be cut"),
    (
        "p1 gpu:2 a\np2 gpu:2 b\n",
        "without header, and which column names the nodes is not certain; write it with sinfo",
    ),
    ("HOSTNAMES,GRES,STATE\na,gpu:t4:2,idle\n", "with commas between its columns, which cannot be told from those"),
    ("4 gpu:a100:8\n", "which column names the nodes is not certain"),
    ("a gpu:2\nb gpu:2 idle\n", "lines have different numbers of columns"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_table_that_may_be_misread_is_refused(write: Callable[[str], str], text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read("slurm", write(text))


# Records of Slurm


def test_a_reason_is_no_key(write: Callable[[str], str]) -> None:
    text = "NodeName=a Arch=x86_64 Gres=gpu:t4:2 State=IDLE Reason=was Gres=gpu:t4:4 State=DOWN\n"
    assert product_counts(read("slurm", write(text))) == {"a": (("t4", 2),)}


def test_the_two_counts_of_a_record_must_agree(write: Callable[[str], str]) -> None:
    text = "NodeName=a Arch=x\n   Gres=gpu:t4:2\n   CfgTRES=cpu=8,gres/gpu=4,gres/gpu:t4=4\n"
    with pytest.raises(InputError, match="line 3: 'a' states gres/gpu=4, and Gres=gpu:t4:2 has 2"):
        read("slurm", write(text))


def test_what_is_not_read_is_named(write: Callable[[str], str]) -> None:
    text = "NodeName=a Arch=x CPUTot=4 Weight=1 Quantum=3\n   Gres=gpu:t4:2,fpga:1,nvme:1\n   State=IDLE\n"
    assert read("slurm", write(text)).notes == ("not read: quantum", "not read: GRES fpga")


def test_slurm_conf(write: Callable[[str], str]) -> None:
    text = (
        "Include gpus.conf\nnodename=DEFAULT Gres=gpu:t4:1 State=UNKNOWN\n"
        'NodeName=a[1-2] CPUs=4 Reason="no Gres=gpu:8" # Gres=gpu:9\n'
        "NodeName=b Gres=gpu:t4:2 State=DRAIN\nNodeName=DEFAULT Gres=gpu:a10:4\nNodeName=c[1-2]\n"
        "DownNodes=c2 State=DOWN\n"
    )
    inventory = read("slurm", write(text))
    assert product_counts(inventory) == {"a1": (("t4", 1),), "a2": (("t4", 1),), "c1": (("a10", 4),)}
    assert {name: node.outage for name, node in inventory.nodes.items() if node.outage} == {"b": "DRAIN", "c2": "DOWN"}
    assert inventory.notes == ("not read: Include gpus.conf",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NodeName=a Name=gpu Count=2 File=/dev/nvidia[0-2]\n", "has Count=2 and 3 files"),
        ("AutoDetect=nvml\n", "is gres.conf, and no line of it states GPUs of a NodeName; give scontrol show node"),
        ("NodeName=a Name=gpu Type\n", "'Type' is not KEY=VALUE"),
    ],
)
def test_gres_conf_refused(write: Callable[[str], str], text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read("slurm", write(text))


def test_gres_conf_counts_files_and_adds_lines(write: Callable[[str], str]) -> None:
    text = (
        "NodeName=a Name=gpu Type=a100 File=/dev/nvidia[0-3] # first\nNodeName=a Name=gpu Type=a100 File=/dev/nvidia4\n"
        "NodeName=a Name=gpu Type=t4 Count=2\nNodeName=b Name=shard Count=8\nNodeName=b Name=gpu File=/dev/nvidia0\n"
    )
    assert product_counts(read("slurm", write(text))) == {"a": (("a100", 5), ("t4", 2)), "b": ((None, 1),)}


# JSON and Kubernetes


def test_json_of_slurm(write: Callable[[str], str]) -> None:
    nodes = [
        {"name": "a", "gres": "gpu:a100:4(S:0-1)", "state": ["IDLE"], "features": ["ib"]},
        {"name": "b", "gres": "gpu:a100:4", "state": ["IDLE", "DRAIN"], "features": []},
        {"name": "c", "gres": "", "state": "idle", "features": "ib"},
        {"name": "d", "gres": "gpu:2", "state": "mixed", "state_flags": ["NOT_RESPONDING"]},
    ]
    inventory = read("slurm", write(json.dumps({"meta": {}, "errors": [], "nodes": nodes})))
    assert product_counts(inventory) == {"a": (("a100", 4),), "c": ()}
    assert (inventory.nodes["a"].features, inventory.nodes["d"].outage) == ("ib", "mixed+NOT_RESPONDING")
    rows = [
        {
            "node": {"state": ["MIXED"]},
            "nodes": {"total": 2, "nodes": ["a", "b"]},
            "gres": {"total": "gpu:h100:8", "used": "gpu:h100:3"},
        },
        {"node": {"state": ["DOWN"]}, "nodes": {"nodes": ["c"]}, "gres": {"total": ""}},
    ]
    assert product_counts(read("slurm", write(json.dumps({"sinfo": rows})))) == {
        "a": (("h100", 8),),
        "b": (("h100", 8),),
    }
    with pytest.raises(InputError, match="node a: 'a' has no GRES, so its GPUs are not stated"):
        read("slurm", write(json.dumps({"nodes": [{"name": "a"}]})))


def kubernetes_node(name: str, labels: dict[str, str], capacity: dict[str, str], **more: Any) -> dict[str, Any]:
    ready = more.get("ready", "True")
    status = {"capacity": capacity, "allocatable": more.get("allocatable", capacity)}
    status["conditions"] = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": more.get("spec", {}),
        "status": status,
    }


LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
EIGHT = {"nvidia.com/gpu": "8", "cpu": "128"}


def test_kubernetes_nodes(write: Callable[[str], str]) -> None:
    items = [
        kubernetes_node("a", {**LABELS, "nvidia.com/gpu.count": "8"}, EIGHT),
        kubernetes_node("down", LABELS, EIGHT, ready="Unknown"),
        kubernetes_node("cordoned", LABELS, EIGHT, spec={"unschedulable": True}),
        kubernetes_node("cpu", {}, {"cpu": "8"}),
        kubernetes_node("broken", LABELS, EIGHT, allocatable={"nvidia.com/gpu": "7"}),
        kubernetes_node("shared", {**LABELS, "nvidia.com/gpu.count": "2", "nvidia.com/gpu.replicas": "4"}, EIGHT),
        kubernetes_node("mig", LABELS, {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.20gb": "2"}),
        kubernetes_node("amd", {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, {"amd.com/gpu": "8"}),
    ]
    inventory = read("kubernetes", write(json.dumps({"apiVersion": "v1", "kind": "List", "items": items})))
    h100 = "NVIDIA-H100-80GB-HBM3"
    assert product_counts(inventory) == {
        "a": ((h100, 8),),
        "cpu": (),
        "broken": ((h100, 7),),
        "shared": ((h100, 2),),
        "mig": ((f"{h100} 3g.20gb", 2),),
        "amd": (("AMD_Instinct_MI300X_OAM", 8),),
    }
    assert inventory.nodes["a"].gpus[0].memory_bytes == 81559 * MIB
    assert inventory.nodes["broken"].notes == ("7 of 8 GPUs are allocatable",)
    assert inventory.nodes["down"].outage == "NotReady"
    assert inventory.nodes["cordoned"].outage == "SchedulingDisabled"
    yaml = (
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: a\n  labels: {nvidia.com/gpu.product: Tesla-T4}\n"
        "status:\n  capacity: {nvidia.com/gpu: '4'}\n"
    )
    assert product_counts(read("kubernetes", write(yaml))) == {"a": (("Tesla-T4", 4),)}
    with pytest.raises(InputError, match=r"node a: 'a' has the label nvidia.com/gpu.count=4 and a capacity of 8"):
        read(
            "kubernetes",
            write(json.dumps({"apiVersion": "v1", **kubernetes_node("a", {"nvidia.com/gpu.count": "4"}, EIGHT)})),
        )


def test_kubectl_describe(write: Callable[[str], str]) -> None:
    node = (
        "Name:               {name}\nLabels:             a=b\n                    nvidia.com/gpu.product=NVIDIA-L4\n"
        "Unschedulable:      {cordoned}\nConditions:\n  Type   Status  LastHeartbeatTime\n  ----   ------\n"
        "  Ready  {ready}    Mon\nCapacity:\n  nvidia.com/gpu:  4\nAllocatable:\n  nvidia.com/gpu:  4\n"
    )
    text = "\n".join(
        node.format(name=name, cordoned=cordoned, ready=ready)
        for name, cordoned, ready in (("a", "false", "True"), ("b", "true", "True"), ("c", "false", "False"))
    )
    inventory = read("kubernetes", write(text))
    assert product_counts(inventory) == {"a": (("NVIDIA-L4", 4),)}
    assert {name: node.outage for name, node in inventory.nodes.items()} == {
        "a": None,
        "b": "SchedulingDisabled",
        "c": "NotReady",
    }


# Drivers' tools


def test_nvidia_smi_without_header(write: Callable[[str], str]) -> None:
    plain = read("nvidia_smi", write("NVIDIA A100-SXM4-80GB, 81920 MiB\nNVIDIA A100-SXM4-80GB, 81920 MiB\n"))
    assert plain.gpus[1] == SmiGpu(1, "NVIDIA A100-SXM4-80GB", 81920 * MIB)
    assert plain.notes == ()
    units = read("nvidia_smi", write("0, NVIDIA A10, 23028, 35, GPU-8a1f\n1, NVIDIA A10, 23028, 36, GPU-8a2f\n"))
    assert units.gpus[1] == SmiGpu(1, "NVIDIA A10", 23028 * MIB)
    assert units.notes == ("not read: column 4, column 5 of a table without header",)
    used = read("nvidia_smi", write("0, NVIDIA A100-SXM4-80GB, 4 MiB\n"))  # memory.used
    assert used.gpus[0].memory_bytes is None


def test_nvidia_smi_notes_columns_that_it_does_not_know(write: Callable[[str], str]) -> None:
    text = "name, memory.total [MiB], utilization.gpu [%], novel.column\nNVIDIA A10, 23028 MiB, 0 %, 3\n"
    assert read("nvidia_smi", write(text)).notes == ("not read: novel.column",)


def test_a_list_of_nvidia_smi_with_slices(tmp_path: Path) -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-2)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n"
    )
    (tmp_path / "list").write_text(text)
    whole, slices = reversed(discover("m", Texts(nvidia_smi={"": str(tmp_path / "list")})).cluster["machines"])
    assert (slices["name"], slices["gpu"], slices["num_gpus"]) == ("local.nvidia_a100_sxm4_40gb_3g_20gb", None, 2)
    assert (whole["gpu"], whole["num_gpus"]) == ("a100_40gb_sxm", 1)


def rocm(tmp_path: Path, **texts: str) -> Discovery:
    for option, text in texts.items():
        (tmp_path / option).write_text(text)
    return discover("m", Texts(**{option: {"": str(tmp_path / option)} for option in texts}))  # type: ignore[arg-type]


def test_amd_machines(tmp_path: Path) -> None:
    products = "======= ROCm System Management Interface =======\n" + "".join(
        f"GPU[{k}]\t\t: Card Series: \t\tAMD Instinct MI300X\nGPU[{k}]\t\t: Card Model: \t\t0x74a1\n"
        f"GPU[{k}]\t\t: VRAM Total Memory (B): 206141652992\n"
        for k in range(2)
    )
    topology = (
        "====== ROCm System Management Interface ======\n=== Link Type between two GPUs ===\n"
        "       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0\n\n=== Numa Nodes ===\nGPU[0] : (Topology) Numa Node: 0\n"
    )
    discovery = rocm(tmp_path, rocm_smi=products, topology=topology)
    (entry,) = discovery.cluster["machines"]
    assert (entry["gpu"], entry["num_gpus"], entry["intra_bandwidth_gb_per_s"]) == ("mi300x", 2, None)
    assert "pairs of GPUs: XGMI 1×" in discovery.notes["local"]


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("nvidia_smi", "==============NVSMI LOG==============\n", "is the log of nvidia-smi -q"),
        ("rocm_smi", "=== ROCm System Management Interface ===\nGPU  Temp\n", "is a text of rocm-smi, which names no"),
        (
            "rocm_smi",
            "GPU: 0\n    ASIC:\n        MARKET_NAME: AMD Instinct MI300X\n",
            "is a text of amd-smi, .*; run rocm-smi",
        ),
        (
            "kubernetes",
            "NAME   STATUS   ROLES   AGE   VERSION\na   Ready   <none>   1d   v1\n",
            "which states no GPUs; run kubectl",
        ),
        ("slurm", "Once upon a time\n", "is no text that discover.slurm reads; give it scontrol show node"),
        ("slurm", "a gpus=8\n", "is a hostfile; give it as discover.hostfile"),
    ],
)
def test_texts_that_are_not_read_say_what_they_are(
    write: Callable[[str], str], option: str, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(option, write(text))


# Several texts of one cluster


def test_texts_must_not_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4 type=rtx_3090\n")
    (tmp_path / "nodes").write_text("NODELIST GRES\na gpu:t4:4\n")
    with pytest.raises(InputError, match="a: has t4 by Slurm, rtx_3090 by the hostfile; give texts that agree"):
        discover("m", Texts(slurm=str(tmp_path / "nodes"), hostfile=str(tmp_path / "hosts")))
    (tmp_path / "nodes").write_text("NODELIST GRES STATE\na gpu:4 idle\n")
    (entry,) = discover("m", Texts(slurm=str(tmp_path / "nodes"), hostfile=str(tmp_path / "hosts"))).cluster["machines"]
    assert entry["gpu"] == "rtx_3090"


def test_the_driver_and_the_scheduler_must_name_one_type(tmp_path: Path) -> None:
    (tmp_path / "smi").write_text("0, NVIDIA H100 80GB HBM3, 81559 MiB\n")
    for gres, fits in (("gpu:h100:1", True), ("gpu:tesla:1", True), ("gpu:1", True), ("gpu:a100:1", False)):
        (tmp_path / "nodes").write_text(f"NODELIST GRES\na {gres}\n")
        texts = Texts(slurm=str(tmp_path / "nodes"), nvidia_smi={"a": str(tmp_path / "smi")})
        if fits:
            assert discover("m", texts).cluster["machines"][0]["gpu"] == "h100_80gb_sxm"
        else:
            with pytest.raises(InputError, match="a: GPU 0 is a NVIDIA H100 80GB HBM3, and its scheduler has a100"):
                discover("m", texts)


def test_no_node_in_service_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("NODELIST GRES STATE\na gpu:4 down\nb (null) idle\n")
    with pytest.raises(
        InputError, match=r"no node in service has GPUs; 1 with GPUs cannot run jobs, such as a \(down\)"
    ):
        discover("m", Texts(slurm=str(tmp_path / "nodes")))
