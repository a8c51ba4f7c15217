"""Calls of every compiled function, in two parts that `compile.py` runs at once.

python -m experiments.app.kernels bounds|search
"""

import math
import sys
from dataclasses import replace

from experiments.app.configurations import named_cluster, named_model
from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.compiled.layers import policies_of, split
from solvers.compiled.state import copy_rows, copy_state, forget_touched, new_state, new_work, touch, touch_all
from solvers.compiled.step import evaluate, refresh
from solvers.compiled.tables import tables_of
from solvers.loop.edits import count_devices, is_group, lowest, pick
from solvers.loop.loading import load_kernels
from solvers.registry import make_solver


def compile_bounds() -> None:
    """Bound small problems, and prove the best plan of a small one."""
    for schedule in (ONE_F_ONE_B.name, INTERLEAVED.name):
        lower_bound_s(PlanPricer(_problem(schedule)), 2.0)
    problem = _problem(ONE_F_ONE_B.name)
    workload = replace(problem.workload, optimizer_sharding="1")
    provable = replace(problem, cluster=named_cluster("hexiscale_case_study"), workload=workload)
    make_solver("exact").solve(provable, Budget(600.0, max_steps=2_000))  # to the end: all of it has run


def _problem(schedule: str) -> Problem:
    cluster = replace(named_cluster("small_mixed"), groups=(), links=())
    workload = Workload(global_batch=8, seq_len=512, schedule=schedule)
    model = replace(named_model("gpt2_345m"), num_layers=4)
    return Problem(cluster, model, workload, Space(replicas=False, max_micro_batch_size=1))


def compile_search() -> None:
    """Call every compiled function of `solvers/compiled` and `solvers/loop` that Python calls."""
    problem = _problem(AUTO)
    tables = tables_of(PlanPricer(problem))
    work, state, other = new_work(tables), new_state(tables), new_state(tables)
    state.plan[0]["num_pipelines"] = state.pipelines[0]["num_stages"] = 1
    state.stages[0, 0]["mask"] = 1
    refresh(tables, work, state)
    touch_all(work, state)
    touch(work, 0)
    evaluate(tables, work, state, math.inf)
    copy_state(state, other)
    copy_rows(work, state, other)
    forget_touched(work)
    split(tables, work, state, 0)
    policies_of(tables, state, 0, 0)
    load_kernels()
    is_group(tables, 0, lowest(1, pick(1, count_devices(1))))


if __name__ == "__main__":
    {"bounds": compile_bounds, "search": compile_search}[sys.argv[1]]()
