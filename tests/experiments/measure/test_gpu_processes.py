"""What several processes are tried with, and the tables of what came of them."""

import pytest

from experiments.lab.trials.communicators import GroupMemory
from experiments.lab.trials.killed import KilledRank
from experiments.lab.trials.trial import ExchangeTime, Trial
from experiments.measure.gpu_processes import ProcessTrials, _troubles, exchange_table, order_trials, toy_model
from hexiopt.plan.check import check
from tests.solvers.problems import cluster

BOTH = {"toy, 2 pipelines of 2 stages, ZeRO-1", "toy, 2 interleaved stages"}


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_launch_orders_are_tried_with_and_without(gpus: int) -> None:
    trials = order_trials(cluster(("a", "fast", gpus)), gpus)
    assert {trial.plan.name for trial in trials if not trial.launch_order} == BOTH
    assert {trial.name for trial in trials} >= BOTH | {f"{name}, no launch order" for name in BOTH}
    assert len({trial.name for trial in trials}) == len(trials) == (4 if gpus > 1 else 13)
    for order_trial in trials:
        assert order_trial.plan.problem.model == toy_model(), order_trial.name
        assert not check(order_trial.plan.problem, order_trial.plan.plan), order_trial.name


def test_gloo_has_no_launch_order() -> None:
    assert order_trials(cluster(("a", "fast", 2)), 0) == []


def test_tables_have_numbers_where_there_is_a_gpu_and_words_where_there_is_none() -> None:
    trained = Trial((0.1,), (6.0, 5.0), (2**30,), (), ExchangeTime(0.02, 0.005))
    hung = Trial(trouble="rank 0: no answer in time")
    outcome = ProcessTrials(
        KilledRank("nccl", "rank 1 ended", 1.25, 2**29),
        [GroupMemory("TP 2", 2**20, 3 * 2**19), GroupMemory("messages", 0.0, None)],
        [("a", trained), ("b", hung)],
    )
    assert [rows for *_, rows in outcome.tables()] == [
        [["nccl", "1.25", "0.5", "rank 1 ended"]],
        [["TP 2", "1.5", "1"], ["messages", "no device memory", "0"]],
        [["a", "6.0000 → 5.0000"], ["b", "rank 0: no answer in time"]],
    ]
    assert exchange_table(outcome.trials)[-1] == [["a", "20", "25%"]]
    cpu = ProcessTrials(KilledRank("gloo", trouble="nothing was killed: no port"))
    assert [rows for *_, rows in cpu.tables()] == [[["gloo", "–", "no device memory", "nothing was killed: no port"]]]
    assert list(ProcessTrials().tables()) == []


def test_losses_are_those_of_the_first_plan() -> None:
    failed, first, same = Trial(trouble="hung"), Trial(losses=(6.0, 5.0)), Trial(losses=(6.0, 5.004))
    assert _troubles([("a", first), ("b", same)]) == []
    (hung, other) = _troubles([("a", failed), ("b", first), ("c", Trial(losses=(6.0, 5.01)))])
    assert hung == "a: hung"
    assert other == "c: losses (6.0, 5.01) are not (6.0, 5.0), as of the first plan"
