"""Speed and quality claims, measured as ratios within one run: `python -m experiments.measure.bench [--only NAME ...]`.

Every row states its budget, seeds and machine. `--quick` takes a tenth of the time, for smoke tests rather than claims.
It writes `bench.csv` into `--out`.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.cases.fleets import FLEETS
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_text
from hexiopt.frame import csv_text
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import layer_ranges
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from hexiopt.study.jobs import cpu_used_s
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.frame.solver import offer_partition
from solvers.loop.search import Loop
from solvers.loop.settings import LoopSettings
from solvers.loop.walk import MOVES
from solvers.registry import make_solver

Cuts = Iterator[Sequence[tuple[tuple[int, int], ...]]]
COMMANDS = 10
WARM_REPEATS = 200


@dataclass(frozen=True)
class BenchRow:
    """One measured claim. `holds` says whether it meets its target; None where it has none."""

    name: str
    what: str
    measured: float
    unit: str
    target: str
    holds: bool | None


def problem(cluster: str, model: str, **overrides: float) -> Problem:
    """A shipped cluster and model under the default workload."""
    return Problem(named_cluster(cluster), named_model(model), Workload(**overrides))  # type: ignore[arg-type]


def pricing(scale: float) -> Iterator[BenchRow]:
    """Pricing one plan on 56 GPUs: with empty caches, and after two pipelines have changed."""
    task = problem("hexiscale_setting_3", "llama_30b")
    result = make_solver("local_search").solve(task, Budget(3600.0, 200))  # of steps, so that it is the same plan
    assert result.plan is not None, "setting 3 has a plan"
    cold = [_pricing_s(PlanPricer(task), result.plan) for _ in range(20)]
    yield BenchRow("pricing", "one plan on 56 GPUs, caches empty", 1e3 * median(cold), "ms", "", None)
    model = PlanPricer(task)
    _pricing_s(model, result.plan)
    again = []
    for _ in range(WARM_REPEATS):
        model.forget_plans()
        again.append(_pricing_s(model, result.plan))
    yield BenchRow(
        "pricing",
        "one plan on 56 GPUs, layers and routes cached",
        1e3 * median(again),
        "ms",
        "≤ 2",
        median(again) <= 2e-3,
    )


def _pricing_s(model: PlanPricer, plan: Plan, *, whole: bool = True) -> float:
    """Seconds of processor time, which depend little on the load of the machine."""
    start = time.process_time()
    if whole:
        model.price(plan)
    else:
        model.pipelines(plan)
    return time.process_time() - start


def prices(scale: float) -> Iterator[BenchRow]:
    """Prices per second of new plans: by a new pricer on a new cluster, by one that has cached layers and routes, and
    of plans that differ little from a priced one."""
    setting_2 = problem("hexiscale_setting_2", "llama2_7b")
    large_task = Problem(
        named_cluster("synthetic", num_machines=128), named_model("llama2_13b"), Workload(global_batch=8192)
    )
    for name, task, num_pipelines, num_stages, num_chunks in (
        ("setting 2, 1F1B, 8 × 4 stages", setting_2, 8, 4, 1),
        ("setting 2, interleaved, 4 × 8 stages × 2", setting_2, 4, 8, 2),
        ("1,024 GPUs, 1F1B, 256 × 4 stages", large_task, 256, 4, 1),
        ("1,024 GPUs, interleaved, 256 × 4 stages × 2", large_task, 256, 4, 2),
    ):
        repeats = max(3, round(20 * scale))
        pipelines = _even_pipelines(task, num_pipelines, num_stages, num_chunks)
        cuts = _cuts(task.model.num_layers, num_stages, num_chunks)
        plan_of = partial(Plan, schedule=INTERLEAVED if num_chunks > 1 else ONE_F_ONE_B)

        def cut_anew(few: int, pipelines: tuple[Pipeline, ...] = pipelines, cuts: Cuts = cuts) -> tuple[Pipeline, ...]:
            """The pipelines, the first `few` of them with layer ranges not used before."""
            layers = next(cuts)
            return tuple(_cut(pipeline, layers) for pipeline in pipelines[:few]) + pipelines[few:]

        def move_batches(turn: int, pipelines: tuple[Pipeline, ...] = pipelines) -> tuple[Pipeline, ...]:
            """The pipelines with micro-batches moved from the first to the last, more of them in each turn."""
            unit = len(pipelines[0].stages) if pipelines[0].num_chunks > 1 else 1
            first, last = pipelines[0].num_micro_batches, pipelines[-1].num_micro_batches
            num_moved = unit * turn % first
            shorter = replace(pipelines[0], num_micro_batches=first - num_moved)
            return shorter, *pipelines[1:-1], replace(pipelines[-1], num_micro_batches=last + num_moved)

        cold = [_pricing_s(_new_model(task), plan_of(cut_anew(num_pipelines))) for _ in range(repeats)]
        model = PlanPricer(task)
        for _ in range(5):
            model.price(plan_of(cut_anew(num_pipelines)))
        known = [_pricing_s(model, plan_of(cut_anew(num_pipelines))) for _ in range(repeats)]
        model.price(plan_of(pipelines))
        changed = [_pricing_s(model, plan_of(cut_anew(1))) for _ in range(repeats)]
        only = [_pricing_s(model, plan_of(cut_anew(1)), whole=False) for _ in range(repeats)]
        batches = [_pricing_s(model, plan_of(move_batches(1 + k))) for k in range(min(repeats, 7))]
        for what, seconds in (
            ("new model and cluster", cold),
            ("layers and routes known", known),
            ("layers of one pipeline changed", changed),
            ("layers of one pipeline changed, its pipelines() only", only),
            ("micro-batches moved between two pipelines", batches),
        ):
            yield BenchRow(
                "prices", f"{name}: {what}, {1e3 * median(seconds):.3g} ms", 1 / median(seconds), "/s", "", None
            )


def _new_model(task: Problem) -> PlanPricer:
    """A pricer with empty caches, on a cluster whose cached properties are empty too."""
    return PlanPricer(replace(task, cluster=replace(task.cluster)))


def _even_pipelines(task: Problem, num_pipelines: int, num_stages: int, num_chunks: int) -> tuple[Pipeline, ...]:
    """Pipelines of one-device stages with equally many layers, and micro-batches of one sequence."""
    layers = layer_ranges([task.model.num_layers // num_stages] * num_stages, num_chunks)
    return tuple(
        Pipeline(
            tuple(Stage(TensorParallel((p * num_stages + s,)), layers[s]) for s in range(num_stages)),
            task.workload.global_batch // num_pipelines,
        )
        for p in range(num_pipelines)
    )


def _cuts(num_layers: int, num_stages: int, num_chunks: int) -> Cuts:
    """Layer ranges of stages with nearly equally many layers; no cut is returned twice."""
    even = num_layers // num_stages
    most = min(3, even - num_chunks)
    changes = [c for c in product((0, 1, -1, 2, -2), repeat=num_stages - 1) if abs(sum(c)) <= most and any(c)]
    Random(0).shuffle(changes)
    for change in changes:
        yield layer_ranges([even + more for more in (*change, -sum(change))], num_chunks)


def _cut(pipeline: Pipeline, layers: Sequence[tuple[tuple[int, int], ...]]) -> Pipeline:
    stages = (replace(stage, layers=ranges) for stage, ranges in zip(pipeline.stages, layers, strict=True))
    return replace(pipeline, stages=tuple(stages))


def candidates(scale: float) -> Iterator[BenchRow]:
    """Candidates that the default evaluates in a second, beside plans that it completes and prices in one."""
    tasks = {"hexiscale_setting_1": problem("hexiscale_setting_1", "llama2_7b")}
    tasks |= {fleet.cluster: fleet.problem() for fleet in FLEETS if fleet.cluster in ("campus", "fleet")}
    for name, task in tasks.items():
        search = Search("candidates", task, Budget(10.0 * scale), 0)
        loop, began_s = Loop(search, LoopSettings(), search.exact_pricer), time.process_time()
        partitions = loop.search(search.until())
        rate = sum(search.operators.of(f"walk.{move}").proposed for move, _ in MOVES) / (time.process_time() - began_s)
        completer, priced_s = PlanCompleter(search.pricer, replicates=False), []
        for met in partitions:
            began_s = time.process_time()
            offer_partition(search, completer, met)
            priced_s.append(time.process_time() - began_s)
        yield BenchRow("candidates", f"{name}: candidates that the walks evaluate", rate, "per CPU s", "", None)
        ratio = rate * median(priced_s)
        what = f"{name}: seconds to complete and price a plan / to evaluate a candidate"
        yield BenchRow("candidates", what, ratio, "×", "≥ 10", ratio >= 10.0)


def commands(scale: float) -> Iterator[BenchRow]:
    """`hexiopt plan` as a whole on synthetic clusters, with ten seeds: from the shell's prompt to the next."""
    for gpus, limit_s, most_s in ((1024, 5.0, 10.0), (10_240, 10.0, 60.0)):
        words = (
            "cluster=synthetic",
            f"cluster.synthetic.num_machines={gpus // 8}",
            "model=llama2_13b",
            f"workload.global_batch={8 * gpus}",
            f"solver.time_limit_s={limit_s * scale:g}",
        )
        took_s, planned = [], 0
        for seed in range(COMMANDS):
            with TemporaryDirectory() as folder:
                began_s = time.perf_counter()
                command = (sys.executable, "-m", "hexiopt", "plan", *words, f"seed={seed}")
                planned += subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
                took_s.append(time.perf_counter() - began_s)
        what = f"{gpus} GPUs, a limit of {limit_s * scale:g} s, {COMMANDS} seeds"
        slowest_s = max(took_s)
        yield BenchRow("commands", f"{what}: plans", planned, "", f"{COMMANDS}", planned == COMMANDS)
        claim = f"{what}: seconds of the slowest command (the fastest {min(took_s):.1f})"
        yield BenchRow("commands", claim, slowest_s, "s", f"≤ {most_s:g}", slowest_s <= most_s)


