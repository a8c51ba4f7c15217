"""What plans, problems and files come to, as plain numbers and texts.

The only file here that knows hexiopt's classes: when they change, change this, and the golden files stay.
"""

import hashlib
import json
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from hexiopt.cost.cost import copy_costs
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.files.plan_file import plan_from_section, plan_to_dict, read_plan
from hexiopt.files.problem_file import problem_from_section
from hexiopt.numbers.frameworks import frameworks
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from hexiopt.solving import Budget
from solvers.registry import make_solver

Data = dict[str, Any]
_NEVER_S = 3600.0


def problem_of(data: Data) -> Problem:
    """The problem that a plan file's `problem` describes."""
    return problem_from_section(Section(data, "problem"))


def pricer(problem: Problem, framework: str) -> PlanPricer:
    """What prices plans of a problem, run by a framework."""
    return PlanPricer(problem, frameworks()[framework])


def price(model: PlanPricer, plan_data: Data) -> Data:
    """Seconds of a plan, and bytes of each part of memory per device, in the order of stages and replicas.

    `executor_end_s` is [pipelines][executors], `memory_bytes[part]` [devices]. A plan that is refused has `refusal`
    alone.
    """
    try:
        plan = plan_from_section(Section(plan_data, "plan"), model.problem.cluster)
        cost = model.price(plan)
    except ValueError as error:
        return {"refusal": str(error)}
    memory = [
        (copy_cost.memory, copy_cost.limit_bytes)
        for _, _, devices, copy_cost in copy_costs(plan, cost)
        for _ in devices
    ]
    return {
        "step_time_s": cost.step_time_s,
        "pipeline_s": cost.pipeline_s,
        "gradient_sync_s": cost.gradient_sync_s,
        "optimizer_s": cost.optimizer_s,
        "mfu": cost.mfu,
        "executor_end_s": [list(pipeline.executor_end_s) for pipeline in cost.pipelines],
        "memory_bytes": {part: [getattr(each, part) for each, _ in memory] for part in MEMORY_PARTS}
        | {"limit": [limit for _, limit in memory]},
    }


def solve(solver: str, problem: Problem, max_steps: int, seed: int) -> Data:
    """What a solver finds in so many steps, however long they take: status, step time and hash of the plan.

    Not the reason where it finds none, for how long a reason is thought about depends on the clock.
    """
    try:
        result = make_solver(solver).solve(problem, Budget(_NEVER_S, max_steps), seed=seed)
    except InputError as error:
        return {"refusal": str(error)}
    outcome: Data = {"status": str(result.status)}
    if result.plan is None or result.cost is None:
        return outcome
    text = json.dumps(plan_to_dict(result.plan, problem.cluster), sort_keys=True)
    return outcome | {"step_time_s": result.cost.step_time_s, "plan_sha256": hashlib.sha256(text.encode()).hexdigest()}


def message(kind: str, text: str) -> str:
    """The error line of a file of a `kind` (plan, cluster or model) with this text; "" if it is read and valid.

    A plan that is read but breaks rules has a line for each.
    """
    suffix = "json" if text.startswith(("{", "[")) else "yaml"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # messages name files without one
        path = Path(f"{kind}.{suffix}")
        path.write_text(text, encoding="utf-8")
        try:
            if kind == "plan":
                read = read_plan(path)
                return "\n".join(map(str, check(read.problem, read.plan)))
            (read_cluster if kind == "cluster" else read_model)(path)
        except InputError as error:
            return str(error)
    return ""
