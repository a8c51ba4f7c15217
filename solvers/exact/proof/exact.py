"""`exact`: proves plans of small clusters optimal, or bounds their distance to the optimum (`proof.py`).

The proof asks whether any plan takes T or less, where T is the best plan's step time less a share. If none does, T is a
lower bound; if one does, it is the new best plan. The shares fall until the plan is proved optimal. The proof covers
1F1B and GPipe with ZeRO-0 and ZeRO-1, and stages of one TP group and one range of layers. Where a problem allows more,
the bound holds only for that part of the plan space, and the result states it as a restricted bound.
"""

import random
from dataclasses import dataclass

from hexiopt.bounds import lower_bound_s
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules, sharding_stages
from hexiopt.result import OPTIMALITY_TOLERANCE, RestrictedBound
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Capabilities
from solvers.core.search import Allowance, Search
from solvers.exact.cp_sat import warm_start
from solvers.exact.proof.proof import Answer, BudgetSpentError, Proof
from solvers.exact.proof.tables import ProofTables
from solvers.frame.solver import SearchSolver

_WARM_SHARE, _WARM_S = 0.15, 10.0  # share of the time limit for the portfolio's plan, and the most seconds
_SHARES = (0.0099, 0.003, 0.001, OPTIMALITY_TOLERANCE / 2)  # shares of the best step time, asked in this order
_WIDER = (0.02, 0.03, 0.05, 0.08, 0.12, 0.2)  # shares asked if the first one is left open
_FIRST = 0.6  # share of the remaining budget for each of them
_MOST_USAGES = 1_000
_FOREVER_S = 1e9  # upper limit on the step time of any plan of interest


@dataclass(frozen=True)
class Exact(SearchSolver):
    """The best plan, and a proof of its distance to the optimum. Steps are the portfolio's, and usages and combinations
    examined."""

    name = "exact"
    capabilities = Capabilities(kind="oracle", pricers="cost_model", cores=2)

    def search(self, run: Search, rng: random.Random) -> None:
        """Start from the portfolio's plan and prove gaps from 1 % down; problems that are not provable get the
        relaxations' bound."""
        covered = [schedule for schedule in schedules(run.problem.workload) if schedule in (GPIPE, ONE_F_ONE_B)]
        provable = bool(covered) and min(sharding_stages(run.problem.workload)) < 2 and is_provable(run.problem)
        share = min(_WARM_SHARE, _WARM_S / run.budget.time_limit_s) if provable else 0.5
        if not warm_start(run, share):
            return
        if not provable:
            if run.plan is not None and run.budget.max_steps is None:  # the clock determines the bound
                run.bound_s = max(run.bound_s, lower_bound_s(run.exact_pricer, run.left_s()))
            return
        proofs = [Proof(ProofTables(run.exact_pricer, schedule), run) for schedule in covered]
        self._prove(run, proofs)

    def _prove(self, run: Search, proofs: list[Proof]) -> None:
        rest = not_covered(run.problem)
        if run.plan is None:
            try:
                answer = _answer(proofs, _FOREVER_S, run.until())
            except BudgetSpentError:
                return
            run.exhausted = answer == "none" and not rest
            if answer != "found":
                return
        if self._proved(run, proofs, _SHARES[0], run.allowance(_FIRST), rest):
            for share in _SHARES[1:]:
                if not self._proved(run, proofs, share, run.until(), rest):
                    return
        else:
            for share in _WIDER:
                if self._proved(run, proofs, share, run.allowance(_FIRST), rest):
                    return

    def _proved(self, run: Search, proofs: list[Proof], share: float, allowed: Allowance, rest: str) -> bool:
        """Whether no plan is better than the best one by more than `share`; finds better plans on the way."""
        answer: Answer = "found"
        while answer == "found":
            limit_s = run.best_s * (1 - share)
            try:
                answer = _answer(proofs, limit_s, allowed)
            except BudgetSpentError:
                return False
        if answer == "none":
            self._bounded(run, limit_s, rest)
        return answer == "none"

    def _bounded(self, run: Search, limit_s: float, rest: str) -> None:
        if rest:
            run.restricted_bound = RestrictedBound(limit_s, f"plans without {rest}")
        else:
            run.bound_s = max(run.bound_s, limit_s)


def _answer(proofs: list[Proof], limit_s: float, allowed: Allowance) -> Answer:
    answers = list[Answer]()
    for proof in proofs:
        answers.append(proof.answer(limit_s, allowed))
        if answers[-1] == "found":
            return "found"
    return "open" if "open" in answers else "none"


def is_provable(problem: Problem) -> bool:
    """Whether the proof covers the cluster: uniform machines with one interface each on a flat network, and few
    usages."""
    cluster, usages = problem.cluster, 1
    if problem.space.sequence or cluster.groups or cluster.links:
        return False
    for m, devices in problem.usable_by_machine.items():
        machine = cluster.machines[m]
        usages *= len(devices) + 1
        if not machine.is_uniform or machine.num_interfaces > 1:
            return False
    return usages <= _MOST_USAGES


def not_covered(problem: Problem) -> str:
    """What the plan space allows and the proof does not cover, in words; empty where it covers everything."""
    parts = [
        *(
            f"the {schedule} schedule"
            for schedule in schedules(problem.workload)
            if schedule not in (GPIPE, ONE_F_ONE_B)
        ),
        *(f"ZeRO-{zero}" for zero in sharding_stages(problem.workload) if zero > 1),
        *(["replicated stages"] if problem.space.replicas else []),
    ]
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
