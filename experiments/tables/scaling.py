"""Scheduling time and gap against the size of the cluster, every solver that can.

    python -m experiments.tables.scaling                      # about 10 minutes on two cores
    python -m experiments.tables.scaling --sizes 16 64 256    # about 1 minute
    python -m experiments.tables.scaling --quick              # seconds

Made-up clusters of machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal
shares, Llama-2 13B, eight sequences a GPU.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.configurations import named_cluster, named_model
from experiments.tables.figures import framed, gpus_axis, legend, line, seconds_axis
from experiments.tables.frame import Report, Table, main
from experiments.tables.markdown import Cell, markdown_table, share, tokens
from experiments.tables.names import OURS
from experiments.tables.options import Options
from experiments.tables.task import BOUND, Found, Outcome, Task, fastest
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.report.style import MUTED, seconds
from solvers.registry import for_any_problem, names

NAMES = names(for_any_problem)

_MODEL = "llama2_13b"
_QUICK_MODEL, _QUICK_SEQ_LEN = "tiny", 512
_SEQUENCES = 8  # a GPU
_GPUS = 8  # a machine
_REFERENCE = 1024  # GPUs for which the budget is stated
_LEAST, _MOST = 1 / 6, 5.0  # times the budget, for other sizes
_CLOSE = 1.01  # of its own last step time, from where a search has settled


def problem(size: int, options: Options) -> Problem:
    """The problem on `size` GPUs."""
    cluster = named_cluster("synthetic", num_machines=size // _GPUS)
    if options.inter_gb_per_s is not None:
        given = {"num_machines": size // _GPUS, "inter_bandwidth_gb_per_s": options.inter_gb_per_s}
        cluster = named_cluster("synthetic", **given)
    batch = _SEQUENCES * size
    if options.quick:
        return Problem(cluster, named_model(_QUICK_MODEL), Workload(batch, _QUICK_SEQ_LEN))
    return Problem(cluster, named_model(_MODEL), Workload(batch))


def limit_s(size: int, options: Options) -> float:
    """The time limit on `size` GPUs."""
    return options.budgets.scaling_s * min(_MOST, max(_LEAST, size / _REFERENCE))


@dataclass(frozen=True)
class Size:
    """A cluster's size: the searches by solver, and the best bound that any of them or the program has proven."""

    gpus: int
    runs: dict[str, Outcome]
    bound: Outcome
    bound_s: float

    def gap(self, solver: str) -> float | None:
        """How far a solver's plan is at most from the best there is."""
        return self.runs[solver].gap(self.bound_s)

    def settled_s(self, solver: str) -> float | None:
        """Seconds until a search was within 1 % of its own end."""
        run = self.runs[solver]
        return None if run.step_time_s is None else run.time_to_s(_CLOSE * run.step_time_s)


def _task(size: int, solver: str, options: Options) -> Task:
    return Task(problem(size, options), solver, limit_s(size, options))


def tasks(options: Options) -> list[Task]:
    """Every solver and the bound on every size."""
    return [_task(size, solver, options) for size in options.sizes for solver in (*NAMES, BOUND)]


def report(options: Options, found: Found) -> Report:
    """Time and gap by size and solver."""
    sizes = []
    for gpus in options.sizes:
        by_name = {solver: _task(gpus, solver, options) for solver in (*NAMES, BOUND)}
        runs = {solver: found[by_name[solver]] for solver in NAMES}
        sizes.append(Size(gpus, runs, found[by_name[BOUND]], found.bound_s(*by_name.values())))
    return Report(
        rows=[_row(size, solver, options) for size in sizes for solver in NAMES],
        tables=[
            markdown_table([_bound_cells(size, options) for size in sizes]),
            markdown_table(
                [_cells(size, solver) for size in sizes for solver in NAMES if size.runs[solver].status != "refused"],
                left=("solver", "status"),
            ),
        ],
        sentences=sentences(sizes),
        notes=(
            "first plan: seconds to the first plan; settled: seconds until the search was within 1 % of its last plan; "
            "search: seconds in all; gap: against the best bound that any solver or the linear program has proven for "
            "that size; memory: peak of the search's processes.",
        ),
        figure=draw(sizes, options),
    )


def _row(size: Size, solver: str, options: Options) -> dict[str, Cell]:
    run, task = size.runs[solver], _task(size.gpus, solver, options)
    return {
        "gpus": size.gpus,
        "solver": solver,
        **run.cells(mfu=False),
        "lower_bound_s": size.bound_s,
        "gap": size.gap(solver),
        "first_plan_s": run.first_plan_s,
        "settled_s": size.settled_s(solver),
        **task.cells(run, memory=True),
    }


