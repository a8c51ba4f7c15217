"""Memory of adapters beside what is priced: states to the byte, activations and logits by saved tensors."""

from dataclasses import replace

import pytest

from hexiopt.problem.lora import Lora
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.schedules.registry import GPIPE
from tests.experiments.lab.test_memory_use import check_all, check_saved
from tests.runtime.expert_plans import expert_model
from tests.runtime.memory_cases import LLAMA, compare, even_plan
from tests.slow import slow_but

CASES = [
    # targets, policy, TP, precision, bytes of an adapter
    ("all", "none", 1, "bf16", 4),
    ("qv", "none", 2, "bf16", 2),
    ("all", "full", 1, "fp32", 4),
    *((targets, policy, 1, "bf16", 4) for targets in ("all", "attention") for policy in RECOMPUTE_POLICIES),
    *(("all", policy, 2, "bf16", 4) for policy in RECOMPUTE_POLICIES),
    ("qv", "full", 1, "bf16", 4),
]


def workload(targets: str, precision: str = "bf16", adapter_bytes: int = 4) -> Workload:
    return Workload(4, 128, precision, training="lora", lora=Lora(4, targets, adapter_bytes=adapter_bytes))


@pytest.mark.parametrize(("targets", "policy", "tp", "precision", "width"), slow_but(CASES[:3], CASES))
def test_adapters_hold_what_is_predicted(targets: str, policy: str, tp: int, precision: str, width: int) -> None:
    """Two stages under 1F1B; no masters."""
    comparisons = compare(even_plan(LLAMA, policy=policy, tp=tp), LLAMA, workload(targets, precision, width))
    check_all(comparisons)
    assert {comparison.measured.master for comparison in comparisons} == {0}


@pytest.mark.slow
def test_what_attention_recomputes_alone_is_predicted_within_3_percent() -> None:
    """With adapters of queries and values under selective recompute, the last layer counts to its end."""
    first, last = compare(even_plan(LLAMA, policy="selective"), LLAMA, workload("qv"))
    assert 0 <= first.off("activations") <= 0.03
    check_saved(last)


FROZEN = [("qwen2_moe", "attention"), ("deepseek_v3", "o"), ("granitemoehybrid", "attention"), ("nemotron_h", "qv")]


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize(("model_type", "targets"), FROZEN)
def test_frozen_experts_hold_as_much_less_as_is_predicted(model_type: str, targets: str, policy: str) -> None:
    """Than trained ones: states but for biases that balance, and of activations what frozen matrices
    read, as the rows that come to experts."""
    model, full = expert_model(model_type, 2, hidden_size=64, inner=48), Workload(4, 64, "fp32", routing="forced")
    plan, lora = even_plan(model, policy=policy, stages=1), replace(full, training="lora", lora=Lora(4, targets))
    (trained,), (frozen,) = (compare(plan, model, work) for work in (full, lora))
    assert [frozen.off(part) for part in ("gradients", "master", "optimizer", "logits")] == [0.0] * 4
    assert frozen.off("weights") == pytest.approx(0, abs=1e-3)
    predicted, measured = (
        getattr(trained, of).activations - getattr(frozen, of).activations for of in ("predicted", "measured")
    )
    assert predicted == pytest.approx(measured, rel=0.01)


def test_sharded_adapters() -> None:
    """Under ZeRO-1 moments are shared, frozen weights are not; all tensors at once are closely those predicted."""
    plan = even_plan(LLAMA, GPIPE, stages=1, pipelines=2, batches=2, zero=1)
    (first, second) = compare(plan, LLAMA, workload("all"))
    check_all([first, second])
    assert first.measured.optimizer == first.measured.gradients  # two FP32 moments, of half
    assert -0.03 <= first.predicted.tensors / first.peak_bytes - 1 <= 0.1