def fitting(scale: float) -> Iterator[BenchRow]:
    """CPU seconds of `hexiopt fit` as a whole for two cards, the default workload and adapters."""
    words = ("fit", "model=Qwen/Qwen3-8B", "gpus=[3090,4090]", "workload.training=lora")
    took_s = []
    for _ in range(max(1, round(COMMANDS * scale))):
        before_s = cpu_used_s()
        with TemporaryDirectory() as folder:
            subprocess.run((sys.executable, "-m", "hexiopt", *words), cwd=folder, capture_output=True, check=True)
        took_s.append(cpu_used_s() - before_s)
    middle_s = median(took_s)
    yield BenchRow("fitting", "hexiopt fit of two cards: CPU seconds", middle_s, "s", "≤ 2", middle_s <= 2.0)


def host(scale: float) -> Iterator[BenchRow]:
    """The host's own time of a training step of this runtime over that of the same model of torch's modules."""
    from experiments.stock import host as small
    from experiments.stock.turns import take_turns

    steps = max(2, round(50 * scale))
    for ways_of, ours in (
        (small.ways_of, "ours"),
        (partial(small.ways_of, is_compiled=True), "ours, layers compiled,"),
    ):
        measured = take_turns(small.SIZE, ways_of, 9, steps, small.CLOCK)
        took_ms = 1e3 * measured.step_s["hexiopt"]
        claim = f"the host's own time of a step: {ours} / modules of torch, {took_ms:.1f} ms of CPU"
        yield BenchRow("host", claim, measured.ratio, "×", "≤ 1.05", measured.ratio <= 1.05)


