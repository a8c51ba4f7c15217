"""`python -m experiments.calibrate`: fits the constants of `hexiopt/numbers/constants.yaml` to measured runs
and writes that file.

The fit is a least-squares fit of the logarithms of predicted over measured step times of the shipped runs, and of
layers that Zorse measured, with a soft L1 loss beyond 8 %. Runs of one layout in several releases weigh together as one
row; all layers of a GPU type and precision together as five. A prior keeps constants that no row determines at their
starting values: a constant at twice its starting value costs as much as a row with an error of 40 %.
`--leave-one-out` fits without each source instead, prints the errors of its rows both ways, and writes them into
`experiments/data/left_out_errors.csv`.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from scipy.optimize import least_squares

from experiments.app.common import Job
from experiments.measure.calibrate_runs import calibrate_runs
from experiments.validation.cases import case_of
from experiments.validation.layers import MeasuredLayer, fitted_layers, predicted_s
from experiments.validation.predict import Case, in_metric, link_constants, predict
from experiments.validation.rows import Row, read_rows
from experiments.validation.score import Scored, gpu_types, group_by, is_fitted
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import LEFT_OUT, RUNS, shipped_measurements
from hexiopt.errors import InputError
from hexiopt.files.plan_file import write_text
from hexiopt.frame import csv_text
from hexiopt.numbers.constants import CALIBRATION, constant_values
from hexiopt.numbers.frameworks import fitted_constants
from hexiopt.numbers.gpus import fitted_efficiency
from hexiopt.report.tabular import plain_table
from hexiopt.study.jobs import provenance

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Free:
    """A constant to fit: its starting value, range and meaning, and the rows that determine it."""

    name: str
    start: float
    least: float
    most: float
    unit: str
    meaning: str
    shown_by: str


_SHARE, _RATE = "share of the peak", "share of the nominal rate"
# Starting values are published measurements of operators and links: 0.9 of the rate of products of the best shape
# (Bekman, ml-engineering, "Maximum Achievable Matmul FLOPS": A100 86 %, H100 80 %), nccl-tests on H100 (NVIDIA/nccl
# issue 1281: 350 to 360 of 450 GB/s), AMP's layers on T4 (`amp_layer_forward_seconds.json`). Shares without a
# measurement start at 0.5. The other values are guesses, some made with knowledge of the rows.
FREE = (
    Free("ampere_gemm_max", 0.77, 0.5, 0.9, _SHARE, "large GEMMs of A100 in BF16 and FP16", "A100"),
    Free("hopper_gemm_max", 0.72, 0.4, 0.8, _SHARE, "large GEMMs of H100 in BF16", "H100"),
    Free("turing_gemm_max", 0.25, 0.1, 0.6, _SHARE, "large GEMMs of T4 at 70 W in FP16", "T4"),
    Free("nvlink_efficiency", 0.79, 0.4, 1.0, _RATE, "what collectives reach over NVLink", "TP over NVLink"),
    Free("infiniband_efficiency", 0.8, 0.4, 1.0, _RATE, "what rings reach over InfiniBand or RoCE", "A100, H100"),
    Free("ethernet_efficiency", 0.6, 0.2, 1.0, _RATE, "what rings reach over TCP", "AMP"),
    Free("pcie_efficiency", 0.25, 0.1, 1.0, _RATE, "what collectives reach over PCIe, all GPUs at once", "T4"),
    Free("memory_traffic", 2.0, 1.0, 6.0, "factor", "bytes that element-wise operators move, over fused ones", "all"),
    Free("megatron_memory_traffic", 2.0, 1.0, 6.0, "factor", "the same in Megatron with dropout", "Megatron to 2022"),
    Free("compiled_memory_traffic", 1.2, 1.0, 3.0, "factor", "the same with torch.compile", "torchtitan"),
    Free("fsdp_contention", 0.5, 0.0, 1.0, "share", "of hidden FSDP communication that compute loses", "FSDP"),
    Free("megatron_tp_exposed", 0.5, 0.0, 1.0, "share", "of TP collectives not hidden by overlap", "Megatron of 2024"),
    Free("async_tp_exposed", 0.5, 0.0, 1.0, "share", "the same of asynchronous TP", "torchtitan"),
    Free("blackwell_gemm_max", 0.5, 0.3, 0.8, _SHARE, "large GEMMs of B200 in BF16", "B200"),
    Free("blackwell_attention_max", 0.25, 0.1, 0.7, _SHARE, "fused attention of B200, by FlashAttention-2", "B200"),
    Free("blackwell_quantized_max", 0.65, 0.3, 0.9, _SHARE, "large GEMMs of B200 in FP8 and FP4", "B200, GB200, GB300"),
    Free("ultra_nvfp4_max", 0.5, 0.2, 0.9, _SHARE, "large GEMMs of B300 and GB300 in NVFP4", "GB300"),
    Free("gb200_power", 0.95, 0.6, 1.3, "factor", "shares of peaks of GB200 over those of B200", "GB200"),
    Free("gb300_power", 1.05, 0.6, 1.5, "factor", "shares of peaks of GB300 over those of B200", "GB300"),
    Free("te_fp8_cast_bytes", 6, 1, 40, "bytes", "that a cast to FP8 moves, Transformer Engine", "H100, Blackwell"),
    Free("te_mxfp8_cast_bytes", 6, 1, 40, "bytes", "the same to MXFP8", "Blackwell"),
    Free("te_nvfp4_cast_bytes", 6, 1, 40, "bytes", "the same to NVFP4", "Blackwell"),
    Free("torchao_fp8_cast_bytes", 6, 1, 40, "bytes", "that a cast to FP8 moves in torchtitan", "torchtitan"),
    Free("cudnn_attention", 1.5, 1.0, 2.5, "factor", "speed of cuDNN's attention over FlashAttention-2's", "Megatron"),
    Free("h100_nvl_gemm_max", 0.5, 0.2, 0.8, _SHARE, "large GEMMs of H100 NVL at 400 W", "layers"),
    Free("l4_gemm_max", 0.5, 0.2, 0.8, _SHARE, "large GEMMs of L4 at 72 W", "layers"),
    Free("ampere_fp32_max", 0.9, 0.4, 1.0, _SHARE, "large GEMMs in FP32 of A100 and V100", "layers"),
    Free("graphics_fp32_max", 0.5, 0.2, 1.0, _SHARE, "the same of GA10x and AD10x", "layers"),
    Free("pascal_fp32_max", 0.8, 0.4, 1.0, _SHARE, "the same of P100 and P40", "layers"),
    Free("t4_burst", 1.7, 1.0, 3.0, "factor", "speed of T4 in short bursts over long runs at 70 W", "layers"),
    Free("deepspeed_layer_host_us", 5500, 500, 20000, "µs", "to issue a layer's forward in Megatron of 2021", "AMP"),
    Free("internevo_holder_us", 2600, 0, 20000, "µs", "for each rank of a ZeRO-1 group, once a step", "InternEvo"),
)  # fmt: skip
_OUTLIER = 0.08
# Residual of a constant at twice its starting value, chosen from 0.1 to 0.4 by `--leave-one-out`.
_PRIOR = 0.4
_STEP = 0.02
_LAYERS = 5.0
_LEFT_OUT = ("source", "GPU", "precision", "rows", "median fitted, %", "left out, %", "interval")
_INSIDE = 1e-3  # of its range, in logarithms, a constant begins


def fit(
    cases: Sequence[Case],
    layers: Sequence[MeasuredLayer] = (),
    progress: Progress | None = None,
    near: Mapping[str, float] | None = None,
    prior: float = _PRIOR,
) -> dict[str, float]:
    """The values of all constants that predict `cases` and `layers` best; the fit starts from `near` where it is given.

    `prior` is the residual of a constant at twice its starting value.
    """
    start = np.array([free.start for free in FREE])
    measured: list[Case | MeasuredLayer] = [*cases, *layers]
    # Times or rates: only a sign differs, which the square drops.
    target = np.array([entry.seconds if isinstance(entry, MeasuredLayer) else entry.row.value for entry in measured])
    weights = np.concatenate(
        [_weights([_layout(case) for case in cases], 1), _weights(list(map(_series, layers)), _LAYERS)]
    )
    task = None if progress is None else progress.add_task("fit", total=None)
    known: dict[tuple[Hashable, tuple[float, ...]], float] = {}
    same = [_layout(entry) if isinstance(entry, Case) else entry for entry in measured]
    touches = [_touches(entry) for entry in measured]

    def values(x: Floats) -> dict[str, float]:
        return {free.name: float(v) for free, v in zip(FREE, start * np.exp(x), strict=True)}

    def residuals(x: Floats) -> Floats:
        trial = values(x)
        predictions = []
        for k, entry in enumerate(measured):
            key = (same[k], tuple(trial[name] for name in touches[k]))
            if key not in known:
                known[key] = _prediction(entry, trial)
            predictions.append(known[key])
        if progress is not None and task is not None:
            progress.advance(task)
        errors: Floats = np.log(np.array(predictions) / target)
        return np.concatenate([errors * weights, prior * x / np.log(2)])

    begin = np.zeros(len(FREE)) if near is None else np.log(np.array([near[free.name] for free in FREE]) / start)
    low = np.log(np.array([max(free.least, 1e-3 * free.start) for free in FREE]) / start)
    high = np.log(np.array([free.most for free in FREE]) / start)
    solved = least_squares(
        residuals,
        np.clip(begin, low + _INSIDE, high - _INSIDE),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
        diff_step=[_STEP] * len(FREE),
        max_nfev=25,
        xtol=1e-3,
        ftol=1e-4,
    )
    return {name: float(f"{value:.4g}") for name, value in values(solved.x).items()}


def _prediction(entry: Case | MeasuredLayer, values: Mapping[str, float]) -> float:
    return (
        sum(predicted_s(entry, values))
        if isinstance(entry, MeasuredLayer)
        else in_metric(entry, predict(entry, values).step_time_s)
    )


def _layout(case: Case) -> Row:
    """The row of a case without its release and its figures."""
    notes = re.sub(r"model_tflops=[^;]*|RAW:[^;]*", "", case.row.notes)
    return replace(case.row, line=0, source_path_or_url="", value=1.0, notes=notes)


def _series(layer: MeasuredLayer) -> tuple[str, str]:
    return layer.gpu, layer.workload.precision


def _weights(kinds: Sequence[Hashable], rows_per_kind: float) -> Floats:
    """Weights by which all of a kind weigh together as `rows_per_kind` rows."""
    counts = Counter(kinds)
    return np.array([(rows_per_kind / counts[kind]) ** 0.5 for kind in kinds])


@cache
def _touches(entry: Case | MeasuredLayer) -> tuple[str, ...]:
    """The constants on which a prediction may depend: those of its GPUs, its software and its links."""
    if isinstance(entry, MeasuredLayer):
        names = {*fitted_efficiency(entry.gpu).values(), *fitted_constants("hexiopt"), "t4_burst"}
    else:
        machines = dict.fromkeys(entry.problem.cluster.machines)
        names = {name for machine in machines for name in fitted_efficiency(machine.gpu.name).values()}
        names |= fitted_constants(entry.framework).union(*map(link_constants, machines))
    return tuple(free.name for free in FREE if free.name in names)


def run(job: Job) -> float:
    """`hexiopt calibrate`: fit to the shipped runs and those of a file, or the factors of a cluster to its own runs.

    Raises InputError.
    """
    if job.config.run is not None:
        if job.config.data:
            raise InputError("run: does not go with data=...; fit the one, or the other")
        return calibrate_runs(job)
    paths = [RUNS] + ([Path(job.config.data)] if job.config.data else [])
    cases, layers = [case for path in paths for case in _cases(path)], fitted_layers()
    with Progress(transient=True, disable=job.in_sweep) as progress:
        values = fit(cases, layers, progress)
    rows = [(free.name, f"{values[free.name]:.4g}", free.unit, free.meaning) for free in FREE]
    job.show(plain_table(("Constant", "Value", "Unit", "What"), rows, left=("Constant", "Unit", "What")))
    job.write(CALIBRATION.name, calibration_yaml(values, cases, layers))
    job.show_files(CALIBRATION.name)
    return float("nan")


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, and write the calibration."""
    parser = argparse.ArgumentParser(prog="python -m experiments.calibrate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--leave-one-out", action="store_true", help="the errors of each source without its rows")
    options = parser.parse_args(argv)
    console = Console()
    cases, layers = _cases(RUNS), fitted_layers()
    with Progress(console=console, transient=True) as progress:
        if options.leave_one_out:
            rows = _leave_one_out(cases, layers, progress)
            console.print(plain_table(_LEFT_OUT, rows, left=_LEFT_OUT[:3]))
            about = provenance()
            ends = about["date"], about["code"][:8]
            write_text(LEFT_OUT, csv_text([(*_LEFT_OUT, "date", "code"), *((*row, *ends) for row in rows)]))
            return 0
        values = fit(cases, layers, progress)
    for free in FREE:
        console.print(f"{free.name:26} {values[free.name]:>9.4g} {free.unit}: {free.meaning}")
    write_text(CALIBRATION, calibration_yaml(values, cases, layers))
    console.print(f"written: {CALIBRATION.name}, fitted on {len(cases)} rows and {len(layers)} layers")
    return 0


