"""Random sequence layouts, for tests of their geometry, cost and bounds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from hexiopt.plan.parallelism import ORDERS, SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.plan.token_layout import Range
from hexiopt.problem.problem import Problem


def parts(total: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`count` numbers of at least 1 that sum to `total`."""
    if count == 1:
        return st.just((total,))
    cuts = st.lists(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1, unique=True)
    return cuts.map(lambda given: tuple(b - a for a, b in pairwise([0, *sorted(given), total])))


@st.composite
def layouts_of(draw: st.DrawFn, devices: tuple[int, ...], seq_len: int, heads: int) -> SequenceParallel:
    """A layout of all of `devices`, in groups of any sizes."""
    left, groups, tokens = list(devices), [], iter(draw(parts(seq_len, len(devices))))
    while left:
        size = draw(st.integers(1, min(heads, len(left))))
        members, left = tuple(left[:size]), left[size:]
        groups.append(SequenceGroup(members, tuple(next(tokens) for _ in members), draw(parts(heads, size))))
    return SequenceParallel(tuple(groups), draw(st.sampled_from(ORDERS)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceParallel, int, int]:
    """A layout of a few devices, its sequence length and its number of heads."""
    heads, count = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    seq_len = draw(st.integers(count, 60))
    return draw(layouts_of(tuple(range(count)), seq_len, heads)), seq_len, heads


@st.composite
def with_layouts(draw: st.DrawFn, pairs: st.SearchStrategy[tuple[Problem, Plan]]) -> tuple[Problem, Plan]:
    """A problem and a plan, some of whose stages have sequence layouts instead of replicas; ZeRO-1 at most."""
    problem, plan = draw(pairs)
    workload = replace(problem.workload, sequence_parallel=True)
    problem = replace(problem, workload=workload, space=replace(problem.space, sequence=True))
    seq_len, heads = problem.workload.seq_len, problem.model.num_heads

    def change(stage: Stage) -> Stage:
        devices = tuple(draw(st.permutations(stage.devices)))
        if len(stage.layers) > 1 or len(devices) > seq_len or not draw(st.booleans()):
            return stage
        return replace(stage, parallelism=draw(layouts_of(devices, seq_len, heads)))

    pipelines = tuple(replace(p, stages=tuple(map(change, p.stages))) for p in plan.pipelines)
    sharding = replace(plan.sharding, stage=min(plan.sharding.stage, 1))
    return problem, replace(plan, pipelines=pipelines, sharding=sharding)


def causal_pairs(queries: Sequence[Range], keys: Sequence[Range]) -> int:
    """How many (query, key) pairs have the key no later than the query."""
    return sum(_pairs(query, key) for query in queries for key in keys)


def _pairs(queries: Range, keys: Range) -> int:
    """Sum over the queries q of how many keys k <= q there are."""
    (first, end), (low, high) = queries, keys
    whole = max(0, end - max(first, high)) * (high - low)  # queries beyond all keys
    start, stop = max(first, low), min(end, high)  # queries among the keys: q sees q - low + 1
    if start < stop:
        whole += (stop - start) * (start + stop + 1 - 2 * low) // 2
    return whole
