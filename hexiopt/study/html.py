"""The HTML that notebooks show for problems, plans and results; `hexiopt.api` registers it."""

import base64
from collections.abc import Callable, Iterable
from dataclasses import fields
from html import escape
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.frame import Frame
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine, spec_spans
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.report.style import gib, rate
from hexiopt.study.solution import PlacedPlan, PlanCost, Solution
from hexiopt.value import Value


def register() -> None:
    """Register the HTML of each class."""
    pages: dict[type, Callable[[Any], str]] = {
        Cluster: _cluster,
        Machine: lambda machine: _facts(machine.name, _machine(machine).items()),
        ModelSpec: _model,
        Workload: lambda workload: _facts("Workload", _stated(workload)),
        Space: lambda space: _facts("Plan space", _stated(space)),
        Problem: _problem,
        PlanCost: _cost,
        PlacedPlan: _plan,
        Solution: _solution,
    }
    Value.pages.update(pages)


def _machine(machine: Machine) -> dict[str, str]:
    inside = "" if machine.num_gpus == 1 else rate(machine.intra_bandwidth_bytes_per_s)
    network = rate(machine.nic_bandwidth_bytes_per_s)
    return {
        "GPU": machine.gpu.name,
        "GPUs": f"{machine.num_gpus:,}",
        "BF16 TFLOPS": f"{(machine.gpu.peak_flops('bf16') or 0.0) / 1e12:.4g}",
        "Usable GiB": gib(machine.gpu.usable_memory_bytes),
        "Inside GB/s": inside,
        "Network GB/s": f"{machine.num_interfaces} × {network}" if network != "inf" else "",
    }


def _cluster(cluster: Cluster) -> str:
    rows = []
    for name, span in spec_spans(cluster.machines).items():
        rows.append({"Machine": name, "Machines": len(span), **_machine(cluster.machines[span[0]])})
    return Frame.of(rows, title=f"{cluster.name}: {cluster.num_devices:,} GPUs")._repr_html_()


def _model(model: ModelSpec) -> str:
    shape = [
        ("architecture", model.architecture),
        ("parameters", f"{model.num_params / 1e9:.3g} B"),
        ("layers", f"{model.num_layers:,}"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("heads", f"{model.num_heads:,}, of keys and values {model.num_kv_heads:,}"),
        ("MLP size", f"{model.ffn_size:,}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("positions", f"{model.max_positions:,}"),
    ]
    return _facts(model.name, shape)


def _problem(problem: Problem) -> str:
    work = problem.workload
    facts = [
        ("batch", f"{work.global_batch:,} × {work.seq_len:,} tokens"),
        ("precision", work.precision),
        *((name.replace("_", " "), getattr(work, name)) for name in ("recompute", "schedule", "optimizer_sharding")),
        *_stated(problem.space),
    ]
    return _cluster(problem.cluster) + _model(problem.model) + _facts("Workload and plan space", facts)


def _cost(cost: PlanCost) -> str:
    ours = cost.pricer is None or isinstance(cost.pricer, PlanPricer)
    return cost.breakdown()._repr_html_() if ours else f"<pre>{escape(repr(cost))}</pre>"


def _plan(plan: PlacedPlan) -> str:
    from hexiopt.report.panels.canvas import png

    picture = base64.b64encode(png(plan.plot())).decode()
    said = escape(repr(plan))
    return f'<img alt="{said}" style="max-width: 100%; background: #fff" src="data:image/png;base64,{picture}">'


def _solution(result: Solution) -> str:
    text = f"<pre>{escape(str(result))}</pre>"
    return text if result.plan is None else text + _plan(result.plan)


def _stated(value: Workload | Space) -> list[tuple[str, str]]:
    """The fields of a workload, or those of a plan space that differ from their defaults, as text."""
    kept = [(one, getattr(value, one.name)) for one in fields(value)]
    return [(one.name, str(own)) for one, own in kept if isinstance(value, Workload) or own != one.default]


def _facts(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    return Frame(("", title), tuple(pairs))._repr_html_()
