"""Measured runs with adapters: what their rows state, and how well clean ones are predicted."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.validation.cases import case_of
from experiments.validation.memory import process_ratios
from experiments.validation.predict import cost_model
from experiments.validation.rows import Row, read_rows
from experiments.validation.runs import Runs
from experiments.validation.shapes import InexpressibleError, adapters_of
from experiments.validation.shipped import DATA, shipped_measurements
from hexiopt.problem.lora import Lora

ROWS = read_rows(DATA / "lora_runs.csv")
FIRST = ROWS[0]


@pytest.mark.parametrize(
    ("notes", "adapters"),
    [
        ("LoRA;rank=64;targets=all;quant=none", Lora(64)),
        ("LoRA;rank=8;targets=q,k,v", Lora(8, "qkv")),
        ("LoRA;rank=8;targets=q,v,o,mlp", Lora(8, ("q", "v", "o", "gate", "up", "down"))),
        ("QLoRA;rank=8;targets=qv;quant=bnb-nf4-dq;adapter_bytes=2", Lora(8, "qv", "nf4_double", 2)),
        ("LoRA;rank=8", None),
        ("full fine-tuning;optimizer=AdamW", None),
    ],
)
def test_rows_state_adapters(notes: str, adapters: Lora | None) -> None:
    assert adapters_of(replace(FIRST, notes=notes)) == adapters


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"notes": "QLoRA;rank=8;targets=all;quant=gptq-int4"}, "quantised by gptq-int4"),
        ({"notes": "LoRA;rank=8;targets=all;mean length below max_length"}, "mixed lengths"),
        ({"zero_stage_or_fsdp": "zero2"}, "ZeRO-2 or ZeRO-3"),
    ],
)
def test_what_is_not_modelled_beside_adapters_is_left_out(change: dict[str, str], reason: str) -> None:
    with pytest.raises(InexpressibleError, match=reason):
        case_of(replace(FIRST, **change), shipped_measurements())  # type: ignore[arg-type]


def test_clean_rows_of_many_tokens_are_predicted_within_a_tenth() -> None:
    """The median of time and memory, over all rows that state what is modelled."""
    times, memories, priced = [], [], []
    for row in ROWS:
        if not _is_clean(row):
            continue
        case = case_of(row, shipped_measurements())
        cost = cost_model(case).price(case.plan)
        assert case.framework == "transformers_peft"
        priced.append((case, cost))
        times.append(cost.step_time_s / row.value)
        memories += process_ratios(case, cost)
    assert len(times) == len(memories) == 12
    assert np.median(np.abs(np.array(times) - 1)) < 0.10
    assert np.median(np.abs(np.array(memories) - 1)) < 0.10
    # 14 B's two fastest and 1.8 B's slowest lie outside the range of the other models.
    assert list(Runs([], [], priced).held_out_lines()) == [
        "adapters, at least 1,024 tokens: 9 of 12 runs within the interval of runs of other models"
    ]
    of_one_model = [pair for pair in priced if pair[0].row.model_name == "qwen-7b"]
    assert list(Runs([], [], of_one_model).held_out_lines()) == []


def _is_clean(row: Row) -> bool:
    try:
        return adapters_of(row) is not None and (row.seq_len or 0) * (row.micro_batch or 0) >= 1024
    except InexpressibleError:
        return False
