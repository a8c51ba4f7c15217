"""What a cluster would gain from other machines and links: alternatives planned with one budget and compared.

The cluster as it is comes first, and the other searches begin from its plan, where their solver can. Every plan found
for one alternative is offered to all others, which take it where it obeys their rules and is faster than their own. So
a machine more never makes the plan worse, and a machine less never makes it better. The searches are jobs of a sweep:
they run on several processes, and what is done is not run again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hexiopt.bounds import LowerBound, lower_bound, our_model
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import read_plan
from hexiopt.files.sweep_files import PLAN_FILE
from hexiopt.frame import Frame
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.compared.choices import Choice
from hexiopt.report.facts import price_per_hour
from hexiopt.report.style import amount, count, seconds
from hexiopt.solving import Budget, Capabilities, Pricer
from hexiopt.solving.catalogue import made_solver
from hexiopt.solving.plugins import pricer_maker
from hexiopt.study.alternatives import ADD, BASE, LINK, TAKE, Alternative
from hexiopt.study.fitting import certified
from hexiopt.study.jobs import SweepJob
from hexiopt.study.replan.mending import kept
from hexiopt.study.solution import PlacedPlan
from hexiopt.study.sweeping import run_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80  # of the printed table


@dataclass(frozen=True, slots=True)
class Option:
    """An alternative with its plan; `found_for` names the alternative whose search found it.

    `bound_share` is the part of the bound's throughput that the machines added or taken have (None: unknown).
    """

    alternative: Alternative
    plan: PlacedPlan | None
    found_for: str
    bound_share: float | None

    @property
    def step_time_s(self) -> float:
        """Seconds, infinite without a plan."""
        return self.plan.cost.step_time_s if self.plan else float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, 0 without a plan."""
        return self.plan.cost.tokens_per_s if self.plan else 0.0

    @property
    def price_per_hour(self) -> float | None:
        """Of the machines that the plan uses; None where one of them states no price."""
        price, unpriced = price_per_hour(self.alternative.problem, self.plan) if self.plan else (None, 0)
        return None if unpriced else price

    @property
    def price_per_trillion_tokens(self) -> float | None:
        """Of the machines that the plan uses; None where one of them states no price."""
        price = self.price_per_hour
        return None if price is None else price / 3600 / self.tokens_per_s * 1e12


@dataclass(frozen=True, repr=False)
class WhatIf(Frame):
    """Alternatives to a cluster, one row each: `options` has their plans, `bound` the lower bound of the cluster as it
    is."""

    options: tuple[Option, ...] = field(default=(), kw_only=True)
    bound: LowerBound = field(default_factory=lambda: LowerBound(0.0, {}), kw_only=True)

    @classmethod
    def among(cls, options: Sequence[Option], bound: LowerBound) -> "WhatIf":
        """A table of `options`, of which the first is the cluster as it is: machines, then links, best first."""
        base, *others = options
        order = [base, *sorted(others, key=lambda one: (_ORDER.index(one.alternative.change), one.step_time_s))]
        problem = base.alternative.problem
        rows = [_row(option, base) for option in order]
        title = f"{problem.model.name} on {problem.cluster.name}"
        return cls.of(rows, title=title, options=tuple(order), bound=bound)

    def choices(self) -> list[Choice]:
        """The options with a plan as points of time and money; of GPUs where prices are unknown."""
        planned = [option for option in self.options if option.plan is not None]
        known = all(option.price_per_hour is not None for option in planned)
        return [
            Choice(
                option.alternative.name,
                option.step_time_s,
                (option.price_per_trillion_tokens or 0.0) if known else float(_gpus(option)),
                option.alternative.change,
            )
            for option in planned
        ]

    def plot(self) -> "Figure":
        """A matplotlib figure: price per trillion tokens over step time, and the options that no other beats in both.
        Where a price is unknown, the number of GPUs takes its place."""
        from hexiopt.report.compared.tradeoff import tradeoff_figure

        known = all(option.price_per_hour is not None for option in self.options if option.plan)
        return tradeoff_figure(self.choices(), self.title, "price per trillion tokens" if known else "GPUs used")

    def __str__(self) -> str:
        return "\n".join(_text(self))


