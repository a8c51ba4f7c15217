"""The dynamic program over TP groups and replicas, against all ways to cut blocks of GPUs into stages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan.token_layout import Ints
from solvers.heuristics import kernel
from solvers.heuristics.fewest_stages import StageBlock, StageWay, Ways, fewest_stages


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[dict[StageWay, Ints]], int]:
    """GPUs of each block, what stages hold there, and the layers to place."""
    gpus = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    most = sum(gpus)
    counts = st.lists(st.integers(-1, 4), min_size=6 * most, max_size=6 * most)
    ways = (StageWay(1), StageWay(2), StageWay(4), StageWay(1, 2), StageWay(1, 3))
    drawn = [draw(st.sets(st.sampled_from(ways), max_size=2)) for _ in gpus]
    held = [{way: np.array(draw(counts)).reshape(2, 3, most) for way in sorted(own)} for own in drawn]
    return gpus, held, draw(st.integers(1, 3 * most))


def cuts(size: int, ways: Sequence[StageWay]) -> Iterator[tuple[StageWay, ...]]:
    """All ways to take stages from some of `size` GPUs, one after another."""
    yield ()
    for way in ways:
        if way.gpus <= size:
            yield from ((way, *rest) for rest in cuts(size - way.gpus, ways))


def most_layers(ways: Ways, held: Sequence[Mapping[StageWay, Ints]]) -> int | None:
    """How many layers the stages hold at most; None where one holds none."""
    stages = [(b, k, way) for b, own in enumerate(ways) for k, way in enumerate(own)]
    total = 0
    for s, (b, k, way) in enumerate(stages):
        after = len(stages) - 1 - s
        sides = (s > 0 and k == 0) + (after > 0 and k == len(ways[b]) - 1)
        n = int(held[b][way][int(s == 0), sides, after])
        if n < 1:
            return None
        total += n
    return total if stages else None


@given(cases())
def test_no_way_has_fewer_stages(case: tuple[list[int], list[dict[StageWay, Ints]], int]) -> None:
    gpus, held, layers = case
    ways = product(*(cuts(size, tuple(own)) for size, own in zip(gpus, held, strict=True)))
    counts = [sum(map(len, way)) for way in ways if (most_layers(way, held) or 0) >= layers]
    blocks = [
        StageBlock(size, tuple(own), np.array([*own.values()], np.int64).reshape(-1, 2, 3, sum(gpus)))
        for size, own in zip(gpus, held, strict=True)
    ]
    found = fewest_stages(blocks, layers)
    if not counts:
        assert found is None
        return
    assert found is not None
    assert all(sum(way.gpus for way in own) <= size for own, size in zip(found, gpus, strict=True))
    assert sum(map(len, found)) == min(counts)
    assert (most_layers(found, held) or 0) >= layers


@given(st.data())
def test_most_layers_within_a_time(data: st.DataObject) -> None:
    seconds = st.lists(st.sampled_from([1.0, 2.0, 3.0, math.inf]), min_size=3, max_size=3).map(sorted)
    times_s = np.array(data.draw(st.lists(seconds, min_size=8, max_size=8))).reshape(2, 2, 2, 3)
    limits_s = np.array(data.draw(st.lists(st.sampled_from([-1.0, 1.0, 1.5, 3.0, 4.0]), min_size=3, max_size=3)))
    expected = (times_s[:, :, None] <= limits_s[:, None, None]).sum(axis=-1)
    assert (kernel.most_layers(times_s, limits_s) == expected).all()
