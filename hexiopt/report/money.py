"""What a plan costs where the price of its machines is known."""

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.style import amount, count


def hourly(problem: Problem, plan: Plan) -> tuple[float | None, int]:
    """The price per hour of the machines that the plan uses, in the currency of their `price_per_hour`, and how many
    of them state none; None where all do."""
    machines = [problem.cluster.machines[m] for m in set(problem.cluster.machine_of[list(plan.devices())].tolist())]
    prices = [machine.price_per_hour for machine in machines if machine.price_per_hour is not None]
    return sum(sorted(prices)) if prices else None, len(machines) - len(prices)


def money(problem: Problem, plan: Plan, cost: Cost) -> list[tuple[str, str]]:
    """The price of the machines that the plan uses, per step and per trillion tokens, in words; empty where no machine
    states one."""
    per_hour, unpriced = hourly(problem, plan)
    if per_hour is None:
        return []
    per_s = per_hour / 3600
    beside = f" (without {count(unpriced, 'machine')} of unknown price)" if unpriced else ""
    step, trillion = amount(per_s * cost.step_time_s), amount(per_s / cost.tokens_per_s * 1e12)
    return [("price", f"{step} per step, {trillion} per trillion tokens{beside}")]
