"""The runs of a file beside their predictions, and the errors by source, GPU type, family and kind of peak."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.reports.validation import Errors, Prediction
from experiments.validation.cases import Measurements, case_of
from experiments.validation.layers import measured_layers, predicted_s
from experiments.validation.memory import allocated_ratios, process_ratios, reserved_ratios
from experiments.validation.metrics import in_metric, step_time_s
from experiments.validation.predict import Case, cost_model
from experiments.validation.rows import Row, read_rows
from experiments.validation.score import Predicted, Scored, family, gpu_types, group_by, is_half_precision, spearman
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import shipped_measurements
from hexiopt.cost.cost import Cost
from hexiopt.numbers.constants import constant_values
from hexiopt.numbers.errors import MANY_TOKENS

FAMILY = 8  # least number of rows for a meaningful ρ
GPU_TYPE = 10  # least number of rows for a summary of a GPU type
_PEAKS = ("of tensors", allocated_ratios), ("of the allocator", reserved_ratios), ("of the process", process_ratios)


@dataclass(frozen=True)
class Runs:
    """The runs of a file: `predictions` of all, in its order, and `priced` plans of those that can be predicted."""

    rows: Sequence[Row]
    predictions: Sequence[Prediction]
    priced: Sequence[tuple[Case, Cost]]

    @classmethod
    def of(
        cls,
        path: Path,
        measurements: Measurements | None = None,
        track: Callable[[Sequence[Row]], Iterable[Row]] = iter,
        every: int = 1,
    ) -> "Runs":
        """The runs of `path`, or its first and `every` so many after it, predicted with `measurements` (default: those
        shipped); `track` shows progress.

        Raises InputError where the file is wrong.
        """
        measurements = measurements or shipped_measurements()
        rows = read_rows(path)[::every]
        results = [_predict(row, measurements) for row in track(rows)]
        return cls(rows, [prediction for prediction, _ in results], [priced for _, priced in results if priced])

    @property
    def predicted_metrics(self) -> list[Predicted]:
        """The runs that can be predicted, with their metrics."""
        return [(case, in_metric(case, cost.step_time_s)) for case, cost in self.priced]

    @property
    def skipped_lines(self) -> dict[str, list[int]]:
        """The lines of runs that cannot be predicted, by reason."""
        reasons = group_by((run for run in self.predictions if run.reason), lambda run: run.reason)
        return {reason: [run.line for run in group] for reason, group in reasons.items()}

    def errors(
        self,
        key: Callable[[Case], tuple[str, str]],
        at_least: int = 1,
        of: Callable[[Case], bool] = lambda case: True,
    ) -> list[Errors]:
        """The errors of each group of at least so many of the runs `of` which this holds; its key is (name, GPU)."""
        groups = group_by((pair for pair in self.predicted_metrics if of(pair[0])), lambda pair: key(pair[0]))
        return [
            _errors(*named, Scored.of(group), _rho(group)) for named, group in groups.items() if len(group) >= at_least
        ]

    def by_source(self) -> list[Errors]:
        """The errors by source, GPU and precision."""
        return self.errors(lambda case: (case.row.source, f"{case.row.gpu} {case.problem.workload.precision}"))

    def by_type(self) -> list[Errors]:
        """The errors of rows in BF16 and FP16, by GPU type."""
        return self.errors(lambda case: ("all", gpu_types(case)), GPU_TYPE, lambda case: is_half_precision(case.row))

    def by_family(self) -> list[Errors]:
        """The errors of rows of one model on one cluster."""
        return self.errors(family, FAMILY)

    def of_adapters(self) -> list[Errors]:
        """The errors of runs that train adapters, by whether a micro-batch has enough tokens that the GPU binds."""
        return self.errors(_size, of=lambda case: case.problem.workload.adapters is not None)

    def of_peaks(self) -> list[Errors]:
        """The errors of peaks of memory, by source."""
        lines = []
        for what, ratios_of in _PEAKS:
            for (source, trained), group in group_by(
                self.priced, lambda pair: (pair[0].row.source, _training_suffix(pair[0]))
            ).items():
                ratios = [ratio for case, cost in group for ratio in ratios_of(case, cost)]
                if ratios:
                    lines.append(_errors(source, what + trained, Scored.of_ratios(np.array(ratios))))
        return lines


def layer_errors() -> list[Errors]:
    """The errors of the times of layers that Zorse measured, by GPU type and precision, and of all."""
    values = constant_values()
    ratios = [(layer, sum(predicted_s(layer, values)) / layer.seconds) for layer in measured_layers()]
    kinds = group_by(ratios, lambda pair: f"{pair[0].gpu} {pair[0].workload.precision}")
    named = [*sorted(kinds.items()), ("all", ratios)]
    return [_errors("Zorse", kind, Scored.of_ratios(np.array([ratio for _, ratio in group]))) for kind, group in named]


def _predict(row: Row, measurements: Measurements) -> tuple[Prediction, tuple[Case, Cost] | None]:
    facts = row.line, row.source, row.gpu, row.gpus, row.model_name, row.precision, row.metric, row.value
    try:
        case = case_of(row, measurements)
    except InexpressibleError as error:
        return Prediction(*facts, reason=str(error)), None
    pipeline, cost = case.plan.pipelines[0], cost_model(case).price(case.plan)
    prediction = Prediction(
        *facts,
        framework=case.framework,
        micro_batch_size=pipeline.micro_batch_size,
        recompute="/".join(dict.fromkeys(pipeline.stages[0].recompute)),
        chunks=pipeline.num_chunks,
        predicted=in_metric(case, cost.step_time_s),
        measured_step_s=step_time_s(case),
        predicted_step_s=cost.step_time_s,
    )
    return prediction, (case, cost)


def _errors(name: str, kind: str, scored: Scored, rho: float | None = None) -> Errors:
    percents = scored.mean_percent, scored.median_percent, scored.p90_percent, scored.bias_percent
    return Errors(name, kind, scored.num_rows, *percents, rho)


def _rho(known: Sequence[Predicted]) -> float | None:
    """The least Spearman's ρ of all families with enough rows; None where there is none."""
    families = [group for group in group_by(known, lambda pair: family(pair[0])).values() if len(group) >= FAMILY]
    rhos = (spearman([case.row.value for case, _ in group], [value for _, value in group]) for group in families)
    return min(rhos, default=None)


def _size(case: Case) -> tuple[str, str]:
    tokens = case.problem.workload.seq_len * case.plan.pipelines[0].micro_batch_size
    few = "fewer than" if tokens < MANY_TOKENS else "at least"
    return f"micro-batches of {few} {MANY_TOKENS:,} tokens", case.row.gpu


def _training_suffix(case: Case) -> str:
    return "" if case.problem.workload.adapters is None else ", adapters"
