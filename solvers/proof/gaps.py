"""The driver of proofs: how far the best plan of a search is from the optimum, for problems small enough.

The proof asks whether any plan takes T or less, where T is the best plan's step time less a share. If none does, T is a
lower bound; if one does, it is the new best plan. The shares fall until the plan is proved optimal. The proof covers
1F1B and GPipe with ZeRO-0 and ZeRO-1, and stages of one TP group and one range of layers. Where a problem allows more,
the bound holds only for that part of the plan space, and the result states it as a restricted bound.
"""

import math

from hexiopt.bounds.stage_cells import shares_across
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, quoted
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving.result import OPTIMALITY_TOLERANCE, RestrictedBound
from solvers.core.search import Allowance, Search
from solvers.proof.combinations import Answer
from solvers.proof.partitions import Packings, PackingTable
from solvers.proof.proof import BudgetSpentError, Proof
from solvers.proof.tables import ProofTables

_SHARES = (0.0099, 0.003, 0.001, OPTIMALITY_TOLERANCE / 2)  # shares of the best step time, asked in this order
_WIDER = (0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02)  # shares asked in this order if the first one is left open
_RELAXED = 0.15  # share of the remaining budget for the relaxations' bound, which then goes first
_FIRST = 0.9  # share of the remaining budget for the first one: what it refutes, the wider ones need not ask
_MOST_USAGES = 1_000
_FOREVER_S = 1e9  # upper limit on the step time of any plan of interest
# Shares of another search's budget for the proof of what the rest of it found: where it covers the whole plan space,
# and where the best plan may be outside what it covers.
_WHOLE, _PART = 0.4, 0.15
_FEW_USAGES = 150  # 8 GPUs in two to four machines have 25 to 81
_LEAST_STEPS = 400  # fewer prove nothing
_COVERED = (GPIPE, ONE_F_ONE_B)


def is_provable(pricer: PlanPricer) -> bool:
    """Whether the proof covers the cluster and some plans: uniform machines with one interface each on a flat network,
    and few usages. Whether bounds hold for the prices, `hexiopt.bounds.our_model` says."""
    problem = pricer.problem
    cluster, workload = problem.cluster, problem.workload
    space = problem.space
    if space.sequence or space.uneven_chunks or space.depth or space.uneven_experts or cluster.groups or cluster.links:
        return False
    if not problem.model.equal_layers:
        return False
    if min(sharding_stages(workload)) > 1 or not any(schedule in _COVERED for schedule in problem.schedules):
        return False
    for m in problem.usable_by_machine:
        machine = cluster.machines[m]
        if not machine.is_uniform or machine.num_interfaces > 1:
            return False
    return num_usages(problem) <= _MOST_USAGES


def num_usages(problem: Problem) -> int:
    """In how many ways a pipeline can take devices of each machine."""
    return math.prod(len(devices) + 1 for devices in problem.usable_by_machine.values())


def not_covered(problem: Problem) -> str:
    """What the plan space allows and the proof does not cover, in words, each with the setting that leaves it out;
    empty where it covers everything."""
    workload = problem.workload
    covered = [str(schedule) for schedule in problem.schedules if schedule in _COVERED]
    parts = [
        *(
            f"the {schedule} schedule (workload.schedule={covered[-1] if covered else _COVERED[-1]})"
            for schedule in problem.schedules
            if schedule not in _COVERED
        ),
        *(["ZeRO-2 and 3 (workload.optimizer_sharding=1)"] if max(sharding_stages(workload)) > 1 else []),
        *(["replicated stages (space.replicas=false)"] if problem.space.replicas else []),
        *(["experts shared over machines (space.max_micro_batch_size=1)"] if shares_across(problem) else []),
        *(["other depths than the schedule's (space.depth=false)"] if problem.space.depth else []),
        *(["experts in any numbers (space.uneven_experts=false)"] if problem.space.uneven_experts else []),
    ]
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def checked_gap(gap: float) -> float:
    """`solver.gap`, at which a search is done. Raises InputError where it is no fraction."""
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0.0 <= gap < 1.0:
        raise InputError(f"solver.gap: {quoted(gap)} is out of range; state a fraction from 0 to below 1")
    return gap


def prove(run: Search, packings: type[Packings] = PackingTable) -> None:
    """Prove gaps of the best plan of `run` from 1 % down to nothing, or wider ones, within its budget; better plans are
    found on the way. Without a plan, look for any first. The problem must be provable. `packings` decide the first
    level."""
    covered = [schedule for schedule in run.problem.schedules if schedule in _COVERED]
    proofs = [Proof(ProofTables(run.exact_pricer, schedule), run, packings) for schedule in covered]
    rest = not_covered(run.problem)
    if run.plan is None:
        try:
            answer = _answer(proofs, _FOREVER_S, run.until())
        except BudgetSpentError:
            return
        run.exhausted = answer == "none" and not rest
        if answer != "found":
            return
    enough = run.enough_gap
    first, *smaller = [share for share in _SHARES if share > enough] + ([enough] if enough else [])
    if _proved(run, proofs, first, run.allowance(_FIRST), rest):
        for share in smaller:
            if not _proved(run, proofs, share, run.until(), rest):
                return
        return
    if not rest and run.budget.max_steps is None:  # the clock determines the bound
        run.relax(_RELAXED * run.left_s())
    for share in _WIDER:
        asked = share > first and run.best_s * (1 - share) > run.bound_s
        if asked and not _proved(run, proofs, share, run.until(), rest):
            return


def _proved(run: Search, proofs: list[Proof], share: float, allowed: Allowance, rest: str) -> bool:
    """Whether no plan is better than the best one by more than `share`; finds better plans on the way."""
    answer: Answer = "found"
    while answer == "found":
        limit_s = run.best_s * (1 - share)
        try:
            answer = _answer(proofs, limit_s, allowed)
        except BudgetSpentError:
            return False
    if answer == "none":
        if rest:
            run.restricted_bound = RestrictedBound(limit_s, f"plans without {rest}")
        else:
            run.bound_s = max(run.bound_s, limit_s)
    return answer == "none"


def _answer(proofs: list[Proof], limit_s: float, allowed: Allowance) -> Answer:
    answers = list[Answer]()
    for proof in proofs:
        answers.append(proof.answer(limit_s, allowed))
        if answers[-1] == "found":
            return "found"
    return "open" if "open" in answers else "none"


def share_for_proof(run: Search) -> float:
    """The share of the budget that another search should leave for `prove`: 0 where too little can be expected."""
    steps, share = run.budget.max_steps, _PART if not_covered(run.problem) else _WHOLE
    ours = run.our_model
    if ours is None or not is_provable(ours) or num_usages(run.problem) > _FEW_USAGES:
        return 0.0
    return share if steps is None or steps * share >= _LEAST_STEPS else 0.0
