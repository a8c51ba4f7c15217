"""Does it fit, how fast, and what then: an answer in seven lines, without a kernel or a network.

Limits are exact for a single pipeline where `capacity.py` answers; elsewhere a search finds what fits. The plan is of a
solver that starts at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.files.price_list import prices_for
from hexiopt.numbers.errors import Evidence
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from hexiopt.report.evidence import SpeedInterval, evidence_of, speed_interval
from hexiopt.report.notes import notes
from hexiopt.report.style import amount, count, gpu_names
from hexiopt.solving import Budget, Solver, valid_seed
from hexiopt.solving.registry import make_solver
from hexiopt.solving.result import Status
from hexiopt.study.alternatives import with_prices
from hexiopt.study.fit import limits_by_search
from hexiopt.study.fitting.capacity import PipelineLimits, is_exact, proof
from hexiopt.study.fitting.cures import Cure, cures
from hexiopt.study.fitting.offers import Offer, trillion_tokens
from hexiopt.study.fitting.offers import offers as best_offers
from hexiopt.study.fitting.owners import BEST, EQUAL, MAP, owners_tokens_per_s
from hexiopt.study.fitting.require import least_required
from hexiopt.study.inputs import constrain
from hexiopt.study.solution import PlacedPlan
from hexiopt.units import GIB

FORMAT, VERSION = "hexiopt.fit", 1
_WORDS = {MAP: "layer split by memory", EQUAL: "equal batches", BEST: "best card alone"}
_STEPS, _SOLVER, _MOST_CARDS = 20, "rules", 16
_LABEL, _WIDTH, _MOST_STAGES, _MOST_PIPELINES = 7, 120, 6, 3


@dataclass(frozen=True)
class Verdict:
    """Whether a problem fits, with the plan that says so; without one, `reason` and changes that help.

    `proved`: whether it is proved that nothing fits; `unmet`: what was required and is not there. `assumed` are figures
    that nobody stated.
    """

    problem: Problem
    plan: PlacedPlan | None
    proved: bool
    reason: str
    limits: PipelineLimits
    exact: bool
    cures: tuple[Cure, ...] = ()
    unmet: tuple[str, ...] = ()
    assumed: str = ""
    offers: tuple[Offer, ...] = ()

    @property
    def fits(self) -> str:
        """`yes`, `not found`, or `impossible` where that is proved."""
        return "yes" if self.plan else "impossible" if self.proved else "not found"

    @property
    def may_fit(self) -> bool:
        """Whether a search may find a plan where there is none: several pipelines hold more than one by sharded states
        alone, of which adapters have next to nothing."""
        settled = self.exact and self.problem.workload.adapters is not None
        return self.plan is None and not self.proved and not settled

    @cached_property
    def speed(self) -> SpeedInterval | None:
        """How far speeds of the kind of the plan were from what was predicted."""
        plan = self.plan
        return None if plan is None else speed_interval(self.problem, plan, plan.cost.tokens_per_s)

    @cached_property
    def owners(self) -> Mapping[str, float]:
        """Tokens per second of what owners do without a planner (NaN: does not fit); empty without a plan, and where
        there are no few cards."""
        few_cards = 1 < len(self.problem.usable_devices) <= _MOST_CARDS and not self.problem.model.shares_experts
        return owners_tokens_per_s(self.problem, compiled=False) if self.plan is not None and few_cards else {}

    def quantities(self) -> dict[str, int | float | None]:
        """The limits and the speed by the names that `require` has."""
        seq_len, micro_batch, num_layers = self.limits.seq_len, self.limits.micro_batch, self.limits.num_layers
        return {
            "context": None if seq_len is None else seq_len.problem.workload.seq_len,
            "micro_batch": None
            if micro_batch is None
            else max(line.micro_batch_size for line in micro_batch.pipelines),
            "layers": None if num_layers is None else num_layers.problem.model.num_layers,
            "tokens_per_s": None if self.plan is None else self.plan.cost.tokens_per_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """What a script reads: plain data, seconds and tokens, null for what does not fit."""
        speed = self.speed
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.problem.model.name,
            "cluster": self.problem.cluster.name,
            "fits": self.fits,
            "reason": self.reason,
            "step_time_s": self.plan and self.plan.cost.step_time_s,
            **self.quantities(),
            "tokens_per_s_interval": [speed.low, speed.high] if speed and speed.low else None,
            "evidence": speed and speed.grade,
            "limits_are_exact": self.exact,
            "beside_tokens_per_s": {name: None if math.isnan(rate) else rate for name, rate in self.owners.items()},
            "cures": [cure.to_dict() for cure in self.cures],
            "unmet": list(self.unmet),
            "offers": [offer.to_dict() for offer in self.offers],
            "assumed": self.assumed,
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """What may be overlooked in the problem, and why its plan is not trained here."""
        return notes(self.problem, self.plan)

    def __str__(self) -> str:
        return "\n".join(line for label, text in self.lines() for line in _wrap(label, text))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Labels and texts, a line or more each."""
        head = {"yes": "FITS", "not found": "NOT FOUND", "impossible": "DOES NOT FIT"}[self.fits]
        yield head, f"{question(self.problem)}{f' ({self.assumed}: assumed)' if self.assumed else ''}"
        if self.plan is not None and self.speed is not None:
            yield "speed", f"{self.plan.cost.tokens_per_s:,.0f} tokens/s; {self.speed}"
        limits = list(self._limits())
        if limits:
            of_one = "exact for one pipeline" if self.exact else "found by search, so more may fit"
            yield "limits", f"{' · '.join(limits)} ({of_one})"
        if self.plan is not None:
            yield "plan", "; ".join([*_pipelines(self.plan), self._memory(self.plan)])
        if self.owners and self.plan is not None:
            yield (
                "beside",
                f"{' · '.join(self._owners_in_words(self.plan.cost.tokens_per_s))} (all in {_storage(self.problem)})",
            )
        if self.plan is not None and (price := trillion_tokens(self.plan)) is not None:
            yield "money", f"{amount(price)} a trillion tokens"
        if self.reason:
            yield "reason", self.reason
        for number, cure in enumerate(self.cures):
            yield "" if number else "cures", str(cure)
        for label, lines in (("offers", self.offers), ("unmet", self.unmet), ("notes", self.notes)):
            for number, line in enumerate(lines):
                yield "" if number else label, str(line)

    def _limits(self) -> Iterator[str]:
        quantities = self.quantities()
        for name, noun in (("context", "context {:,}"), ("micro_batch", "micro-batch {:,}"), ("layers", "{:,} layers")):
            if (most := quantities[name]) is not None:
                yield "1 layer" if (name, most) == ("layers", 1) else noun.format(most)

    def _memory(self, plan: PlacedPlan) -> str:
        cost = plan.facts.tightest.cost
        text = f"{cost.memory.total / GIB:.1f} of {cost.limit_bytes / GIB:.1f} GiB on the fullest GPU"
        more = memory_risk(evidence_of(self.problem, plan), cost.limit_bytes / cost.memory.total)
        return f"{text}; {more}" if more else text

    def _owners_in_words(self, ours: float) -> Iterator[str]:
        for name, rate in self.owners.items():
            times = ours / rate if rate else math.nan
            than = f"{times:.2f} × slower" if times >= 1 else f"{1 / times:.2f} × faster"
            yield f"{_WORDS[name]} {'does not fit' if math.isnan(rate) else than}"