_ORDER = (BASE, ADD, TAKE, LINK)


@dataclass(frozen=True)
class SearchSetup:
    """How every alternative is searched: by the solver `name` with `options`, the same budget and the same seed, and
    the declared cost model `pricer` (None: ours)."""

    name: str
    options: Mapping[str, Any]
    budget: Budget
    seed: int
    pricer: str | None = None

    def judge(self, problem: Problem) -> Pricer | None:
        """The cost model of an alternative's plans; None stands for our own."""
        return None if self.pricer is None else pricer_maker(self.pricer)(problem)

    def certified(self, problem: Problem, plan: Plan) -> PlacedPlan | None:
        """`plan` for an alternative, if it obeys every rule there and fits."""
        return certified(problem, plan, self.judge(problem))

    def job(self, alternative: Alternative, base: PlacedPlan | None = None) -> SweepJob:
        """The search for an alternative, which begins from what the `base` plan is there, if its solver can."""
        start = None
        if base is not None and made_solver(self.name, self.options).takes_start:
            start = self.certified(alternative.problem, base) or kept(base, alternative.problem)
        words = (f"whatif={alternative.name}",)
        bare = None if start is None else Plan(start.pipelines, start.schedule, start.sharding)
        own = words, alternative.problem, self.name, self.seed, self.budget, dict(self.options)
        return SweepJob(*own, start=bare, pricer=self.pricer)


def processes_for(able: Capabilities, stated: int | None) -> int:
    """The number of searches at once: as `stated`, or as many as the cores allow for a solver of this kind.

    More would share cores, and a time limit would mean less search.
    """
    cores = usable_cores()
    return cores // able.busy(cores) if stated is None else stated


def planned(
    found: Sequence[Alternative],
    search: SearchSetup,
    folder: Path,
    processes: int,
    bound_limit_s: float,
    progress: bool | None,
    caller: str = "what_if",
) -> WhatIf:
    """The alternatives, of which the first is the cluster as it is, with the best plan found for each, and their
    values.

    The searches are run in `folder`, on several processes, and begin from the plan of the first where they can. Raises
    KeyboardInterrupt after Ctrl-C, with the way to resume.
    """
    first, *others = found
    base = first.problem
    one = search.job(first)
    run_jobs([one], folder, processes, progress, caller)
    own = [_plan_of(folder / one.key, first, search)]
    jobs = [search.job(alternative, own[0]) for alternative in others]
    run_jobs(jobs, folder, processes, progress, caller)
    own += [_plan_of(folder / job.key, other, search) for job, other in zip(jobs, others, strict=True)]
    judge = search.judge(base) or PlanPricer(base)
    ours = our_model(judge, base)
    bound = LowerBound(judge.features.bound_s, {}) if ours is None else lower_bound(ours, bound_limit_s)
    options = []
    for k, alternative in enumerate(found):
        plan, name = _best(k, found, own, search)
        share = bound.machine_shares.get(alternative.like) if alternative.like is not None else None
        options.append(Option(alternative, plan, name, None if share is None else share * alternative.number))
    if options[0].plan is not None and bound.bound_s > options[0].step_time_s:
        bound = LowerBound(options[0].step_time_s, bound.machine_shares)  # rounding
    return WhatIf.among(options, bound)


def _plan_of(folder: Path, alternative: Alternative, search: SearchSetup) -> PlacedPlan | None:
    path = folder / PLAN_FILE
    try:
        read = read_plan(path) if path.is_file() else None
    except InputError:
        return None
    if read is None:
        return None
    return PlacedPlan.of(alternative.problem, read.plan, read.solver, search.judge(alternative.problem))


def _best(
    k: int, found: Sequence[Alternative], own: Sequence[PlacedPlan | None], search: SearchSetup
) -> tuple[PlacedPlan | None, str]:
    """The fastest plan of all searches for alternative `k`, its own of equal ones, and whose search found it."""
    best, name = own[k], found[k].name
    for other, plan in zip(found, own, strict=True):
        kept = None if plan is None or other is found[k] else search.certified(found[k].problem, plan)
        if kept is not None and (best is None or kept.cost.step_time_s < best.cost.step_time_s * (1 - 1e-12)):
            best, name = PlacedPlan.of(kept.problem, kept, plan.solver if plan else {}, kept.pricer), other.name
    return best, name


