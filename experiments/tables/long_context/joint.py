"""Planning DP, PP, TP and CP × HP together against pipelines alone and sequence layouts alone, at 128K tokens.

python -m experiments.tables.long_context.joint                # about 6 minutes on two cores
python -m experiments.tables.long_context.joint --quick        # seconds, on a tiny setting
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from experiments.tables.figures import framed, hue, legend, spread
from experiments.tables.frame import Report, Table, main
from experiments.tables.long_context.settings import JOINT, LAYOUTS, Setting, asked
from experiments.tables.markdown import Cell, markdown_table, share, times, tokens
from experiments.tables.options import Options
from experiments.tables.task import BOUND, Found, Outcome, Task
from hexiopt.space import Space


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

    def gain(self, run: Outcome) -> float | None:
        """Throughput of the joint plan over another."""
        joint_s, other_s = self.runs[TOGETHER].objective, run.objective
        return other_s / joint_s if math.isfinite(joint_s) and math.isfinite(other_s) else None

    @property
    def gap(self) -> float | None:
        """How far the joint plan is at most from the best there is."""
        joint_s = self.runs[TOGETHER].objective
        return 1 - self.bound_s / joint_s if math.isfinite(joint_s) else None


def _bound(setting: Setting, options: Options) -> Task:
    return Task(setting.problem(options), BOUND, options.budgets.bound_s)


def tasks(options: Options) -> list[Task]:
    """Every way on every cluster, and the bounds."""
    return [
        task
        for setting in asked(JOINT, options)
        for task in (*(way.task(setting, options) for way in WAYS), _bound(setting, options))
    ]


def report(options: Options, found: Found) -> Report:
    """Throughput in each way."""
    joints = []
    for setting in asked(JOINT, options):
        each = {way: way.task(setting, options) for way in WAYS}
        bound_s = found.bound_s(each[TOGETHER], _bound(setting, options))
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
        "status": run.status,
        "step_time_s": run.step_time_s,
        "tokens_per_s": run.tokens_per_s,
        "mfu": run.mfu,
        "joint_over_it": joint.gain(run),
        "lower_bound_s": joint.bound_s if way == TOGETHER else run.bound_s,
        "runtime_s": run.runtime_s,
        "time_limit_s": task.time_limit_s,
        "seed": task.seed,
        "search_sha256": task.sha256,
        "reason": run.reason,
    }


def _cells(joint: Joint) -> dict[str, str]:
    return {
        "setting": joint.setting.label,
        **{f"{way.label} (tokens/s)": tokens(joint.runs[way].tokens_per_s) for way in WAYS},
        "× pipelines only": times(joint.gain(joint.runs[PIPELINES])),
        "× sequence only": times(joint.gain(joint.runs[SEQUENCES])),
        "MFU": share(joint.runs[TOGETHER].mfu),
        "gap": share(joint.gap),
    }


def sentences(joints: Sequence[Joint]) -> list[str]:
    """On how many clusters the joint plan beats both others, and by how much."""
    better = [joint for joint in joints if joint.runs[TOGETHER].objective < joint.single.objective]
    names = ", ".join(
        f"{joint.setting.place}" + ("" if (gain := joint.gain(joint.single)) is None else f" by {gain - 1:.1%}")
        for joint in better
    )
    said = [f"Joint plans beat both others on {len(better)} of {len(joints)} clusters{': ' if names else ''}{names}."]
    for joint in joints:
        if not math.isfinite(joint.runs[TOGETHER].objective):
            said.append(f"{joint.setting.label} has no joint plan.")
        elif joint.runs[TOGETHER].objective > joint.single.objective:
            lost = joint.runs[TOGETHER].objective / joint.single.objective - 1
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
    offsets = spread(len(WAYS), 0.8)
    for k, way in enumerate(WAYS):
        for x, joint in enumerate(joints):
            own_s, one_s = joint.runs[way].objective, joint.single.objective
            height = (one_s if math.isfinite(one_s) else own_s) / own_s if math.isfinite(own_s) else 0.0
            bar = ax.bar(
                x + offsets[k], height, 0.8 / len(WAYS) * 0.92, color=hue(k), label=way.label if not x else None
            )
            ax.bar_label(bar, [f"{height:.2f}" if height else "no\nplan"], fontsize=8, padding=1)
    ax.set_xticks(range(len(joints)), [joint.setting.place.replace(" · ", "\n") for joint in joints], fontsize=9)
    ax.set_ylabel("throughput (better single way = 1)")
    ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
    legend(figure, ax, 3)
    return figure


TABLE = Table("joint", "Pipelines and sequence layouts planned together", tasks, report, __package__)

if __name__ == "__main__":
    sys.exit(main(TABLE, __doc__))
