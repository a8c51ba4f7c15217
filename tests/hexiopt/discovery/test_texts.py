"""Each reader on what its tool prints; anything else is a line with file and line."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.discovery.kinds import read
from hexiopt.discovery.smi import SmiGpu
from hexiopt.discovery.topology import Topology
from hexiopt.errors import InputError
from tests.hexiopt.discovery.texts import (
    A100,
    A100_TOPOLOGY,
    DGX_TOPOLOGY,
    HOSTFILE,
    LAB,
    LAB_TOPOLOGY,
    SCONTROL,
    SCONTROL_ONE_LINE,
    SINFO,
)

Reader = Callable[[str], Any]


def read_nvidia_smi(path: str) -> tuple[SmiGpu, ...]:
    return read("nvidia_smi", path).gpus  # type: ignore[no-any-return]


def read_topology(path: str) -> Topology:
    return read("topology", path)  # type: ignore[no-any-return]


def gpus_of(option: str, path: str) -> dict[str, Any]:
    """The products and counts of each node."""
    nodes = read(option, path).nodes
    return {name: tuple((group.product, group.count) for group in node.gpus) for name, node in nodes.items()}


def read_slurm(path: str) -> dict[str, Any]:
    return gpus_of("slurm", path)


def read_kubernetes(path: str) -> dict[str, Any]:
    return gpus_of("kubernetes", path)


def read_hostfile(path: str) -> dict[str, Any]:
    return gpus_of("hostfile", path)


def test_nvidia_smi_columns_in_any_order_with_and_without_units(write: Callable[[str], str]) -> None:
    gpus = read_nvidia_smi(write(LAB))
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert gpus[0] == SmiGpu(0, "NVIDIA GeForce RTX 3090", 24576 * 2**20, 4, 16)
    assert read_nvidia_smi(write(A100))[3] == SmiGpu(3, "NVIDIA A100-SXM4-80GB", 81920 * 2**20)
    unknown = "index, name, memory.total [MiB], power.draw [W]\n0, NVIDIA A10, [N/A], 12.3 W\n"
    assert read_nvidia_smi(write(unknown)) == (SmiGpu(0, "NVIDIA A10", None),)


def test_topologies(write: Callable[[str], str]) -> None:
    lab = read_topology(write(LAB_TOPOLOGY))
    assert (lab.num_gpus, lab.cards) == (4, ())
    assert (lab.nvlinks(0, 1), lab.nvlinks(1, 0), lab.nvlinks(0, 2)) == (4, 4, 0)
    assert lab.paths[2, 3] == "PHB"
    a100 = read_topology(write(A100_TOPOLOGY))
    assert a100.cards == ("NIC0", "NIC1")
    assert {a100.nvlinks(i, j) for j in range(4) for i in range(j)} == {12}
    dgx = read_topology(write(DGX_TOPOLOGY))
    assert (dgx.num_gpus, dgx.cards) == (8, ("mlx5_0",))
    assert sum(dgx.nvlinks(i, j) for j in range(8) for i in range(j)) == 8 * 6 / 2  # each V100 has six links


def test_slurm(write: Callable[[str], str]) -> None:
    assert read_slurm(write(SCONTROL)) == {
        "gpu01": (("nvidia_a100-sxm4-80gb", 8),),
        "gpu02": (("tesla", 2), ("t4", 1)),
        "login": (),
    }
    assert read_slurm(write(SCONTROL_ONE_LINE)) == dict.fromkeys(["d-0", "d-1"], (("a100", 8),))
    nodes = read_slurm(write(SINFO))
    assert nodes["gpu01"] == nodes["gpu02"] == (("rtx_3090", 4),)
    assert nodes["gpu03"] == ((None, 8),)
    assert nodes["cpu2"] == ()
    conf = "NodeName=DEFAULT CPUs=64\nNodeName=n[1-2] Gres=gpu:no_consume:2,gpu:h100\n"
    assert read_slurm(write(conf)) == dict.fromkeys(["n1", "n2"], ((None, 2), ("h100", 1)))


def test_hostfiles(write: Callable[[str], str]) -> None:
    assert read_hostfile(write(HOSTFILE)) == {
        "a": ((None, 8),),
        "b": ((None, 4),),
        "c": ((None, 2),),
        "10.0.0.7": ((None, None),),
    }


KUBERNETES = (
    "apiVersion: v1\nitems:\n- kind: Node\n  metadata: {name: a, labels: {nvidia.com/gpu.count: '2'}}\n  status:\n"
    "    capacity: {nvidia.com/gpu: '2'}\n    conditions: [{type: Ready, status: 'True'}]\n"
)
BAD = [
    (read_nvidia_smi, "", "is empty"),
    (read_nvidia_smi, "index, memory.total [MiB]\n0, 23028 MiB\n", "line 1: .*is a header without name"),
    (read_nvidia_smi, "0, NVIDIA A10\n1, NVIDIA A10, 23028 MiB\n", "no header, and lines of different lengths"),
    (read_nvidia_smi, "NVIDIA A10, NVIDIA A10\n", "no header, and which column is the name is not certain"),
    (read_nvidia_smi, A100 + "4, NVIDIA A100-SXM4-80GB\n", "line 6: .*has 2 columns"),
    (read_nvidia_smi, A100 + "3, NVIDIA A100-SXM4-80GB, 81920\n", "line 6: '3' .*twice"),
    (read_nvidia_smi, A100 + "x, NVIDIA A100-SXM4-80GB, 81920\n", "line 6: 'x' is not a whole number"),
    (read_nvidia_smi, A100 + "4, NVIDIA A100-SXM4-80GB, -1\n", "line 6: '-1' is not a whole number"),
    (read_nvidia_smi, A100 + "4, , 81920\n", "line 6: '' is not a GPU's name"),
    (read_nvidia_smi, A100 + "7, NVIDIA A100-SXM4-80GB, 81920\n", "without gaps"),
    (read_nvidia_smi, "index, name, memory.total [MiB]\n", "names no GPU"),
    (read_topology, "", "is empty; write it with nvidia-smi topo -m"),
    (read_topology, LAB, "is CSV of nvidia-smi; give it as discover.nvidia_smi, not as discover.topology"),
    (read_topology, LAB_TOPOLOGY.replace("GPU2\tSYS\tSYS", "GPU2\tSYS\tPHB"), "SYS from GPU1 to GPU2 and PHB back"),
    (read_topology, LAB_TOPOLOGY.replace("GPU3\tSYS", "GPU9\tSYS"), "line 5: 'GPU9' is not one row for each"),
    (read_topology, LAB_TOPOLOGY.replace("PHB\t X", "FOO\t X"), "line 5: 'FOO' is not a path"),
    (read_topology, "\tGPU0\tGPU1\nGPU0\t X \tSYS\n", "has no row GPU1"),
    (read_topology, "\tGPU0\tGPU1\nGPU0\t X \nGPU1\tSYS\t X \n", "line 2: .*has 1 paths"),
    (read_topology, "\tGPU0\tGPU2\n", "line 1: .*without gaps"),
    (read_topology, "\tGPU0\tGPU0\n", "line 1: .*twice"),
    (read_slurm, "", "is empty; write it with scontrol show node"),
    (read_slurm, "Gres=gpu:2\nNodeName=a\n", "line 1: 'Gres=gpu:2' states Gres of no node"),
    (read_slurm, "NodeName=a Gres=gpu:1\nNodeName=a Gres=gpu:1\n", "line 2: 'a' is a node that appears twice"),
    (read_slurm, "NodeName=a[1-\n", "line 1: .*brackets"),
    (read_slurm, "NodeName=a/b Gres=gpu:1\n", "line 1: 'a/b' is not a name"),
    (read_slurm, "NODELIST GRES\na gpu:1\na gpu:2\n", "line 3: 'a' appears above with another GRES"),
    (read_slurm, "NODELIST GRES\na\n", "line 2: 'a' has 1 columns, the header 2"),
    (read_slurm, "a gpu:a100:8:x:y\n", "line 1: .*is not a GRES"),
    (read_slurm, "a gpu:a100:99999\n", "line 1: .*is not a GRES of up to"),
    (read_slurm, "a gpu::8\n", "line 1: .*is not a GRES"),
    (read_hostfile, "# none\n", "is no text that discover.hostfile reads; give it one host per line"),
    (read_hostfile, "a slots=0\n", "line 1: '0' is not a number of slots"),
    (read_hostfile, "a slots=8\n\nb:x\n", "line 3: 'x' is not a number of slots"),
    (read_hostfile, "a:4 slots=4\n", "line 1: .*states slots twice"),
    (read_hostfile, "a gpus=4\n", "line 1: 'gpus=4' is not valid after a host"),
    (read_hostfile, "a slots=1\na slots=1\n", "line 2: 'a' is a host that appears twice"),
    (read_hostfile, "fe80::1:4\n", "line 1: 'fe80::1' is not a name"),
]


@pytest.mark.parametrize(("reader", "text", "message"), BAD)
def test_malformed_text_is_refused_with_its_line(
    reader: Reader, text: str, message: str, write: Callable[[str], str]
) -> None:
    path = write(text)
    with pytest.raises(InputError, match=message) as caught:
        reader(path)
    assert str(caught.value).startswith(path)
    assert "; " in str(caught.value)


READERS = [
    (read_nvidia_smi, LAB),
    (read_nvidia_smi, "0, NVIDIA A10, 23028 MiB\n1, NVIDIA A10, 23028 MiB\n"),
    (read_nvidia_smi, "GPU 0: NVIDIA A10 (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n"),
    (read_topology, LAB_TOPOLOGY),
    (read_topology, "=== Link Type between two GPUs ===\n   GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n"),
    (read_slurm, SCONTROL),
    (read_slurm, SINFO),
    (read_slurm, "a gpu:t4:2 idle\nb (null) down*\n"),
    (read_slurm, "NodeName=DEFAULT Gres=gpu:2\nNodeName=a[1-2] \\\n  State=DOWN # x\nDownNodes=a1\n"),
    (read_slurm, "NodeName=a Name=gpu Type=t4 File=/dev/nvidia[0-3] Count=4\n"),
    (read_slurm, '{"nodes": [{"name": "a", "gres": "gpu:2", "state": ["IDLE"], "features": "x"}]}'),
    (read_slurm, '{"sinfo": [{"node": {"state": ["IDLE"]}, "nodes": {"nodes": ["a"]}, "gres": {"total": "gpu:2"}}]}'),
    (read_kubernetes, KUBERNETES),
    (read_kubernetes, "Name: a\nLabels: nvidia.com/gpu.count=2\nCapacity:\n  nvidia.com/gpu: 2\n"),
    (read_hostfile, HOSTFILE),
]


@given(st.sampled_from(READERS), st.data())
def test_damaged_text_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Reader, str], data: st.DataObject
) -> None:
    reader, text = case
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 20)))
    put = data.draw(st.text('GPU01X =:,[]{}()-#|"\n\tNVgres', max_size=8))
    path = tmp_path_factory.mktemp("damaged") / "text"
    path.write_text(text[:at] + put + text[end:])
    with suppress(InputError):
        reader(str(path))
