"""What a GPU takes to quantise a message, or to dequantise one."""

from hexiopt.cost.executors.compute import Amount, OperatorTimes
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload


def quantization_s(clock: OperatorTimes, model: ModelSpec, workload: Workload, tokens: Amount) -> Amount:
    """Seconds for a message of so many `tokens`: a memory-bound kernel reads one form and writes the other."""
    hidden = model.hidden_size
    return clock.memory_s(tokens * float(hidden * workload.element_bytes + workload.message_bytes(hidden)))
