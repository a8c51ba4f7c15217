"""Names of products: those of the driver mean one type, those of administrators only where they say enough."""

import pytest

from hexiopt.readers.discovery.product import Match, match

MIB = 2**20

DRIVER = [
    ("NVIDIA A100-SXM4-80GB", 81920, "a100_80gb_sxm"),
    ("NVIDIA A100-SXM4-40GB", 40960, "a100_40gb_sxm"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100_80gb_pcie"),
    ("NVIDIA A100-PCIE-40GB", 40536, "a100_40gb_pcie"),
    ("Tesla V100-SXM2-16GB", 16160, "v100_16gb_sxm"),
    ("Tesla V100-SXM2-32GB", 32510, "v100_32gb_sxm"),
    ("Tesla V100-PCIE-16GB", 16384, "v100_16gb_pcie"),
    ("Tesla P100-SXM2-16GB", 16280, "p100"),
    ("Tesla T4", 15360, "t4"),
    ("Tesla K80", 11441, "k80"),
    ("GeForce RTX 2080 Ti", 11019, "rtx_2080_ti"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx_3090"),
    ("NVIDIA GeForce RTX 3090 Ti", 24564, "rtx_3090_ti"),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx_5090"),
    ("NVIDIA TITAN RTX", 24220, "titan_rtx"),
    ("NVIDIA RTX A6000", 49140, "rtx_a6000"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx_6000_ada"),
    ("NVIDIA A10", 23028, "a10"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100_80gb_sxm"),
    ("NVIDIA H100 PCIe", 81559, "h100_80gb_pcie"),
    ("NVIDIA H800", 81559, "h800_80gb_sxm"),
    ("NVIDIA H200", 143771, "h200_141gb_sxm"),
    ("NVIDIA H20", 97871, "h20"),
    ("NVIDIA GH200 480GB", 97871, "gh200_96gb"),
    ("NVIDIA GB200", 189471, "gb200"),
    ("NVIDIA B300 SXM6 AC", 275040, "b300"),
    ("NVIDIA GB300", 284208, "gb300"),
    ("NVIDIA H100 NVL", 95830, "h100_nvl"),
    ("NVIDIA H200 NVL", 143771, "h200_nvl"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx_pro_6000"),
    ("AMD Instinct MI300X OAM", 196592, "mi300x"),
    ("NVIDIA B200", 183359, "b200"),
]


@pytest.mark.parametrize(("name", "mib", "gpu"), DRIVER)
def test_a_drivers_name_means_one_type(name: str, mib: int, gpu: str) -> None:
    assert match(name, mib * MIB) == Match(gpu)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Tesla P100-PCIE-16GB", 16280),  # the catalogue's P100 is the module
        ("Tesla V100-PCIE-32GB", 32510),
        ("Tesla V100-FHHL-16GB", 16160),
        ("Quadro RTX 6000", 24576),
        ("NVIDIA GeForce RTX 4090 D", 24564),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887),
        ("NVIDIA H20", 143771),
        ("NVIDIA GH200 144G HBM3e", 147456),
        ("NVIDIA H800 PCIe", 81559),
        ("1g.5gb", None),
        ("a100_1g.5gb", None),
        ("gtx_1080", None),
        ("", None),
    ],
)
def test_a_relative_of_a_type_is_not_the_type(name: str, mib: int | None) -> None:
    assert match(name, None if mib is None else mib * MIB) == Match(None, ())


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("a100", ("a100_40gb_pcie", "a100_40gb_sxm", "a100_80gb_pcie", "a100_80gb_sxm")),
        ("a100_80gb", ("a100_80gb_pcie", "a100_80gb_sxm")),
        ("A100-SXM4", ("a100_40gb_sxm", "a100_80gb_sxm")),
        ("v100", ("v100_16gb_pcie", "v100_16gb_sxm", "v100_32gb_sxm")),
        ("h200", ("h200_141gb_sxm",)),  # or the PCIe card, called NVL
        ("p100", ("p100",)),  # or the PCIe card
    ],
)
def test_an_administrators_word_may_leave_choices(name: str, choices: tuple[str, ...]) -> None:
    assert match(name) == Match(None, choices)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("t4", "t4"),
        ("rtx3090", "rtx_3090"),
        ("3090", "rtx_3090"),
        ("geforce_rtx_2080ti", "rtx_2080_ti"),
        ("a6000", "rtx_a6000"),
        ("nvidia_a100-sxm4-80gb", "a100_80gb_sxm"),
        ("nvidia_h100_80gb_hbm3", "h100_80gb_sxm"),
        ("h100_80gb_pcie", "h100_80gb_pcie"),
        ("b200", "b200"),
        ("b200_192gb", "b200"),
        ("gb200_192gb", "gb200"),
        ("mi355x", "mi355x"),
    ],
)
def test_an_administrators_word_may_say_enough(name: str, gpu: str) -> None:
    assert match(name) == Match(gpu)


def test_memory_tells_types_of_one_name_apart() -> None:
    assert match("A100-SXM4", 40960 * MIB) == Match("a100_40gb_sxm")
    assert match("NVIDIA H100", 97871 * MIB) == Match(None, ("h100_96gb_sxm",))
