"""Adapters and optimizers: counts against matrices written out, what cannot be combined, files."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.configurations import named_cluster, named_model
from hexiopt.errors import InputError
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.problem.lora import TARGETS, Lora
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.parameters import Parameters
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.hexiopt.shapes_of_kinds import MIXED

LLAMA, QWEN = named_model("llama2_7b"), named_model("qwen3_8b")
CLUSTER = named_cluster("small_mixed")
SOME = st.lists(st.sampled_from(TARGETS), min_size=1, unique=True)


def lora_work(**lora: Any) -> Workload:
    return Workload(training="lora", lora=Lora(**lora))


def shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each matrix of a Llama layer, as transformers has them."""
    hidden, ffn = model.hidden_size, model.ffn_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inward = {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "gate": (hidden, ffn), "up": (hidden, ffn)}
    return inward | {"o": (q, hidden), "down": (ffn, hidden)}


@given(targets=SOME, rank=st.integers(1, 128), model=st.sampled_from((LLAMA, QWEN)))
def test_adapters_are_two_matrices_a_target(targets: list[str], rank: int, model: ModelSpec) -> None:
    parameters = Parameters(model, lora_work(targets=targets, rank=rank))
    expected = sum(rank * sum(shapes(model)[name]) for name in targets)
    assert parameters.layer_params == expected
    assert parameters.num_trained_params == model.num_layers * expected
    assert (parameters.first_params, parameters.last_params, parameters.tied_params) == (0, 0, 0)


@given(targets=SOME, tp=st.sampled_from((1, 2, 4, 8)))
def test_a_rank_holds_one_of_the_two_matrices_whole(targets: list[str], tp: int) -> None:
    """What reads hidden states is cut by its outputs, so that its first matrix is whole; the others, their second."""
    [group] = Parameters(QWEN, lora_work(targets=targets, rank=4)).trained_groups
    expected = 0.0
    for name in targets:
        inputs, outputs = shapes(QWEN)[name]
        expected += 4 * (inputs / tp + outputs if name in ("o", "down") else inputs + outputs / tp)
    assert group.split.on(largest_shard(QWEN, tp)) == expected


@given(
    storage=st.sampled_from((("16bit", 2.0), ("nf4", 0.5625), ("int8", 1.0 + 1 / 1024))), width=st.sampled_from((2, 4))
)
def test_bytes_of_adapters_beside_frozen_parameters(storage: tuple[str, float], width: int) -> None:
    """Of 4 states of an adapter two take `adapter_bytes`, moments 8 bytes; only matrices of layers are quantised."""
    name, stored = storage
    parameters = Parameters(QWEN, lora_work(storage=name, adapter_bytes=width))
    matrices = QWEN.num_layers * sum(i * o for i, o in shapes(QWEN).values())
    others = QWEN.num_params - matrices
    expected = stored * matrices + 2 * others + (2 * width + 8) * parameters.num_trained_params
    assert parameters.bytes == pytest.approx(expected, rel=1e-12)


def test_flops_of_training() -> None:
    """Frozen matrices take two thirds of trained ones, without the embedding; adapters all of theirs."""
    work = lora_work(rank=8, targets="qv")
    seq_len, parameters = work.seq_len, Parameters(QWEN, work)
    matrices = QWEN.num_layers * sum(i * o for i, o in shapes(QWEN).values()) + QWEN.vocabulary_params
    attention = 3 * QWEN.num_layers * 2 * seq_len * QWEN.q_size
    assert parameters.flops_per_token == 4 * matrices + attention + 6 * parameters.num_trained_params
    whole = Parameters(QWEN, Workload())
    assert whole.flops_per_token == QWEN.model_flops_per_token(seq_len) == 6 * matrices + attention


@pytest.mark.parametrize(
    ("optimizer", "total", "step_bytes"),
    [
        ("adamw", 16, 28),
        ("adamw_bf16", 8, 14),
        ("adamw_8bit", 6 + 1 / 32, 10 + 1 / 16),
        ("lion", 12, 20),
        ("lion_8bit", 5 + 1 / 64, 8 + 1 / 32),
        ("adafactor", 4, 12),
        ("muon", 12, 20),
        ("momentum", 6, 10),
        ("sgd", 4, 6),
    ],
)
def test_bytes_of_optimizers(optimizer: str, total: float, step_bytes: float) -> None:
    """Of a parameter in BF16: all states, and what a step reads and writes, counted by hand."""
    states = Workload(optimizer=optimizer).states
    assert states.total == total
    assert states.step_bytes == step_bytes


def test_every_optimizer_has_a_row_with_its_source() -> None:
    assert all(row.source and row.name == name for name, row in OPTIMIZERS.items())


