"""Predicted memory of measured runs beside the peaks that their notes state, in GiB.

`peak_allocated_gib_by_stage`, `peak_allocated_gib` or `max_memory_gb` (in GB) are what tensors took,
`peak_reserved_gib` or `peak_mem_gib` what torch's allocator held for them. The prediction of the first leaves out the
reserve, that of the second has it; that of neither has communicators, whose memory is not the allocator's. `mem_gib`,
or `mem_gb`, is what the process held, where `memory=process`: the allocator's, CUDA's context, and what the trainer
holds beyond our executor.
"""

from collections.abc import Iterator

from experiments.validation.predict import Case
from experiments.validation.rules import TRANSFORMERS
from hexiopt.cost.cost import Cost
from hexiopt.problem.model import largest_shard
from hexiopt.problem.parameters import adapted_matrices
from hexiopt.units import GB, GIB

_CONTEXT_BYTES = GIB // 2  # of CUDA and its libraries in a process
# What transformers holds, counted in its code: of a logit its 16 bits, their shifted copy, FP32 logits and their
# log-probabilities, 12 bytes for our 6; of a layer FP32 copies in its two norms and rotary positions, and the input of
# SiLU; of an adapter with dropout its value and mask for each element of the input.
_LOGIT_BYTES, _NORM_BYTES, _SILU_BYTES, _DROPOUT_BYTES = 6, 16, 2, 3


def allocated_ratios(case: Case, cost: Cost) -> Iterator[float]:
    """Predicted over measured peak of tensors, of each stage where stages are stated; nothing where no peak is."""
    note = case.row.note("peak_allocated_gib_by_stage") or case.row.note("peak_allocated_gib")
    memories = [stage.memory for stage in cost.pipelines[0].stages]
    predicted = [memory.tensors / GIB for memory in memories]
    peaks = [float(peak) for peak in note.split("/")] if note else []
    if decimal := case.row.note("max_memory_gb"):
        peaks = [float(decimal) * GB / GIB]
    if len(peaks) == 1:
        predicted = [max(predicted)]
    yield from (tensors / peak for tensors, peak in zip(predicted, peaks, strict=False))


def reserved_ratios(case: Case, cost: Cost) -> Iterator[float]:
    """Predicted over measured peak of what the allocator held; nothing where none is stated."""
    note = case.row.note("peak_reserved_gib") or case.row.note("peak_mem_gib")
    if note:
        memories = [stage.memory for stage in cost.pipelines[0].stages]
        yield max(memory.total - memory.communicators for memory in memories) / GIB / float(note)


def process_ratios(case: Case, cost: Cost) -> Iterator[float]:
    """Predicted over measured memory of the process; nothing where none is stated."""
    note, what = case.row.note("mem_gib") or case.row.note("mem_gb"), case.row.note("memory")
    if note and what and what.startswith("process"):
        [*memories] = (stage.memory for stage in cost.pipelines[0].stages)
        held = max(memory.total - memory.communicators for memory in memories)
        yield (held + _CONTEXT_BYTES + _trainer_bytes(case)) / GIB / float(note)


def _trainer_bytes(case: Case) -> float:
    """Bytes that the run's trainer holds beyond our executor, of a run with one stage."""
    if case.framework != TRANSFORMERS:
        return 0.0
    model, workload, pipeline = case.problem.model, case.problem.workload, case.plan.pipelines[0]
    element = _NORM_BYTES * model.hidden_size + _SILU_BYTES * model.ffn_size
    if workload.adapters is not None and case.row.note("dropout"):
        whole, kind = largest_shard(model, 1), model.kinds[0]
        inputs = (matrix.inputs.on(whole) for matrix in adapted_matrices(model, kind, workload.adapters))
        element += _DROPOUT_BYTES * sum(inputs)
    layers = 1 if pipeline.stages[0].policy == "full" else model.num_layers
    return float(workload.seq_len * pipeline.micro_batch_size * (layers * element + _LOGIT_BYTES * model.vocab_size))