def _gpus(option: Option) -> int:
    return len(option.plan.devices()) if option.plan else 0


def worth_per_hour(option: Option, base: Option) -> float | None:
    """The price per hour at which what is added (or was taken) leaves the price of a token as it is; None where prices
    are unknown."""
    price = base.price_per_hour
    if price is None or not option.plan or not base.plan:
        return None
    gain = option.tokens_per_s / base.tokens_per_s - 1
    return price * (-gain if option.alternative.change == TAKE else gain) + 0.0  # never −0


def _row(option: Option, base: Option) -> dict[str, Any]:
    gain = option.tokens_per_s / base.tokens_per_s - 1 if option.plan and base.plan else None
    return {
        "alternative": option.alternative.name,
        "change": option.alternative.change,
        "step_time_s": option.step_time_s if option.plan else None,
        "tokens_per_s": option.tokens_per_s if option.plan else None,
        "gain": gain,
        "gpus_used": _gpus(option) if option.plan else None,
        "price_per_hour": option.price_per_hour,
        "price_per_trillion_tokens": option.price_per_trillion_tokens,
        "worth_per_hour": None if option is base else worth_per_hour(option, base),
        "bound_share": option.bound_share,
        "found_for": option.found_for if option.plan else None,
    }


# ------------------------------------------------------------------------------------- text


def _text(found: WhatIf) -> list[str]:
    base = found.options[0]
    money = any(option.price_per_hour is not None for option in found.options)
    shares = base.plan is not None and any(option.bound_share is not None for option in found.options)
    bound = ["bound"] if shares else []
    header = ["", "step", "gain", *bound, *(["per hour", "per T tok.", "worth/h"] if money else ["GPUs"])]
    cells = [header]
    for option, row in zip(found.options, found, strict=True):
        line = [option.alternative.name]
        line.append(seconds(option.step_time_s) if option.plan else "no plan")
        line.append("" if option is base or row["gain"] is None else f"{row['gain']:+.1%}")
        share = row["bound_share"]
        if shares:
            line.append("" if share is None else f"{-share if option.alternative.change == TAKE else share:+.1%}")
        if money:
            keys = ("price_per_hour", "price_per_trillion_tokens", "worth_per_hour")
            line += ["" if row[key] is None else amount(row[key]) for key in keys]
        else:
            line.append(f"{row['gpus_used'] or 0:,}")
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], _WIDTH - sum(width + 2 for width in widths[1:]))
    lines = [f"What if: {found.title}", ""]
    for line in cells:
        parts = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        name, *rest = _wrapped(line[0], widths[0])
        lines += ["  ".join([name.ljust(widths[0]), *parts[1:]]).rstrip(), *rest]
    return [*lines, "", *_notes(found, base, money, shares)]


def _wrapped(name: str, width: int) -> list[str]:
    """The name of an alternative in lines; what stands in brackets stays together."""
    whole = re.sub(r"\(.*?\)", lambda found: found[0].replace(" ", "\xa0"), name)
    return [
        line.replace("\xa0", " ") for line in wrap(whole, width, subsequent_indent="  ", break_on_hyphens=False)
    ] or [""]


def _notes(found: WhatIf, base: Option, money: bool, shares: bool) -> list[str]:
    notes = []
    if base.plan is not None and found.bound.bound_s:
        gap = 1 - found.bound.bound_s / base.step_time_s
        notes.append(f"As it is, no plan is faster than {seconds(found.bound.bound_s)} (gap {max(0.0, gap):.1%}).")
    if shares:
        notes += [
            "gain: in tokens per second. bound: the machine's share of the throughput in the",
            "lower bound, its dual value; a larger gain says that the base is far from it.",
        ]
    elif base.plan is not None:
        notes.append("gain: in tokens per second.")
    if money:
        notes += [
            "per hour, per T (trillion) tokens: machines that the plan uses. worth/h: the",
            "price per hour at which a token costs as much as now.",
        ]
    shared = sum(option.found_for != option.alternative.name for option in found.options if option.plan)
    if shared:
        notes.append(f"{count(shared, 'plan')} came from the search for another alternative.")
    return notes
