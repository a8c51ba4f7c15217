"""The names of GPU types in schedulers.

`nvidia.com/gpu.product` is the driver's product name with dashes (NVIDIA/k8s-device-plugin, gpu-feature-discovery);
SkyPilot's names are those of its catalogue. `export.gpu_names` overrides both, since drivers and sites differ.
"""

from collections.abc import Mapping

# Of each type: its label of Kubernetes, and its name in SkyPilot; - where it has none.
_TABLE = """
    k80                Tesla-K80                  K80
    p100               Tesla-P100-SXM2-16GB       P100
    v100_16gb_sxm      Tesla-V100-SXM2-16GB       V100
    v100_32gb_sxm      Tesla-V100-SXM2-32GB       V100-32GB
    v100_16gb_pcie     Tesla-V100-PCIE-16GB       V100
    v100_32gb_pcie     Tesla-V100-PCIE-32GB       -
    v100s_32gb_pcie    Tesla-V100S-PCIE-32GB      -
    p100_16gb_pcie     Tesla-P100-PCIE-16GB       -
    p100_12gb_pcie     Tesla-P100-PCIE-12GB       -
    t4                 Tesla-T4                   T4
    quadro_rtx_4000    Quadro-RTX-4000            -
    quadro_rtx_5000    Quadro-RTX-5000            -
    quadro_rtx_6000    Quadro-RTX-6000            -
    quadro_rtx_8000    Quadro-RTX-8000            -
    rtx_2080           NVIDIA-GeForce-RTX-2080    -
    rtx_2080_ti        NVIDIA-GeForce-RTX-2080-Ti -
    titan_rtx          NVIDIA-TITAN-RTX           -
    a100_40gb_sxm      NVIDIA-A100-SXM4-40GB      A100
    a100_80gb_sxm      NVIDIA-A100-SXM4-80GB      A100-80GB-SXM
    a100_40gb_pcie     NVIDIA-A100-PCIE-40GB      A100
    a100_80gb_pcie     NVIDIA-A100-80GB-PCIe      A100-80GB
    a800_80gb_sxm      NVIDIA-A800-SXM4-80GB      -
    a800_80gb_pcie     NVIDIA-A800-80GB-PCIe      -
    a30                NVIDIA-A30                 -
    a10                NVIDIA-A10                 A10
    a10g               NVIDIA-A10G                A10G
    a2                 NVIDIA-A2                  -
    a16                NVIDIA-A16                 -
    a40                NVIDIA-A40                 A40
    rtx_a4000          NVIDIA-RTX-A4000           RTXA4000
    rtx_a5000          NVIDIA-RTX-A5000           RTXA5000
    rtx_a6000          NVIDIA-RTX-A6000           RTXA6000
    rtx_3080_ti        NVIDIA-GeForce-RTX-3080-Ti -
    rtx_3090           NVIDIA-GeForce-RTX-3090    RTX3090
    rtx_3090_ti        NVIDIA-GeForce-RTX-3090-Ti -
    l4                 NVIDIA-L4                  L4
    l40                NVIDIA-L40                 L40
    l40s               NVIDIA-L40S                L40S
    l20                NVIDIA-L20                 -
    rtx_4000_ada       NVIDIA-RTX-4000-Ada-Generation -
    rtx_4500_ada       NVIDIA-RTX-4500-Ada-Generation -
    rtx_5000_ada       NVIDIA-RTX-5000-Ada-Generation -
    rtx_6000_ada       NVIDIA-RTX-6000-Ada-Generation RTX6000-Ada
    rtx_4080           NVIDIA-GeForce-RTX-4080    -
    rtx_4090           NVIDIA-GeForce-RTX-4090    RTX4090
    rtx_3060_12gb      NVIDIA-GeForce-RTX-3060    -
    rtx_3070           NVIDIA-GeForce-RTX-3070    -
    rtx_3080_10gb      NVIDIA-GeForce-RTX-3080    -
    rtx_4060_ti_16gb   NVIDIA-GeForce-RTX-4060-Ti -
    rtx_4070           NVIDIA-GeForce-RTX-4070    -
    rtx_4070_ti        NVIDIA-GeForce-RTX-4070-Ti -
    rtx_4070_ti_super  NVIDIA-GeForce-RTX-4070-Ti-SUPER -
    rtx_4080_super     NVIDIA-GeForce-RTX-4080-SUPER -
    rtx_5060_ti_16gb   NVIDIA-GeForce-RTX-5060-Ti -
    rtx_5070           NVIDIA-GeForce-RTX-5070    -
    rtx_5070_ti        NVIDIA-GeForce-RTX-5070-Ti -
    rtx_5080           NVIDIA-GeForce-RTX-5080    -
    rtx_5090           NVIDIA-GeForce-RTX-5090    RTX5090
    h100_80gb_sxm      NVIDIA-H100-80GB-HBM3      H100-SXM
    h100_80gb_pcie     NVIDIA-H100-PCIe           H100
    h100_96gb_sxm      NVIDIA-H100-96GB-HBM3      -
    h100_nvl           NVIDIA-H100-NVL            -
    h800_80gb_sxm      NVIDIA-H800                -
    h800_80gb_pcie     NVIDIA-H800-PCIe           -
    h200_141gb_sxm     NVIDIA-H200                H200
    h20                NVIDIA-H20                 -
    h200_nvl           NVIDIA-H200-NVL            -
    gh200_96gb         NVIDIA-GH200-480GB         GH200
    gh200_144gb        NVIDIA-GH200-144G-HBM3e    -
    b200               NVIDIA-B200                B200
"""
_NAMES = {gpu: names for gpu, *names in map(str.split, _TABLE.strip().splitlines())}


def kubernetes_product(gpu: str, gpu_names: Mapping[str, str]) -> str | None:
    """The value of the label nvidia.com/gpu.product of a GPU type, from `gpu_names` if there; None if unknown."""
    return gpu_names.get(gpu) or _name(gpu, 0)


def skypilot_accelerator(gpu: str, gpu_names: Mapping[str, str]) -> str | None:
    """SkyPilot's name of a GPU type, from `gpu_names` if there; None if unknown."""
    return gpu_names.get(gpu) or _name(gpu, 1)


def _name(gpu: str, column: int) -> str | None:
    name = _NAMES.get(gpu, ("-", "-"))[column]
    return None if name == "-" else name
