"""Predicted memory of measured runs beside the peaks that their notes state, in GiB.

`peak_allocated_gib_by_stage` or `peak_allocated_gib` are what tensors took, `peak_reserved_gib` or `peak_mem_gib` what
torch's allocator held for them. The prediction of the first leaves out the reserve, that of the second has it; that of
neither has communicators, whose memory is not the allocator's.
"""

from collections.abc import Iterator

from experiments.validation.predict import Case
from hexiopt.cost.cost import Cost
from hexiopt.units import GIB


def allocated_ratios(case: Case, cost: Cost) -> Iterator[float]:
    """Predicted over measured peak of tensors, of each stage where stages are stated; nothing where no peak is."""
    stated = case.row.note("peak_allocated_gib_by_stage") or case.row.note("peak_allocated_gib")
    memories = [stage.memory for stage in cost.pipelines[0].stages]
    predicted = [memory.tensors / GIB for memory in memories]
    peaks = [float(peak) for peak in stated.split("/")] if stated else []
    if len(peaks) == 1:
        predicted = [max(predicted)]
    yield from (own / peak for own, peak in zip(predicted, peaks, strict=False))


def reserved_ratios(case: Case, cost: Cost) -> Iterator[float]:
    """Predicted over measured peak of what the allocator held; nothing where none is stated."""
    stated = case.row.note("peak_reserved_gib") or case.row.note("peak_mem_gib")
    if stated:
        memories = [stage.memory for stage in cost.pipelines[0].stages]
        yield max(memory.total - memory.communicators for memory in memories) / GIB / float(stated)
