"""What this machine's GPUs make of hexiopt, in at most ten minutes: `python -m experiments.measure.gpu` (`make gpu`).

It measures the GPUs and their links, prices plans with that, trains with each for a few steps, and prints what was
predicted beside what was measured. On one GPU it trains models of 8B and 1B shapes; on several also with every way of
communicating, and with plans of two stages and more. Then several processes show, at toy size, what happens when one is
killed, and more (`gpu_processes.py`). A plan that gives no answer is ended, and said to have given none.

It writes `cluster.yaml`, which other commands take as `cluster=PATH`, what it was fitted to (`profile.json`), a plan
file for each trial, and `gpu.json`, of which `hexiopt validate data=gpu.json` makes a table of errors. Without a GPU it
does the same at toy size on the CPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.app.configurations import named_model
from experiments.lab.profile.local import measure_here
from experiments.lab.profile.points import Measurement
from experiments.lab.profile.rank import Request
from experiments.lab.profile.result import result_of
from experiments.lab.profile.summary import summary_tables
from experiments.lab.trials.plans import TrialPlan, trial_plans
from experiments.lab.trials.trial import Trial, TrialRequest, try_plan
from experiments.measure.gpu_processes import exchange_table, toy_model, toy_workload, try_processes
from experiments.measure.trial_files import FORMAT, VERSION
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import read_cluster
from hexiopt.files.plan_file import plan_file_to_dict, write_plan, write_text
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.report.tabular import plain_table
from hexiopt.units import GIB
from runtime.device import num_gpus

_ON_CPU = "No GPU: the same on two processes of the CPU, at toy size. Its figures say nothing about GPUs."
_SHOWN_KERNELS = 8


@dataclass(frozen=True)
class TrialScale:
    """How large everything is: seconds of each kind of measurement, the models, the workload, steps that count, and
    seconds: of all in all, and after which a plan is given up."""

    seconds: float
    processes: int | None
    single: list[ModelSpec]
    several: ModelSpec
    workload: Workload
    steps: int
    all_s: float
    limit_s: float


def of_gpus(precision: str) -> TrialScale:
    """Models of 8B and 1B shapes (Llama 3 and 3.2, arXiv 2407.21783) at 4,096 tokens."""
    large = named_model("llama3_8b")
    small = replace(
        large, name="llama3_1b", num_layers=16, hidden_size=2048, ffn_size=8192, head_dim=64, tied_embeddings=True
    )
    workload = Workload(8, 4096, precision=precision, loss_chunk_tokens=1024)
    return TrialScale(1.0, None, [large, small], small, workload, 5, all_s=540.0, limit_s=150.0)


def of_cpu(precision: str) -> TrialScale:
    """What a CPU computes in milliseconds."""
    toy = toy_model()
    return TrialScale(0.02, 2, [toy], toy, toy_workload(precision), 3, 540.0, 150.0)


def measure_machine(folder: Path, scale: TrialScale, tell: Callable[[str], None], console: Console) -> Measurement:
    """This machine's profile, shown and written."""
    measurement = measure_here(Request(scale.seconds, processes=scale.processes, machine="here"), tell)
    result = result_of(measurement, "here", None)
    write_text(folder / "profile.json", json.dumps(measurement.to_dict()) + "\n")
    write_text(folder / "cluster.yaml", result.text("Written by make gpu; profile.json has every measured point."))
    for title, header, rows in summary_tables(measurement, result):
        console.print(f"\n{title}", plain_table(header, rows))
    return measurement


def attempt(
    trial_plan: TrialPlan, number: int, folder: Path, scale: TrialScale, is_compiled: bool
) -> tuple[Cost, Trial]:
    """The price of a plan, and what came of training with it."""
    cost, path = PlanPricer(trial_plan.problem).price(trial_plan.plan), folder / f"plan-{number}.json"
    write_plan(path, trial_plan.problem, trial_plan.plan, cost, {})
    return cost, try_plan(TrialRequest(path, scale.steps, is_compiled, scale.limit_s))


