"""Max-min fairness: nothing is overfull, and nobody can get more but from someone who has no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.simulation.fair_shares import Need, fair_rates

Needs = list[dict[int, float]]
seconds = st.one_of(st.sampled_from((0.5, 1.0)), st.floats(1e-3, 10.0))


@st.composite
def messages(draw: st.DrawFn) -> tuple[Needs, list[float]]:
    count = draw(st.integers(1, 6))
    needs = [draw(st.dictionaries(st.integers(0, 3), seconds, min_size=1)) for _ in range(count)]
    most = [draw(st.one_of(st.just(float("inf")), st.floats(1e-2, 10.0))) for _ in range(count)]
    return needs, most


def rates_of(needs: Needs, most: list[float], flows: int = 1) -> list[float]:
    return fair_rates([[Need(r, s, flows) for r, s in need.items()] for need in needs], most)


@given(messages(), st.integers(2, 5))
def test_equal_messages_are_one_with_so_many_flows(given: tuple[Needs, list[float]], flows: int) -> None:
    needs, most = given
    assert rates_of(needs * flows, most * flows) == pytest.approx(rates_of(needs, most, flows) * flows, rel=1e-9)


@given(messages())
def test_each_is_at_its_most_or_has_a_full_resource_of_which_none_has_more(given: tuple[Needs, list[float]]) -> None:
    """What characterises max-min fair rates (Bertsekas and Gallager, section 6.5.2)."""
    needs, most = given
    rates = rates_of(needs, most)
    share = [rate * max(need.values()) for rate, need in zip(rates, needs, strict=True)]
    used = {r: sum(rate * need.get(r, 0.0) for rate, need in zip(rates, needs, strict=True)) for r in range(4)}
    assert max(used.values()) <= 1 + 1e-9
    for k, resources in enumerate(needs):
        assert 0.0 < rates[k] <= most[k] * (1 + 1e-9)
        assert rates[k] >= most[k] * (1 - 1e-9) or any(
            used[r] >= 1 - 1e-9 and share[k] >= max(share[j] for j, other in enumerate(needs) if r in other) - 1e-9
            for r in resources
        )


def test_alone_halved_and_what_others_leave() -> None:
    assert rates_of([{0: 2.0, 1: 1.0}], [float("inf")]) == [0.5]
    assert rates_of([{0: 2.0}], [0.1]) == [0.1]
    assert rates_of([{0: 2.0}, {0: 2.0}], [float("inf")] * 2) == [0.25, 0.25]
    # The second is held up elsewhere, so that the first has more than half.
    assert rates_of([{0: 1.0}, {0: 1.0, 1: 1.0}, {1: 1.0}, {1: 1.0}], [float("inf")] * 4) == pytest.approx(
        [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    )
    assert rates_of([], []) == []
