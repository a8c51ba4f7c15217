"""The words of published runs: precisions, metrics as people write them, and features that are not priced."""

import re
from dataclasses import replace
from typing import Any

import pytest

from experiments.validation.cases import case_of
from experiments.validation.features import unpriced_features
from experiments.validation.metric_names import Metric, metric_named
from experiments.validation.rules import precision_of
from experiments.validation.shapes import InexpressibleError
from tests.experiments.test_validate import NOTHING, PLAIN, case


@pytest.mark.parametrize(
    ("stated", "precision"),
    [
        ("", "bf16"),
        ("amp_bf16", "bf16"),
        ("fp8-rowwise", "fp8"),
        ("FP16", "fp16"),
        ("fp32 (TF32 unknown)", "fp32"),
        ("FP8-CS", "fp8"),
        ("fp8 (not in table)", "fp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_the_precision_that_a_row_states(stated: str, precision: str) -> None:
    assert precision_of(replace(PLAIN, precision=stated)) == precision


@pytest.mark.parametrize("stated", ["FP4", "mxfp4", "int8", "bf1 6"])
def test_an_unknown_precision_is_no_other(stated: str) -> None:
    """Not BF16: a run in FP4 would be predicted 68 % too slow."""
    with pytest.raises(InexpressibleError, match=f"precision '{stated}' is not modelled; known: nvfp4, mxfp8, fp8,"):
        case(precision=stated)


@pytest.mark.parametrize(
    ("name", "stands_for"),
    [
        ("step_time_ms", Metric("iter_time_s", 1e-3)),
        ("iter_ms", Metric("iter_time_s", 1e-3)),
        ("s/it", Metric("iter_time_s")),
        ("it/s", Metric("iter_per_s")),
        ("min_per_1k_iterations", Metric("iter_time_s", 0.06)),
        ("tokens/s/gpu", Metric("tokens_per_s_per_gpu")),
        ("Tok/s/GPU", Metric("tokens_per_s_per_gpu")),
        ("tokens_per_second_per_device", Metric("tokens_per_s_per_gpu")),
        ("tokens_per_s", Metric("tokens_per_s")),
        ("samples_per_s", Metric("samples_per_s")),
        ("sequences/sec", Metric("samples_per_s")),
        ("TFLOP/s/GPU", Metric("tflops_per_gpu")),
        ("MFU %", Metric("mfu")),
        ("mfu_fraction", Metric("mfu", 100.0)),
    ],
)
def test_metrics_as_people_write_them(name: str, stands_for: Metric) -> None:
    assert metric_named(name) == stands_for


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tflops", "of one GPU or of all? write tflops_per_gpu"),
        ("tps", "write tokens_per_s_per_gpu or tokens_per_s"),
        ("throughput", "write tokens_per_s"),
        ("step_time", "in which unit? write iter_time_s or iter_time_ms"),
        ("mem_gb", "memory is no measure of a step"),
        ("peak_memory_GiB", "memory is no measure of a step"),
        ("speed", "is not known; write iter_per_s, iter_time_s, mfu"),
    ],
)
def test_names_that_leave_it_open_are_refused_with_the_remedy(name: str, words: str) -> None:
    assert words in str(metric_named(name))


@pytest.mark.parametrize(
    ("stated", "feature"),
    [
        ({"notes": "EP=8;ETP=1;experts=256 top8"}, "mixture of experts"),
        ({"model_name": "mixtral-8x7b"}, "mixture of experts"),
        ({"model_name": "qwen3-coder-480b-a35b"}, "mixture of experts"),
        ({"others": {"num_experts": "64"}}, "mixture of experts"),
        ({"notes": "LoRA;rank=64;quant=none"}, "adapters (LoRA)"),
        ({"notes": "QLoRA;quant=nf4"}, "adapters (LoRA) and quantised weights"),
        ({"others": {"lora_rank": "16"}}, "adapters (LoRA)"),
        ({"notes": "hybrid Mamba2+MLP+attention"}, "state-space or linear-attention layers"),
        ({"notes": "MLA q1536 kv512"}, "multi-head latent attention"),
        ({"notes": "EP=1;dense"}, None),
        ({"notes": "full fine-tuning;trainer=transformers+peft 2023"}, None),
        ({"others": {"num_experts": "0", "lora_rank": "", "run": "17"}}, None),
    ],
)
def test_what_is_not_priced_is_told_by_notes_name_or_column(stated: dict[str, Any], feature: str | None) -> None:
    row = replace(PLAIN, **stated)
    assert unpriced_features(row.notes, row.model_name, row.others) == feature
    if feature is not None:
        with pytest.raises(InexpressibleError, match=re.escape(feature)):
            case_of(row, NOTHING)
