"""`python -m experiments.calibrate`: fits the constants of `hexiopt/calibration/constants.yaml` to measured runs
and writes that file.

The fit is a least-squares fit of the logarithms of predicted over measured step times of the shipped runs in BF16 and
FP16, with a soft L1 loss beyond 8 %. A prior keeps constants that no row determines at their starting values: a
constant at twice its starting value costs as much as a row with an error of 40 %.
`--leave-one-out` also fits without each source of a GPU type that has several sources, and prints both errors.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from scipy.optimize import least_squares

from experiments.validation.cases import case_of
from experiments.validation.metrics import in_metric
from experiments.validation.predict import Case, predicted
from experiments.validation.rows import read_rows
from experiments.validation.score import Scored, gpu_types, grouped, is_half_precision
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import RUNS, shipped_measurements
from hexiopt.calibration.constants import CALIBRATION
from hexiopt.readers.plan_file import write_text

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
# (Bekman, ml-engineering, "Maximum Achievable Matmul FLOPS": A100 86 %, H100 80 %), FlashAttention-2 with a causal mask
# on H100 (Shah et al., arXiv 2407.08608, figure 5: 333 TFLOPS at 8,192 tokens), nccl-tests on H100 (NVIDIA/nccl issue
# 1281: 350 to 360 of 450 GB/s), AMP's layers on T4 (`amp_layer_forward_seconds.json`). Shares without
# a measurement start at 0.5. The other values are guesses, some made with knowledge of the rows.
FREE = (
    Free("ampere_gemm_max", 0.77, 0.5, 0.9, _SHARE, "large GEMMs of A100 in BF16 and FP16", "A100"),
    Free("hopper_gemm_max", 0.72, 0.4, 0.8, _SHARE, "large GEMMs of H100 in BF16", "H100"),
    Free("hopper_attention_max", 0.33, 0.1, 0.7, _SHARE, "fused attention of H100, by FlashAttention-2", "H100"),
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
    Free("deepspeed_layer_host_us", 5500, 500, 20000, "µs", "to issue a layer's forward in Megatron of 2021", "AMP"),
    Free("internevo_holder_us", 2600, 0, 20000, "µs", "for each rank of a ZeRO-1 group, once a step", "InternEvo"),
)  # fmt: skip
_OUTLIER = 0.08
# Residual of a constant at twice its starting value, chosen from 0.1 to 0.4 by `--leave-one-out`.
_PRIOR = 0.4
_STEP = 0.02
_INSIDE = 1e-3  # of its range, in logarithms, a constant begins


def fit(
    cases: Sequence[Case],
    progress: Progress | None = None,
    near: Mapping[str, float] | None = None,
    prior: float = _PRIOR,
) -> dict[str, float]:
    """The values of all constants that predict `cases` best; the fit starts from `near` where it is given.

    `prior` is the residual of a constant at twice its starting value.
    """
    start = np.array([free.start for free in FREE])
    target = np.array([case.row.value for case in cases])  # times or rates: only a sign differs, which the square drops
    task = None if progress is None else progress.add_task("fit", total=None)
    kept: dict[tuple[int, tuple[float, ...]], float] = {}
    touches = [_touches(case) for case in cases]

    def values(x: Floats) -> dict[str, float]:
        return {free.name: float(v) for free, v in zip(FREE, start * np.exp(x), strict=True)}

    def residuals(x: Floats) -> Floats:
        trial = values(x)
        found = []
        for k, case in enumerate(cases):
            key = (k, tuple(trial[name] for name in touches[k]))
            if key not in kept:
                kept[key] = in_metric(case, predicted(case, trial).step_time_s)
            found.append(kept[key])
        if progress is not None and task is not None:
            progress.advance(task)
        errors: Floats = np.log(np.array(found) / target)
        return np.concatenate([errors, prior * x / np.log(2)])

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
        xtol=1e-4,
        ftol=1e-5,
    )
    return {name: float(f"{value:.4g}") for name, value in values(solved.x).items()}


@cache
def _touches(case: Case) -> tuple[str, ...]:
    """The constants on which the prediction of a case depends, found by varying each."""
    base = {free.name: free.start for free in FREE}
    at = predicted(case, base).step_time_s

    def moves(free: Free) -> bool:
        trials = min(free.start * 1.3, free.most), free.start * 0.7
        return any(predicted(case, base | {free.name: trial}).step_time_s != at for trial in trials)

    return tuple(free.name for free in FREE if moves(free))


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, and write the calibration."""
    parser = argparse.ArgumentParser(prog="python -m experiments.calibrate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--leave-one-out", action="store_true", help="also fit without each source of a GPU type")
    options = parser.parse_args(argv)
    console = Console()
    cases = _cases()
    with Progress(console=console, transient=True) as progress:
        found = fit(cases, progress)
    for free in FREE:
        console.print(f"{free.name:26} {found[free.name]:>9.4g} {free.unit}: {free.meaning}")
    write_text(CALIBRATION, calibration_yaml(found, cases))
    console.print(f"written: {CALIBRATION.name}, fitted on {len(cases)} rows")
    if options.leave_one_out:
        _leave_one_out(cases, found, console)
    return 0


def _cases() -> list[Case]:
    given, found = shipped_measurements(), []
    for row in read_rows(RUNS):
        if is_half_precision(row):
            try:
                found.append(case_of(row, given))
            except InexpressibleError:
                continue
    return found


def _leave_one_out(cases: Sequence[Case], found: Mapping[str, float], console: Console) -> None:
    """Print the errors of the rows of each (GPU type, source), with these rows in the fit and without them."""
    groups = grouped(cases, lambda case: (gpu_types(case), case.row.source))
    for gpu in sorted({gpu for gpu, _ in groups}):
        sources = [source for other, source in groups if other == gpu]
        if len(sources) < 2:
            continue
        for source in sources:
            own = groups[gpu, source]
            rest = [case for case in cases if case not in own]
            without = fit(rest, near=found)
            inside, outside = (_errors(own, values) for values in (found, without))
            console.print(
                f"{gpu}, {source}: {len(own)} rows, mean error {inside.mean_percent:.1f} % fitted, "
                f"{outside.mean_percent:.1f} % left out ({outside.mean_percent / inside.mean_percent:.2f} times)"
            )


def _errors(cases: Sequence[Case], values: Mapping[str, float]) -> Scored:
    return Scored.of([(case, in_metric(case, predicted(case, values).step_time_s)) for case in cases])


def calibration_yaml(found: Mapping[str, float], cases: Sequence[Case]) -> str:
    """The text of the calibration file: constants with values, meanings and the rows that they were fitted on."""
    touches = [_touches(case) for case in cases]
    sources = sorted({case.row.source.split(" (")[0] for case in cases})
    lines = [
        "# Constants fitted on published runs by `python -m experiments.calibrate`, which writes this file.",
        f"# {len(cases)} rows in BF16 and FP16 of experiments/data/measured_training_throughput.csv, of:",
        *(f"#   {source}" for source in sources),
        "constants:",
    ]
    for free in FREE:
        rows = sum(free.name in names for names in touches)
        lines += [
            f"  {free.name}:",
            f"    value: {found[free.name]:g}",
            f"    unit: {free.unit}",
            f'    meaning: "{free.meaning}"',
            f'    fitted_on: "{free.shown_by} ({rows} rows)"',
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
