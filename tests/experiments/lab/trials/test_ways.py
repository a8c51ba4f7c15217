"""Every way of communicating trains to the same losses, over gloo and, where there is a GPU, over NCCL on it alone."""

import gzip
import json
from pathlib import Path

import pytest

from experiments.lab.trials.plans import TrialPlan, trial_plans
from experiments.lab.trials.trial import ExchangeTime, Trial, TrialRequest, exchange_in, try_plan
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.problem.workload import Workload
from tests.experiments.lab.trials.gpu import HAS_GPU, first_gpu, needs_gpu
from tests.runtime.memory_cases import LLAMA
from tests.solvers.problems import cluster

__all__ = ["first_gpu"]
pytestmark = pytest.mark.usefixtures("first_gpu")

WAYS = {plan.name: plan for plan in trial_plans(cluster(("a", "fast", 4)), [LLAMA], LLAMA, Workload(4, 64, "fp32"))}
QUICK = ("small, 2 pipelines, ZeRO-1", "small, a stage of TP 2, one of 1")


def trial(plan: TrialPlan, folder: Path, launch_order: bool = True) -> Trial:
    path = folder / "plan.json"
    write_plan(path, plan.problem, plan.plan, PlanPricer(plan.problem).price(plan.plan), {})
    return try_plan(TrialRequest(path, 2, False, 240.0, shares_gpu=HAS_GPU, launch_order=launch_order))


@pytest.fixture(scope="module")
def losses(first_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    """Of one device."""
    alone = trial(WAYS["small, 1 device"], tmp_path_factory.mktemp("alone"))
    assert alone.trouble is None
    assert alone.exchange == ExchangeTime()
    return alone.losses


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS if "1 " not in name]
)
def test_ways_of_communicating(name: str, losses: tuple[float, ...], tmp_path: Path) -> None:
    made = trial(WAYS[name], tmp_path)
    assert made.trouble is None
    assert made.losses == pytest.approx(losses, rel=1e-4)
    assert made.exchange.total_s > 0


@needs_gpu
@pytest.mark.parametrize("launch_order", [False, True])
def test_orders_that_ranks_agree_on_need_no_order_of_nccls(
    launch_order: bool, losses: tuple[float, ...], tmp_path: Path
) -> None:
    for name in ("small, 2 pipelines of 2 stages, ZeRO-1", "small, 2 interleaved stages"):
        made = trial(WAYS[name], tmp_path, launch_order)
        assert (made.trouble, made.losses) == (None, pytest.approx(losses, rel=1e-4))


def write_trace(path: Path, *events: tuple[str, str, int, float, float]) -> Path:
    rows = [
        {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": begin, "dur": end - begin}
        for cat, name, tid, begin, end in events
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *rows]}).encode()))
    return path


def test_what_is_hidden_is_in_the_trace(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "gpu.json.gz",
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 0, 10),
        ("kernel", "ncclDevKernel_SendRecv", 21, 8, 14),
        ("kernel", "gemm", 7, 2, 5),
        ("kernel", "softmax", 7, 4, 6),
        ("kernel", "gemm", 7, 13, 20),
        ("cpu_op", "aten::mm", 1, 0, 30),
    )
    assert exchange_in(path) == ExchangeTime(pytest.approx(14e-6), pytest.approx(5e-6))  # type: ignore[arg-type]
    path = write_trace(
        tmp_path / "cpu.json.gz",
        ("user_annotation", "gloo:all_reduce", 2, 0, 10),
        ("cpu_op", "aten::copy_", 2, 0, 10),
        ("cpu_op", "aten::mm", 1, 9, 30),
    )
    assert exchange_in(path) == ExchangeTime(pytest.approx(10e-6), pytest.approx(1e-6))  # type: ignore[arg-type]
