"""Learning rates by step."""

from itertools import pairwise

import pytest

from experiments.app.verb_config import CHOICES
from runtime.settings import AdamW, Settings

ADAM = AdamW(lr=2.0)


@pytest.mark.parametrize("schedule", CHOICES["train.lr_schedule"])
def test_rates_warm_up_then_fall_to_the_least(schedule: str) -> None:
    settings = Settings(steps=40, adam=ADAM, lr_schedule=schedule, warmup_steps=4, min_lr_share=0.25)
    rates = [settings.lr(step) for step in range(40)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert settings.lr(40) == pytest.approx(0.5)


def test_wsd_is_stable_until_the_last_share_of_steps() -> None:
    settings = Settings(steps=20, adam=ADAM, lr_schedule="wsd", warmup_steps=2, decay_share=0.2, min_lr_share=0.0)
    rates = [settings.lr(step) for step in range(20)]
    assert rates[1:17] == [2.0] * 16
    assert rates[17:] == pytest.approx([1.5, 1.0, 0.5])


def test_without_decay_the_rate_stays() -> None:
    settings = Settings(steps=9, adam=ADAM, lr_schedule="wsd", warmup_steps=0, decay_share=0.0)
    assert {settings.lr(step) for step in range(9)} == {2.0}
