"""Like GPUs are named in the order of the plan, and a plan's price never changes by it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import read_plan
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.solving.naming import name_in_order, renumber
from tests.conftest import Run
from tests.experiments.command_line import QUICK

PROBLEM = hx.Problem(
    cluster=hx.Cluster.of({"h100_80gb_sxm": 8, "a100_80gb_sxm": 8}, 25),
    model=hx.model("llama2_7b"),
    workload=hx.Workload(global_batch=16),
)


def plan_of(*groups: tuple[int, ...]) -> Plan:
    """A pipeline with a stage on each of the groups."""
    cuts = [32 * k // len(groups) for k in range(len(groups) + 1)]
    stages = [Stage.of(group, cuts[k], cuts[k + 1], "full") for k, group in enumerate(groups)]
    return Plan((Pipeline(tuple(stages), 16),))


def in_order(problem: hx.Problem, plan: Plan) -> tuple[Plan, Cost]:
    pricer = PlanPricer(problem)
    return name_in_order(plan, pricer.price(plan), pricer)


def test_like_gpus_are_named_in_order() -> None:
    plan = plan_of((2, 3, 6, 7), (9, 15), (5, 1))
    cost = PlanPricer(PROBLEM).price(plan)
    named, price = in_order(PROBLEM, plan)
    assert named == plan_of((0, 1, 2, 3), (8, 9), (4, 5))
    assert price == PlanPricer(PROBLEM).price(named)
    assert price.step_time_s == cost.step_time_s


def test_excluded_and_unlike_gpus_stay() -> None:
    plan = plan_of((2, 3), (12, 13))
    without = PROBLEM.replace(space=PROBLEM.space.replace(exclude=("h100_80gb_sxm:0",)))
    assert in_order(without, plan)[0] == plan_of((1, 2), (8, 9))
    lab = PROBLEM.replace(cluster=hx.cluster("small_mixed"), workload=hx.Workload(global_batch=4, seq_len=512))
    slow = plan_of((0, 1), (4, 5))  # old:0 and old:1 share a bridge, old:2 and old:3 do not
    assert in_order(lab, slow) == (slow, PlanPricer(lab).price(slow))


@given(st.permutations(range(8)), st.permutations(range(8, 16)))
def test_a_permutation_within_machines_is_undone(first: list[int], second: list[int]) -> None:
    tidy = plan_of((0, 1, 2, 3), (8, 9, 10, 11), (4, 5), (12,))
    mixed = renumber(tidy, dict(enumerate([*first, *second])))
    assert in_order(PROBLEM, mixed)[0] == tidy


@pytest.mark.slow
def test_the_command_line_writes_such_a_plan(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(
        "name: one\nmachines:\n  - {name: h, gpu: h100_80gb_sxm, num_gpus: 8, intra_bandwidth_gb_per_s: 450}\n"
    )
    for seed in range(4):
        assert hexiopt("plan", *QUICK, "cluster=one.yaml", f"seed={seed}").code == 0
        text = (tmp_path / "out" / "plan.json").read_text()
        assert hexiopt("plan", *QUICK, "cluster=one.yaml", f"seed={seed}").code == 0
        again = (tmp_path / "out" / "plan.json").read_text()
        assert text == again, "equal runs write equal files"
        used = read_plan(tmp_path / "out" / "plan.json").plan.devices()
        assert used == tuple(range(len(used)))
