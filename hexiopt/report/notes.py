"""What a user may have overlooked in a valid problem: notes of one line each."""

from hexiopt.problem.problem import Problem
from hexiopt.report.style import clipped, listed, rate
from hexiopt.units import GB

FASTEST_NIC_GB_PER_S = 100.0
"""The fastest network interface on the market, per direction: 800 Gbit/s (ConnectX-8)."""

LONG_CONTEXT = 32_768
"""The sequence length in tokens from which sequence layouts are worth a try."""


def notes(problem: Problem) -> list[str]:
    """Notes on how the model was read, implausible network rates, sequences beyond its positions, sequence layouts."""
    return [*problem.model.notes, *_network(problem), *_positions(problem), *_long_context(problem)]


def _network(problem: Problem) -> list[str]:
    fast: dict[float, dict[str, None]] = {}
    for machine in problem.cluster.machines if len(problem.cluster.machines) > 1 else ():
        if machine.nic_bandwidth_bytes_per_s > FASTEST_NIC_GB_PER_S * GB:
            fast.setdefault(machine.nic_bandwidth_bytes_per_s, {})[machine.spec_name] = None
    return [
        f"{rate(value)} GB/s per network interface ({listed(list(names), 3)}) is more than any on the market has "
        f"({FASTEST_NIC_GB_PER_S:g}); if it is in Gbit/s, state {rate(value / 8)}"
        for value, names in fast.items()
    ]


def _positions(problem: Problem) -> list[str]:
    length, positions = problem.workload.seq_len, problem.model.max_positions
    if length <= positions:
        return []
    return [
        f"seq_len {length:,} is beyond the {positions:,} positions of {clipped(problem.model.name, 60)} "
        "(max_position_embeddings); the plan holds, but the model must be trained for such positions"
    ]


def _long_context(problem: Problem) -> list[str]:
    length = problem.workload.seq_len
    if length < LONG_CONTEXT or problem.space.sequence or len(problem.usable_devices) == 1:
        return []
    return [f"with seq_len {length:,}, space.sequence=true may find a faster plan: GPUs then share a sequence"]
