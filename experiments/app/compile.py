"""Compiles all numba kernels once per machine, so that no search spends its time limit on it; `make install` runs it.

python -m experiments.app.compile
"""

from dataclasses import replace

from experiments.app.configurations import named_cluster, named_model
from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.registry import make_solver


def main() -> None:
    """Run the compiled parts of bounds, planners and proofs on small problems."""
    model = replace(named_model("gpt2_345m"), num_layers=4)
    space = Space(replicas=False, max_micro_batch_size=1)
    cluster = replace(named_cluster("small_mixed"), groups=(), links=())
    for schedule in (ONE_F_ONE_B.name, INTERLEAVED.name):
        workload = Workload(global_batch=8, seq_len=512, schedule=schedule)
        problem = Problem(cluster, model, workload, space)
        lower_bound_s(PlanPricer(problem), 2.0)
        for solver in ("portfolio", "columns"):
            make_solver(solver).solve(problem, Budget(120.0, max_steps=60))
    workload = Workload(global_batch=8, seq_len=512, schedule=ONE_F_ONE_B.name, optimizer_sharding="1")
    provable = Problem(named_cluster("hexiscale_case_study"), model, workload, space)
    make_solver("exact").solve(provable, Budget(600.0, max_steps=2_000))  # to the end, so that all of it has run


if __name__ == "__main__":
    main()