def memory_risk(runs: Evidence | None, spare: float) -> str:
    """A warning where published runs of the kind needed more than `spare` times what was predicted for them."""
    over = sum(ratio > spare for ratio in runs.memory) if runs is not None else 0
    return (
        f"tight: {over} of {len(runs.memory)} published runs needed that much more than predicted"
        if runs and over
        else ""
    )


def question(problem: Problem) -> str:
    """What is asked, in words."""
    workload, cluster = problem.workload, problem.cluster
    training = "full training" if workload.adapters is None else f"LoRA of rank {workload.lora.rank}"
    batch = f"{workload.global_batch} × {workload.seq_len:,} tokens"
    optimizer = "" if workload.optimizer == "adamw" else f", {workload.optimizer}"
    return f"{problem.model.name}, {training} ({_storage(problem)}){optimizer}, {batch}, on {cluster.name}"


def _storage(problem: Problem) -> str:
    adapters = problem.workload.adapters
    return problem.workload.precision if adapters is None else adapters.storage


def _wrap(label: str, text: str) -> list[str]:
    first = label.ljust(_LABEL) if len(label) < _LABEL else f"{label}  "
    return wrap(first + text, _WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)


def _pipelines(plan: PlacedPlan) -> Iterator[str]:
    for pipeline in plan.pipelines[:_MOST_PIPELINES]:
        stages = [_stage(plan, stage) for stage in pipeline.stages]
        more = [f"{len(stages) - _MOST_STAGES} more"] if len(stages) > _MOST_STAGES else []
        batches = f"{pipeline.num_micro_batches} × {pipeline.micro_batch_size} sequences"
        yield f"{' > '.join([*stages[:_MOST_STAGES], *more])}, {batches}"
    if len(plan.pipelines) > _MOST_PIPELINES:
        yield f"and {count(len(plan.pipelines) - _MOST_PIPELINES, 'pipeline')} more"


