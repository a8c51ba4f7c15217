"""Context parallelism as in Megatron-LM: each sequence in equal parts, each part on a TP group.

A part counts as a sequence of the workload, and every TP group belongs to a different pipeline, so that gradients and
sharded states go around all of them. Only attention crosses parts. No solver plans it, as the sequence layouts of
`hexiopt.plan.parallelism` do the same with unequal parts; it serves to price runs of other systems.
"""

from dataclasses import dataclass

from hexiopt.cost.executors.compute import ComputeTimes
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload


@dataclass(frozen=True)
class ContextParallel:
    """`degree` devices with a part of each sequence, connected by links of `bytes_per_s` and `latency_s`.

    With `all_to_all` heads are exchanged for tokens before attention, and back after it (Jacobs et al., arXiv
    2309.14509); otherwise keys and values go around a ring while attention runs (Liu et al., arXiv 2310.01889).
    """

    degree: int
    bytes_per_s: float
    latency_s: float
    all_to_all: bool

    def extra_s(
        self, model: ModelSpec, workload: Workload, tp: int, micro_batch_size: int, compute: ComputeTimes
    ) -> tuple[float, float]:
        """Seconds by which the exchange prolongs the forward and the backward of a layer that computes `compute`."""
        tokens_bytes = float(micro_batch_size * workload.seq_len * workload.element_bytes)
        queries = tokens_bytes * model.num_heads * model.head_dim / tp
        pair = 2.0 * tokens_bytes * max(1.0, model.num_kv_heads / tp) * model.head_dim
        others = self.degree - 1
        if self.all_to_all:
            seconds = others * (2.0 * queries + pair) / self.degree / self.bytes_per_s + 4 * others * self.latency_s
            return seconds, seconds
        step_s = pair / self.bytes_per_s + self.latency_s
        # In the backward the ring carries the gradients of keys and values too.
        return (
            others * max(0.0, step_s - compute.attention_s / self.degree),
            others * max(0.0, 2.0 * step_s - compute.attention_backward_s / self.degree),
        )
