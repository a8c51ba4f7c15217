"""Traces have the actions of a rank as spans, of the steps that were asked for."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from runtime.mapping.lowering import Action
from runtime.settings import TRACE_AFTER
from runtime.training.trace import StepTrace
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee
from tests.runtime.ranks import random_plan, run_ranks


def test_the_actions_of_the_traced_steps_are_spans(tmp_path: Path) -> None:
    plan, model, batch = random_plan(random.Random(2))
    first, count = 40, 2

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, batch)
        tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1))
        trace = StepTrace(rank_trainee.pipeline, torch.device("cpu"), first, count, tmp_path / "trace")
        ended = []
        for step in range(first, first + TRACE_AFTER + count + 2):
            trace.begin(step)
            rank_trainee.step(lambda a, b: tokens[a:b], SETTINGS.lr)
            if trace.ends(step + 1):
                ended.append((step + 1, trace.write(step + 1, rank)))
        return ended, [(str(action), isinstance(action, Action)) for action in rank_trainee.pipeline.actions]

    for rank, (ended, actions) in enumerate(run_ranks(len(plan.devices()), work)):
        ((step, path),) = ended
        assert step == first + TRACE_AFTER + count
        assert path.name == f"steps-00000043-00000044-rank-{rank:05d}.json.gz"
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        spans = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert {name: spans[name] for name, _ in actions} == {
            name: count * times for name, times in Counter(name for name, _ in actions).items()
        }
        assert any(name.endswith("F0") for name, computes in actions if computes)
        assert any(event["name"] == "aten::mm" for event in events)


def test_none_is_asked_for(tmp_path: Path) -> None:
    trace = StepTrace(None, torch.device("cpu"), 0, 0, tmp_path)  # type: ignore[arg-type]
    for step in range(9):
        trace.begin(step)
        assert not trace.ends(step)
    assert list(tmp_path.iterdir()) == []
