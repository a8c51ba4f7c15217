"""How tokens and heads are allocated to the devices of groups: by capability, in whole numbers, at least one each,
within caps.

A device takes `token_s` seconds for a token outside attention and `pair_s` for a (query, key) pair of one head, forward
and backward. With h heads in a group that holds T of S tokens, each of which attends to v keys, it works for token_s ·
t + pair_s · h · T · v seconds. In zigzag order v is about S/2 for every token; in contiguous order it is the number of
tokens before the group plus half of its own. The balanced allocation (`balanced_tokens`) makes all devices work equally
long; the simpler rules of the paper, proportional to compute and to its square root (HexiSeq, arXiv 2605.07569, stage
II), are also available.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hexiopt.cost.executors.compute import Blocks, OperatorTimes, attention_times, dense_times
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.token_layout import Floats, Ints
from hexiopt.problem.model import largest_shard
from solvers.completion.allocation import proportional

_MANY = 1e7  # tokens, where launches no longer count
_BISECTIONS = 60


@dataclass(frozen=True)
class Rates:
    """Forward and backward seconds [devices]: of a token outside attention, and of a head's (query, key) pair."""

    token_s: Floats
    pair_s: Floats

    def of_sequence_s(self, seq_len: int, num_heads: int) -> Floats:
        """Seconds that each device alone needs for a layer of a sequence [devices]."""
        return self.token_s * seq_len + self.pair_s * (0.5 * seq_len**2 * num_heads)


class RateTable:
    """The rates of a problem's GPU types, by recompute policy."""

    def __init__(self, model: PlanPricer) -> None:
        self._model = model
        self._of_types: Memo[tuple[Gpu, str], tuple[float, float]] = Memo(lambda key: self._of_type(*key))

    def of(self, devices: Sequence[int], policy: str) -> Rates:
        """The rates of `devices` under a recompute policy."""
        cluster = self._model.problem.cluster
        machines = cluster.machine_of[list(devices)].tolist()
        table = {m: self._of_types[cluster.machines[m].gpu, policy] for m in set(machines)}
        both = np.array([table[m] for m in machines])
        return Rates(both[:, 0], both[:, 1])

    def _of_type(self, gpu: Gpu, policy: str) -> tuple[float, float]:
        problem, framework = self._model.problem, self._model.framework
        spec, workload = problem.model, problem.workload
        clock, shard = OperatorTimes(gpu, workload.precision), largest_shard(spec, 1)
        again = float(policy == "full")
        gemm, memory = 1.0 + again + c.GEMM_BACKWARD_PASSES, 1.0 + again + c.MEMORY_BACKWARD_PASSES
        each = [dense_times(spec.layer, workload, clock, shard, n * _MANY, framework) for n in (1, 2)]
        dense_s = [one.before_s(gemm, memory) + one.after_s(gemm, memory) for one in each]
        pairs = _MANY**2
        forward_s, backward_s = attention_times(
            clock,
            gpu.flash_attention,
            4 * spec.head_dim,
            workload.element_bytes,
            Blocks(pairs, 2 * pairs, 1.0),
            framework.block_attention_speed,
        )
        attention_s = forward_s * (2.0 if policy != "none" else 1.0) + backward_s
        return (dense_s[1] - dense_s[0]) / _MANY, attention_s / pairs


@dataclass(frozen=True)
class TokenAllocation:
    """Devices in groups with their tokens and heads [devices], in the order of the groups."""

    groups: tuple[tuple[int, ...], ...]
    tokens: Ints
    heads: Ints
    order: str

    def layout(self) -> SequenceParallel:
        """The allocation as a sequence layout."""
        ends = list(accumulate(map(len, self.groups)))
        tokens, heads = self.tokens.tolist(), self.heads.tolist()
        return SequenceParallel(
            tuple(
                SequenceGroup(own, tuple(tokens[end - len(own) : end]), tuple(heads[end - len(own) : end]))
                for own, end in zip(self.groups, ends, strict=True)
            ),
            self.order,
        )

    def with_tokens(self, tokens: Ints) -> "TokenAllocation":
        """The same with other tokens."""
        return replace(self, tokens=tokens)


def starts_of(groups: Sequence[Sequence[int]]) -> Ints:
    """The index of the first device of each group [groups]."""
    return np.array([0, *accumulate(map(len, groups))][:-1])


def head_parts(groups: Sequence[Sequence[int]], weights: Floats, num_heads: int, unit: int = 1) -> Ints:
    """Query heads of each device [devices], in every group proportional to `weights`.

    In multiples of `unit` where every device of the group can get one.
    """
    found = []
    for first, own in zip(starts_of(groups).tolist(), groups, strict=True):
        each = unit if num_heads % unit == 0 and len(own) * unit <= num_heads else 1
        found.append(each * proportional(weights[first : first + len(own)], num_heads // each))
    return np.concatenate(found)


def balanced_tokens(starts: Ints, rates: Rates, heads: Ints, order: str, seq_len: int) -> Floats:
    """Fractional tokens of each device with which all devices work equally long [devices]."""
    per_group = np.add.reduceat(1.0 / rates.token_s, starts)
    head_s = rates.pair_s * heads
    attention = np.add.reduceat(head_s / rates.token_s, starts)
    if order == "zigzag":
        visible = np.full(len(starts), 0.5 * seq_len)
        tokens = per_group / (1.0 + attention * visible)
        busy_s = seq_len / tokens.sum()
        tokens = tokens * busy_s
    else:
        busy_s, tokens, visible = _contiguous(per_group, attention, seq_len)
    group = np.repeat(np.arange(len(starts)), np.diff([*starts.tolist(), len(heads)]))
    own = (busy_s - head_s * (tokens * visible)[group]) / rates.token_s
    own = np.maximum(own, 1e-3 * tokens[group] / np.bincount(group)[group])
    found: Floats = own * (tokens / np.add.reduceat(own, starts))[group]
    return found


def _contiguous(per_group: Floats, attention: Floats, seq_len: int) -> tuple[float, Floats, Floats]:
    """Seconds, tokens of every group, and keys that each of them attends to; found by bisection over the seconds."""
    low, high = 0.0, (seq_len + 0.5 * attention.max() * seq_len**2) / per_group.min()
    rows = list(zip(per_group.tolist(), attention.tolist(), strict=True))

    def sizes(busy_s: float) -> list[float]:
        before, found = 0.0, []
        for rate, load in rows:
            linear = 1.0 + load * before
            size = (2.0 * rate * busy_s) / (linear + (linear**2 + 2.0 * load * rate * busy_s) ** 0.5)
            found.append(size)
            before += size
        return found

    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if sum(sizes(middle)) >= seq_len else (middle, high)
    tokens = np.array(sizes(high))
    return high, tokens, np.cumsum(tokens) - 0.5 * tokens
