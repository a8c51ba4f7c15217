"""The HTML that notebooks show for problems, plans and results."""

import base64
from collections.abc import Iterable
from dataclasses import fields
from html import escape

from hexiopt.bounds import our_model
from hexiopt.frame import Frame
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine, spec_spans
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.report.style import gib, rate
from hexiopt.study.solution import PlacedPlan, PlanCost, Solution

_CHOICES = ("message_precision", "recompute", "schedule", "optimizer_sharding")  # of a workload


def to_html(value: object) -> str | None:
    """The HTML of a value; None for other classes, of which a notebook shows the text."""
    match value:
        case Cluster():
            return _cluster(value)
        case Machine():
            return _facts(value.name, _machine(value).items())
        case ModelSpec():
            return _model(value)
        case Workload():
            return _facts("Workload", _fields(value))
        case Space():
            return _facts("Plan space", _fields(value))
        case Problem():
            return _problem(value)
        case PlanCost():
            return _cost(value)
        case PlacedPlan():
            return _plan(value)
        case Solution():
            return f"<pre>{escape(str(value))}</pre>" + (_plan(value.plan) if value.plan else "")
    return None


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
        *((name.replace("_", " "), getattr(work, name)) for name in _CHOICES),
        *([("training", training)] if (training := problem.parameters.in_words) else []),
        *_fields(problem.space),
    ]
    return _cluster(problem.cluster) + _model(problem.model) + _facts("Workload and plan space", facts)


def _cost(cost: PlanCost) -> str:
    ours = our_model(cost.plan.pricer, cost.plan.problem)
    return cost.breakdown()._repr_html_() if ours else f"<pre>{escape(repr(cost))}</pre>"


def _plan(plan: PlacedPlan) -> str:
    from hexiopt.report.panels.canvas import png

    picture = base64.b64encode(png(plan.plot())).decode()
    description = escape(repr(plan))
    return f'<img alt="{description}" style="max-width: 100%; background: #fff" src="data:image/png;base64,{picture}">'


def _fields(value: Workload | Space) -> list[tuple[str, str]]:
    """The fields of a workload, or the fields of a plan space that differ from their defaults, as text."""
    pairs = [(field, getattr(value, field.name)) for field in fields(value)]
    return [(field.name, str(v)) for field, v in pairs if isinstance(value, Workload) or v != field.default]


def _facts(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    return Frame(("", title), tuple(pairs))._repr_html_()