def _cases(path: Path) -> list[Case]:
    measurements, cases = shipped_measurements(), []
    for row in read_rows(path):
        if is_fitted(row):
            try:
                cases.append(case_of(row, measurements))
            except InexpressibleError:
                continue
    return cases


def _leave_one_out(cases: Sequence[Case], layers: Sequence[MeasuredLayer], progress: Progress) -> list[tuple[str, ...]]:
    """Median errors of each source's rows by GPU type and precision: of the constants in use, and of constants fitted
    without these rows, with the interval that holds the latter in nine of ten resamples."""
    rows: list[tuple[str, ...]] = []
    sources = group_by(cases, lambda case: case.row.source)
    for source, source_cases in progress.track(sources.items(), description="sources"):
        without = fit([case for case in cases if case.row.source != source], layers, near=constant_values())
        for kind, kind_cases in group_by(
            source_cases, lambda case: (gpu_types(case), case.problem.workload.precision)
        ).items():
            inside, outside = (_errors(kind_cases, values) for values in (constant_values(), without))
            low, high = outside.median_interval_percent
            errors = (f"{inside.median_percent:.1f}", f"{outside.median_percent:.1f}", f"{low:.1f} to {high:.1f}")
            rows.append((source, *kind, str(len(kind_cases)), *errors))
    return rows


