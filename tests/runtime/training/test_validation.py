"""What is held out is never trained on, and its loss is that of one process."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexiopt.errors import InputError
from runtime.data.batches import Batches
from runtime.data.corpus import Corpus
from runtime.settings import Settings
from runtime.training.preparation import prepared_run
from runtime.training.settings import TrainingRun
from runtime.training.validation import Validation
from tests.runtime.data.corpora import position_file, token_file
from tests.runtime.parallel.test_training import SEQ_LEN, trainee, whole
from tests.runtime.ranks import random_plan, run_ranks
from tests.runtime.training.test_preparation import PROBLEM
from tests.slow import slow_but

CPU = torch.device("cpu")


def the_run(tokens: Path, **more: Any) -> TrainingRun:
    return TrainingRun("own", Path("plan.json"), tokens, Path("checkpoints"), Settings(**more))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_a_share_is_never_trained_on(share: float, tmp_path: Path) -> None:
    run = the_run(position_file(tmp_path, 100 * SEQ_LEN + 5), validation_share=share)
    trained, held_out = run.batches(SEQ_LEN), run.validation_batches(SEQ_LEN)
    assert held_out is not None
    firsts = [set(source.sequences(0, 3 * source.num_windows)[:, 0].tolist()) for source in (trained, held_out)]
    assert len(firsts[1]) == held_out.num_windows == round(100 * share)
    assert firsts[0] | firsts[1] == set(range(0, 100 * SEQ_LEN, SEQ_LEN))
    assert max(firsts[0]) < min(firsts[1])


def test_without_a_share_all_is_trained_on(tmp_path: Path) -> None:
    run = the_run(position_file(tmp_path, 100))
    assert run.validation_batches(9) is None
    assert run.batches(9) == Batches(run.tokens, 9, 0)
    apart = replace(run, validation=token_file(tmp_path, [1, 2, 3]))
    assert apart.batches(2) == Batches(run.tokens, 2, 0)
    assert apart.validation_batches(2) == Batches(tmp_path / "tokens.npy", 2, 0)


@pytest.mark.parametrize("separator", slow_but((3,), (None, 3)))
def test_its_loss_is_that_of_one_process(separator: int | None, tmp_path: Path) -> None:
    """Over as many whole batches as there are, and at most as many as are asked for; always of the same ones."""
    plan, model, batch = random_plan(random.Random(8))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, SEQ_LEN * (3 * batch + 1) + 1)
    held_out = Batches(token_file(tmp_path, tokens), SEQ_LEN, 7, separator)

    def losses(plan: Any, most: int) -> list[Any]:
        def work(rank: int) -> Any:
            settings = Settings(steps=10, validation_every=4, validation_batches=most, separator=separator)
            validation = Validation(trainee(plan, model, batch), held_out, batch, CPU, settings)
            assert [step for step in range(1, 11) if validation.is_due(step)] == [4, 8, 10]
            waited: list[int] = []
            return [validation.loss(lambda: waited.append(1)) for _ in range(2)], len(waited)

        return run_ranks(len(plan.devices()), work)

    for most, count in ((2, 2), (8, 3)):
        ((expected, _),) = losses(whole(model, batch), most)
        assert expected[0] == expected[1]
        for validation_losses, batches in losses(plan, most):
            assert validation_losses == pytest.approx(expected, rel=1e-10)
            assert batches == 2 * count


@pytest.mark.parametrize(
    ("num_tokens", "share", "message"),
    [(16 * 40 + 1, 0.05, "train.validation: has 2 sequences, and a global batch 4"), (33, 0.1, "has no window of 17")],
)
def test_too_little_is_one_line(num_tokens: int, share: float, message: str, tmp_path: Path) -> None:
    data = token_file(tmp_path, [1] * num_tokens)
    settings = Settings(validation_share=share)
    with pytest.raises(InputError, match=message):
        prepared_run(tmp_path / "plan.json", PROBLEM, tmp_path, settings, Corpus(data))


def test_a_corpus_of_its_own_is_tokenised_alike(tmp_path: Path) -> None:
    vocabulary = PROBLEM.model.vocab_size
    for name, length in (("a", 200), ("b", 100)):
        (tmp_path / f"{name}.txt").write_bytes(bytes(k % (vocabulary - 1) for k in range(length)))
    corpus = Corpus(tmp_path / "a.txt", tmp_path / "b.txt", separator=vocabulary - 1, document_masking=True)
    run = prepared_run(tmp_path / "plan.json", PROBLEM, tmp_path, Settings(), corpus)
    assert run.settings.separator == vocabulary - 1
    held_out = run.validation_batches(16)
    assert held_out is not None
    assert np.load(held_out.tokens).tolist()[-2:] == [99 % (vocabulary - 1), vocabulary - 1]
    assert TrainingRun.of(run.to_dict()) == run
    assert (
        prepared_run(
            tmp_path / "plan.json", PROBLEM, tmp_path, Settings(), replace(corpus, document_masking=False)
        ).settings.separator
        is None
    )
