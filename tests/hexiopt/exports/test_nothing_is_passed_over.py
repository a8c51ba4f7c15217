"""One key of a layout is dropped, misspelt, changed or added: its reading says so, in one way or another.

The problem or the plan changes, a note appears, or the file is refused; otherwise the key is on the list of those that
are named as harmless, or states that a feature is not used. Never the same digits in silence.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportedPlan
from hexiopt.exports.trainers import (
    flashflex,
    galvatron,
    megatron_arguments,
)
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.exports.trainers.vocabularies import accelerate, deepspeed, torchtitan
from hexiopt.ledger import OFF, Vocabulary
from tests.hexiopt.exports.one_key_changes import (
    Change,
    add_keys,
    change_values,
    drop_keys,
    keys_of,
    outcome,
    reading,
    rename_keys,
    with_keys,
)
from tests.hexiopt.exports.stated_layouts import StatedLayout, exported_layouts, exported_mixtures, stated_layouts

MEGATRON = ("megatron", "megatron_bridge", "flagscale")
VOCABULARIES: dict[str, Vocabulary] = {
    "torchtitan": torchtitan.VOCABULARY,
    "deepspeed": deepspeed.VOCABULARY,
    "accelerate": accelerate.VOCABULARY,
    "galvatron": galvatron.VOCABULARY,
    "flashflex": flashflex.VOCABULARY,
    **dict.fromkeys(MEGATRON, megatron_arguments.vocabulary()),
}


# Keys whose change may come to the same, as another key of the file has it, or by the target's own rule.
EQUIVALENT = {
    ("torchtitan", "parallelism.pipeline_parallel_last_stage_less_layers"): "its rule divides the layers alike",
    ("megatron", "recompute-modules"): "core attention is the default",
    ("megatron", "spec"): "the pattern of blocks implies the program",
    ("megatron", "make-vocab-size-divisible-by"): "the vocabulary is a multiple already",
    ("flagscale", "model.make_vocab_size_divisible_by"): "the vocabulary is a multiple already",
    ("accelerate", "fsdp_config.fsdp_reshard_after_forward"): "a single shard has nothing to reshard",
    ("flagscale", "system.tensor_model_parallel_size"): "the meshes state it",
    ("flagscale", "system.pipeline_model_parallel_size"): "the meshes state it",
    ("flagscale", "system.recompute.recompute_num_layers"): "every stage states its own",
    ("flagscale", "system.recompute.recompute_method"): "every stage states its own",
}


@dataclass(frozen=True)
class Silence:
    """A change after which the same plan comes without another word, and what excuses it, if anything."""

    change: Change
    excuse: str | None


def excuse(layout: StatedLayout, change: Change, before: ImportedPlan) -> str | None:
    """Why a change may go unsaid: by the lists that a reader has, or as the key was named as not read all along."""
    vocabulary, name = VOCABULARIES[layout.trainer], change.key
    values = [keys_of(version).get(change.key) for version in (layout, change.layout) if change.key in keys_of(version)]
    if layout.kind == "python":
        values = [literal(str(value)) for value in values]
    if all(value in OFF for value in values):
        return "not used"
    if layout.trainer in MEGATRON:
        name = name.rpartition(".")[2].replace("_", "-")
        values = [value if isinstance(value, list) else [str(value)] for value in values]
        plain = megatron_arguments.harmless_values(name)
        if all(value in plain for value in values):
            return "harmless"
    if vocabulary.is_harmless(name):
        return "harmless"
    if change.what.startswith("set") and any(f"{change.key}," in f"{note}," for note in before.notes):
        return "named as not read"
    if vocabulary.refuses(name) and all(vocabulary.reason(name, value) is None for value in values):
        return "not used"
    return EQUIVALENT.get((layout.trainer, change.key)) or (idle(change) if layout.trainer == "megatron" else None)


def idle(change: Change) -> str | None:
    """Why an argument of Megatron-LM decides nothing beside the others of its script."""
    keys = keys_of(change.layout)
    pattern = "".join(keys.get("hybrid-layer-pattern", [])).strip("'").partition("/")[0].replace("|", "")
    reasons = {
        "ffn-hidden-size": "experts state their own, and no layer is dense" * ("moe-ffn-hidden-size" in keys),
        "expert-tensor-parallel-size": "there are no experts" * ("num-experts" not in keys),
        "num-layers": "the pattern has as many" * (keys.get("num-layers") == [str(len(pattern))]),
    }
    return reasons.get(change.key) or None


def literal(text: str) -> Any:
    """The value of a Python literal, or its text."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def silences(
    layouts: Iterable[StatedLayout], change_all: Callable[[StatedLayout], Iterator[Change]], outcomes: Counter[str]
) -> list[Silence]:
    """The changes that go unsaid, with their excuses; `outcomes` counts what became of all."""
    unsaid = []
    for written in layouts:
        layout = with_keys(written, keys_of(written))
        before = reading(layout)
        assert not isinstance(before, InputError), f"{layout.trainer}, {layout.name}: {before}"
        for change in change_all(layout):
            word = outcome(before, change)
            outcomes[word] += 1
            if word == "silent":
                unsaid.append(Silence(change, excuse(layout, change, before)))
    return unsaid


