"""The study of adapters on unequal cards: what owners do is priced as it runs."""

import math

import pytest

from experiments.studies.cases.cards import FLEETS, MODELS, STORAGES, CardFleet
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.study.fitting.owners import (
    Prices,
    balanced_layers,
    best_card,
    device_map,
    equal_batches,
    proportional_layers,
    weight_bytes,
)

PC, CARDS = FLEETS[0], ("rtx_3090", "rtx_4090")


def alike(count: int, model: str = "qwen3_8b", storage: str = "nf4") -> Problem:
    """As many cards of one type."""
    return PC.problem(model, storage).replace(cluster=Cluster.of({"rtx_4090": count}))


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.cluster)
@pytest.mark.parametrize("storage", STORAGES)
def test_splits_cover_the_layers_in_order(fleet: CardFleet, storage: str) -> None:
    for model in MODELS:
        problem = fleet.problem(model, storage)
        for cut in (balanced_layers, proportional_layers):
            split = cut(problem, problem.usable_devices)
            if split is not None:
                ends = [end for _, (_, end) in split]
                assert [first for _, (first, _) in split] == [0, *ends[:-1]]
                assert ends[-1] == problem.model.num_layers


def test_weights_are_those_of_the_model() -> None:
    for storage, width in (("16bit", 2.0), ("nf4", 0.5625)):
        problem = PC.problem("qwen3_8b", storage)
        model, (layer, embedding, head) = problem.model, weight_bytes(PC.problem("qwen3_8b", storage))
        assert embedding == 2.0 * model.vocab_size * model.hidden_size
        assert head == pytest.approx(embedding, rel=1e-4)  # and the final norm
        assert layer == pytest.approx(width * model.layer_params, rel=1e-3)


def test_full_training_has_the_weights_of_all_modules() -> None:
    problem = PC.problem("qwen3_8b", "16bit")
    full = problem.replace(workload=problem.workload.replace(training="full"))
    for ours, theirs in zip(weight_bytes(full), weight_bytes(problem), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_balanced_split_by_hand() -> None:
    """Two cards of 24 GB: a part is half of the weights and 1.25 layers, of which the first card keeps its largest
    module free; the other takes what is left."""
    problem = alike(2, storage="16bit")
    layer, embedding, head = weight_bytes(problem)
    room = (embedding + 36 * layer + head) / 2 + 1.25 * layer - max(layer, head) - embedding
    first = int(room // layer)
    assert 12 < first < 18
    assert balanced_layers(problem, (0, 1)) == [(0, (0, first)), (1, (first, 36))]


def test_alone_on_its_machine_a_card_is_mapped_as_it_is() -> None:
    """With one card a step of `device_map` is one of that card, micro-batch by micro-batch."""
    prices = Prices(alike(1))
    alone = best_card(prices)
    assert device_map(prices) == pytest.approx(alone, rel=0.01)
    assert equal_batches(prices) == pytest.approx(alone)


def test_equal_cards_gain_what_there_are_of_them() -> None:
    """Gradients of adapters are few: two like cards are nearly twice as fast, and a map of both no faster than one."""
    prices = Prices(alike(2))
    alone = best_card(prices)
    assert 1.9 * alone < equal_batches(prices) < 2.0 * alone
    # Without recompute, for which a map of two cards has room, a pass is saved.
    assert device_map(prices) < 4 / 3 * alone


def test_the_slowest_card_decides() -> None:
    slow, fast = (Prices(PC.problem("qwen3_8b", "nf4").replace(cluster=Cluster.of({gpu: 2}))) for gpu in CARDS)
    both = equal_batches(Prices(PC.problem("qwen3_8b", "nf4")))
    assert both == pytest.approx(equal_batches(slow), rel=0.02)
    assert both < equal_batches(fast)


def test_what_fits_no_card_is_nan() -> None:
    prices = Prices(PC.problem("qwen3_32b", "16bit"))
    assert all(math.isnan(baseline(prices)) for baseline in (device_map, equal_batches, best_card))
