"""The measurement of a row, and its prediction by the cost model, in the row's own metric (`metric_names.py`).

`tflops_per_gpu` and `mfu` (in percent of the dense BF16 peak) count FLOPs as the source does: per token, 6 for each
parameter outside the input embedding, and all of attention rather than its causal half (12 · layers · width · length;
PaLM, arXiv 2204.02311, appendix B). Megatron of 2021 counts 96 B s l h² (1 + s/6h + V/16lh) with full recompute and
three quarters of that without (Narayanan et al., arXiv 2104.04473, section 5.1). Of models with experts Megatron counts
the FLOPs of the experts that a token goes to, and the causal half of attention: within 1 % of `model_tflops` in its
tables.
"""

from experiments.validation.metric_names import ITER_TIME, ITERATIONS, SAMPLES, TFLOPS, TOKENS, TOKENS_OF_GPU
from experiments.validation.predict import Case
from hexiopt.units import TFLOP

_PERCENT = 100.0


def in_metric(case: Case, step_time_s: float) -> float:
    """The value of the row's metric for a step time in seconds."""
    row, workload, gpus = case.row, case.problem.workload, case.problem.cluster.num_devices
    if row.metric == ITER_TIME:
        return step_time_s
    rates = {
        ITERATIONS: 1.0,
        TOKENS: float(workload.tokens),
        TOKENS_OF_GPU: workload.tokens / gpus,
        SAMPLES: workload.global_batch / case.parts,  # with context parallelism a sequence is several of the workload
    }
    if row.metric in rates:
        return rates[row.metric] / step_time_s
    per_gpu = _counted_flops(case) / (step_time_s * gpus)
    if row.metric == TFLOPS:
        return per_gpu / TFLOP
    peaks = [machine.num_gpus * (machine.gpu.peak_flops("bf16") or 0.0) for machine in case.problem.cluster.machines]
    return _PERCENT * per_gpu * gpus / sum(peaks)


def step_time_s(case: Case) -> float:
    """The step time that the row measured, in seconds."""
    value = case.row.value
    if case.row.metric == ITER_TIME:
        return value
    return in_metric(case, 1.0) / value  # all other metrics are rates


def _counted_flops(case: Case) -> float:
    model, workload = case.problem.model, case.problem.workload
    length, width = workload.seq_len * case.parts, model.hidden_size
    if model.layers:
        return float(workload.tokens * model.model_flops_per_token(length))
    if case.framework.startswith("megatron_20"):
        layers, vocabulary = model.num_layers, model.vocab_size
        recomputed = case.plan.pipelines[0].stages[0].policy == "full"
        whole = 96.0 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
        return workload.tokens * whole * (1.0 if recomputed else 0.75)
    params = model.num_layers * model.layer_params + model.vocabulary_params
    return workload.tokens * (6.0 * params + 12.0 * model.num_layers * model.q_size * length)