def unexcused_changes(unsaid: Iterable[Silence]) -> list[str]:
    """The changes that nothing excuses."""
    return [str(silence.change) for silence in unsaid if silence.excuse is None]


def layouts_of(trainer: str) -> list[StatedLayout]:
    """The layouts of a trainer, as people state them and as ours are exported."""
    layouts = *stated_layouts(), *exported_layouts(range(2)), *exported_mixtures(range(2))
    return [layout for layout in layouts if layout.trainer == trainer]


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
        assert (again.problem, again.plan) == (before.problem, before.plan)


@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
@pytest.mark.parametrize("change_all", [drop_keys, rename_keys])
def test_no_key_is_missed_in_silence(trainer: str, change_all: Callable[[StatedLayout], Iterator[Change]]) -> None:
    outcomes = Counter[str]()
    assert unexcused_changes(silences(layouts_of(trainer), change_all, outcomes)) == []
    assert outcomes["changed"] + outcomes["noted"] + outcomes["refused"] >= 20


def test_a_reader_that_passes_keys_over_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts_of("deepspeed")[0]
    first = reading(layout)
    assert not isinstance(first, InputError)
    monkeypatch.setattr(TRAINERS["deepspeed"], "read", lambda text, context: first)
    changes = unexcused_changes(silences([layout], drop_keys, Counter()))
    assert f"deepspeed, {layout.name}: drop train_batch_size" in changes
    assert f"deepspeed, {layout.name}: drop steps_per_print" not in changes


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("ab1,-. ", max_size=5),
    st.lists(st.one_of(st.integers(-1, 40), st.text("a1", max_size=2), st.lists(st.integers(0, 40))), max_size=3),
)
SETTINGS_FILES = ("accelerate", "deepspeed", "flashflex", "galvatron", "torchtitan")


@pytest.mark.parametrize("trainer", SETTINGS_FILES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_values_a_file_has_it_is_read_or_refused_in_one_line(trainer: str, data: st.DataObject) -> None:
    layout = data.draw(
        st.sampled_from(
            [stated for stated in stated_layouts() if stated.trainer == trainer and stated.kind != "python"]
        )
    )
    keys = keys_of(layout)
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(keys)), VALUES, min_size=1, max_size=4))
    if layout.kind == "toml":
        changed = {key: value for key, value in changed.items() if value is not None}
    result = reading(with_keys(layout, keys | changed))
    assert isinstance(result, ImportedPlan) or "\n" not in str(result)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
def test_no_other_value_is_passed_over_in_silence(trainer: str) -> None:
    outcomes = Counter[str]()
    assert unexcused_changes(silences(layouts_of(trainer), change_values, outcomes)) == []
    assert outcomes["changed"] + outcomes["noted"] + outcomes["refused"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(VOCABULARIES))
def test_no_further_key_is_passed_over_in_silence(trainer: str) -> None:
    layouts = layouts_of(trainer)
    known = vocabulary_of(layouts)
    outcomes = Counter[str]()
    unsaid = silences(layouts, lambda layout: add_keys(layout, known), outcomes)
    assert unexcused_changes(unsaid) == []
    assert outcomes["noted"] + outcomes["refused"] >= 5
