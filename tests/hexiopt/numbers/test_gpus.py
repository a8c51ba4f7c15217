"""The GPU catalogue against what others publish; overrides, round trips and refusals of users' types."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.numbers import gpus
from hexiopt.numbers.gpus import LINKS, Efficiency, Gpu, catalogue, gpu_from_section, gpu_to_dict
from hexiopt.numbers.products import find_gpu
from hexiopt.reading import Section, read_mapping

PUBLISHED = read_mapping(Path(__file__).with_name("published_gpus.yaml"))
TABLES = {table["source"]: table for table in PUBLISHED["tables"]}
TYPES = read_mapping(Path(gpus.__file__).with_name("gpus.yaml"))["types"]
NAMES = sorted(catalogue())
NEW = {"tflops": 80, "memory_gib": 24, "hbm_gb_per_s": 900}


def read(data: dict[str, Any], name: str = "my_gpu", base: Gpu | None = None) -> Gpu:
    return gpu_from_section(Section(data, f"my.yaml: gpus.{name}"), name, base)


def override(name: str, **data: Any) -> Gpu:
    return read(data, name, catalogue()[name])


# The catalogue


def test_catalogue_is_large_and_immutable() -> None:
    assert len(NAMES) >= 40
    assert {"k80", "rtx_3080_ti", "a800_80gb_sxm", "h100_96gb_sxm", "gh200_96gb", "b200", "cpu"} <= set(NAMES)
    with pytest.raises(TypeError):
        catalogue()["mine"] = catalogue()["t4"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalogue()["t4"].source = "mine"  # type: ignore[misc]


def test_every_type_states_every_value() -> None:
    """The defaults for new types must never stand in for a forgotten value of the catalogue."""
    required = set(gpu_to_dict(catalogue()["t4"])) - {"flash_attention", "peer_to_peer", "efficiency"}
    required -= {f"tflops_{precision}" for precision in gpus.QUANTIZED_BYTES}
    for name, entry in TYPES.items():
        assert required <= set(entry), name


@pytest.mark.parametrize("name", NAMES)
def test_values_are_sane(name: str) -> None:
    gpu = catalogue()[name]
    assert gpu.name == name
    assert gpu.source
    assert gpu.link in LINKS
    assert 0.85 * gpu.memory_bytes < gpu.usable_memory_bytes < gpu.memory_bytes - 0.49 * 2**30
    assert 0 < gpu.efficiency.gemm_max <= 0.95
    assert gpu.efficiency.attention_max < gpu.efficiency.gemm_max
    if name == "cpu":
        return
    assert 3e12 < gpu.flops_fp32 < 2e14
    assert 5 * 2**30 < gpu.memory_bytes < 300 * 2**30
    assert 1.6e11 < gpu.hbm_bytes_per_s < 1e13
    for rate in (gpu.flops_bf16, gpu.flops_fp16):
        assert rate is None or 9e12 < rate < 3e15
    if gpu.flops_fp8 and gpu.flops_bf16:
        assert gpu.flops_fp8 == pytest.approx(2 * gpu.flops_bf16, rel=0.02)
    assert gpu.flops_mxfp8 in (None, gpu.flops_fp8)
    if gpu.flops_nvfp4 and gpu.flops_fp8:
        assert 2 * gpu.flops_fp8 <= gpu.flops_nvfp4 <= 4 * gpu.flops_fp8
    if gpu.flops_tf32 and gpu.flops_bf16:
        assert gpu.flops_tf32 == pytest.approx(gpu.flops_bf16 / 2, rel=0.02)


def test_which_types_lack_what() -> None:
    none = {p: {n for n in NAMES if catalogue()[n].peak_flops(p) is None} for p in ("bf16", "fp16", "tf32", "fp32")}
    before_ampere = {
        *("k80", "p100", "p100_16gb_pcie", "p100_12gb_pcie", "p40"),
        *("v100_16gb_sxm", "v100_32gb_sxm", "v100_16gb_pcie", "v100_32gb_pcie", "v100s_32gb_pcie"),
        *("quadro_rtx_4000", "quadro_rtx_5000", "quadro_rtx_6000", "quadro_rtx_8000"),
        *(
            "titan_v",
            "t4",
            "rtx_2060_6gb",
            "rtx_2060_12gb",
            "rtx_2060_super",
            "rtx_2070",
            "rtx_2070_super",
            "rtx_2080",
            "rtx_2080_super",
            "rtx_2080_ti",
            "titan_rtx",
        ),
    }
    assert none["bf16"] == before_ampere
    assert none["fp16"] == {"k80", "p40"}
    assert none["tf32"] == before_ampere | {
        "cpu",
        "rx_7900_xt",
        "rx_7900_xtx",
        "mi210",
        "mi250",
        "mi250x",
        "mi350x",
        "mi355x",
    }
    assert none["fp32"] == set()
    assert {n for n in NAMES if not catalogue()[n].flash_attention} == before_ampere
    staged = {n for n in NAMES if re.match(r"rtx_[2-5]0[5-9]0|titan_rtx|rx_", n)}
    assert {n for n in NAMES if not catalogue()[n].peer_to_peer} == staged


def test_a_value_in_units_inside() -> None:
    gpu = catalogue()["a100_80gb_sxm"]
    assert (gpu.flops_bf16, gpu.memory_bytes, gpu.hbm_bytes_per_s) == (312e12, 80 * 2**30, 2.039e12)
    assert gpu.efficiency.launch_s == pytest.approx(5e-6)
    assert gpu.efficiency.gemm_half_flops == pytest.approx(7e-6 * 312e12)


# What others publish


def listed_differences(table: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (gpu, field)
        for difference in table["differences"]
        for gpu in difference["gpus"]
        for field in difference["fields"]
        if difference["reason"]
    }


@pytest.mark.parametrize("source", TABLES)
def test_differences_from_published_tables_are_the_listed_ones(source: str) -> None:
    table = TABLES[source]
    differences = {}
    for name, values in table["values"].items():
        ours = gpu_to_dict(catalogue()[name]) | {"watts": catalogue()[name].watts}
        for field, theirs in values.items():
            if abs(ours[field] - theirs) > PUBLISHED["tolerance"] * theirs:
                differences[name, field] = f"{name}.{field}: {ours[field]} here, {theirs} there"
    unexplained = [text for key, text in differences.items() if key not in listed_differences(table)]
    stale = sorted(listed_differences(table) - set(differences))
    assert not unexplained, "give a reason in published_gpus.yaml, or mend gpus.yaml"
    assert not stale, "these differ no longer; take them off the list"


def test_tensor_rates_follow_from_units_and_clocks() -> None:
    """FLOP a clock and SM with FP32 accumulation (NVIDIA's architecture whitepapers): 1,024 of tensor cores with FP16
    from Turing on, half of it on GeForce cards; the number of SMs and the clock are those of `chips`."""
    for name, (sms, clock_mhz) in PUBLISHED["chips"]["values"].items():
        half = catalogue()[name].efficiency.gemm_max > 0.8
        rate = catalogue()[name].flops_fp16
        assert rate == pytest.approx((512 if half else 1024) * sms * clock_mhz * 1e6, rel=0.03), name


def test_each_type_but_the_nominal_is_in_some_published_table() -> None:
    published = {name for table in TABLES.values() for name in table["values"]}
    assert set(NAMES) - published == {"cpu", "h100_nvl", "mi350x"}


# A cluster file's types


def test_new_type_and_its_defaults() -> None:
    gpu = read(NEW)
    assert (gpu.name, gpu.flops_bf16, gpu.flops_fp16, gpu.flops_tf32) == ("my_gpu", 80e12, 80e12, None)
    assert gpu.flops_fp32 == 5e12
    assert gpu.usable_memory_bytes == pytest.approx(0.9 * 24 * 2**30)
    assert (gpu.link, gpu.flash_attention, gpu.peer_to_peer) == ("pcie4", True, False)
    assert gpu.efficiency == Efficiency(0.7, pytest.approx(0.64e9), 0.4, 0.8, pytest.approx(5e-6))
    assert gpu.source


def test_stated_values_go_before_defaults() -> None:
    gpu = read(NEW | {"tflops_bf16": 60, "tflops_fp32": 20, "usable_memory_gib": 22.5, "flash_attention": False})
    assert (gpu.flops_bf16, gpu.flops_fp16, gpu.flops_fp32) == (60e12, 80e12, 20e12)
    assert gpu.usable_memory_bytes == 22.5 * 2**30
    assert not gpu.flash_attention


@pytest.mark.parametrize(("stated", "none"), [("tflops_bf16", "flops_fp16"), ("tflops_fp16", "flops_bf16")])
def test_a_single_16bit_rate_leaves_the_other_out(stated: str, none: str) -> None:
    gpu = read({stated: 32, "memory_gib": 8, "hbm_gb_per_s": 300})
    assert getattr(gpu, none) is None
    assert gpu.flops_fp32 == 2e12


def test_override_changes_only_what_it_states() -> None:
    base = catalogue()["rtx_3090"]
    gpu = override("rtx_3090", tflops=65, efficiency={"gemm_max": 0.8})
    efficiency = dataclasses.replace(base.efficiency, gemm_max=0.8)
    assert gpu == dataclasses.replace(
        base, flops_bf16=65e12, flops_fp16=65e12, efficiency=efficiency, source=gpu.source
    )
    assert base.source in gpu.source
    assert gpu.source != base.source
    assert override("rtx_3090") == base


def test_usable_memory_follows_memory() -> None:
    base = catalogue()["rtx_3090"]
    assert override("rtx_3090", memory_gib=48).usable_memory_bytes == pytest.approx(2 * base.usable_memory_bytes)
    both = override("rtx_3090", memory_gib=48, usable_memory_gib=40)
    assert both.usable_memory_bytes == 40 * 2**30


def test_tflops_never_invents_bf16() -> None:
    gpu = override("v100_16gb_sxm", tflops=100)
    assert (gpu.flops_bf16, gpu.flops_fp16) == (None, 100e12)


def test_null_takes_a_rate_away() -> None:
    assert override("a30", tflops_bf16=None).flops_bf16 is None


# Round trips


@pytest.mark.parametrize("name", NAMES)
def test_catalogue_round_trip(name: str) -> None:
    gpu = catalogue()[name]
    data = json.loads(json.dumps(gpu_to_dict(gpu)))
    assert read(data, name, gpu) == gpu
    assert read(data, name) == gpu


def test_dict_shows_the_file_s_numbers() -> None:
    for name in NAMES:
        quoted = gpu_to_dict(catalogue()[name])
        assert {key: quoted[key] for key in TYPES[name] if key in quoted and key != "efficiency"} == {
            key: value for key, value in TYPES[name].items() if key in quoted and key != "efficiency"
        }


def numbers(most: float) -> st.SearchStrategy[float]:
    return st.floats(min_value=1e-6, max_value=most)


FRACTIONS = numbers(1)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """Any subset of the keys that overrides a type, plus those that a new type needs."""
    memory = draw(numbers(4096))
    optional = {
        "tflops_bf16": st.none() | numbers(1e5),
        "tflops_fp16": st.none() | numbers(1e5),
        "tflops_tf32": st.none() | numbers(1e5),
        "usable_memory_gib": st.floats(min_value=memory / 2, max_value=memory),
        "link": st.sampled_from(LINKS),
        "flash_attention": st.booleans(),
        "peer_to_peer": st.booleans(),
        "source": st.text(min_size=1),
        "efficiency": st.fixed_dictionaries(
            {},
            optional={
                "gemm_max": FRACTIONS,
                "gemm_half_gflop": st.just(0) | numbers(1e6),
                "attention_max": FRACTIONS,
                "memory_max": FRACTIONS,
                "launch_us": st.just(0) | numbers(1e5),
            },
        ),
    }
    fixed = {"tflops": numbers(1e5), "tflops_fp32": numbers(1e5), "hbm_gb_per_s": numbers(1e5)}
    return {"memory_gib": memory, **draw(st.fixed_dictionaries(fixed, optional=optional))}


@given(entries(), st.sampled_from([None, *NAMES]))
def test_round_trip_is_exact(entry: dict[str, Any], base: str | None) -> None:
    gpu = read(entry, base or "my_gpu", base and catalogue()[base])
    data = json.loads(json.dumps(gpu_to_dict(gpu)))
    assert read(data, gpu.name, base and catalogue()[base]) == gpu
    assert gpu_to_dict(read(data, gpu.name)) == data
    assert gpu.usable_memory_bytes <= gpu.memory_bytes


# Refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tflops": float("nan")}, ["gpus.my_gpu.tflops", "not finite"]),
        ({"tflops": True}, ["gpus.my_gpu.tflops", "not a number"]),
        ({"tflops": -80}, ["-80", "above 0"]),
        ({"tflops": 0}, ["out of range", "above 0"]),
        ({"tflops": None}, ["gpus.my_gpu.tflops", "null"]),
        ({"tflops_bf16": 1e6}, ["gpus.my_gpu.tflops_bf16", "at most 100000"]),
        ({"tflops_fp32": None}, ["gpus.my_gpu.tflops_fp32", "null"]),
        ({"memory_gib": "24"}, ["'24'", "not a number"]),
        ({"memory_gib": 5000}, ["at most 4096"]),
        ({"memory_gib": None}, ["gpus.my_gpu.memory_gib", "hexiopt profile"]),
        ({"usable_memory_gib": 25}, ["25", "at most 24"]),
        ({"hbm_gb_per_s": float("inf")}, ["not finite"]),
        ({"link": "nvlink9"}, ["nvlink9", "nvlink"]),
        ({"flash_attention": 1}, ["true or false"]),
        ({"efficiency": {"gemm_max": 1.5}}, ["gpus.my_gpu.efficiency.gemm_max", "at most 1"]),
        ({"efficiency": {"attention_max": 0}}, ["attention_max", "above 0"]),
        ({"efficiency": {"launch_us": None}}, ["launch_us", "null"]),
        ({"efficiency": {"gemm_mx": 0.5}}, ["gemm_mx", "gemm_max"]),
        ({"efficiency": 0.5}, ["efficiency", "mapping"]),
        ({"memory_gb": 24}, ["memory_gb", "unknown key", "memory_gib"]),
        ({"tflops_bf_16": 24}, ["tflops_bf_16", "unknown key", "tflops_bf16"]),
        ({"family": "ampere"}, ["family", "unknown key"]),
    ],
)
def test_bad_values_name_file_key_and_rule(change: dict[str, Any], words: list[str]) -> None:
    for base in (None, catalogue()["a30"]):
        with pytest.raises(InputError) as error:
            read({**NEW, **change}, base=base)
        for word in ["my.yaml", *words]:
            assert word in str(error.value)


@pytest.mark.parametrize("missing", NEW)
def test_new_type_lacks_a_required_value(missing: str) -> None:
    with pytest.raises(InputError, match=rf"gpus\.my_gpu\.{missing}: is missing"):
        read({key: value for key, value in NEW.items() if key != missing})


def test_rates_of_nothing_at_all() -> None:
    with pytest.raises(InputError, match="tflops_fp32: is missing"):
        read({"tflops_fp16": None, "memory_gib": 8, "hbm_gb_per_s": 300})


@pytest.mark.parametrize("name", ["RTX 3090", "rtx-3090", "My_gpu", "a__b", "", "_a"])
def test_names_are_lower_snake_case(name: str) -> None:
    with pytest.raises(InputError, match="lower-case letters"):
        read(NEW, name)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx_3080_ti"),
        ("4060ti-16gb", "rtx_4060_ti_16gb"),
        ("3060 12", "rtx_3060_12gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb_sxm"),
        ("Tesla T4", "t4"),
        ("A6000", "rtx_a6000"),
        ("RX 7900 XTX", "rx_7900_xtx"),
        ("7900xt", "rx_7900_xt"),
        ("Titan V", "titan_v"),
        ("A2000 12GB", "rtx_a2000_12gb"),
        ("RTX PRO 5000 72GB", "rtx_pro_5000_72gb"),
        ("pro 4500", "rtx_pro_4500"),
        ("2060 super", "rtx_2060_super"),
    ],
)
def test_a_type_is_also_known_by_the_names_of_its_product(name: str, gpu: str) -> None:
    assert find_gpu(name, {}, "gpus") is catalogue()[gpu]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("A100", "may be a100_40gb_pcie or a100_40gb_sxm or a100_80gb_pcie or a100_80gb_sxm"),
        ("3060", "may be rtx_3060_12gb or rtx_3060_8gb; write one of them"),
        ("3050", "may be rtx_3050_6gb or rtx_3050_8gb, or GeForce RTX 3050 4GB, which the catalogue lacks"),
        ("rtx_309", "is not a known GPU; did you mean rtx_3090"),
        ("mi999x", "is not a known GPU; known:"),
        ("", "is not a known GPU; known:"),
    ],
)
def test_unknown_gpu_is_an_error_that_says_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(InputError) as error:
        find_gpu(name, {}, "my.yaml: machines[0].gpu")
    assert str(error.value).startswith(f"my.yaml: machines[0].gpu: {name!r} {meant}")


def test_a_cluster_s_own_type_goes_first() -> None:
    mine = override("t4", tflops=30)
    assert find_gpu("t4", {"t4": mine}, "x") is mine
    assert find_gpu("t4", {}, "x") is catalogue()["t4"]
    with pytest.raises(InputError, match="did you mean my_gpu"):
        find_gpu("mygpu", {"my_gpu": read(NEW)}, "x")
