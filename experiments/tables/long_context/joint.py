"""Planning DP, PP, TP and CP × HP together against pipelines alone and sequence layouts alone, at 128K tokens.

python -m experiments.tables.long_context.joint                # about 6 minutes on two cores
python -m experiments.tables.long_context.joint --quick        # seconds, on a tiny setting
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from experiments.tables.figures import framed, legend, relative_bars
from experiments.tables.frame import Report, Table, main
from experiments.tables.long_context.settings import JOINT, LAYOUTS, Setting, asked
from experiments.tables.markdown import Cell, markdown_table, share, times, tokens
from experiments.tables.options import Options
from experiments.tables.task import Found, Outcome, Task
from hexiopt.problem.space import Space


@dataclass(frozen=True)
class Way:
    """A way to plan: its solver and plan space."""

    label: str
    solver: str
    space: Space

    def task(self, setting: Setting, options: Options) -> Task:
        """Its search in a setting."""
        return Task(setting.problem(options, space=self.space), self.solver, options.budgets.joint_s)


PIPELINES = Way("pipelines only", "portfolio", Space())
SEQUENCES = Way("sequence only", "hexiseq", replace(LAYOUTS, num_stages=1))
TOGETHER = Way("joint", "portfolio", LAYOUTS)
WAYS = (PIPELINES, SEQUENCES, TOGETHER)


@dataclass(frozen=True)
class Joint:
    """A setting: what was found in each way, and the bound of all plans."""

    setting: Setting
    runs: dict[Way, Outcome]
    bound_s: float

    @property
    def single(self) -> Outcome:
        """The better of the two single ways."""
        return min((self.runs[PIPELINES], self.runs[SEQUENCES]), key=lambda run: run.objective)

    @property
    def together(self) -> Outcome:
        """The joint plan."""
        return self.runs[TOGETHER]


def tasks(options: Options) -> list[Task]:
    """Every way on every cluster, and the bounds."""
    return [
        task
        for setting in asked(JOINT, options)
        for task in (*(way.task(setting, options) for way in WAYS), setting.bound(options))
    ]


def report(options: Options, found: Found) -> Report:
    """Throughput in each way."""
    joints = []
    for setting in asked(JOINT, options):
        each = {way: way.task(setting, options) for way in WAYS}
        bound_s = found.bound_s(each[TOGETHER], setting.bound(options))
        joints.append(Joint(setting, {way: found[task] for way, task in each.items()}, bound_s))
    return Report(
        rows=[_row(joint, way, options) for joint in joints for way in WAYS],
        tables=[markdown_table([_cells(joint) for joint in joints], left=("setting",))],
        sentences=sentences(joints),
        notes=(
            "pipelines only: the portfolio without sequence layouts; sequence only: `hexiseq` with data-parallel "
            "pipelines of one stage each, as its paper plans; joint: the portfolio, which decides stage by stage "
            "between tensor parallelism and a sequence layout.",
        ),
        figure=draw(joints, options),
    )


def _row(joint: Joint, way: Way, options: Options) -> dict[str, Cell]:
    run, task = joint.runs[way], way.task(joint.setting, options)
    return {
        "cluster": joint.setting.cluster,
        "model": joint.setting.model,
        "seq_len": joint.setting.seq_len,
        "way": way.label,
        "solver": way.solver,
        **run.cells(),
        "joint_over_it": joint.together.over(run),
        "lower_bound_s": joint.bound_s if way == TOGETHER else run.bound_s,
        **task.cells(run),
    }


def _cells(joint: Joint) -> dict[str, str]:
    return {
        "setting": joint.setting.label,
        **{f"{way.label} (tokens/s)": tokens(joint.runs[way].tokens_per_s) for way in WAYS},
        "× pipelines only": times(joint.together.over(joint.runs[PIPELINES])),
        "× sequence only": times(joint.together.over(joint.runs[SEQUENCES])),
        "MFU": share(joint.together.mfu),
        "gap": share(joint.together.gap(joint.bound_s)),
    }


def sentences(joints: Sequence[Joint]) -> list[str]:
    """On how many clusters the joint plan beats both others, and by how much."""
    better = [joint for joint in joints if joint.together.objective < joint.single.objective]
    names = ", ".join(
        f"{joint.setting.place}"
        + ("" if (gain := joint.together.over(joint.single)) is None else f" by {gain - 1:.1%}")
        for joint in better
    )
    said = [f"Joint plans beat both others on {len(better)} of {len(joints)} clusters{': ' if names else ''}{names}."]
    for joint in joints:
        if joint.together.step_time_s is None:
            said.append(f"{joint.setting.label} has no joint plan.")
        elif joint.together.objective > joint.single.objective:
            lost = joint.together.objective / joint.single.objective - 1
            said.append(f"At {joint.setting.label} the joint search ends {lost:.1%} behind the better single one.")
    return said


def draw(joints: Sequence[Joint], options: Options) -> Figure:
    """Throughput over the better of the single ways, a group of bars a cluster."""
    figure, (ax,) = framed(
        10.5,
        4.8,
        "Pipelines, tensor parallelism and sequence layouts planned together",
        f"Throughput by our cost model over the better of the two single ways; {options.budgets.joint_s:g} s a search",
    )
    groups = [joint.setting.place.replace(" · ", "\n") for joint in joints]
    series = {way.label: [joint.runs[way] for joint in joints] for way in WAYS}
    relative_bars(ax, groups, series, [joint.single for joint in joints])
    ax.set_ylabel("throughput (better single way = 1)")
    legend(figure, ax, 3)
    return figure


TABLE = Table("joint", "Pipelines and sequence layouts planned together", tasks, report, __package__)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