def row(trial_plan: TrialPlan, cost: Cost, trial: Trial) -> list[str]:
    """A plan's line of the table."""
    devices = len(trial_plan.plan.devices())
    priced = [f"{1e3 * cost.step_time_s:.4g}", f"{cost.tensor_bytes / GIB:.3g}"]
    if trial.trouble is not None:
        return [trial_plan.name, "–", priced[0], "", "", "–", priced[1], trial.trouble.splitlines()[0]]
    return [
        trial_plan.name,
        f"{1e3 * trial.step_s:.4g}",
        priced[0],
        f"{trial_plan.problem.workload.tokens / trial.step_s / devices:.4g}",
        f"{100 * trial_plan.problem.mfu(trial.step_s, devices):.1f} %",
        f"{max(trial.peak_bytes) / GIB:.3g}",
        priced[1],
        f"{trial.losses[0]:.4f} → {trial.losses[-1]:.4f}",
    ]


HEADER = ("Plan", "Step, ms", "priced", "Tokens/s a device", "MFU", "GiB at most", "priced", "Loss")


def kernel_rows(trial: Trial) -> list[list[str]]:
    """What took longest of a step."""
    return [
        [
            kernel.name if len(kernel.name) <= 60 else f"{kernel.name[:59]}…",
            str(kernel.calls),
            f"{1e3 * kernel.seconds:.3g}",
        ]
        for kernel in trial.kernels[:_SHOWN_KERNELS]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns 1 if a plan could not be trained, or processes did what they must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--eager", action="store_true", help="do not compile layers")
    options = parser.parse_args(argv)
    console, folder, began_s = Console(highlight=False), options.out, time.monotonic()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler notes its own beginning and end
    folder.mkdir(parents=True, exist_ok=True)
    is_gpu = num_gpus() > 0

    def has_time(limit_s: float) -> bool:
        return time.monotonic() - began_s <= scale.all_s - limit_s

    scale = of_gpus("bf16") if is_gpu else of_cpu("fp32")
    if not is_gpu:
        console.print(_ON_CPU)
    with console.status("measuring") as status:
        measurement = measure_machine(folder, scale, lambda line: status.update(f"measuring: {line}"), console)
        precision = measurement.devices[0].precision
        workload = replace(scale.workload, precision="fp32" if precision == "fp16" else precision)
        cluster = read_cluster(folder / "cluster.yaml")
        plans = trial_plans(cluster, scale.single, scale.several, workload)
        rows, plan_files, trials, kernels, left_out = [], [], list[tuple[str, Trial]](), [], []
        for number, trial_plan in enumerate(plans):
            if not has_time(scale.limit_s):
                left_out.append(trial_plan.name)
                continue
            status.update(f"training: {trial_plan.name} ({number + 1} of {len(plans)})")
            cost, trial = attempt(trial_plan, number, folder, scale, is_gpu and not options.eager)
            rows.append(row(trial_plan, cost, trial))
            plan_files.append(plan_file_to_dict(trial_plan.problem, trial_plan.plan, cost, {}))
            trials.append((trial_plan.name, trial))
            if number < len(scale.single) and trial.kernels:
                kernels.append((trial_plan.name, kernel_rows(trial)))
        processes = try_processes(folder, cluster, lambda line: status.update(f"processes: {line}"), has_time)
    console.print("\nTraining", plain_table(HEADER, rows, left=("Plan", "Loss")))
    for name, used in kernels:
        console.print(f"\nA step of {name}", plain_table(("Kernel", "Calls", "ms"), used, left=("Kernel",)))
    for title, header, cells in (*processes.tables(), exchange_table(trials + processes.trials)):
        console.print(f"\n{title}", plain_table(header, cells, left=(header[0], header[-1])))
    for line in processes.troubles:
        console.print(f"not as it must be: {line}")
    for name in left_out + processes.left_out:
        console.print(f"not tried, as ten minutes would not suffice: {name}")
    about = {"format": FORMAT, "version": VERSION, "torch": measurement.torch_version, "is_gpu": is_gpu}
    files = [
        {"name": name, "plan": plan, "measured": trial.to_dict()}
        for plan, (name, trial) in zip(plan_files, trials, strict=True)
    ]
    content = {**about, "trials": files, **processes.to_dict()}
    write_text(folder / "gpu.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    console.print(f"\n{folder / 'gpu.json'}\n{folder / 'cluster.yaml'}")
    return int(bool(processes.troubles) or any(trial.trouble is not None for _, trial in trials))


if __name__ == "__main__":
    sys.exit(main())
