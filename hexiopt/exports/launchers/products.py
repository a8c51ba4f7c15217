"""GPU types as schedulers call them.

`nvidia.com/gpu.product` is the driver's product name with dashes (NVIDIA/k8s-device-plugin, gpu-feature-discovery);
SkyPilot's names are those of its catalogue. `export.gpu_names` overrides both, since drivers and sites differ.
"""

from collections.abc import Mapping

_KUBERNETES = {
    "k80": "Tesla-K80",
    "p100": "Tesla-P100-SXM2-16GB",
    "v100_16gb_sxm": "Tesla-V100-SXM2-16GB",
    "v100_32gb_sxm": "Tesla-V100-SXM2-32GB",
    "v100_16gb_pcie": "Tesla-V100-PCIE-16GB",
    "t4": "Tesla-T4",
    "rtx_2080": "NVIDIA-GeForce-RTX-2080",
    "rtx_2080_ti": "NVIDIA-GeForce-RTX-2080-Ti",
    "titan_rtx": "NVIDIA-TITAN-RTX",
    "a100_40gb_sxm": "NVIDIA-A100-SXM4-40GB",
    "a100_80gb_sxm": "NVIDIA-A100-SXM4-80GB",
    "a100_40gb_pcie": "NVIDIA-A100-PCIE-40GB",
    "a100_80gb_pcie": "NVIDIA-A100-80GB-PCIe",
    "a800_80gb_sxm": "NVIDIA-A800-SXM4-80GB",
    "a800_80gb_pcie": "NVIDIA-A800-80GB-PCIe",
    "a30": "NVIDIA-A30",
    "a10": "NVIDIA-A10",
    "a10g": "NVIDIA-A10G",
    "a40": "NVIDIA-A40",
    "rtx_a4000": "NVIDIA-RTX-A4000",
    "rtx_a5000": "NVIDIA-RTX-A5000",
    "rtx_a6000": "NVIDIA-RTX-A6000",
    "rtx_3080_ti": "NVIDIA-GeForce-RTX-3080-Ti",
    "rtx_3090": "NVIDIA-GeForce-RTX-3090",
    "rtx_3090_ti": "NVIDIA-GeForce-RTX-3090-Ti",
    "l4": "NVIDIA-L4",
    "l40": "NVIDIA-L40",
    "l40s": "NVIDIA-L40S",
    "rtx_6000_ada": "NVIDIA-RTX-6000-Ada-Generation",
    "rtx_4080": "NVIDIA-GeForce-RTX-4080",
    "rtx_4090": "NVIDIA-GeForce-RTX-4090",
    "rtx_5090": "NVIDIA-GeForce-RTX-5090",
    "h100_80gb_sxm": "NVIDIA-H100-80GB-HBM3",
    "h100_80gb_pcie": "NVIDIA-H100-PCIe",
    "h100_96gb_sxm": "NVIDIA-H100-96GB-HBM3",
    "h800_80gb_sxm": "NVIDIA-H800",
    "h200_141gb_sxm": "NVIDIA-H200",
    "h20": "NVIDIA-H20",
    "gh200_96gb": "NVIDIA-GH200-480GB",
    "b200": "NVIDIA-B200",
}

_SKYPILOT = {
    "k80": "K80",
    "p100": "P100",
    "v100_16gb_sxm": "V100",
    "v100_32gb_sxm": "V100-32GB",
    "v100_16gb_pcie": "V100",
    "t4": "T4",
    "a100_40gb_sxm": "A100",
    "a100_40gb_pcie": "A100",
    "a100_80gb_sxm": "A100-80GB-SXM",
    "a100_80gb_pcie": "A100-80GB",
    "a10": "A10",
    "a10g": "A10G",
    "a40": "A40",
    "rtx_a4000": "RTXA4000",
    "rtx_a5000": "RTXA5000",
    "rtx_a6000": "RTXA6000",
    "rtx_3090": "RTX3090",
    "rtx_4090": "RTX4090",
    "rtx_5090": "RTX5090",
    "rtx_6000_ada": "RTX6000-Ada",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "h100_80gb_sxm": "H100-SXM",
    "h100_80gb_pcie": "H100",
    "h200_141gb_sxm": "H200",
    "gh200_96gb": "GH200",
    "b200": "B200",
}


def kubernetes_product(gpu: str, own: Mapping[str, str]) -> str | None:
    """The value of the label nvidia.com/gpu.product of a GPU type; None where it is not known."""
    return own.get(gpu) or _KUBERNETES.get(gpu)


def skypilot_accelerator(gpu: str, own: Mapping[str, str]) -> str | None:
    """SkyPilot's name of a GPU type; None where it is not known."""
    return own.get(gpu) or _SKYPILOT.get(gpu)
