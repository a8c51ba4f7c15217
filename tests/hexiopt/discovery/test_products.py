"""Names of products: those of the driver mean one type, those of administrators only where they say enough."""

import pytest

from hexiopt.exports.launchers.products import kubernetes_product
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.products import Match, is_amd, match, mig_profile

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
    ("Tesla P100-PCIE-16GB", 16280, "p100_16gb_pcie"),
    ("Tesla P100-PCIE-12GB", 12198, "p100_12gb_pcie"),
    ("Tesla V100-PCIE-32GB", 32510, "v100_32gb_pcie"),
    ("Tesla V100S-PCIE-32GB", 32510, "v100s_32gb_pcie"),
    ("Quadro RTX 8000", 49152, "quadro_rtx_8000"),
    ("Quadro RTX 6000", 24576, "quadro_rtx_6000"),
    ("Quadro RTX 5000", 16384, "quadro_rtx_5000"),
    ("Quadro RTX 4000", 8192, "quadro_rtx_4000"),
    ("NVIDIA RTX 5000 Ada Generation", 32760, "rtx_5000_ada"),
    ("NVIDIA RTX 4500 Ada Generation", 24570, "rtx_4500_ada"),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "rtx_4000_ada"),
    ("NVIDIA RTX A4500", 20470, "rtx_a4500"),
    ("NVIDIA A16", 15356, "a16"),
    ("NVIDIA A2", 15356, "a2"),
    ("NVIDIA L20", 46068, "l20"),
    ("NVIDIA A800 40GB Active", 40960, "a800_40gb_pcie"),
    ("NVIDIA H800 PCIe", 81559, "h800_80gb_pcie"),
    ("NVIDIA GH200 144G HBM3e", 147456, "gh200_144gb"),
    ("AMD Instinct MI210", 65520, "mi210"),
    ("AMD Instinct MI250X", 65520, "mi250x"),
    ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 65520, "mi250"),
    ("AMD Instinct MI300A", 131072, "mi300a"),
    ("AMD Instinct MI300X VF", 196592, "mi300x"),
    ("NVIDIA GeForce RTX 5060 Ti", 16311, "rtx_5060_ti_16gb"),
    ("NVIDIA GeForce RTX 5060 Ti", 8151, "rtx_5060_ti_8gb"),
    ("NVIDIA GeForce RTX 5070", 12227, "rtx_5070"),
    ("NVIDIA GeForce RTX 5070 Ti", 16303, "rtx_5070_ti"),
    ("NVIDIA GeForce RTX 5080", 16303, "rtx_5080"),
    ("NVIDIA GeForce RTX 4090 D", 24564, "rtx_4090_d"),
    ("NVIDIA GeForce RTX 4080 SUPER", 16376, "rtx_4080_super"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx_4070_ti_super"),
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx_4060_ti_16gb"),
    ("NVIDIA GeForce RTX 3080", 10240, "rtx_3080_10gb"),
    ("NVIDIA GeForce RTX 3060", 12288, "rtx_3060_12gb"),
    ("NVIDIA GeForce RTX 3060", 8192, "rtx_3060_8gb"),
    ("NVIDIA GeForce RTX 2080 SUPER", 8192, "rtx_2080_super"),
    ("NVIDIA TITAN V", 12066, "titan_v"),
    ("NVIDIA GeForce RTX 2060", 6144, "rtx_2060_6gb"),
    ("NVIDIA GeForce RTX 2060", 12288, "rtx_2060_12gb"),
    ("NVIDIA GeForce RTX 3050", 8192, "rtx_3050_8gb"),
    ("NVIDIA GeForce RTX 5050", 8151, "rtx_5050"),
    ("NVIDIA RTX A2000", 6138, "rtx_a2000_6gb"),
    ("NVIDIA RTX A2000 12GB", 12282, "rtx_a2000_12gb"),
    ("NVIDIA RTX A1000", 8188, "rtx_a1000"),
    ("NVIDIA RTX 2000 Ada Generation", 16380, "rtx_2000_ada"),
    ("NVIDIA RTX PRO 2000 Blackwell", 16311, "rtx_pro_2000"),
    ("NVIDIA RTX PRO 4000 Blackwell", 24467, "rtx_pro_4000"),
    ("NVIDIA RTX PRO 4500 Blackwell", 32623, "rtx_pro_4500"),
    ("NVIDIA RTX PRO 5000 Blackwell", 48935, "rtx_pro_5000_48gb"),
    ("NVIDIA RTX PRO 5000 72GB Blackwell", 73402, "rtx_pro_5000_72gb"),
    ("AMD Radeon RX 7900 XTX", 24560, "rx_7900_xtx"),
    ("AMD Radeon RX 7900 XT", 20464, "rx_7900_xt"),
]