def test_muon_leaves_embedding_and_head_to_adam() -> None:
    parameters = Parameters(LLAMA, Workload(optimizer="muon"))
    assert (parameters.workload.states.moment, parameters.end_states.moment) == (4, 8)
    ends = LLAMA.embedding_params + LLAMA.head_params
    assert parameters.bytes == 12 * LLAMA.num_params + 4 * ends
    square = 5 * (4 + 2) * LLAMA.hidden_size**3
    oblong = 5 * (4 * LLAMA.hidden_size**2 * LLAMA.ffn_size + 2 * LLAMA.hidden_size**3)
    assert sum(parameters.orthogonal_flops()) == 4 * square + 3 * oblong


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        ({"lora": {"rank": 8}}, "training: 'full' has no adapters; choose workload.training=lora"),
        ({"training": "dora"}, "training: 'dora' is not known"),
        ({"training": "lora", "lora": {"rank": 0}}, "lora.rank: 0 is out of range; it must be at least 1"),
        ({"training": "lora", "lora": {"targets": "norms"}}, "lora.targets: 'norms' is not known"),
        ({"training": "lora", "lora": {"targets": ["q", "x"]}}, "lora.targets: 'x' is not known"),
        ({"training": "lora", "lora": {"targets": []}}, "lora.targets: .* names no matrix; choose all, attention"),
        ({"training": "lora", "lora": {"storage": "nf3"}}, "lora.storage: 'nf3' is not known; did you mean nf4"),
        ({"training": "lora", "lora": {"adapter_bytes": 3}}, "lora.adapter_bytes: 3 is not a width; choose 2 or 4"),
        ({"training": "lora", "lora": {"ranks": 3}}, "lora.ranks: 3 is unknown; did you mean rank"),
        ({"training": "lora", "lora": 8}, "lora: 8 is no mapping"),
        ({"training": "lora", "precision": "fp8"}, "precision: 'fp8' is not modelled beside adapters"),
        ({"training": "lora", "optimizer_sharding": 3}, "optimizer_sharding: 3 is not modelled with adapters; choose"),
        ({"optimizer": "adafactor", "optimizer_sharding": 1}, "optimizer_sharding: 1 .* whole matrices"),
        ({"optimizer": "adam"}, "optimizer: 'adam' is not known; did you mean adamw"),
    ],
)
def test_refusals_of_workloads(workload: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"workload: {text}"):
        Workload(**workload)


@pytest.mark.parametrize(
    ("model", "workload", "space", "text"),
    [
        (LLAMA, {"training": "lora"}, {"sequence": True}, "space: sequence: true is not modelled"),
        (LLAMA, {"training": "lora"}, {"split_backward": True}, "space: split_backward: true is not modelled"),
        (LLAMA, {"training": "lora", "schedule": "zb"}, {}, "workload: schedule: zb puts off gradients of weights"),
        (LLAMA, {"optimizer": "muon"}, {}, "workload: optimizer: muon needs whole matrices, .*max_tp=1"),
        (LLAMA, {"optimizer": "adafactor"}, {"max_tp": 2}, "optimizer: adafactor needs whole matrices, .*max_tp=1"),
        (named_model("gpt_3b"), {"training": "lora", "lora": {"targets": "gate"}}, {}, "no matrix gate"),
        (
            MIXED,
            {"training": "lora"},
            {},
            "down and gate and up would be those of experts too.*=attention",
        ),
        (
            replace(MIXED, extra_layers=MIXED.layers[-1:]),
            {"training": "lora", "lora": {"targets": "qv"}},
            {},
            "lora is not modelled for layers that predict further tokens",
        ),
        (
            MIXED,
            {"training": "lora", "lora": {"targets": "qv", "storage": "nf4"}},
            {},
            "nf4 is not modelled",
        ),
    ],
)
def test_refusals_of_problems(model: ModelSpec, workload: dict[str, Any], space: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Problem(CLUSTER, model, Workload(**workload), Space(**space))


@given(targets=SOME | st.just("qv"), optimizer=st.sampled_from(("adamw", "lion_8bit", "sgd")))
def test_problems_go_through_files(targets: list[str] | str, optimizer: str) -> None:
    """With everything that is trained; a problem of full AdamW has the file that it always had."""
    work = replace(lora_work(targets=targets, storage="nf4_double"), optimizer=optimizer)
    problem = Problem(CLUSTER, LLAMA, work)
    data = problem_to_dict(problem)
    assert problem_from_section(Section(data, "problem")) == problem
    assert problem_sha256(problem) != problem_sha256(replace(problem, workload=lora_work(targets=targets)))
    plain = problem_to_dict(Problem(CLUSTER, LLAMA))
    assert not {"training", "lora", "optimizer"} & set(plain["workload"])
