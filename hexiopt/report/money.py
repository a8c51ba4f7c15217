"""What a plan costs where the price of its machines is known."""

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.style import amount, count


def money(problem: Problem, plan: Plan, cost: Cost) -> list[tuple[str, str]]:
    """The price of the machines that the plan uses, per step and per trillion tokens, in the currency of their
    `price_per_hour`; empty where no machine states one."""
    machines = [problem.cluster.machines[m] for m in set(problem.cluster.machine_of[list(plan.devices())].tolist())]
    prices = [machine.price_per_hour for machine in machines if machine.price_per_hour is not None]
    if not prices:
        return []
    per_s = sum(sorted(prices)) / 3600
    unpriced = len(machines) - len(prices)
    beside = f" (without {count(unpriced, 'machine')} of unknown price)" if unpriced else ""
    step, trillion = amount(per_s * cost.step_time_s), amount(per_s / cost.tokens_per_s * 1e12)
    return [("price", f"{step} per step, {trillion} per trillion tokens{beside}")]