@pytest.mark.parametrize(("name", "mib", "gpu"), DRIVER)
def test_a_drivers_name_means_one_type(name: str, mib: int, gpu: str) -> None:
    assert match(name, mib * MIB) == Match(gpu)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Tesla V100-FHHL-16GB", 16160),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887),
        ("NVIDIA H20", 143771),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 12282),  # a 4070 Ti's memory
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20475),
        ("NVIDIA RTX PRO 4000 Blackwell SFF Edition", 24467),
        ("AMD Radeon RX 7900 GRE", 16368),
        ("NVIDIA TITAN V JHH Special Edition", 32510),
        ("NVIDIA GeForce RTX 3050", 4096),
        ("Quadro RTX 6000 with Max-Q Design", 24576),
        ("1g.5gb", None),
        ("a100_1g.5gb", None),
        ("gtx_1080", None),
        ("", None),
    ],
)
def test_a_relative_of_a_type_is_not_the_type(name: str, mib: int | None) -> None:
    assert match(name, None if mib is None else mib * MIB) == Match(None, ())


A100 = ("a100_40gb_pcie", "a100_40gb_sxm", "a100_80gb_pcie", "a100_80gb_sxm")
V100 = ("v100_16gb_pcie", "v100_16gb_sxm", "v100_32gb_pcie", "v100_32gb_sxm", "v100s_32gb_pcie")


@pytest.mark.parametrize(
    ("name", "choices", "others"),
    [
        ("a100", A100, ("A100-SXM-64GB",)),
        ("a100_80gb", ("a100_80gb_pcie", "a100_80gb_sxm"), ()),
        ("A100-SXM4", ("a100_40gb_sxm", "a100_80gb_sxm"), ("A100-SXM-64GB",)),
        ("v100", V100, ("V100-FHHL-16GB", "V100-DGXS-16GB", "V100-DGXS-32GB")),
        ("v100-32gb", ("v100_32gb_pcie", "v100_32gb_sxm", "v100s_32gb_pcie"), ("V100-DGXS-32GB",)),
        ("h200", ("h200_141gb_sxm", "h200_nvl"), ()),
        ("h100_80gb", ("h100_80gb_pcie", "h100_80gb_sxm"), ()),
        ("p100", ("p100", "p100_12gb_pcie", "p100_16gb_pcie"), ()),
        ("gh200", ("gh200_144gb", "gh200_96gb"), ()),
        ("rtx6000", ("quadro_rtx_6000", "rtx_6000_ada", "rtx_pro_6000"), ("RTX PRO 6000 Blackwell Max-Q",)),
        (
            "rtx4000",
            ("quadro_rtx_4000", "rtx_4000_ada", "rtx_pro_4000"),
            ("RTX 4000 SFF Ada Generation", "RTX PRO 4000 Blackwell SFF"),
        ),
        ("rtx_pro_5000", ("rtx_pro_5000_48gb", "rtx_pro_5000_72gb"), ()),
        ("a2000", ("rtx_a2000_12gb", "rtx_a2000_6gb"), ()),
        ("rtx_5060_ti", ("rtx_5060_ti_16gb", "rtx_5060_ti_8gb"), ()),
    ],
)
def test_an_administrators_word_may_leave_choices(name: str, choices: tuple[str, ...], others: tuple[str, ...]) -> None:
    """All products of that name are named: those of the catalogue, and those that it lacks."""
    assert match(name) == Match(None, choices, others)


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
        ("rtx8000", "quadro_rtx_8000"),  # the only product of that name
        ("4070ti", "rtx_4070_ti"),
        ("4070tisuper", "rtx_4070_ti_super"),
        ("nvidia-rtx-3090", "rtx_3090"),
    ],
)
def test_an_administrators_word_may_say_enough(name: str, gpu: str) -> None:
    assert match(name) == Match(gpu)


@pytest.mark.parametrize("gpu", sorted(catalogue()))
def test_the_label_that_is_exported_is_read_as_the_same_type(gpu: str) -> None:
    """Kubernetes' label nvidia.com/gpu.product, with the memory that stands beside it."""
    product = kubernetes_product(gpu, {})
    if product is not None:
        assert match(product, catalogue()[gpu].memory_bytes) == Match(gpu)


def test_memory_tells_types_of_one_name_apart() -> None:
    assert match("A100-SXM4", 40960 * MIB) == Match("a100_40gb_sxm")
    assert match("NVIDIA H100", 97871 * MIB) == Match(None, ("h100_96gb_sxm",), ("H100-SXM5-94GB", "H100-PCIE-96GB"))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("a100_3g.20gb", "3g.20gb"),
        ("nvidia_a100_80gb_pcie_1g.10gb", "1g.10gb"),
        ("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "3g.20gb"),
        ("1g.5gb", "1g.5gb"),
        ("a100-80gb", None),
        ("NVIDIA GH200 480GB", None),
        ("rtx_3060_12gb", None),
    ],
)
def test_slices_are_told_from_whole_gpus(name: str, profile: str | None) -> None:
    assert mig_profile(name) == profile


def test_makers_of_cards() -> None:
    assert {gpu.name for gpu in catalogue().values() if is_amd(gpu)} == {
        *("mi210", "mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x"),
        *("rx_7900_xt", "rx_7900_xtx"),
    }
