"""A question of the page: the commands that ask the same, and cures as the form has them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from experiments.app.cli import main
from experiments.web.question import TRAININGS, Question, question_from
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.study.fitting.capacity import Capacity
from hexiopt.study.fitting.verdict import verdict

ASKED: dict[str, Any] = {
    "pcs": [[["3060 12gb", 1]]],
    "network": "1",
    "model": "llama2_7b",
    "training": "full",
    "rank": 8,
    "seq_len": 2048,
    "global_batch": 4,
    "seconds": 1,
}
TWO_PCS = [[["3090", 2], ["RTX 4090", 1], ["rtx_3090", 1]], [["4060ti-16gb", 2]]]


def question_with(**changes: Any) -> Question:
    return question_from(ASKED | changes)


def test_commands_name_the_cards_in_their_pcs() -> None:
    fit, plan = question_with(pcs=TWO_PCS, training="qlora").commands
    words = (
        "model=llama2_7b 'gpus=[[3xrtx_3090,rtx_4090],[2xrtx_4060_ti_16gb]]' network=1gbe workload.training=lora "
        "workload.lora.storage=nf4 workload.lora.rank=8 workload.seq_len=2048 workload.global_batch=4"
    )
    assert fit == f"hexiopt fit {words}"
    assert plan == f"hexiopt plan {words} solver.time_limit_s=1"


@pytest.mark.parametrize("training", TRAININGS)
def test_the_command_asks_the_same(training: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of which the page says what `hexiopt fit` does: speed, interval, grade, limits and cures."""
    question = question_with(pcs=[[["3090", 1], ["4090", 1]]], training=training)
    answer = verdict(question.problem(), assumed=question.cards.assumed)
    words = shlex.split(question.commands[0])[1:]
    code = main([*words, "print=json", f"hydra.run.dir={tmp_path}"])
    assert code == (0 if answer.plan else 3)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer.to_dict()))


@pytest.mark.parametrize(
    ("changes", "trainings"),
    [
        ({}, {"full", "qlora"}),
        ({"pcs": [[["3060 12gb", 6]]]}, {"full_8bit", "full"}),
        ({"training": "lora", "model": "llama2_13b"}, {"qlora", "lora"}),
        ({"pcs": TWO_PCS, "seq_len": 2**17, "training": "lora"}, {"qlora", "lora"}),
    ],
)
def test_a_cure_sets_the_form_to_what_fits(changes: dict[str, Any], trainings: set[str]) -> None:
    question = question_with(**changes)
    answer = verdict(question.problem())
    assert answer.plan is None
    assert answer.cures
    forms = [question.form_of(cure.plan.problem) for cure in answer.cures]
    assert {form["training"] for form in forms} == trainings
    for cure, form in zip(answer.cures, forms, strict=True):
        cured = question_from(ASKED | changes | form)
        assert Capacity(cured.problem()).fits, form
        assert cured.problem().workload == cure.plan.problem.workload
        assert len(cured.problem().usable_devices) == len(cure.plan.problem.usable_devices)


def test_a_form_that_nothing_changed_is_the_question() -> None:
    for training in TRAININGS:
        question = question_with(pcs=TWO_PCS, training=training)
        again = question_from(ASKED | question.form_of(question.problem()))
        assert problem_to_dict(again.problem()) == problem_to_dict(question.problem())
