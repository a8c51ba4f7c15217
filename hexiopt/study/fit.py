"""What fits in memory: the longest context, the most layers and the largest micro-batch that have a plan.

A plan that obeys every rule is the proof that its request fits. A request without a plan is *impossible* where a solver
proves that, and else *not found*: one that fits may exist. A shorter context, or a model of fewer layers, fits where a
longer one does, so bisection keeps a request that fits below one without a plan. (Where constraints on plans break that
rule, the result still fits, but a larger one may too.)
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hexiopt.errors import InputError
from hexiopt.frame import Frame, align
from hexiopt.plan.plan import Plan
from hexiopt.problem.architectures import RANGES
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies, sharding_stages
from hexiopt.problem.workload import MAX_SEQ_LEN
from hexiopt.reading import number_in
from hexiopt.report.facts import largest_parts, memory_of_limit
from hexiopt.report.notes import training_notes
from hexiopt.report.style import clip, count
from hexiopt.solving import Budget, OnProgress, Pricer, PricerMaker, Solver, valid_seed
from hexiopt.solving.referee import Refereed
from hexiopt.solving.registry import make_solver
from hexiopt.solving.result import Status
from hexiopt.study.bisection import largest
from hexiopt.study.fitting.capacity import MAX_MICRO_BATCH, PipelineLimits
from hexiopt.study.inputs import constrain
from hexiopt.study.price import certify
from hexiopt.study.running import Interrupt, status_line
from hexiopt.study.solution import PlacedPlan

_PRECISION = 0.03
_GRAIN = {"seq_len": 128, "num_layers": 1}  # steps of each quantity
_COLUMNS = (
    *("devices", "gpus", "fits", "micro_batch", "seq_len", "num_layers", "params"),
    *("seq_len_without_plan", "seq_len_impossible", "num_layers_without_plan", "num_layers_impossible", "binds"),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """The most of a quantity that fits, with the plan that proves it (None: nothing fits).

    Of the values tried above `most`, `without_plan` is the least for which no plan was found, and `impossible` the
    least for which a solver proved that there is none. `reason` is the solver's, for `impossible` if there is one, else
    for `without_plan`.
    """

    quantity: str
    most: int | None
    plan: PlacedPlan | None
    without_plan: int | None
    impossible: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Fitting:
    """What fits on some of a cluster's devices. `plan` is for the problem as asked (None: not found)."""

    devices: str
    num_gpus: int
    plan: PlacedPlan | None
    proved: bool  # that nothing fits, where there is no plan
    reason: str
    micro_batch: int | None
    micro_batch_plan: PlacedPlan | None
    limits: tuple[Limit, ...]

    @property
    def fits(self) -> str:
        """`yes`, `not found`, or `impossible` where that is proved."""
        return "yes" if self.plan else "impossible" if self.proved else "not found"

    @property
    def binds(self) -> str:
        """What binds at the longest context, in words."""
        plan = next((limit.plan for limit in self.limits if limit.plan), None)
        return binding_memory(plan) if plan else self.reason

    def row(self) -> dict[str, Any]:
        """A row of `Fit`."""
        row: dict[str, Any] = {"devices": self.devices, "gpus": self.num_gpus, "fits": self.fits}
        row["micro_batch"] = self.micro_batch
        for limit in self.limits:
            row |= {
                limit.quantity: limit.most,
                f"{limit.quantity}_without_plan": limit.without_plan,
                f"{limit.quantity}_impossible": limit.impossible,
            }
            if limit.quantity == "num_layers" and limit.plan is not None:
                row["params"] = limit.plan.problem.model.num_params
        return row | {"binds": self.binds}


@dataclass(frozen=True, repr=False)
class Fit(Frame):
    """What fits, one row for the whole cluster and for each GPU type alone; `fittings` has the plans that prove it."""

    fittings: tuple[Fitting, ...] = field(default=(), kw_only=True)
    tried: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        heads = ("", "fits", "context", "layers", "parameters", "micro-batch")
        cells = [heads, *(_cells(fitting) for fitting in self.fittings)]
        lines = [f"What fits: {self.title}", "", *align(cells, [False, False, *[True] * 4]), ""]
        for fitting in self.fittings:
            lines += _wrap("", f"{_devices(fitting)}:")
            if not fitting.plan:
                lines += _wrap("  as asked", f"{fitting.fits}: {fitting.reason}")
            for limit in fitting.limits:
                lines += _wrap(f"  {_NAMES[limit.quantity]}", _in_words(limit))
        plan = self.fittings[0].plan
        notes = [] if plan is None else training_notes(plan.problem, plan)
        lines += ["", *(line for note in notes for line in _wrap("Note", note))]
        return "\n".join([*lines, *_wrap("Tried", self.tried)])


