"""The runs of a file beside their predictions: errors by source, GPU type, family and kind of peak, and the intervals
of `hexiopt fit` (`hexiopt/numbers/errors.yaml`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.reports.validation import Errors, Prediction
from experiments.validation.cases import Measurements, case_of
from experiments.validation.layers import measured_layers, predicted_s
from experiments.validation.memory import allocated_ratios, process_ratios, reserved_ratios
from experiments.validation.predict import Case, cost_model, in_metric, step_time_s
from experiments.validation.rows import Row, read_rows
from experiments.validation.score import Predicted, Scored, family, gpu_types, group_by, is_half_precision, spearman
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import shipped_measurements
from hexiopt.cost.cost import Cost
from hexiopt.files.plan_file import write_text
from hexiopt.numbers.constants import constant_values
from hexiopt.numbers.errors import LEAST, MANY_TOKENS, Evidence
from hexiopt.reading import Section, read_mapping
from hexiopt.report.evidence import kind_of

PricedCase = tuple[Case, Cost]

FAMILY = 8  # least number of rows for a meaningful ρ
GPU_TYPE = 10  # least number of rows for a summary of a GPU type
_PEAKS = ("of tensors", allocated_ratios), ("of the allocator", reserved_ratios), ("of the process", process_ratios)
_HEAD = f"""# Measured over predicted values of published runs: the intervals of hexiopt fit. Written by
#   hexiopt validate data=FILE validate.errors=hexiopt/numbers/errors.yaml
# with each FILE below. Kinds are told by what is trained, and whether micro-batches have {MANY_TOKENS:,} tokens.
"""


@dataclass(frozen=True)
class Runs:
    """The runs of a file: `predictions` of all, in its order, and `priced` plans of those that can be predicted."""

    rows: Sequence[Row]
    predictions: Sequence[Prediction]
    priced: Sequence[PricedCase]

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

    def write_errors(self, path: Path, data: Path) -> None:
        """Replace the rows of these runs, which are of the file `data`, in the file `path`: one of each kind of
        `LEAST` runs or more.

        Raises InputError where the file is not one of such rows.
        """
        name = data.as_posix()
        old = Section(read_mapping(path), str(path)).items("kinds") if path.exists() else []
        rows = [row for row in old if row["data"] != name]
        for (kind, many), pairs in group_by(self.priced, _key).items():
            if kind is not None and len(pairs) >= LEAST:
                rows.append(_row(kind, many, name, pairs))
        rows.sort(key=lambda row: (row["kind"], not row["many_tokens"], row["data"]))
        write_text(path, _HEAD + yaml.safe_dump({"kinds": rows}, sort_keys=False, width=120, default_flow_style=None))

    def held_out_lines(self) -> Iterator[str]:
        """How many runs of each kind lie in the interval of speeds that the others give, a line each: those of other
        sources, or of other models where all are of one source. Where fewer than `LEAST` are left, it is their
        range."""
        for (kind, many), pairs in group_by(self.priced, _key).items():
            for what, name in _HELD_OUT.items():
                groups = [[_speed(pair) for pair in group] for group in group_by(pairs, name).values()]
                if kind is not None and len(groups) > 1:
                    within = sum(_within(kind, many, groups, k) for k in range(len(groups)))
                    tokens, others = _tokens_in_words(many), f"within the interval of runs of other {what}"
                    yield f"{kind}, {tokens}: {within} of {len(pairs)} runs {others}"
                    break


def layer_errors() -> list[Errors]:
    """The errors of the times of layers that Zorse measured, by GPU type and precision, and of all."""
    values = constant_values()
    ratios = [(layer, sum(predicted_s(layer, values)) / layer.seconds) for layer in measured_layers()]
    kinds = group_by(ratios, lambda pair: f"{pair[0].gpu} {pair[0].workload.precision}")
    named = [*sorted(kinds.items()), ("all", ratios)]
    return [_errors("Zorse", kind, Scored.of_ratios(np.array([ratio for _, ratio in group]))) for kind, group in named]


def _predict(row: Row, measurements: Measurements) -> tuple[Prediction, PricedCase | None]:
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
    return f"micro-batches of {_tokens_in_words(_has_many_tokens(case))}", case.row.gpu


def _has_many_tokens(case: Case) -> bool:
    """Whether a micro-batch has enough tokens that the host does not bind."""
    return case.problem.workload.seq_len * case.plan.pipelines[0].micro_batch_size >= MANY_TOKENS


def _tokens_in_words(many: bool) -> str:
    return f"{'at least' if many else 'fewer than'} {MANY_TOKENS:,} tokens"


def _training_suffix(case: Case) -> str:
    return "" if case.problem.workload.adapters is None else ", adapters"


_HELD_OUT: dict[str, Callable[[PricedCase], str]] = {
    "sources": lambda pair: pair[0].row.source,
    "models": lambda pair: pair[0].row.model_name,
}


def _within(kind: str, many: bool, groups: Sequence[Sequence[float]], held: int) -> int:
    """The number of runs of a group within the interval of the other groups."""
    others = sorted(speed for k, group in enumerate(groups) if k != held for speed in group)
    known = len(others) >= LEAST
    low, high = Evidence(kind, many, "", (), tuple(others), ()).interval if known else (others[0], others[-1])
    return sum(low <= speed <= high for speed in groups[held])


def _speed(pair: PricedCase) -> float:
    """Measured over predicted."""
    case, cost = pair
    return round(cost.step_time_s / step_time_s(case), 3)


def _key(pair: PricedCase) -> tuple[str | None, bool]:
    case, _ = pair
    return kind_of(case.problem), _has_many_tokens(case)


def _row(kind: str, many: bool, data: str, pairs: Sequence[PricedCase]) -> dict[str, Any]:
    speed = sorted(map(_speed, pairs))
    memory = sorted(round(1.0 / ratio, 3) for case, cost in pairs for ratio in process_ratios(case, cost))
    gpus = sorted({gpu.name for case, _ in pairs for gpu in case.problem.cluster.types})
    return {"kind": kind, "many_tokens": many, "data": data, "gpus": gpus, "speed": speed, "memory": memory}
