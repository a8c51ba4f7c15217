"""One key of a layout is dropped, misspelt, changed or added: its reading says so, in one way or another.

The problem or the plan changes, a note appears, or the file is refused; otherwise the key is on the list of those that
are named as harmless, or states that a feature is not used. Never the same digits in silence.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportedPlan
from hexiopt.exports.trainers import (
    accelerate_vocabulary,
    deepspeed_vocabulary,
    flashflex,
    galvatron,
    megatron_arguments,
    torchtitan_vocabulary,
)
from hexiopt.ledger import OFF, Vocabulary
from tests.hexiopt.exports.one_key_changes import (
    Change,
    added,
    dropped,
    keys_of,
    outcome,
    reading,
    renamed,
    revalued,
    with_keys,
)
from tests.hexiopt.exports.stated_layouts import StatedLayout, exported_layouts, stated_layouts

MEGATRON = ("megatron", "megatron_bridge", "flagscale")
VOCABULARIES: dict[str, Vocabulary] = {
    "torchtitan": torchtitan_vocabulary.VOCABULARY,
    "deepspeed": deepspeed_vocabulary.VOCABULARY,
    "accelerate": accelerate_vocabulary.VOCABULARY,
    "galvatron": galvatron.VOCABULARY,
    "flashflex": flashflex.VOCABULARY,
    **dict.fromkeys(MEGATRON, megatron_arguments.vocabulary()),
}


@dataclass(frozen=True)
class Silence:
    """A change after which the same plan comes without another word, and what excuses it, if anything."""

    change: Change
    excuse: str | None


def excuse(layout: StatedLayout, change: Change, before: ImportedPlan) -> str | None:
    """Why a change may go unsaid: by the lists that a reader has, or as the key was named as not read all along."""
    vocabulary, name = VOCABULARIES[layout.trainer], change.key
    if layout.trainer in MEGATRON:
        name = name.rpartition(".")[2].replace("_", "-")
    if vocabulary.is_harmless(name):
        return "harmless"
    if change.what.startswith("set") and any(f"{change.key}," in f"{note}," for note in before.notes):
        return "named as not read"
    value, after = keys_of(layout).get(change.key), keys_of(change.layout).get(change.key)
    if change.what in ("drop", "rename"):
        after = value
    if vocabulary.refuses(name) and vocabulary.reason(name, after) is None:
        return "not used"
    return "not used" if value in OFF and after in OFF else None


def silences(
    layouts: Iterable[StatedLayout], change_all: Callable[[StatedLayout], Iterator[Change]], outcomes: Counter[str]
) -> list[Silence]:
    """The changes that go unsaid, with their excuses; `outcomes` counts what became of all."""
    found = []
    for layout in layouts:
        before = reading(layout)
        assert not isinstance(before, InputError), f"{layout.trainer}, {layout.name}: {before}"
        for change in change_all(layout):
            word = outcome(before, change)
            outcomes[word] += 1
            if word == "silent":
                found.append(Silence(change, excuse(layout, change, before)))
    return found


def unexcused(found: Iterable[Silence]) -> list[str]:
    """The changes that nothing excuses."""
    return [str(silence.change) for silence in found if silence.excuse is None]


def layouts_of(trainer: str) -> list[StatedLayout]:
    """The layouts of a trainer, as people state them and as ours are exported."""
    return [layout for layout in (*stated_layouts(), *exported_layouts(range(2))) if layout.trainer == trainer]


def vocabulary_of(layouts: Iterable[StatedLayout]) -> dict[str, Any]:
    """All keys of some layouts, with a value for each."""
    return {key: value for layout in layouts for key, value in keys_of(layout).items()}


def test_there_are_fifty_layouts_and_each_is_read_as_its_keys_are() -> None:
    layouts = [*stated_layouts(), *exported_layouts(range(2))]
    assert len(layouts) >= 50
    for layout in layouts:
        before, again = reading(layout), reading(with_keys(layout, keys_of(layout)))
        assert not isinstance(before, InputError), f"{layout.trainer}, {layout.name}: {before}"
        assert not isinstance(again, InputError), f"{layout.trainer}, {layout.name}: {again}"
        assert (again.problem, again.plan, sorted(again.notes)) == (before.problem, before.plan, sorted(before.notes))


@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
@pytest.mark.parametrize("change_all", [dropped, renamed])
def test_no_key_is_missed_in_silence(trainer: str, change_all: Callable[[StatedLayout], Iterator[Change]]) -> None:
    outcomes = Counter[str]()
    assert unexcused(silences(layouts_of(trainer), change_all, outcomes)) == []
    assert outcomes["changed"]
    assert outcomes["noted"] + outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
def test_no_other_value_is_passed_over_in_silence(trainer: str) -> None:
    outcomes = Counter[str]()
    assert unexcused(silences(layouts_of(trainer), revalued, outcomes)) == []
    assert outcomes["changed"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
def test_no_further_key_is_passed_over_in_silence(trainer: str) -> None:
    layouts = layouts_of(trainer)
    known = vocabulary_of(layouts)
    outcomes = Counter[str]()
    found = silences(layouts, lambda layout: added(layout, known), outcomes)
    assert unexcused(found) == []
    assert outcomes["noted"] + outcomes["refused"]