_NAMES = {"seq_len": "context", "num_layers": "layers"}
_WIDTH = 80


def _devices(fitting: Fitting) -> str:
    if fitting.devices == "all":
        return f"all {count(fitting.num_gpus, 'GPU')}"
    return f"{fitting.num_gpus:,} × {clip(fitting.devices, 24)}"


def _cells(fitting: Fitting) -> tuple[str, ...]:
    """A row of the printed table."""
    row = fitting.row()
    numbers = {
        key: "–" if row.get(key) is None else f"{row[key]:,}" for key in ("seq_len", "num_layers", "micro_batch")
    }
    params = f"{row['params'] / 1e9:.3g} B" if "params" in row else "–"
    return _devices(fitting), fitting.fits, numbers["seq_len"], numbers["num_layers"], params, numbers["micro_batch"]


def _in_words(limit: Limit) -> str:
    """The most that fits and what binds there, the least without a plan, and the least proved impossible."""
    parts = ["none fits" if limit.most is None else f"{limit.most:,} fits"]
    if limit.plan is not None:
        parts[0] += f" ({binding_memory(limit.plan)})"
        if limit.most == _top(limit.plan.problem, limit.quantity):
            parts.append("a model cannot have more")
    if limit.without_plan is not None and limit.without_plan != limit.impossible:
        parts.append(f"{limit.without_plan:,} not found")
    if limit.impossible is not None:
        parts.append(f"{limit.impossible:,} impossible")
    why = f" ({limit.reason.partition(': ')[2] or limit.reason})" if limit.reason else ""
    return "; ".join(parts) + why


def _wrap(label: str, text: str) -> list[str]:
    """Break `text` into lines of at most 80 characters, after the first indented as far as the text."""
    first = label.ljust(12) if label else ""
    return textwrap.wrap(first + text, _WIDTH, subsequent_indent=" " * len(first), break_on_hyphens=False)


def fit(
    problem: Problem,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 3.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    pricer: str | Pricer | PricerMaker | None = None,
    precision: float = _PRECISION,
    progress: bool | None = None,
    **options: object,
) -> Fit:
    """What fits in memory, on the whole cluster and on the devices of each GPU type alone.

    The rows of the table say whether the problem fits as asked, the longest `seq_len` and the largest `num_layers`
    that do, each with everything else as asked, and the largest micro-batch in sequences that fits in a plan found. The
    global batch is bounded by time alone: micro-batches follow each other. `fittings` has the plans that prove it.
    Above, a request is `impossible` where the solver proves it, and `without_plan` where it found none.

    `solver` answers each question that no plan at hand answers within `time_limit_s` seconds and `max_steps` steps;
    `precision` is the relative distance to the least refused request at which bisection ends; `pricer` is as in
    `solve`. After Ctrl-C the answers so far are returned. Raises InputError as `solve` does.
    """
    budget, seed = Budget(time_limit_s, max_steps), valid_seed(seed)
    precision = number_in(precision, "precision", at_least=0.0, at_most=1.0)
    refereed = make_solver(solver, options, pricer)
    fittings: list[Fitting] = []
    with Interrupt().caught() as interrupt, status_line(progress) as tell:
        for name, part in parts_of(constrain(problem)):
            fittings.append(_Questions(name, part, refereed, budget, seed, interrupt, tell).fitting(precision))
            if interrupt.pressed:
                break
    title = f"{problem.model.name} on {problem.cluster.name}"
    rows = [fitting.row() for fitting in fittings]
    return Fit.of(rows, _COLUMNS, title=title, fittings=tuple(fittings), tried=space_in_words(problem))


