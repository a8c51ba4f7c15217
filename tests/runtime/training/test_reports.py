"""Steps are told in order: at once on a CPU, on GPUs while the next one is under way."""

from typing import Any, cast

import pytest

from runtime.training.rank import NotFinite, _Reports
from runtime.training.trainee import StepOutcome, Trainee
from tests.solvers.problems import cluster


class Outcome:
    """Of a step that has the loss `loss`, of which rank 1 is to blame if it is no number."""

    def __init__(self, loss: float, *, stops: bool = False) -> None:
        self.loss, self.seconds, self.stops = loss, 0.5, stops

    def read(self) -> tuple[float, float]:
        return self.loss, 1.0

    class trainee:  # noqa: N801
        class layout:  # noqa: N801
            devices = (0, 2)

        @staticmethod
        def blame(outcome: "Outcome") -> list[int]:
            return [1]


@pytest.mark.parametrize(("ahead", "expected"), [(0, [1, 2, 3, 4]), (1, [0, 1, 3, 3])])
def test_how_many_are_told_after_each(ahead: int, expected: list[int]) -> None:
    """The third is the last one before a checkpoint."""
    told: list[Any] = []
    reports = _Reports(cast("Trainee", Outcome.trainee), cluster(("a", "fast", 3)), ahead, told.append)
    seen = []
    for step in range(1, 5):
        reports.add(step, cast("StepOutcome", Outcome(float(step))), is_last=step == 3)
        seen.append(len(told))
    assert seen == expected
    assert [(event["step"], event["loss"]) for event in told] == [(n, float(n)) for n in range(1, seen[-1] + 1)]


def test_a_stop_is_heard_of_with_the_step_that_it_was_asked_for_in() -> None:
    told: list[Any] = []
    reports = _Reports(cast("Trainee", Outcome.trainee), cluster(("a", "fast", 3)), 1, told.append)
    heard = []
    for step in range(1, 5):
        reports.add(step, cast("StepOutcome", Outcome(1.0, stops=step == 2)), is_last=False)
        heard.append(reports.stops)
    assert heard == [False, False, True, True]
    reports.finish()
    assert [event["step"] for event in told] == [1, 2, 3, 4]


def test_a_step_that_is_no_number_is_named_though_the_next_one_is_under_way() -> None:
    reports = _Reports(cast("Trainee", Outcome.trainee), cluster(("a", "fast", 3)), 1, lambda event: None)
    reports.add(1, cast("StepOutcome", Outcome(float("nan"))), is_last=False)
    with pytest.raises(NotFinite, match=r"step 1: the loss is nan on rank 1 \(a:2\)"):
        reports.add(2, cast("StepOutcome", Outcome(float("nan"))), is_last=False)
