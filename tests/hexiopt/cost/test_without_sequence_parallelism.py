"""TP groups without sequence parallelism: what every rank holds whole, computes whole, and sends whole."""

from contextlib import nullcontext
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import MemoryModel
from hexiopt.cost.executors.routes import route, token_transfers
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import write_program
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import EXECUTOR, TRAINERS
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import catalogue
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.units import GIB
from tests.strategies import models

LLAMA_70B = ModelSpec(
    name="llama2_70b",
    architecture="llama",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=28672,
    vocab_size=32000,
    max_positions=4096,
)
WHOLE, DIVIDED = Workload(512, sequence_parallel=False), Workload(512)
CLUSTER = Cluster.of({"h100_80gb_sxm": 128}, inter_gb_per_s=50, gpus_per_machine=8, name="c")


def of_70b(workload: Workload) -> Problem:
    return Problem(CLUSTER, LLAMA_70B, workload)


def two_stages(tp: int = 8) -> Plan:
    """NVIDIA/Megatron-LM#1031: PP 2 with TP 8 on 128 H100, which ran out of memory without sequence parallelism."""
    pipelines = 64 // tp
    groups = [tuple(range(tp * k, tp * (k + 1))) for k in range(2 * pipelines)]
    return Plan(
        tuple(
            Pipeline((Stage.of(groups[p], 0, 40), Stage.of(groups[pipelines + p], 40, 80)), 512 // pipelines)
            for p in range(pipelines)
        ),
        sharding=Sharding(1),
    )


@given(models(), st.sampled_from((1, 2, 3, 8)), st.sampled_from((100, 4096)), st.integers(1, 3))
def test_norms_and_layer_inputs_are_whole(model: ModelSpec, tp: int, seq_len: int, size: int) -> None:
    """Korthikanti et al., arXiv 2205.05198, equations 2 and 4, without dropout: of 10 + 24/t bytes a token, hidden
    size and layer, 8 are inputs and outputs of two norms; with sequence parallelism these are divided too."""
    gpu, work = catalogue()["a100_80gb_sxm"], Workload(8, seq_len)
    divided = MemoryModel(model, work, gpu, tp, size)
    whole = MemoryModel(model, replace(work, sequence_parallel=False), gpu, tp, size)
    more = size * (seq_len - ceil(seq_len / tp))
    norm = 4 * model.hidden_size + (8 if model.norm_bias else 4)
    for policy, expected in (("none", 2 * norm), ("selective", 2 * norm), ("full", 2 * model.hidden_size)):
        extra_bytes = whole.layer_activation_bytes(policy) - divided.layer_activation_bytes(policy)
        assert extra_bytes == pytest.approx(more * expected)


def test_a_70b_model_with_tp_8_keeps_almost_three_times_the_activations() -> None:
    """(8 + 26/8) / (34/8): about what the paper's formula says of GPT; here with grouped queries and a gated MLP."""
    whole, divided = (PlanPricer(of_70b(work)).price(two_stages()).pipelines[0].stages[0] for work in (WHOLE, DIVIDED))
    q, kv, ffn, h, s = 8192 / 8, 1024 / 8, 28672 / 8, 8192, 4096
    inner = 2 * (2 * q + 2 * kv) + 6 * ffn + 4 * 64 / 8  # q, k, v, output, MLP, log-sum-exp
    stage = 2 * 40 * s  # two micro-batches in flight
    assert whole.memory.activations == pytest.approx(stage * (8 * h + 8 + inner) + 2 * s * 9)
    assert divided.memory.activations == pytest.approx(stage * (h + 1 + inner) + 2 * s * 9)
    assert 2.5 < whole.memory.activations / divided.memory.activations < 3
    assert whole.memory.total - divided.memory.total > 18 * GIB


def test_a_layer_is_priced_as_in_a_framework_without() -> None:
    """Norms are computed whole, and the backward gathers no input again: 8 collectives of a layer, not 10."""
    plan, framework = two_stages(), replace(default_framework(), sequence_parallel=False)
    by_workload = PlanPricer(of_70b(WHOLE)).price(plan)
    by_framework = PlanPricer(of_70b(DIVIDED), framework).price(plan)
    for a, b in zip(by_workload.pipelines[0].stages, by_framework.pipelines[0].stages, strict=True):
        assert a.forward_s == pytest.approx(b.forward_s, rel=1e-3)  # but for the head's norm
        assert a.backward_s == pytest.approx(b.backward_s, rel=1e-3)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_receiver_takes_a_whole_copy(senders: int, receivers: int) -> None:
    here, there = tuple(range(senders)), tuple(range(8, 8 + receivers))
    pairs = token_transfers(here, there, divided=False)
    assert [(to, share) for _, to, share in pairs] == [(device, 1.0) for device in there]
    loads = [sum(sender == source for source, _, _ in pairs) for sender in here]
    assert max(loads) == ceil(receivers / senders)
    whole, divided = (route(CLUSTER, here, there, divided=flag) for flag in (False, True))
    assert whole.alone_s(1e9) >= divided.alone_s(1e9)


def test_without_tensor_parallelism_nothing_changes() -> None:
    small = replace(LLAMA_70B, num_layers=4)
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((8,), 2, 4)), 512),))
    whole, divided = (PlanPricer(Problem(CLUSTER, small, work)).price(plan) for work in (WHOLE, DIVIDED))
    assert whole == divided