def limits_by_search(problem: Problem, solver: Refereed, budget: Budget, seed: int) -> PipelineLimits:
    """What `solver` finds to fit, each question within `budget`; see `fit`."""
    with Interrupt().caught() as interrupt:
        fitting = _Questions("all", problem, solver, budget, seed, interrupt, lambda _: None).fitting(_PRECISION)
    by_name = {limit.quantity: limit.plan for limit in fitting.limits}
    return PipelineLimits(by_name["seq_len"], fitting.micro_batch_plan, by_name["num_layers"])


def parts_of(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem on all its devices, then on those of each GPU type alone if there are several types."""
    yield "all", problem
    cluster, used = problem.cluster, problem.usable_by_machine
    types = dict.fromkeys(cluster.machines[m].gpu.name for m in used)
    for name in types if len(types) > 1 else ():
        others = [cluster.machines[m].name for m in used if cluster.machines[m].gpu.name != name]
        exclude = (*problem.space.exclude, *others)
        yield name, problem.replace(space=problem.space.replace(exclude=exclude))


def space_in_words(problem: Problem) -> str:
    """What plans may choose, as far as it changes their memory."""
    space, workload = problem.space, problem.workload
    widest = max(map(len, problem.usable_by_machine.values()))
    return (
        f"TP {', '.join(map(str, space.allowed_tp(widest)))}; "
        f"ZeRO {', '.join(map(str, sharding_stages(workload)))}; "
        f"recompute {', '.join(recompute_policies(workload))}; "
        f"schedule {', '.join(map(str, problem.schedules))}; "
        f"sequence layouts {'too' if space.sequence else 'not (space.sequence=true)'}"
    )


def binding_memory(plan: PlacedPlan) -> str:
    """The stage with the least free memory, and the three largest parts of what it holds."""
    tight = plan.facts.tightest
    return f"{tight.where(2)} hold {memory_of_limit(tight.cost)}: {largest_parts(tight.cost, 3)}"


@dataclass(frozen=True, slots=True)
class _Answer:
    plan: PlacedPlan | None
    proved: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Questions:
    """The questions about one part of the cluster. A plan found for one answers every later one in which it fits."""

    name: str
    problem: Problem
    solver: Refereed
    budget: Budget
    seed: int
    interrupt: Interrupt
    tell: Callable[[str], None]
    plans: list[PlacedPlan] = field(default_factory=list)

    def fitting(self, precision: float) -> Fitting:
        """Answer all questions; bisection ends within the relative `precision`."""
        as_is = self._ask(self.problem, "as asked")
        limits = tuple(self._limit(quantity, as_is, precision) for quantity in _GRAIN)
        size, plan = self._micro_batch()
        return Fitting(
            devices=self.name,
            num_gpus=len(self.problem.usable_devices),
            plan=as_is.plan,
            proved=as_is.proved,
            reason=as_is.reason,
            micro_batch=size,
            micro_batch_plan=plan,
            limits=limits,
        )

    def _ask(self, problem: Problem, words: str, *, proof_only: bool = False) -> _Answer:
        """A plan for `problem`: one found before that fits, else the first that the solver finds.

        With `proof_only`, the solver is only asked for a proof that there is none.
        """
        self.tell(f"{self.name}: {words}")
        judge = self.solver.judge(problem)
        for plan in [] if proof_only else reversed(self.plans):
            valid = certify(problem, plan, judge)
            if valid is not None:
                return _Answer(valid)
        budget = Budget(self.budget.time_limit_s, 1) if proof_only else self.budget
        try:
            result = self.solver.solve(problem, budget, seed=self.seed, on_progress=self._listener(budget), judge=judge)
        except InputError as error:  # such as more layers than the solver takes
            return _Answer(None, reason=str(error))
        if result.plan is None:
            return _Answer(None, result.status == Status.INFEASIBLE, result.reason.partition(";")[0])
        self.plans.append(PlacedPlan.of(problem, result.plan, pricer=judge, cost=result.cost))
        return _Answer(self.plans[-1])

    def _ask_with(self, quantity: str, value: int, *, proof_only: bool = False) -> _Answer:
        return self._ask(_with(self.problem, quantity, value), _value_in_words(quantity, value), proof_only=proof_only)

    def _listener(self, budget: Budget) -> OnProgress:
        """Stop a search at its first plan, unless steps are limited: the clock would then choose the plan."""
        if budget.max_steps is not None:
            return lambda _: not self.interrupt.pressed
        return lambda progress: progress.best_s == float("inf") and not self.interrupt.pressed

    def _limit(self, quantity: str, as_is: _Answer, precision: float) -> Limit:
        grain, top = _GRAIN[quantity], _top(self.problem, quantity)
        answers: dict[int, _Answer] = {}
        first = int(self.problem.workload.seq_len if quantity == "seq_len" else self.problem.model.num_layers)

        def fits(value: int) -> bool:
            if value not in answers and not self.interrupt.pressed:
                answers[value] = as_is if value == first else self._ask_with(quantity, value)
            return value in answers and answers[value].plan is not None

        most = largest(fits, first, grain, top, precision)
        probe = self._lucky_probe(quantity, answers, most, top)
        while probe is not None:  # a plan beyond what was refused: the search goes on from there
            most = largest(fits, probe, grain, top, precision)
            probe = self._lucky_probe(quantity, answers, most, top)
        refused = sorted(value for value, answer in answers.items() if answer.plan is None and value > (most or 0))
        proved = next((value for value in refused if answers[value].proved), None)
        reason = answers[refused[0] if proved is None else proved].reason if refused else ""
        plan = answers[most].plan if most is not None else None
        return Limit(quantity, most, plan, refused[0] if refused else None, proved, reason)

    def _lucky_probe(self, quantity: str, answers: dict[int, _Answer], most: int | None, top: int) -> int | None:
        """Ask for proofs at ever larger values than those refused, until one succeeds.

        Returns the value for which a plan was found instead, if there is one.
        """
        refused = [value for value, answer in answers.items() if answer.plan is None and value > (most or 0)]
        value = max(refused, default=top)
        last = min(top, 64 * value)
        while value < last and not any(answers[v].proved for v in refused) and not self.interrupt.pressed:
            value = min(2 * value, last)
            answers[value] = self._ask_with(quantity, value, proof_only=True)
            if answers[value].plan is not None:
                return value
            refused.append(value)
        return None

    def _micro_batch(self) -> tuple[int | None, PlacedPlan | None]:
        """The largest micro-batch, in sequences, that fits in a plan found before.

        Every pipeline has it and as many micro-batches as before, so the global batch grows with it.
        """
        best: tuple[int | None, PlacedPlan | None] = (None, None)
        size = 1
        while size <= MAX_MICRO_BATCH:
            resized = (self._resize(plan, size) for plan in self.plans)
            fitting = next((plan for plan in resized if plan is not None), None)
            if fitting is None and size > 1:
                break
            best = (size, fitting) if fitting else best
            size *= 2
        return best

    def _resize(self, plan: PlacedPlan, size: int) -> PlacedPlan | None:
        """`plan` with micro-batches of `size` sequences; None where it does not fit."""
        if plan.problem.model != self.problem.model:
            return None
        pipelines = tuple(resized for pipeline in plan.pipelines if (resized := pipeline.resize(size)) is not None)
        if len(pipelines) < len(plan.pipelines):
            return None
        batch = size * sum(pipeline.num_micro_batches for pipeline in pipelines)
        try:
            changed = self.problem.replace(
                workload=self.problem.workload.replace(global_batch=batch),
                space=self.problem.space.replace(max_micro_batch_size=MAX_MICRO_BATCH),
            )
        except InputError:
            return None
        return certify(changed, Plan(pipelines, plan.schedule, plan.sharding), self.solver.judge(changed))


def _top(problem: Problem, quantity: str) -> int:
    """The largest value that a problem may have: a context ends with the learned positions."""
    if quantity == "num_layers":
        return RANGES["num_layers"][1]
    model = problem.model
    return min(MAX_SEQ_LEN, model.max_positions) if model.learned_positions else MAX_SEQ_LEN


def _with(problem: Problem, quantity: str, value: int) -> Problem:
    if quantity == "seq_len":
        return problem.replace(workload=problem.workload.replace(seq_len=value))
    return problem.replace(model=problem.model.with_num_layers(value))


def _value_in_words(quantity: str, value: int) -> str:
    return f"{value:,} tokens" if quantity == "seq_len" else count(value, "layer")
