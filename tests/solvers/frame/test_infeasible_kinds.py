"""Memory proofs where layers have experts or are of several kinds: none is false, and most hopeless problems have
one."""

import itertools
import random
from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.huggingface import read_model
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.frame.infeasible import memory_infeasibility
from solvers.registry import make_solver
from tests.conftest import ROOT, STRESS
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.drawn_experts import drawn_with_experts
from tests.solvers.oracle import TooManyError, every_plan

LITTLE_GIB = (0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0)
MOST = 1500  # plans to price of a problem


def a_plan_fits(problem: Problem) -> bool | None:
    """None where there are too many plans to say that none does."""
    model = PlanPricer(problem)
    try:
        for plan in itertools.islice(every_plan(problem, 20_000), MOST):
            if model.price(plan).fits:
                return True
    except TooManyError:
        return None
    return False if sum(1 for _ in itertools.islice(every_plan(problem, 20_000), MOST + 1)) <= MOST else None


@pytest.mark.parametrize("count", slow_but([16], [16, 300 if STRESS else 40]))
def test_no_memory_proof_is_false(count: int) -> None:
    proved = hopeless = 0
    for number in range(count):
        rng = random.Random(number)
        problem = drawn_with_experts(
            number, num_layers=rng.randint(1, 3), several=number % 3 > 0, memory_gib=LITTLE_GIB
        )
        fits = a_plan_fits(problem)
        proof = memory_infeasibility(problem, PlanPricer(problem).stages)
        assert not (proof and fits), (number, proof)
        proved += proof is not None
        hopeless += fits is False
    assert proved > min(4, 0.1 * count)
    assert 2 * proved >= hopeless


def test_published_models_say_what_is_missing() -> None:
    """DeepSeek-V3, of two kinds, and Mixtral, of one, on eight GPUs of 16 and 8 GiB."""
    for name, kinds in (("deepseek_v3", 2), ("mixtral_8x7b", 1)):
        model = read_model(ROOT / "conf" / "model" / f"{name}.yaml")
        problem = replace(problems.easy(), model=model, workload=Workload(16, 4096))
        assert len(model.kinds) == kinds
        result = make_solver("portfolio").solve(problem, Budget(20.0))
        assert result.status is Status.INFEASIBLE
        assert "GiB" in result.reason


def test_a_model_of_kinds_fits_on_more_devices() -> None:
    """The proof ends where the states of dense layers and of experts have room."""
    proofs = []
    for machines in (1, 2, 4, 8):
        cluster = problems.cluster(*((f"m{k}", "fast", 4) for k in range(machines)))
        model = read_model(ROOT / "conf" / "model" / "qwen3_30b_a3b.yaml")
        problem = Problem(cluster, model, Workload(16, 512))
        proofs.append(memory_infeasibility(problem, PlanPricer(problem).stages) is not None)
    assert proofs == sorted(proofs, reverse=True)
    assert proofs[0]
