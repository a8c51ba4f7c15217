"""The period of pipelines whose stages have any number of micro-batches in flight."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from solvers.compiled.pipelines import cycle_s
from solvers.compiled.state import STAGE
from tests.hexiopt.schedules.test_depth import end_s

ROUNDS = 60  # every cycle of up to 5 rounds recurs in so many micro-batches
FAR = 240  # micro-batches after which only periods are added


@settings(max_examples=30, deadline=None)
@given(
    stage_s=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4),
    message_s=st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(0.0, 4.0)), min_size=3, max_size=3),
    depths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
@example(stage_s=[1.0, 1.0], message_s=[(3.0, 0.0)] * 3, depths=[5, 1, 1, 1])  # the link ahead bounds the period
@example(stage_s=[1.0, 1.0], message_s=[(0.0, 3.0)] * 3, depths=[5, 1, 1, 1])  # the link back
@example(stage_s=[1.0, 1.0], message_s=[(3.0, 3.0)] * 3, depths=[2, 1, 1, 1])  # the round trip
def test_another_micro_batch_takes_a_period(
    stage_s: list[float], message_s: list[tuple[float, float]], depths: list[int]
) -> None:
    """By the clock, far from both ends."""
    count = len(stage_s)
    depths, message_s = sorted(depths[:count], reverse=True), message_s[: count - 1]
    stages = np.zeros((1, count), STAGE)
    for s, row in enumerate(stages[0]):
        row["forward_s"], row["backward_s"], row["depth"] = stage_s[s] / 3, stage_s[s] - stage_s[s] / 3, depths[s]
        if s < count - 1:
            row["send_s"], row["return_s"] = message_s[s]
    ends_s = [end_s(stage_s, message_s, m, tuple(depths)) for m in (FAR, FAR + ROUNDS)]
    # no Python calls it compiled
    period_s = cycle_s.py_func(stages.view(np.recarray), 0, count)  # type: ignore[attr-defined]
    assert period_s == pytest.approx((ends_s[1] - ends_s[0]) / ROUNDS, rel=1e-3)
