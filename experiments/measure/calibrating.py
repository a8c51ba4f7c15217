"""Fits the factors of a `Calibration` to runs of plans: their step times and, where known, those of their devices."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.cost import micro_batch_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.factors import LEAST, MOST, Calibration, calibration_of
from hexiopt.problem.problem import Problem
from hexiopt.study.solution import PlacedPlan

Floats = NDArray[np.float64]
_DEVICES = 2.0  # step times as much as which the devices of a run weigh together
_PRIOR = 0.02  # residual of a factor of 2: what no run determines stays as it was
_STEP = 1e-3  # relative, of a shifted logarithm
_SHIFT = 20.0  # of logarithms, so that steps relative to them are not those of 0
_DIGITS = 4


@dataclass(frozen=True)
class MeasuredRun:
    """A plan that was trained: seconds of a step, and of a micro-batch, forward and backward, on devices by name."""

    name: str
    plan: PlacedPlan
    step_s: float
    device_s: Mapping[str, float]


def step_of(times_s: Sequence[float]) -> float:
    """The usual step time: the median without the first step, which warms up."""
    return statistics.median(times_s[1:] or times_s)


def predict(run: MeasuredRun, calibration: Calibration) -> tuple[float, dict[str, float]]:
    """What the cost model has for a run with these factors: seconds of a step, and of a micro-batch on each device."""
    problem = run.plan.problem
    cluster = calibration.apply_to(problem.cluster)
    cost = PlanPricer(problem.replace(cluster=cluster)).price(run.plan)
    return cost.step_time_s, {cluster.device_name(d): own_s for d, own_s in micro_batch_s(run.plan, cost).items()}


def fit(runs: Sequence[MeasuredRun], source: str) -> Calibration:
    """The calibration of clusters without any that predicts these runs best, by least squares of logarithms.

    The runs are on clusters with the same calibration, if any.
    """
    from scipy.optimize import least_squares  # here, because scipy.optimize is slow to import

    types = list(dict.fromkeys(name for run in runs for name in _types(run.plan.problem, run.plan)))
    before = calibration_of(runs[0].plan.problem.cluster)

    def calibration(x: Floats) -> Calibration:
        factors = np.exp(x - _SHIFT).tolist()
        return Calibration(dict(zip(types, factors[2:], strict=True)), factors[0], factors[1], source)

    def residuals(x: Floats) -> Floats:
        logs = []
        for run in runs:
            step_s, device_s = predict(run, calibration(x))
            logs.append(np.log(step_s / run.step_s))
            both = [(device_s[name], own_s) for name, own_s in run.device_s.items() if name in device_s]
            weight = (_DEVICES / len(both)) ** 0.5 if both else 0.0
            logs += [weight * np.log(predicted_s / own_s) for predicted_s, own_s in both]
        return np.array([*logs, *(_PRIOR * (x - start) / np.log(2))])

    # Operators are as much slower as the devices, or else the steps; links are as they were.
    start = _SHIFT + np.array([0.0, 0.0, *([_slowness(runs)] * len(types))])
    limits = np.log(LEAST) + _SHIFT, np.log(MOST) + _SHIFT
    solved = least_squares(residuals, start, bounds=limits, diff_step=[_STEP] * len(start), xtol=1e-6, ftol=1e-8)
    return _round(calibration(solved.x).after(before))


def _slowness(runs: Sequence[MeasuredRun]) -> float:
    """The logarithm of predicted over measured times at the median."""
    slownesses = []
    for run in runs:
        step_s, device_s = predict(run, Calibration({}))
        ratios = [device_s[name] / own_s for name, own_s in run.device_s.items() if name in device_s]
        slownesses += ratios or [step_s / run.step_s]
    return float(np.log(statistics.median(slownesses)))


def _types(problem: Problem, plan: PlacedPlan) -> list[str]:
    """The GPU types that a plan uses."""
    return [problem.cluster.gpu_of(device).type_name for device in plan.devices()]


def _round(calibration: Calibration) -> Calibration:
    def digits(factor: float) -> float:
        return float(f"{factor:.{_DIGITS}g}")

    compute = {name: digits(factor) for name, factor in calibration.compute.items()}
    return Calibration(compute, digits(calibration.between), digits(calibration.inside), calibration.source)
