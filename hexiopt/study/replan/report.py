"""Plans after a change of the cluster: a table, plain data, and a picture of the frontier and of who fetches what."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from hexiopt.problem.cluster import Cluster
from hexiopt.report.panels.canvas import Picture, plain_axes, save
from hexiopt.report.style import FAINT, INK, MUTED, PAPER, PIPELINE_HUES, clip, count, gib, seconds
from hexiopt.report.tabular import plain_table
from hexiopt.study.replan.replan import Replacement, Replanning
from hexiopt.units import GIB

CHECKPOINT = "checkpoint"
_MOST_MACHINES = 16  # drawn one by one; more are drawn by spec
_MOST_SOURCES = 7
_HEADER = ("Plan", "Step time", "Tokens/s", "Moved", "Moving", "From", "Pays back after", "")


def replanning_table(replanning: Replanning) -> Table:
    """One row per replacement, the least moved first; the best for the horizon is marked."""
    rows = []
    for option in replanning.replacements:
        steps = replanning.pays_back_steps(option)
        rows.append(
            [
                option.name,
                seconds(option.cost.step_time_s),
                f"{option.cost.tokens_per_s:,.0f}",
                f"{gib(option.moving.num_bytes)} GiB",
                seconds(option.moving_s),
                CHECKPOINT if option.moving.from_checkpoint else "peers" if option.moving.transfers else "",
                "" if steps is None else f"{steps:,.0f} steps",
                "chosen" if option is replanning.best else "",
            ]
        )
    note = (
        f"Chosen: trains {count(round(replanning.horizon_steps), 'more step')} first. Moving: seconds of the busiest "
        f"link, all transfers at once; {replanning.storage} (replan.restart_s, replan.checkpoint_gb_per_s)."
    )
    return plain_table(_HEADER, rows, left=("Plan", "From", ""), caption=note, caption_justify="left")


def replanning_to_dict(replanning: Replanning) -> dict[str, Any]:
    """Every replacement, and what each device of the chosen one fetches, in bytes by source."""
    cluster = replanning.best.plan.problem.cluster
    fetched: dict[str, dict[str, float]] = defaultdict(dict)
    for transfer in replanning.best.moving.transfers:
        source = CHECKPOINT if transfer.source is None else cluster.device_name(transfer.source)
        fetched[cluster.device_name(transfer.device)][source] = transfer.num_bytes
    return {
        "horizon_steps": replanning.horizon_steps,
        "restart_s": replanning.restart_s,
        "checkpoint_gb_per_s": replanning.checkpoint_gb_per_s,
        "chosen": replanning.best.name,
        "replacements": [
            {
                "name": option.name,
                "step_time_s": option.cost.step_time_s,
                "moved_bytes": option.moving.num_bytes,
                "moving_s": option.moving_s,
                "from_checkpoint": option.moving.from_checkpoint,
                "pays_back_steps": replanning.pays_back_steps(option),
            }
            for option in replanning.replacements
        ],
        "fetched_bytes": fetched,
    }


def draw_replanning(replanning: Replanning, title: str, path: str | Path) -> None:
    """Write a PNG of the frontier beside who fetches what."""
    save(replanning_figure(replanning, title), path)


def replanning_figure(replanning: Replanning, title: str) -> Figure:
    """Step time over moving time of all replacements, beside what each machine fetches for the chosen one."""
    figure = Picture(figsize=(11, 4.6), facecolor=PAPER, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _draw_frontier(replanning, left)
    # Where the chosen plan moves nothing, what the fastest would have fetched.
    options = (replanning.best, replanning.replacements[-1])
    _draw_fetches(next((option for option in options if option.moving.transfers), None), right)
    figure.suptitle(clip(title, 110), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def _draw_frontier(replanning: Replanning, ax: Axes) -> None:
    points = [(option.moving_s, option.cost.step_time_s) for option in replanning.replacements]
    ax.step(*zip(*points, strict=True), where="post", color=FAINT, zorder=1)
    for k, (option, point) in enumerate(zip(replanning.replacements, points, strict=True)):
        chosen = option is replanning.best
        ax.scatter(*point, s=90 if chosen else 50, color=PIPELINE_HUES[k], zorder=3)
        label = f"{option.name}\n{seconds(option.cost.step_time_s)}" + ("  (chosen)" if chosen else "")
        ax.annotate(label, point, (8, 4), textcoords="offset points", fontsize=8.5)
    ax.margins(0.25)
    most_s = max(option.moving_s for option in replanning.replacements)
    ax.set_xlim(-0.04 * most_s, 1.35 * most_s or 1.0)
    ax.set_xlabel("moving (s)", color=INK)
    ax.set_ylabel("step time (s)", color=INK)
    ax.set_title("What a faster plan costs to begin", loc="left", fontsize=9.5, color=MUTED)
    ax.grid(color="#ECEEF1")
    plain_axes(ax, colors=MUTED, labelsize=8.5).set_axisbelow(True)


def _draw_fetches(option: Replacement | None, ax: Axes) -> None:
    if option is None:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "Nothing has to move", ha="center", color=MUTED, fontsize=9.5)
        return
    cluster = option.plan.problem.cluster
    fetched: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_spec = len({int(cluster.machine_of[transfer.device]) for transfer in option.moving.transfers}) > _MOST_MACHINES
    for transfer in option.moving.transfers:
        source = CHECKPOINT if transfer.source is None else _place(cluster, transfer.source, by_spec)
        fetched[_place(cluster, transfer.device, by_spec)][source] += transfer.num_bytes / GIB
    total: dict[str, float] = defaultdict(float)
    for sizes_by_source in fetched.values():
        for source, size in sizes_by_source.items():
            total[source] += size
    shown = sorted(total, key=lambda source: -total[source])[:_MOST_SOURCES]
    names, ends = list(fetched), dict.fromkeys(fetched, 0.0)
    for k, source in enumerate([*shown, "others"]):
        sizes = {
            name: sum(
                size
                for origin, size in sizes_by_source.items()
                if origin == source or (source == "others" and origin not in shown)
            )
            for name, sizes_by_source in fetched.items()
        }
        if any(sizes.values()):
            hue = FAINT if source == "others" else PIPELINE_HUES[k % len(PIPELINE_HUES)]
            starts = [ends[name] for name in names]
            ax.barh(names, [sizes[name] for name in names], left=starts, color=hue, label=f"from {source}")
            ends = {name: ends[name] + sizes[name] for name in names}
    ax.invert_yaxis()
    ax.set_xlabel("fetched (GiB)", color=INK)
    ax.set_title(f"What each machine fetches for the plan '{option.name}'", loc="left", fontsize=9.5, color=MUTED)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    plain_axes(ax, colors=MUTED, labelsize=8.5).set_axisbelow(True)


def _place(cluster: Cluster, device: int, by_spec: bool) -> str:
    machine = cluster.machines[int(cluster.machine_of[device])]
    return machine.spec_name if by_spec else machine.name
