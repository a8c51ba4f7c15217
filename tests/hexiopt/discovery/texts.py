"""What the tools of a cluster print, as they print it."""

LAB = """\
name, pci.bus_id, index, memory.total [MiB], pcie.link.gen.max, pcie.link.width.max
NVIDIA GeForce RTX 3090, 00000000:17:00.0, 0, 24576 MiB, 4, 16
NVIDIA GeForce RTX 3090, 00000000:65:00.0, 1, 24576 MiB, 4, 16
NVIDIA GeForce RTX 3090, 00000000:CA:00.0, 2, 24576 MiB, 4, 16
NVIDIA GeForce RTX 3090, 00000000:E3:00.0, 3, 24576 MiB, 4, 16
"""

LAB_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\t0-15,32-47\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\t0-15,32-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPHB\t16-31,48-63\t1\t\tN/A
GPU3\tSYS\tSYS\tPHB\t X \t16-31,48-63\t1\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""

A100 = """\
index, name, memory.total [MiB]
0, NVIDIA A100-SXM4-80GB, 81920
1, NVIDIA A100-SXM4-80GB, 81920
2, NVIDIA A100-SXM4-80GB, 81920
3, NVIDIA A100-SXM4-80GB, 81920
"""

A100_TOPOLOGY = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    CPU Affinity    NUMA Affinity
GPU0     X      NV12    NV12    NV12    PXB     SYS     0-31            0
GPU1    NV12     X      NV12    NV12    PXB     SYS     0-31            0
GPU2    NV12    NV12     X      NV12    SYS     PXB     32-63           1
GPU3    NV12    NV12    NV12     X      SYS     PXB     32-63           1
NIC0    PXB     PXB     SYS     SYS      X      SYS
NIC1    SYS     SYS     PXB     PXB     SYS      X

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""

# A DGX-1 with V100: a hybrid cube mesh, whose far pairs have no NVLink.
_NEAR = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def _dgx_cell(i: int, j: int) -> str:
    links = _NEAR.get((min(i, j), max(i, j)))
    return " X " if i == j else f"NV{links}" if links else "SYS"


DGX = "index, name, memory.total [MiB]\n" + "".join(f"{i}, Tesla V100-SXM2-16GB, 16160 MiB\n" for i in range(8))
DGX_TOPOLOGY = "\n".join(
    [
        "\t".join(["", *(f"GPU{i}" for i in range(8)), "mlx5_0", "CPU Affinity"]),
        *("\t".join([f"GPU{i}", *(_dgx_cell(i, j) for j in range(8)), "PIX", "0-19"]) for i in range(8)),
        "\t".join(["mlx5_0", *["PIX"] * 8, " X "]),
    ]
)

SCONTROL = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.10
   AvailableFeatures=a100,ib
   Gres=gpu:nvidia_a100-sxm4-80gb:8(S:0-1),nvme:1
   NodeAddr=gpu01 NodeHostName=gpu01 Version=23.02.6
   OS=Linux 5.15.0-89-generic #99-Ubuntu SMP Mon Oct 30 20:42:41 UTC 2023
   RealMemory=1030000 AllocMem=0 FreeMem=998877 Sockets=2 Boards=1
   CfgTRES=cpu=64,mem=1030000M,billing=64,gres/gpu=8

NodeName=gpu02 Arch=x86_64 CoresPerSocket=16
   Gres=gpu:tesla:2(S:0),gpu:t4:1(S:1)
   State=IDLE ThreadsPerCore=1

NodeName=login Arch=x86_64 CoresPerSocket=16
   Gres=(null)
   State=IDLE
"""

SCONTROL_ONE_LINE = (
    "NodeName=d-0 Arch=x86_64 CPUTot=64 Gres=gpu:a100:8(S:0-1) OS=Linux 5.15.0 State=IDLE Reason=none given\n"
    "NodeName=d-1 Arch=x86_64 CPUTot=64 Gres=gpu:a100:8(S:0,1) OS=Linux 5.15.0 State=IDLE\n"
)

SINFO = """\
NODELIST GRES
gpu[01-02] gpu:rtx_3090:4(S:0-1)
gpu03 gpu:8
gpu03 gpu:8
cpu[1-3] (null)
"""

HOSTFILE = """\
# our lab
a slots=8            # DeepSpeed
b slots=4 max_slots=4
c:2
10.0.0.7
"""

# A machine of a rack of GB200, whose NVLink joins 18 of them, as its fields `fabric.*` say.
GB200_MACHINE = """\
index, name, memory.total [MiB], fabric.clusterUuid, fabric.cliqueId
""" + "".join(f"{k}, NVIDIA GB200, 189471 MiB, 8ee5b8b0-3f0a-4a53-8f2c-9a9c5e1d7a11, 32766\n" for k in range(4))
GB200_TOPOLOGY = (
    "        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity\n"
    "GPU0     X      NV18    NV18    NV18    0-71            0\n"
    "GPU1    NV18     X      NV18    NV18    0-71            0\n"
    "GPU2    NV18    NV18     X      NV18    72-143          1\n"
    "GPU3    NV18    NV18    NV18     X      72-143          1\n"
)
