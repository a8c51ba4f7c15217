"""Names of metrics as people write them, and the one that each stands for.

Words are compared in one spelling: `tok/s/GPU`, `tokens_per_second_per_device` and `tokens_per_s_per_gpu` are the same.
Names that do not say of what they are, such as `tflops`, are refused with the choices.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """What a name stands for: the `metric`, of which a value counts `factor`."""

    metric: str
    factor: float = 1.0


ITER_TIME, TOKENS_OF_GPU, TOKENS = "iter_time_s", "tokens_per_s_per_gpu", "tokens_per_s"
SAMPLES, ITERATIONS, TFLOPS, MFU = "samples_per_s", "iter_per_s", "tflops_per_gpu", "mfu"

METRICS = {
    **dict.fromkeys(("iter_time_s", "iter_s", "s_per_iter", "time_per_iter_s"), Metric(ITER_TIME)),
    **dict.fromkeys(("iter_time_ms", "iter_ms", "ms_per_iter", "time_per_iter_ms"), Metric(ITER_TIME, 1e-3)),
    "min_per_1k_iter": Metric(ITER_TIME, 60e-3),
    "iter_per_s": Metric(ITERATIONS),
    **dict.fromkeys(("tokens_per_s_per_gpu", "tokens_per_gpu_per_s", "tgs"), Metric(TOKENS_OF_GPU)),
    "tokens_per_s": Metric(TOKENS),
    "samples_per_s": Metric(SAMPLES),
    **dict.fromkeys(("tflops_per_gpu", "tflops_per_s_per_gpu", "model_tflops_per_gpu"), Metric(TFLOPS)),
    **dict.fromkeys(("mfu", "mfu_percent"), Metric(MFU)),
    "mfu_fraction": Metric(MFU, 100.0),
}
"""By name: seconds of a step, tokens and sequences (samples) of all GPUs or one, TFLOPS of one, percent of the peak."""

_OPEN = {
    "tflops": "of one GPU or of all? write tflops_per_gpu",
    "tflops_per_s": "of one GPU or of all? write tflops_per_gpu",
    "tps": "of one GPU or of all? write tokens_per_s_per_gpu or tokens_per_s",
    "throughput": "of what? write tokens_per_s, tokens_per_s_per_gpu or samples_per_s",
    "iter_time": "in which unit? write iter_time_s or iter_time_ms",
    "time": "of what, in which unit? write iter_time_s or iter_time_ms",
    "hfu": "counts what is recomputed; write mfu, tflops_per_gpu or a time",
}
_MEMORY = re.compile(r"(?:^|_)(?:mem|memory|vram|gib|gb|mib|mb)(?:_|$)")
_SPELLINGS = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("millisecond", "milliseconds", "msec"), "ms"),
    **dict.fromkeys(("minute", "minutes"), "min"),
    **dict.fromkeys(("tok", "toks", "token"), "tokens"),
    **dict.fromkeys(("sample", "sequence", "sequences", "seq", "seqs"), "samples"),
    **dict.fromkeys(("step", "steps", "iteration", "iterations", "iters", "it"), "iter"),
    **dict.fromkeys(("gpus", "device", "devices"), "gpu"),
    **dict.fromkeys(("tflop", "teraflops"), "tflops"),
    **dict.fromkeys(("pct",), "percent"),
}


def metric_named(name: str) -> Metric | str:
    """What a name stands for; or the reason why that is not known, with the remedy."""
    words = re.sub(r"/", "_per_", name.strip().lower().replace("%", "_percent"))
    spelled = "_".join(_SPELLINGS.get(word, word) for word in re.split(r"[\s_-]+", words) if word)
    if spelled in METRICS:
        return METRICS[spelled]
    if spelled in _OPEN:
        return _OPEN[spelled]
    if _MEMORY.search(spelled):
        return "memory is no measure of a step; write it into notes as peak_mem_gib=…, next to a metric of time"
    return f"is not known; write {', '.join(sorted({metric.metric for metric in METRICS.values()}))}"
