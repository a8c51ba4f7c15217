"""Problems: parts that fit each other, their hash, and the mapping of a plan file."""

import copy
import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.numbers.frameworks import calibration_sha256
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.models import TOY
from tests.strategies import JSON, LAB, problems

MODEL = TOY
FP16 = Workload(precision="fp16", global_batch=8)


def again(data: Any) -> Problem:
    return problem_from_section(Section(data, "plan.json: problem"))


@given(problems())
def test_round_trip_through_json(problem: Problem) -> None:
    text = json.dumps(problem_to_dict(problem), allow_nan=False)
    restored = again(json.loads(text))
    assert restored == problem
    assert problem_sha256(restored) == problem_sha256(problem)


def test_the_hash_is_that_of_the_mapping() -> None:
    """SHA-256 of UTF-8 JSON with sorted keys and no spaces."""
    problem = Problem(LAB, replace(MODEL, name="modèle"), FP16)
    data = problem_to_dict(problem)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert problem_sha256(problem) == hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert data["cost_model"]["calibration_sha256"] == calibration_sha256()
    assert {"cluster", "model", "workload", "cost_model"} <= set(data)


@pytest.mark.parametrize(
    "other",
    [
        Problem(LAB, MODEL, replace(FP16, global_batch=9)),
        Problem(LAB, replace(MODEL, ffn_size=101), FP16),
        Problem(replace(LAB, name="other"), MODEL, FP16),
        Problem(LAB, MODEL, FP16, Space(replicas=False)),
    ],
)
def test_another_problem_has_another_hash(other: Problem) -> None:
    assert problem_sha256(other) != problem_sha256(Problem(LAB, MODEL, FP16))


def test_usable_devices() -> None:
    def usable(*exclude: str) -> tuple[int, ...]:
        return Problem(LAB, MODEL, FP16, Space(exclude=exclude)).usable_devices

    assert usable() == tuple(range(8))
    assert usable("v") == (0, 1, 2, 3)
    assert usable("v-1", "a:0", "a:0") == (1, 2, 3, 4, 5)
    # As tables and cluster files write them.
    assert usable("v-[0-1]") == usable("v-0,v-1") == usable("v")
    assert usable("a:0-1,3", "v-[0-1]:1") == (2, 4, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": Workload()}, r"bf16.*v100_32gb_sxm.*fp16 or fp32.*exclude=\[v\]"),
        ({"workload": replace(FP16, precision="tf32")}, "tf32"),
        ({"space": Space(exclude=("a", "v"))}, "leaves no device"),
        ({"space": Space(exclude=("w",))}, "not a machine"),
        ({"space": Space(exclude=("v-[0-2]",))}, "'v-2' is not a machine of the cluster; did you mean v-1"),
        ({"space": Space(exclude=("v-[1-0]",))}, "has the range 1-0, which descends"),
        ({"space": Space(exclude=("a:2-4",))}, "'a:4' is out of range"),
        ({"space": Space(exclude=("a:4",))}, "out of range"),
        ({"space": Space(num_stages=5)}, "4 layers"),
        ({"space": Space(num_pipelines=9)}, "8 sequences"),
        ({"space": Space(num_pipelines=3, num_stages=3)}, "need 9 devices"),
        ({"space": Space(num_pipelines=2, num_stages=3, exclude=("v",))}, "cluster has 4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Problem(**({"cluster": LAB, "model": MODEL, "workload": FP16} | changes))


def test_a_gpu_without_the_arithmetic_may_be_left_out() -> None:
    problem = Problem(LAB, MODEL, Workload(), Space(exclude=("v",)))
    assert problem.usable_devices == (0, 1, 2, 3)
    assert again(problem_to_dict(problem)) == problem


def test_learned_positions_limit_the_sequence() -> None:
    learned = replace(MODEL, architecture="gpt2", attention_bias=True, mlp_bias=True, tied_embeddings=True)
    Problem(LAB, learned, replace(FP16, seq_len=1000))
    with pytest.raises(InputError, match="1001 is more than the 1000 positions"):
        Problem(LAB, learned, replace(FP16, seq_len=1001))
    Problem(LAB, MODEL, replace(FP16, seq_len=1001))  # rotary positions go on


# ------------------------------------------------------------------ damaged mappings

UNSHARDED = problem_to_dict(Problem(LAB, MODEL, FP16))


@given(data=st.data())
def test_a_damaged_mapping_is_read_or_refused(data: st.DataObject) -> None:
    """Some value anywhere inside replaced, removed or joined by a key: a problem or InputError."""
    damaged = copy.deepcopy(UNSHARDED)
    for _ in range(data.draw(st.integers(1, 2))):
        here: Any = damaged
        while True:
            keys = sorted(here) if isinstance(here, dict) else range(len(here))
            key = data.draw(st.sampled_from(list(keys)))
            deeper = isinstance(here[key], dict | list) and len(here[key])
            if not deeper or data.draw(st.integers(0, 3)) == 0:
                break
            here = here[key]
        if data.draw(st.booleans()):
            here[key] = data.draw(JSON)
        elif isinstance(here, dict):
            here[data.draw(st.text(max_size=5))] = data.draw(JSON)
        else:
            del here[key]
    with suppress(InputError):
        again(damaged)


@given(JSON)
def test_any_data_is_refused(data: Any) -> None:
    with pytest.raises(InputError):
        again(data)


def test_another_cost_model_is_refused() -> None:
    data = copy.deepcopy(UNSHARDED)
    data["cost_model"]["version"] = "0"
    with pytest.raises(InputError, match=r"cost_model\.version: '0' is not the cost model '1'"):
        again(data)


def test_utilisation_counts_the_devices_that_compute() -> None:
    problem = Problem(LAB, MODEL, FP16)
    whole = problem.mfu(2.0)
    flops = problem.workload.tokens * problem.model.model_flops_per_token(problem.workload.seq_len)
    assert whole == flops / (2.0 * problem.cluster.total_peak_flops(problem.workload.precision))
    assert problem.mfu(2.0, 1) == pytest.approx(whole * problem.cluster.num_devices)