def test_files_state_the_switch_only_where_it_is_off() -> None:
    on, off = of_70b(DIVIDED), of_70b(WHOLE)
    data = problem_to_dict(on), problem_to_dict(off)
    assert "sequence_parallel" not in data[0]["workload"]
    assert data[1]["workload"]["sequence_parallel"] is False
    assert [problem_from_section(Section(section, "plan.json")) for section in data] == [on, off]
    assert problem_sha256(on) != problem_sha256(off)
    data[1]["workload"]["sequence_parallel"] = "no"
    with pytest.raises(InputError, match=r"workload\.sequence_parallel: 'no' is not true or false"):
        problem_from_section(Section(data[1], "plan.json"))


def test_sequence_layouts_do_not_go_with_it() -> None:
    with pytest.raises(InputError, match=r"space: sequence: .*; choose workload.sequence_parallel=true, or space"):
        Problem(CLUSTER, LLAMA_70B, WHOLE, Space(sequence=True))


LACK_ZERO_1 = {"flashflex", "galvatron"}
ZERO_2 = {"torchtitan", "accelerate"}
WITHOUT = {"megatron", "megatron_bridge", "flagscale", "deepspeed", *ZERO_2}
SMALL = replace(LLAMA_70B, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11008)


@pytest.mark.parametrize("name", [name for name, trainer in TRAINERS.items() if trainer.is_launched])
@pytest.mark.parametrize("tp", [1, 8])
def test_trainers_state_it_or_refuse(name: str, tp: int) -> None:
    trainer = TRAINERS[name]
    groups = [tuple(range(tp * k, tp * (k + 1))) for k in range(8 // tp)]
    pipelines = tuple(Pipeline((Stage.of(devices, 0, 32),), 8 * tp) for devices in groups)
    plan = Plan(pipelines, sharding=Sharding(2 if name in ZERO_2 else 1))
    precision = "fp16" if name == "flashflex" else "bf16"  # the one that it trains in
    problem = Problem(CLUSTER, SMALL, Workload(64, 4096, precision, sequence_parallel=False))
    if name not in WITHOUT:
        ours = "false cannot be trained with tensor parallelism; take true, or constraints.max_tp=1"
        theirs = "no tensor parallelism without sequence parallelism; plan with"
        message = "ZeRO-1" if tp == 1 else ours if name == EXECUTOR else theirs
        with pytest.raises(InputError, match=message) if tp > 1 or name in LACK_ZERO_1 else nullcontext():
            write_program(problem, plan, trainer)
        assert restrict(problem, trainer).space.max_tp == 1
        return
    (text, *more) = (
        "\n".join(write_program(replace(problem, workload=work), plan, trainer).files.values())
        for work in (problem.workload, replace(problem.workload, sequence_parallel=True))
    )
    assert "sequence-parallel" not in text
    assert "sequence_parallel: true" not in text
    if name in ("megatron", "flagscale"):
        assert ("--sequence-parallel" in more[0]) == (tp > 1)
    if name == "torchtitan":
        assert ("enable_sequence_parallel = False" in text) == (tp > 1)
    if name == "megatron_bridge":
        assert ("model.sequence_parallel=false" in text) == (tp > 1) == ("model.sequence_parallel=true" in more[0])
