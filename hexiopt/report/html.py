"""A plan as one HTML file that needs nothing else: no scripts, no fonts, nothing from the network."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.readers.problem_file import problem_sha256, problem_to_dict
from hexiopt.report import table
from hexiopt.report.rows import PipelineRow, StageRow, plan_rows, unused_devices
from hexiopt.report.step_parts import step_parts
from hexiopt.report.style import (
    MEMORY_COLOURS,
    MEMORY_LABELS,
    device_ranges,
    gib,
    ink_on,
    listed,
    milliseconds,
    rate,
    seconds,
)
from hexiopt.result import Point

_MAX_PIPELINES, _MAX_STAGES = 200, 600
_MAX_POINTS = 500
_NUMBER = ' class="n"'
_CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #616e7c; --line: #d5dae0; --page: #f6f7f9;
  --card: #fff; --accent: #3a6ea5; --warn: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #3a4450; --page: #14181d; --card: #1d232a;
    --accent: #7fb2e5; --warn: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .8rem; }
p { margin: .3rem 0; }
.muted { color: var(--muted); }
.warn { color: var(--warn); font-weight: 600; }
section, .tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 1.2rem; margin-top: 1.2rem; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem;
  margin-top: 1.2rem; }
.tiles div { padding: .8rem 1rem; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 600; text-align: left; vertical-align: bottom; }
th, td { padding: .28rem .55rem; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; }
tr.group td { font-weight: 600; padding-top: .9rem; }
.chip { display: inline-block; min-width: 2.6em; padding: 0 .4em; border-radius: 4px; text-align: center; }
.bar { display: flex; width: 130px; height: 12px; background: var(--line); border-radius: 3px;
  overflow: hidden; }
.bar i { height: 100%; }
.step { width: 100%; height: 22px; margin: .6rem 0; }
.parts { width: auto; min-width: 320px; }
.pairs { width: auto; }
.pairs th { font-weight: 400; padding-left: 0; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; }
pre { overflow-x: auto; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  padding: .8rem; font-size: .84rem; }
svg { max-width: 100%; height: auto; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1.5rem; }
"""