def _stage(plan: PlacedPlan, stage: Stage) -> str:
    again = sum(policy != "none" for policy in stage.policies()[0]) if len(stage.layers) == 1 else 0
    recompute = f" ({again} recomputed)" if again else ""
    number = f"{len(stage.devices)} " if len(stage.devices) > 1 else ""
    return f"{stage.num_layers} layers{recompute} on {number}{gpu_names(plan.problem.cluster, stage.devices)}"


def kernel_free(problem: Problem) -> PlanPricer:
    """Our cost model, which neither compiles nor loads a kernel."""
    return PlanPricer(problem, network=FairShares(compiled=False))


def verdict(
    problem: Problem,
    solver: str | Solver | type = _SOLVER,
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = _STEPS,
    *,
    require: Mapping[str, Any] | None = None,
    offers: str | Path | Mapping[str, Any] | None = None,
    assumed: str = "",
    **options: object,
) -> Verdict:
    """Whether `problem` fits, the speed to expect of a plan with an interval by published runs, the longest context,
    the largest micro-batch and the most layers, and what owners do without a planner beside it.

    Without a plan, `cures` has up to three changes that were seen to fit, the cheapest first. `require` maps context,
    micro_batch, layers and tokens_per_s to the least that is asked of them: `unmet` says which fall short. `offers` is
    a price list (docs/questions.md): the three best of its cards, one more of each. The other
    arguments are as of `solve`; the default solver starts at once, others may find faster plans. Raises InputError.
    """
    problem, budget, seed = constrain(problem), Budget(time_limit_s, max_steps), valid_seed(seed)
    prices = prices_for(problem, offers)
    problem = with_prices(problem, prices)
    wanted = least_required(Section(dict(require or {}), "require"))
    exact = is_exact(problem)
    start: Plan | None = proof(problem) if exact else None
    refereed = make_solver(solver, options, kernel_free)
    judge = kernel_free(problem)
    result = refereed.solve(problem, budget, seed=seed, judge=judge, start=start if refereed.takes_start else None)
    plan = PlacedPlan.of(problem, result.plan, {}, judge, result.cost) if result.plan is not None else None
    limits = PipelineLimits.of(problem) if exact else limits_by_search(problem, refereed, budget, seed)
    answer = Verdict(
        problem,
        plan,
        result.status == Status.INFEASIBLE,
        "" if plan else result.reason.partition(";")[0],
        limits,
        exact,
        tuple(cures(problem)) if plan is None else (),
        assumed=assumed,
        offers=() if offers is None else best_offers(problem, plan, prices, refereed, budget, seed),
    )
    return _judge(answer, wanted)


def _judge(answer: Verdict, wanted: Mapping[str, float]) -> Verdict:
    quantities = answer.quantities()
    unmet = [
        f"{name} {value or 0:,.10g} is less than the {least:,.10g} required"
        for name, least in wanted.items()
        if (value := quantities[name]) is None or value < least
    ]
    return replace(answer, unmet=tuple(unmet))
