"""Scheduling time of sequence layouts against the size of the cluster.

    python -m experiments.tables.long_context.scheduling                    # about 6 minutes on two cores
    python -m experiments.tables.long_context.scheduling --sizes 16 128     # seconds

Made-up clusters of machines of eight (`conf/cluster/synthetic.yaml`): H100, A100, RTX 4090 and RTX 3090 in equal
shares; a GPT-style 7B, sequences of 128K tokens, one for every sixteen GPUs and eight at least.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.configurations import named_cluster, named_model
from experiments.tables import published
from experiments.tables.figures import framed, gpus_axis, legend, line, seconds_axis
from experiments.tables.frame import Report, Table, main
from experiments.tables.long_context.settings import BASELINES, GLOBAL_BATCH, HEXISEQ
from experiments.tables.markdown import Cell, markdown_table, share, tokens
from experiments.tables.names import Planner
from experiments.tables.options import Options
from experiments.tables.task import Found, Outcome, Task, fastest
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.report.style import INK, seconds

_MODEL, _SEQ_LEN = "gpt_7b", 131_072
_QUICK_MODEL, _QUICK_SEQ_LEN = "tiny", 4096
_GPUS = 8  # a machine
_GPUS_A_SEQUENCE = 16
_LIMITS_S = {128: 0.9, 1024: 9.0, 10_240: 110.0}  # up to so many GPUs; with loading, 1, 10 and 120 s


@dataclass(frozen=True)
class Size:
    """A cluster's size: the searches by planner."""

    gpus: int
    runs: dict[Planner, Outcome]

    @property
    def bound_s(self) -> float:
        """The best bound that any of the searches has proven."""
        return max(run.bound_s for run in self.runs.values())


def limit_s(gpus: int) -> float:
    """The time limit on a cluster of `gpus`."""
    return next((limit for most, limit in _LIMITS_S.items() if gpus <= most), max(_LIMITS_S.values()))


def sizes(options: Options) -> tuple[int, ...]:
    """Those asked for, and the paper's between them."""
    asked = options.sizes
    return tuple(sorted({*asked, *(n for n in published.scheduling_s() if min(asked) <= n <= max(asked))}))


def problem(gpus: int, options: Options) -> Problem:
    """The problem on `gpus` GPUs."""
    cluster = named_cluster("synthetic", num_machines=gpus // _GPUS)
    batch, space = max(GLOBAL_BATCH, gpus // _GPUS_A_SEQUENCE), Space(sequence=True)
    if options.quick:
        return Problem(cluster, named_model(_QUICK_MODEL), Workload(batch, _QUICK_SEQ_LEN), space)
    return Problem(cluster, named_model(_MODEL), Workload(batch, _SEQ_LEN), space)


def _task(gpus: int, planner: Planner, options: Options) -> Task:
    return planner.task(problem(gpus, options), limit_s(gpus))


def tasks(options: Options) -> list[Task]:
    """Every planner on every size."""
    return [_task(gpus, planner, options) for gpus in sizes(options) for planner in (HEXISEQ, *BASELINES)]


def report(options: Options, found: Found) -> Report:
    """Time by size and planner."""
    measured = [
        Size(gpus, {planner: found[_task(gpus, planner, options)] for planner in (HEXISEQ, *BASELINES)})
        for gpus in sizes(options)
    ]
    return Report(
        rows=[_row(size, planner, options) for size in measured for planner in size.runs],
        tables=[
            markdown_table(
                [_cells(size, planner) for size in measured for planner in size.runs], left=("planner", "status")
            )
        ],
        sentences=sentences(measured),
        notes=(
            "first plan: seconds to the first plan; search: seconds in all; gap: against the best bound that any "
            "search has proven for that size. A search that ends at its limit, of a baseline too, has not seen its "
            "whole space.",
        ),
        figure=draw(measured, options),
    )


def _row(size: Size, planner: Planner, options: Options) -> dict[str, Cell]:
    run, task = size.runs[planner], _task(size.gpus, planner, options)
    return {
        "gpus": size.gpus,
        "planner": planner.label,
        **run.cells(mfu=False),
        "lower_bound_s": size.bound_s,
        "first_plan_s": run.first_plan_s,
        **task.cells(run, memory=True),
    }


def _cells(size: Size, planner: Planner) -> dict[str, str]:
    run = size.runs[planner]
    paper_s = published.scheduling_s().get(size.gpus) if planner == HEXISEQ else None
    return {
        "GPUs": f"{size.gpus:,}",
        "planner": planner.label,
        "tokens/s": tokens(run.tokens_per_s),
        "gap": share(run.gap(size.bound_s)),
        "first plan": seconds(run.first_plan_s) if run.first_plan_s is not None else "",
        "search": seconds(run.runtime_s),
        "(paper)": seconds(paper_s) if paper_s is not None else "",
        "limit": seconds(limit_s(size.gpus)),
        "memory": f"{run.peak_gib:.1f} GiB",
        "status": run.status.replace("_", " "),
    }


def sentences(measured: Sequence[Size]) -> list[str]:
    """Ours beside the paper's times, and what its plans are worth."""
    said = []
    paper = published.scheduling_s()
    for size in measured:
        ours = size.runs[HEXISEQ]
        if ours.step_time_s is None:
            said.append(f"{size.gpus:,} GPUs: no plan in {seconds(limit_s(size.gpus))}.")
            continue
        _, best = fastest({planner: size.runs[planner] for planner in BASELINES})
        ratio = ours.over(best)
        beside = f" ({published.HEXISEQ_SOURCE}: {paper[size.gpus]:g} s)" if size.gpus in paper else ""
        than = "" if ratio is None else f", {ratio:.2f} × as fast as the best baseline's"
        said.append(f"{size.gpus:,} GPUs: a plan in {seconds(ours.runtime_s)}{beside}{than}.")
    return said


def draw(measured: Sequence[Size], options: Options) -> Figure:
    """Seconds of search against the number of GPUs, a line a planner; the paper's as points."""
    figure, (ax,) = framed(
        9.0,
        4.6,
        "Scheduling time of sequence layouts",
        f"Made-up clusters of H100, A100, RTX 4090 and RTX 3090; {_QUICK_MODEL if options.quick else _MODEL}",
    )
    gpus = [size.gpus for size in measured]
    for k, planner in enumerate((HEXISEQ, *BASELINES)):
        spent = [size.runs[planner].runtime_s for size in measured]
        ax.plot(gpus, spent, label=planner.label, **line(k))
    paper = {n: s for n, s in published.scheduling_s().items() if n in gpus}
    if paper:
        ax.plot(list(paper), list(paper.values()), "*", color=INK, markersize=11, label="HexiSeq (paper)")
    gpus_axis(ax, gpus)
    seconds_axis(ax, "search (s)")
    legend(figure, ax, 5)
    return figure


TABLE = Table("scheduling", "Long contexts: scheduling time against cluster size", tasks, report, __package__)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