def report_html(
    problem: Problem,
    plan: Plan,
    cost: Cost,
    png: bytes | str | Path,
    *,
    solver: Mapping[str, Any] | None = None,
    trajectory: Sequence[Point] = (),
    command: str | None = None,
) -> str:
    """The page. `png` is the picture or its path, `solver` the plan file's object of that name.

    `command` is what made the plan, shown as the way to reproduce it.
    """
    picture = png if isinstance(png, bytes) else Path(png).read_bytes()
    name = f"{problem.model.name} on {problem.cluster.name}"
    rows = plan_rows(problem, plan, cost, group_above=12, max_pipelines=_MAX_PIPELINES, max_stages=_MAX_STAGES)
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="muted">{escape(table.headline(problem))}</p>',
        _tiles(problem, plan, cost, solver),
        *_warnings(problem, plan, cost),
        _section(
            "The plan",
            f'<img alt="cluster, layers, timeline and memory of the plan" '
            f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
        ),
        _section(
            "Summary",
            '<div class="columns">'
            + _pairs([*table.performance(problem, cost), *table.bound(cost, solver)])
            + _pairs([*table.choices(problem, plan), *table.origin(solver)])
            + "</div>",
        ),
        _section("Where the step goes", _step(problem, plan, cost)),
        _section("Stages", f'{_stages(rows.pipelines)}<p class="muted">{escape(rows.note)}</p>'),
        _section("Memory", _memory(rows.pipelines)),
        _search(cost, solver, trajectory),
        _section("The problem", _problem(problem)),
        _section("Reproduce", _reproduce(problem, solver, command)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _tiles(problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any] | None) -> str:
    tiles = [
        ("step time", seconds(cost.step_time_s)),
        ("tokens/s", f"{cost.tokens_per_s:,.0f}"),
        ("MFU", f"{cost.mfu:.1%}"),
        ("pipelines", f"{len(plan.pipelines):,}"),
        ("GPUs used", f"{len(plan.devices()):,} of {problem.cluster.num_devices:,}"),
    ]
    if table.bound(cost, solver):
        assert solver is not None
        gap = max(0.0, 1 - solver["lower_bound_s"] / cost.step_time_s)
        tiles.insert(3, ("gap to the bound", f"{gap:.1%}"))
    cells = (f'<div><span class="muted">{name}</span><b>{escape(value)}</b></div>' for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _warnings(problem: Problem, plan: Plan, cost: Cost) -> list[str]:
    lines = []
    if not cost.fits:
        lines.append(f'<p class="warn">{escape(table.misfit(problem, plan, cost))}</p>')
    unused = unused_devices(problem, plan)
    if unused:
        lines.append(f"<p>Unused: {escape(listed(device_ranges(problem.cluster, unused), 40))}</p>")
    return [_section("Note", "".join(lines))] if lines else []


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (
        f'<tr><th class="muted">{"&emsp;" if name.startswith(" ") else ""}{escape(name.strip())}</th>'
        f"<td>{escape(value)}</td></tr>"
        for name, value in pairs
    )
    return f'<table class="pairs">{"".join(rows)}</table>'


def _table(headers: Sequence[tuple[str, bool]], body: Iterable[str]) -> str:
    """Headers with whether the column holds numbers; rows as HTML."""
    cells = "".join(f"<th{_NUMBER if number else ''}>{escape(name)}</th>" for name, number in headers)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _chip(row: PipelineRow, stage: StageRow) -> str:
    colour = row.stage_colour(stage)
    style = f"background:{colour};color:{ink_on(colour)}"
    return f'<span class="chip" style="{style}">{row.stage_name(stage)}</span>'


def _row(*cells: tuple[str, bool]) -> str:
    parts = (f"<td{_NUMBER if number else ''}>{cell}</td>" for cell, number in cells)
    return f"<tr>{''.join(parts)}</tr>"


def _heading(row: PipelineRow, span: int) -> str:
    text = f"pipeline {row.title}: {row.batch} micro-batches, ends at {seconds(row.end_s)}"
    text += ", the longest" if row.longest else ""
    return f'<tr class="group"><td colspan="{span}">{escape(text)}</td></tr>'


def _stages(rows: Sequence[PipelineRow]) -> str:
    headers = [
        ("Stage", False),
        ("Devices", False),
        ("TP", True),
        ("Layers", True),
        ("", True),
        ("Recompute", False),
        ("Forward ms", True),
        ("Backward ms", True),
        ("Busy %", True),
        ("Send ms", True),
        ("Binds", False),
    ]
    body = []
    for row in rows:
        body.append(_heading(row, len(headers)))
        for stage in row.stages:
            more = " …" if len(row.members) > 1 else ""
            body.append(
                _row(
                    (_chip(row, stage), False),
                    (escape(stage.place) + more, False),
                    (escape(stage.tp), True),
                    (stage.layers, True),
                    (str(stage.num_layers), True),
                    (escape(stage.recompute), False),
                    (milliseconds(stage.cost.forward_s), True),
                    (milliseconds(stage.cost.backward_s), True),
                    (f"{100 * stage.busy:.0f}", True),
                    ("–" if stage.send_s is None else milliseconds(stage.send_s), True),
                    (escape(" ".join(stage.binds)), False),
                )
            )
    note = "Times are per micro-batch; busy is the share of the step; sending is to the next stage and back."
    return _table(headers, body) + f'<p class="muted">{note}</p>'


def _memory(rows: Sequence[PipelineRow]) -> str:
    headers = [("Stage", False), ("", False), ("Total", True), ("Limit", True), ("%", True)]
    headers += [(MEMORY_LABELS[part], True) for part in MEMORY_PARTS]
    body = []
    for row in rows:
        for stage in row.stages:
            held, limit = stage.cost.memory, stage.cost.limit_bytes
            whole = max(held.total, limit)
            widths = [(part, 100 * getattr(held, part) / whole) for part in MEMORY_PARTS]
            bars = "".join(
                f'<i style="width:{width:.2f}%;background:{MEMORY_COLOURS[part]}"></i>' for part, width in widths
            )
            share = f"{100 * held.total / limit:.0f}"
            body.append(
                _row(
                    (_chip(row, stage), False),
                    (f'<span class="bar">{bars}</span>', False),
                    (gib(held.total), True),
                    (gib(limit), True),
                    (f'<span class="warn">{share}</span>' if held.total > limit else share, True),
                    *((gib(getattr(held, part)), True) for part in MEMORY_PARTS),
                )
            )
    swatches = " ".join(
        f'<span class="swatch" style="background:{MEMORY_COLOURS[part]}"></span>{MEMORY_LABELS[part]}&ensp;'
        for part in MEMORY_PARTS
    )
    note = f'<p class="muted">GiB on the fullest device of each stage. {swatches}</p>'
    return note + _table(headers, body)


def _search(cost: Cost, solver: Mapping[str, Any] | None, trajectory: Sequence[Point]) -> str:
    """Bound, gap, and how the best step time fell; empty where nothing is known."""
    lines = []
    known = table.bound(cost, solver)
    if known:
        text = "No plan of the space has a shorter step than the lower bound"
        lines.append(f"<p>{text}: {escape(known[0][1])}.</p>")
    if trajectory:
        bound_s = solver["lower_bound_s"] if known and solver is not None else None
        lines.append(_trajectory_svg(trajectory, bound_s, (solver or {}).get("runtime_s")))
    return _section("The search", "".join(lines)) if lines else ""


def _trajectory_svg(trajectory: Sequence[Point], bound_s: float | None, runtime_s: Any) -> str:
    """Best step time over runtime as a stair, the bound dashed."""
    points = [(point.runtime_s, point.step_time_s) for point in trajectory]
    if len(points) > _MAX_POINTS:
        stride = len(points) / _MAX_POINTS
        points = [points[int(k * stride)] for k in range(_MAX_POINTS)] + points[-1:]
    end = max([points[-1][0], float(runtime_s) if isinstance(runtime_s, (int, float)) else 0.0, 1e-9])
    values = [value for _, value in points] + ([bound_s] if bound_s else [])
    low, high = min(values), max(values)
    spread = (high - low) or high or 1.0
    low, high = low - 0.08 * spread, high + 0.08 * spread
    left, top, width, height = 80.0, 12.0, 640.0, 200.0

    def at(time_s: float, value: float) -> tuple[float, float]:
        return left + width * time_s / end, top + height * (high - value) / (high - low)

    x, y = at(*points[0])
    path = f"M{x:.1f} {y:.1f}"
    for point in points[1:]:
        x, y = at(*point)
        path += f"H{x:.1f}V{y:.1f}"
    path += f"H{left + width:.1f}"
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="var(--accent)"/>'
        for x, y in (at(*point) for point in points[:100])
    )
    labels = []
    for value in dict.fromkeys([points[0][1], points[-1][1]]):
        y = at(0, value)[1] + 4
        labels.append(f'<text x="{left - 8}" y="{y:.1f}" text-anchor="end">{seconds(value)}</text>')
    bound = ""
    if bound_s:
        y = at(0, bound_s)[1]
        bound = (
            f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--muted)" '
            f'stroke-dasharray="5 4"/><text x="{left + width}" y="{y - 5:.1f}" text-anchor="end">'
            f"lower bound {seconds(bound_s)}</text>"
        )
    right, low_edge = left + width, top + height
    return (
        f'<svg viewBox="0 0 {right + 20:.0f} {low_edge + 40:.0f}" width="{right + 20:.0f}" role="img" '
        'aria-label="best step time over runtime" style="font:12px system-ui,sans-serif;fill:var(--muted)">'
        f'<path d="M{left} {top}V{low_edge}H{right}" fill="none" stroke="var(--line)"/>{bound}'
        f'<path d="{path}" fill="none" stroke="var(--accent)" stroke-width="2"/>{dots}{"".join(labels)}'
        f'<text x="{left}" y="{low_edge + 18}" text-anchor="middle">0</text>'
        f'<text x="{right}" y="{low_edge + 18}" text-anchor="end">{seconds(end)} of search</text></svg>'
    )


