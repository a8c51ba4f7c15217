"""Memory of the CP-SAT model of one skeleton, as in `hexiopt/cost/executors/sequence/memory.py`."""

from dataclasses import dataclass

import numpy as np

from hexiopt.cost.executors.communicators import Communicators
from hexiopt.numbers import coefficients as c
from solvers.sequence.exact.variables import Sum, Variables


@dataclass(frozen=True)
class SkeletonNeeds:
    """What a stage needs besides its skeleton: micro-batches in flight, bytes of states on each device, and by how many
    stages each network resource is shared.
    """

    held: int
    states_bytes: tuple[tuple[int, float], ...]
    sharers: tuple[tuple[int, int], ...] = ()


def fit_memory(v: Variables, need: SkeletonNeeds) -> None:
    """Constrain every device to hold its states and the activations of its micro-batches.

    Where heads are free, rings and copies of keys and values count as if each key-value head were on a single device.
    """
    grid, many = v.grid, v.grid.resolution
    width, dim = grid.problem.workload.element_bytes, v.spec.head_dim
    largest = v.model.new_int_var(1, many, "largest")
    for total in v.group_quanta:
        v.model.add(largest >= total)
    states = dict(need.states_bytes)
    quantum = float(grid.size * grid.quantum)
    communicators = Communicators(grid.problem.cluster)
    for k, (d, gpu) in enumerate(zip(v.devices, v.gpus, strict=True)):
        g = v.group_of[k]
        parted, ringed = len(v.places[g]) > 1, len(v.places) > 1
        each = grid.bytes_of(gpu, v.skeleton.policy, need.held, parted)
        inside = communicators.layout_bytes(gpu, len(v.places[g]), len(v.places))
        free_bytes = int(gpu.usable_memory_bytes - states[d] - communicators.total_bytes(gpu, inside)) + 1
        for variant in range(2):
            moves = each.travelling[variant]
            own = each.own[variant]
            head, kv_head = each.head[variant], each.kv_head[variant]
            if parted:
                own += moves * dim * width * quantum * (v.spec.num_heads + 2 * v.spec.num_kv_heads)
                head += moves * dim * width * quantum
                kv_head += moves * dim * width * quantum * 2
            extra: Sum = 0
            if ringed:
                head += moves * quantum * dim * c.ACCUMULATOR_BYTES
                block = moves * 4.0 * quantum * 2 * dim * width
                if v.fixed is not None:
                    rings = np.add.reduceat(np.tile(v.rings.kv_heads, len(v.places)), v.rings.starts)
                    extra = int(block * int(rings[k])) * largest
                else:
                    kv_head += block
            if v.fixed is not None:
                extra += int(each.copy[variant] * int(v.copies[k])) * v.group_quanta[g]
            v.model.add(
                int(own) * v.quanta[k] + v.times_heads(v.group_quanta[g], many, k, head, kv_head, int) + extra
                <= free_bytes
            )
