"""What a cluster would gain from other machines and links: alternatives planned with one budget and compared.

The cluster as it is comes first; the other searches begin from its plan, if their solver can. Every plan found for one
alternative is offered to all others, which take it if it obeys their rules and is faster than the plan they have. So a
machine more never makes the plan worse, and a machine less never makes it better. The searches are jobs of a sweep:
they run on several processes, and finished ones are not run again.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from hexiopt.bounds import LowerBound, lower_bound, our_model
from hexiopt.errors import InputError
from hexiopt.files.plan_file import read_plan
from hexiopt.files.price_list import prices_for
from hexiopt.files.sweep_files import PLAN_FILE
from hexiopt.frame import Frame, align
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import number_in
from hexiopt.report.facts import price_per_hour
from hexiopt.report.style import amount, count, seconds
from hexiopt.solving import Budget, Pricer, valid_seed
from hexiopt.solving.referee import Refereed
from hexiopt.solving.registry import ALIASES, make_solver
from hexiopt.study.alternatives import ADD, BASE, LINK, TAKE, Alternative, Wishes, alternatives, with_prices
from hexiopt.study.compare import bound_limit_s
from hexiopt.study.inputs import constrain
from hexiopt.study.jobs import SweepJob
from hexiopt.study.price import certify
from hexiopt.study.replan.survivors import whole_pipelines
from hexiopt.study.solution import PlacedPlan
from hexiopt.study.sweep import run_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hexiopt.report.compared.tradeoff import Choice

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
        """The price per hour of the machines that the plan uses; None where one of them states no price."""
        price, unpriced = price_per_hour(self.alternative.problem, self.plan) if self.plan else (None, 0)
        return None if unpriced else price

    @property
    def price_per_trillion_tokens(self) -> float | None:
        """The price of 10¹² tokens on the machines that the plan uses; None where one of them states no price."""
        price = self.price_per_hour
        return None if price is None else price / 3600 / self.tokens_per_s * 1e12


@dataclass(frozen=True, repr=False)
class WhatIf(Frame):
    """Alternatives to a cluster, one row each.

    `options` has their plans, `bound` the lower bound of the cluster as it is.
    """

    options: tuple[Option, ...] = field(default=(), kw_only=True)
    bound: LowerBound = field(default_factory=lambda: LowerBound(0.0, {}), kw_only=True)

    @classmethod
    def among(cls, options: Sequence[Option], bound: LowerBound) -> "WhatIf":
        """Tabulate `options`, of which the first is the cluster as it is: machines, then links, best first."""
        base, *others = options
        order = [base, *sorted(others, key=lambda other: (_ORDER.index(other.alternative.change), other.step_time_s))]
        problem = base.alternative.problem
        rows = [_row(option, base) for option in order]
        title = f"{problem.model.name} on {problem.cluster.name}"
        return cls.of(rows, title=title, options=tuple(order), bound=bound)

    def choices(self) -> "list[Choice]":
        """The options with a plan as points of time and money; of GPUs where prices are unknown."""
        from hexiopt.report.compared.tradeoff import Choice  # here, because matplotlib is slow to import

        planned = [option for option in self.options if option.plan is not None]
        priced = all(option.price_per_hour is not None for option in planned)
        return [
            Choice(
                option.alternative.name,
                option.step_time_s,
                (option.price_per_trillion_tokens or 0.0) if priced else float(_gpus(option)),
                option.alternative.change,
            )
            for option in planned
        ]

    def plot(self) -> "Figure":
        """A matplotlib figure: price per trillion tokens over step time, and the options that no other beats in both.

        If a price is unknown, the number of GPUs takes its place.
        """
        from hexiopt.report.compared.tradeoff import tradeoff_figure

        priced = all(option.price_per_hour is not None for option in self.options if option.plan)
        return tradeoff_figure(self.choices(), self.title, "price per trillion tokens" if priced else "GPUs used")

    def __str__(self) -> str:
        return "\n".join(_text(self))


_ORDER = (BASE, ADD, TAKE, LINK)


def what_if(
    problem: Problem,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    prices: str | Path | Mapping[str, Any] | None = None,
    factor: float = 2.0,
    take: Sequence[str] | Sequence[Sequence[str]] = (),
    add: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
    pricer: str | None = None,
    folder: str | Path | None = None,
    bound_time_limit_s: float | None = None,
    processes: int | None = None,
    progress: bool | None = None,
    caller: str = "what_if",
    **options: Any,
) -> WhatIf:
    """What the cluster would gain from other machines and links: one row per alternative, with its plan in `options`.

    Alternatives are the cluster with one machine of a kind more or less, without all of a kind, with the rates of a
    kind of links multiplied by `factor`, and with what the price list `prices` offers, a file or a mapping
    (docs/questions.md); and what you state: without the machines in `take`, or with those in `add`, a number by the
    name of a machine of the cluster or on offer. Several such sets are an alternative each. Each is searched
    with the same solver and budget, from the plan of the cluster as it is where the solver can begin from one. A plan
    found for one counts for every other that it is valid for, so a machine more never makes the plan worse. `gain` is
    in tokens per second, `bound_share` the dual value of a machine in the lower bound as a share of its throughput,
    `worth_per_hour` the price at which a token costs as much as now. `pricer` is the name of a declared cost model that
    prices plans instead of ours.

    With a `folder` the same call resumes: it keeps the plans there. `processes` run at once (by default as many as the
    solver's cores allow). Raises InputError, and KeyboardInterrupt after Ctrl-C, which says to call
    `caller` again.
    """
    budget, seed = Budget(time_limit_s, max_steps), valid_seed(seed)
    factor = number_in(factor, "factor", above=1.0, at_most=1000.0)
    limit_s = bound_limit_s(budget, bound_time_limit_s)
    refereed = make_solver(solver, options, pricer)
    solver = ALIASES.get(solver, solver)
    offered = prices_for(constrain(problem), prices)
    tried = alternatives(with_prices(problem, offered), offered, factor, Wishes(take, add))
    refereed.judge(problem)  # a cost model that lacks something is refused before anything is searched

    def job(alternative: Alternative, base: PlacedPlan | None = None) -> SweepJob:
        """The search for an alternative; it begins from the `base` plan as that is valid there, if its solver can."""
        start: Plan | None = None
        if base is not None and refereed.takes_start:
            judge = refereed.judge(alternative.problem)
            start = certify(alternative.problem, base, judge) or whole_pipelines(base, judge)
        bare = None if start is None else Plan(start.pipelines, start.schedule, start.sharding)
        which = (f"whatif={alternative.name}",)
        return SweepJob(which, alternative.problem, solver, seed, budget, dict(options), start=bare, pricer=pricer)

    with nullcontext(folder) if folder is not None else TemporaryDirectory() as path:

        def search(jobs: Sequence[SweepJob]) -> list[PlacedPlan | None]:
            run_jobs(jobs, Path(path), processes, progress, caller)
            return [_plan_of(Path(path), job, refereed) for job in jobs]

        plans = search([job(tried[0])])
        plans += search([job(alternative, plans[0]) for alternative in tried[1:]])
    bound = _bound(refereed.judge(tried[0].problem), tried[0].problem, limit_s)
    rows = [_option(k, tried, plans, refereed, bound) for k in range(len(tried))]
    if rows[0].plan is not None and bound.bound_s > rows[0].step_time_s:
        bound = LowerBound(rows[0].step_time_s, bound.machine_shares)  # rounding
    return WhatIf.among(rows, bound)


def _plan_of(folder: Path, job: SweepJob, solver: Refereed) -> PlacedPlan | None:
    """The plan that a search has left in its folder."""
    path = folder / job.key / PLAN_FILE
    try:
        file = read_plan(path) if path.is_file() else None
    except InputError:
        return None
    if file is None or job.problem is None:
        return None
    return PlacedPlan.of(job.problem, file.plan, file.solver, solver.judge(job.problem))


def _bound(judge: Pricer, problem: Problem, limit_s: float) -> LowerBound:
    ours = our_model(judge, problem)
    return LowerBound(judge.features.bound_s, {}) if ours is None else lower_bound(ours, limit_s)


def _option(
    k: int, tried: Sequence[Alternative], plans: Sequence[PlacedPlan | None], solver: Refereed, bound: LowerBound
) -> Option:
    """Alternative `k` with the fastest plan of all searches, its own of equal ones, and whose search found it."""
    alternative, best, name = tried[k], plans[k], tried[k].name
    judge = solver.judge(alternative.problem) if best is None else best.pricer
    for other, plan in zip(tried, plans, strict=True):
        valid = None if plan is None or other is alternative else certify(alternative.problem, plan, judge)
        if valid is not None and (best is None or valid.cost.step_time_s < best.cost.step_time_s * (1 - 1e-12)):
            record = plan.solver if plan else {}
            best, name = PlacedPlan.of(alternative.problem, valid, record, judge, valid.cost), other.name
    share = bound.machine_shares.get(alternative.like) if alternative.like is not None else None
    return Option(alternative, best, name, None if share is None else share * alternative.number)


def _gpus(option: Option) -> int:
    return len(option.plan.devices()) if option.plan else 0


def worth_per_hour(option: Option, base: Option) -> float | None:
    """The price per hour at which the machines added (or removed) leave the price of a token as it is.

    None where prices are unknown.
    """
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


def _text(table: WhatIf) -> list[str]:
    base = table.options[0]
    money = any(option.price_per_hour is not None for option in table.options)
    shares = base.plan is not None and any(option.bound_share is not None for option in table.options)
    bound = ["bound"] if shares else []
    header = ["", "step", "gain", *bound, *(["per hour", "per T tok.", "worth/h"] if money else ["GPUs"])]
    cells = [header]
    for option, row in zip(table.options, table, strict=True):
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
    names, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    width = min(names, _WIDTH - sum(2 + number for number in others))
    rows = []
    for line in cells:
        name, *rest = _wrap_name(line[0], width)
        rows += [[name, *line[1:]], *([more, *[""] * len(others)] for more in rest)]
    lines = [f"What if: {table.title}", "", *align(rows, [False, *[True] * len(others)], width)]
    return [*lines, "", *_notes(table, base, money, shares)]


def _wrap_name(name: str, width: int) -> list[str]:
    """Break the name of an alternative into lines of `width` characters; text in brackets stays together."""
    whole = re.sub(r"\(.*?\)", lambda match: match[0].replace(" ", "\xa0"), name)
    return [
        line.replace("\xa0", " ") for line in wrap(whole, width, subsequent_indent="  ", break_on_hyphens=False)
    ] or [""]


def _notes(table: WhatIf, base: Option, money: bool, shares: bool) -> list[str]:
    notes = []
    if base.plan is not None and table.bound.bound_s:
        gap = 1 - table.bound.bound_s / base.step_time_s
        problem, bound = base.alternative.problem, f"{seconds(table.bound.bound_s)} (gap {max(0.0, gap):.1%})"
        notes += wrap(f"As it is, none of the {problem.plans_in_words} is faster than {bound}.", _WIDTH)
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
    shared = sum(option.found_for != option.alternative.name for option in table.options if option.plan)
    if shared:
        notes.append(f"{count(shared, 'plan')} came from the search for another alternative.")
    return notes
