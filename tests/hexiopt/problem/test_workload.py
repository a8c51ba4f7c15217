"""Workloads: defaults, what each value means in bytes, and what is refused."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given

from hexiopt.errors import InputError
from hexiopt.files.problem_file import workload_from_section, workload_to_dict
from hexiopt.problem.lora import Lora
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.strategies import workloads


def read(data: Any) -> Workload:
    return workload_from_section(Section(data, "workload.yaml"))


def test_defaults() -> None:
    """256 sequences of 4,096 tokens, BF16, everything else free."""
    workload = read({})
    assert workload == Workload()
    assert workload_to_dict(workload) == {
        "global_batch": 256,
        "seq_len": 4096,
        "precision": "bf16",
        "recompute": "auto",
        "schedule": "auto",
        "optimizer_sharding": "auto",
        "gradient_bytes": 2,
    }
    assert workload.tokens == 2**20


@given(workloads())
def test_round_trip(workload: Workload) -> None:
    data = workload_to_dict(workload)
    # By files written before there were any.
    left_out = {
        "loss_chunk_tokens": None,
        "sequence_parallel": True,
        "message_precision": "training",
        "gradient_precision": "training",
    }
    left_out |= {"routing": "natural", "training": "full", "lora": Lora(), "optimizer": "adamw"}
    stated = {field.name for field in fields(Workload) if getattr(workload, field.name) != left_out.get(field.name, ())}
    assert set(data) == stated
    assert read(data) == workload


@pytest.mark.parametrize(
    ("precision", "gradient_bytes", "expected"),
    [
        ("bf16", 2, (2, 2, 4, 8)),
        ("fp16", 4, (2, 4, 4, 8)),
        ("fp32", 2, (4, 4, 0, 8)),
        ("tf32", 4, (4, 4, 0, 8)),
    ],
)
def test_bytes(precision: str, gradient_bytes: int, expected: tuple[int, ...]) -> None:
    work = Workload(precision=precision, gradient_bytes=gradient_bytes)
    sizes = work.element_bytes, work.states.gradient, work.states.master, work.states.moment
    assert sizes == expected


@pytest.mark.parametrize("stated", [0, 1, "0", "1", "auto"])
def test_sharding_is_a_stage_or_auto(stated: Any) -> None:
    assert read({"optimizer_sharding": stated}).optimizer_sharding == str(stated)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("global_batch", 0, "out of range"),
        ("global_batch", 10**7 + 1, "out of range"),
        ("global_batch", 2.5, "whole number"),
        ("global_batch", True, "not a number"),
        ("global_batch", "64", "not a number"),
        ("global_batch", None, "null"),
        ("seq_len", -1, "out of range"),
        ("seq_len", float("nan"), "not finite"),
        ("precision", "fp4", "did you mean|known"),
        ("precision", 16, "not text"),
        ("message_precision", "fp4", "not known; .*fp8"),
        ("message_precision", None, "null"),
        ("gradient_precision", "8bit", "not known; .*fp8"),
        ("recompute", "some", "known"),
        ("schedule", "1f1", "did you mean 1f1b"),
        ("optimizer_sharding", 4, "not known"),
        ("optimizer_sharding", True, "not known"),
        ("optimizer_sharding", 1.0, "not known"),
        ("optimizer_sharding", [1], "not known"),
        ("gradient_bytes", 3, "choose 2 or 4"),
        ("gradient_bytes", 8, "out of range"),
        ("global_bach", 64, "did you mean global_batch"),
    ],
)
def test_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read({key: value})
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["optimizer_sharding", "global_batch", "gradient_bytes", "precision"])
def test_a_number_too_long_to_print_is_refused(key: str) -> None:
    """YAML reads hexadecimal numbers of any length; Python prints 4,300 digits at most."""
    with pytest.raises(InputError, match=key):
        read({key: 1 << 100_000})