def _errors(cases: Sequence[Case], values: Mapping[str, float]) -> Scored:
    return Scored.of([(case, in_metric(case, predict(case, values).step_time_s)) for case in cases])


def calibration_yaml(values: Mapping[str, float], cases: Sequence[Case], layers: Sequence[MeasuredLayer] = ()) -> str:
    """The text of the calibration file: constants with values, meanings and the rows that they were fitted on."""
    touches, on_layers = [_touches(case) for case in cases], [_touches(layer) for layer in layers]
    sources = sorted({case.row.source.split(" (")[0] for case in cases})
    lines = [
        "# Constants fitted on published runs by `python -m experiments.calibrate`, which writes this file.",
        f"# {len(layers)} layers of experiments/data/zorse_layer_latencies.json, and {len(cases)} rows of",
        "# experiments/data/measured_training_throughput.csv, of:",
        *(f"#   {source}" for source in sources),
        "constants:",
    ]
    for free in FREE:
        counts = [sum(free.name in names for names in found_in) for found_in in (touches, on_layers)]
        rows = " and ".join(f"{count} {what}" for count, what in zip(counts, ("rows", "layers"), strict=True) if count)
        lines += [
            f"  {free.name}:",
            f"    value: {values[free.name]:g}",
            f"    unit: {free.unit}",
            f'    meaning: "{free.meaning}"',
            f'    fitted_on: "{free.shown_by} ({rows})"',
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