def _step(problem: Problem, plan: Plan, cost: Cost) -> str:
    """The parts of the step time as one bar and as a table."""
    spent = step_parts(problem, plan, cost)
    bars = "".join(
        f'<i title="{part.name}: {part.duration}" style="width:{100 * part.share:.2f}%;background:{part.colour}"></i>'
        for part in spent.parts
    )
    body = [
        _row(
            (f'<span class="swatch" style="background:{part.colour}"></span>{part.name}', False),
            (part.duration, True),
            (part.percent, True),
        )
        for part in spent.parts
    ]
    body.append(
        _row(("<b>step time</b>", False), (f"<b>{seconds(cost.step_time_s)}</b>", True), ("<b>100.0%</b>", True))
    )
    note = f"Seconds of {spent.executor}, which ends last."
    table_html = _table([("Part", False), ("Time", True), ("Share", True)], body)
    narrow = table_html.replace("<table>", '<table class="parts">', 1)
    return f'<p class="muted">{note}</p><span class="bar step">{bars}</span>{narrow}'


def _problem(problem: Problem) -> str:
    cluster, model, workload = problem.cluster, problem.model, problem.workload
    specs: dict[str, list[int]] = {}
    for m, machine in enumerate(cluster.machines):
        specs.setdefault(machine.spec_name, []).append(m)
    body = []
    for name, members in list(specs.items())[:_MAX_PIPELINES]:
        machine = cluster.machines[members[0]]
        peak = machine.gpu.peak_flops(workload.precision) or 0.0
        body.append(
            _row(
                (escape(name), False),
                (f"{len(members):,} × {machine.num_gpus}", True),
                (escape(machine.gpu.name), False),
                (f"{peak / 1e12:.4g}", True),
                (gib(machine.gpu.usable_memory_bytes), True),
                ("–" if machine.num_gpus == 1 else rate(machine.intra_bandwidth_bytes_per_s), True),
                (f"{machine.num_interfaces} × {rate(machine.nic_bandwidth_bytes_per_s)}", True),
            )
        )
    headers = [
        ("Machine", False),
        ("Machines × GPUs", True),
        ("GPU", False),
        (f"{workload.precision} TFLOPS", True),
        ("Usable GiB", True),
        ("Inside GB/s", True),
        ("Network GB/s", True),
    ]
    shape = [
        ("model", f"{model.name}, {model.num_params / 1e9:.3g} B parameters"),
        ("shape", f"{model.num_layers} layers, hidden {model.hidden_size:,}, {model.num_heads} heads"),
        ("", f"{model.num_kv_heads} KV heads, MLP {model.ffn_size:,}, vocabulary {model.vocab_size:,}"),
    ]
    work = [
        ("batch", f"{workload.global_batch:,} × {workload.seq_len:,} tokens"),
        ("precision", f"{workload.precision}, {workload.stored_gradient_bytes}-byte gradients"),
        ("recompute", workload.recompute),
    ]
    text = json.dumps(problem_to_dict(problem), indent=1, ensure_ascii=False, default=str)
    return (
        _table(headers, body)
        + f'<div class="columns" style="margin-top:1rem">{_pairs(shape)}{_pairs(work)}</div>'
        + f"<details><summary>The whole problem as JSON</summary><pre>{escape(text)}</pre></details>"
    )


def _reproduce(problem: Problem, solver: Mapping[str, Any] | None, command: str | None) -> str:
    lines = [command] if command else []
    if not lines and solver and "name" in solver:
        lines.append(f"hexiopt plan solver={solver['name']} seed={solver.get('seed', 0)}  # and this problem")
    lines.append("hexiopt price plan=plan.json")
    return (
        f"<pre>{escape(chr(10).join(lines))}</pre>"
        f'<p class="muted">plan.json beside this file holds the whole problem. SHA-256 of the problem: '
        f"{problem_sha256(problem)}</p>"
    )