def training(scale: float) -> Iterator[BenchRow]:
    """The training step time of this runtime over that of stock torch on this machine."""
    from experiments.stock import pipelines, tensor_parallel
    from experiments.stock.turns import take_turns

    steps = max(2, round(50 * scale))
    for size, ways_of, what, most in (
        (pipelines.SIZE, pipelines.ways_of, "2 pipelines of 2 stages: ours / pipelines and DDP of torch", 1.05),
        (tensor_parallel.SIZE, tensor_parallel.ways_of, "layers on 2 TP ranks: ours / DTensor", 1.0),
    ):
        measured = take_turns(size, ways_of, 6, max(1, steps // 5))
        claim = f"{what}, {1e3 * measured.step_s['hexiopt']:.0f} ms a step"
        yield BenchRow("training", claim, measured.ratio, "×", f"≤ {most:g}", measured.ratio <= most)


def saving(scale: float) -> Iterator[BenchRow]:
    """How long a checkpoint of 2 GiB stops training, over how long it takes to write."""
    from experiments.lab.saving import saving_times

    for count, measured in zip(("first", "second"), saving_times(round(scale * 2**31)), strict=True):
        ratio = measured.stopped_s / measured.written_s
        claim = f"{count} checkpoint of {measured.size_bytes / 2**30:.1f} GiB: stop / write, {measured.written_s:.1f} s"
        yield BenchRow("saving", claim, ratio, "×", "≤ 0.1", ratio <= 0.1)


BENCHES: dict[str, Callable[[float], Iterator[BenchRow]]] = {
    "pricing": pricing,
    "prices": prices,
    "candidates": candidates,
    "commands": commands,
    "fitting": fitting,
    "host": host,
    "training": training,
    "saving": saving,
}


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES))
    parser.add_argument("--quick", action="store_true", help="a tenth of every budget")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    console = Console()
    console.print(
        f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}; every ratio from this run"
    )
    rows = []
    for name in options.only:
        for row in BENCHES[name](0.1 if options.quick else 1.0):
            rows.append(row)
            verdict = {True: "holds", False: "missed", None: ""}[row.holds]
            console.print(f"{row.what}: {row.measured:.4g} {row.unit} {row.target} {verdict}", highlight=False)
    table = Table("bench", "what", "measured", "target", "")
    for row in rows:
        verdict = {True: "✓", False: "missed", None: ""}[row.holds]
        table.add_row(row.name, row.what, f"{row.measured:.4g} {row.unit}", row.target, verdict)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [(row.name, row.what, row.measured, row.unit, row.target, row.holds) for row in rows]
    write_text(options.out / "bench.csv", csv_text([("bench", "what", "measured", "unit", "target", "holds"), *cells]))
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