def _bound_cells(size: Size, options: Options) -> dict[str, str]:
    _, best = fastest(size.runs)
    return {
        "GPUs": f"{size.gpus:,}",
        "time limit": f"{limit_s(size.gpus, options):.3g} s",
        "bound": seconds(size.bound_s),
        "of the linear program": seconds(size.bound.bound_s) if size.bound.bound_s else "not in time",
        "after": seconds(size.bound.runtime_s),
        "best step time": seconds(best.step_time_s) if best.step_time_s is not None else "no plan",
        "best gap": share(best.gap(size.bound_s)),
    }


def _cells(size: Size, solver: str) -> dict[str, str]:
    run, settled_s = size.runs[solver], size.settled_s(solver)
    return {
        "GPUs": f"{size.gpus:,}",
        "solver": f"`{solver}`",
        "step time": seconds(run.step_time_s) if run.step_time_s is not None else "",
        "tokens/s": tokens(run.tokens_per_s, ""),
        "gap": share(size.gap(solver)),
        "first plan": seconds(run.first_plan_s) if run.first_plan_s is not None else "",
        "settled": seconds(settled_s) if settled_s is not None else "",
        "search": seconds(run.runtime_s),
        "memory": f"{run.peak_gib:.1f} GiB",
        "status": run.status.replace("_", " "),
    }


def sentences(sizes: Sequence[Size]) -> list[str]:
    """The largest cluster, which solver is best at each size, and who cannot."""
    said = []
    for size in sizes:
        best, run = fastest(size.runs)
        gap = run.gap(size.bound_s)
        if gap is None:
            said.append(f"No solver has a plan for {size.gpus:,} GPUs.")
            continue
        over = size.runs[OURS.solver].objective / run.objective - 1
        longer = f"; a step of `{OURS.solver}`'s takes {over:.1%} longer" if 0 < over < math.inf else ""
        said.append(
            f"{size.gpus:,} GPUs: `{best}` has the best plan, at most {gap:.1%} from the best there is{longer}."
        )
    for solver in NAMES:
        refused = [size for size in sizes if size.runs[solver].status == "refused"]
        without = [size for size in sizes if size.runs[solver].status not in ("refused", "optimal", "feasible")]
        if refused:
            said.append(f"`{solver}` does not take {_listed(refused)}: {refused[0].runs[solver].reason}.")
        if without:
            said.append(f"`{solver}` has no plan in time for {_listed(without)}.")
    return said


def _listed(sizes: Sequence[Size]) -> str:
    return f"{', '.join(f'{size.gpus:,}' for size in sizes)} GPUs"


def draw(sizes: Sequence[Size], options: Options) -> Figure:
    """Gap and time to settle against the number of GPUs, a line a solver."""
    figure, (left, right) = framed(
        10.5,
        4.6,
        "From 16 to 10,240 GPUs" if sizes[-1].gpus == 10_240 else f"Up to {sizes[-1].gpus:,} GPUs",
        f"Made-up clusters of H100, A100, RTX 4090 and RTX 3090; {_QUICK_MODEL if options.quick else _MODEL}, "
        f"{_SEQUENCES} sequences a GPU; one seed",
        columns=2,
    )
    gpus = [size.gpus for size in sizes]
    for k, solver in enumerate(NAMES):
        gaps = [size.gap(solver) for size in sizes]
        if any(gap is not None for gap in gaps):
            left.plot(gpus, [math.nan if gap is None else 100 * gap for gap in gaps], label=solver, **line(k))
            right.plot(gpus, [size.settled_s(solver) or math.nan for size in sizes], **line(k))
    limits = [limit_s(size, options) for size in gpus]
    right.plot(gpus, limits, ":", color=MUTED, linewidth=1.2)
    right.annotate("time limit", (gpus[0], limits[0]), (4, 4), textcoords="offset points", color=MUTED, fontsize=9)
    for ax in (left, right):
        gpus_axis(ax, gpus)
    left.set_ylabel("gap to the lower bound (%)")
    left.set_ylim(bottom=0)
    seconds_axis(right, "time to within 1 % of its last plan (s)")
    legend(figure, left, 7)
    return figure


TABLE = Table("scaling", "Scheduling time and gap against cluster size", tasks, report)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
