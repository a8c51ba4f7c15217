"""Plans with sequence layouts train as one process does: gradients and loss curves, in float64."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hexiopt.files.plan_file import FORMAT, VERSION, plan_to_dict
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import head_ranges, kv_range, sub_rings
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.data.batches import Batches
from runtime.launch.head import AfterFaults, training_events
from runtime.settings import Settings
from runtime.state.checkpoint import Checkpoint, finished_checkpoints
from runtime.training.settings import TrainingRun
from tests.conftest import STRESS
from tests.runtime.launch.test_faults import problem
from tests.runtime.parallel.test_training import SETTINGS, equal_one_process, features, trainee, whole
from tests.runtime.ranks import TIMEOUT_S, random_model, random_sequence_plan, run_ranks
from tests.slow import slow_but

SEQ_LEN = 10
SEEDS = range(60)  # of plans
FEW = (8, 17, 19, 25, 27, 35, 53)  # small ones that have every feature between them
# Of what is around sequence layouts; what else there is has its own tests.
AROUND = {"1f1b", "interleaved", "tied embeddings on different stages", "ZeRO-1 over all"}


def case(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_sequence_plan(random.Random(seed), SEQ_LEN)


@pytest.mark.parametrize("seed", slow_but((53,), SEEDS if STRESS else FEW))
def test_a_plan_trains_as_one_process(seed: int) -> None:
    """Half of them have a group for each lane of messages, as NCCL needs, and no tags."""
    equal_one_process(case(seed), 20 if STRESS else 4, SEQ_LEN)


def test_groups_that_cut_the_heads_at_different_places() -> None:
    """Beside a pipeline of one device; most devices are in several sub-rings."""
    groups = (SequenceGroup((4, 1, 3), (7, 2, 1), (3, 2, 1)), SequenceGroup((0, 5), (3, 5), (2, 4)))
    stages = (Stage(SequenceParallel(groups, "zigzag"), ((0, 1),), ("none",)),)
    plan = Plan((Pipeline(stages, 1, 2), Pipeline((Stage.of((2,), 0, 1),), 1)))
    model = replace(random_model(random.Random(0), 1), num_kv_heads=2)
    assert "several sub-rings of a device" in sequence_features(plan, model)
    equal_one_process((plan, model, 3), 4, 18)


@pytest.mark.slow
def test_a_run_from_a_plan_file(tmp_path: Path) -> None:
    """Processes of a plan file train as one, tell of steps, checkpoints and timelines, and end."""
    task = problem()
    groups = (SequenceGroup((3, 0), (9, 2), (1, 3)), SequenceGroup((1,), (5,), (4,)))
    layout = SequenceParallel(groups, "zigzag")
    long = Pipeline((Stage(layout, ((0, 3),), ("full",)), Stage.of((4, 5), 3, 4)), 3)
    plan = Plan((long, Pipeline((Stage.of((2,), 0, 4),), 1)), ONE_F_ONE_B, Sharding(1))
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8))
    content = {"format": FORMAT, "version": VERSION, "problem": problem_to_dict(task)}
    (tmp_path / "plan.json").write_text(json.dumps(content | plan_to_dict(plan, task.cluster)))
    settings = Settings(steps=4, adam=SETTINGS, seed=1, checkpoint_every=4, timeout_s=TIMEOUT_S)
    run = TrainingRun("own", tmp_path / "plan.json", tokens, tmp_path / "checkpoints", settings, float64=True)
    events = list(training_events(run, tmp_path, AfterFaults("stop", lambda lost: run.plan, 0)))
    losses = [event["loss"] for event in events if event["event"] == "step"]

    def train_alone(rank: int) -> list[float]:
        workload = task.workload
        rank_trainee = trainee(
            whole(task.model, workload.global_batch), task.model, workload.global_batch, seq_len=workload.seq_len
        )
        batches = Batches(tokens, workload.seq_len, settings.seed)
        firsts = [step * workload.global_batch for step in range(4)]
        return [
            rank_trainee.step(
                lambda a, b, at=at: torch.from_numpy(batches.sequences(at + a, at + b)), settings.lr(step)
            )[0]
            for step, at in enumerate(firsts)
        ]

    assert [losses] == [pytest.approx(expected, rel=1e-9) for expected in run_ranks(1, train_alone)]
    Checkpoint(finished_checkpoints(tmp_path / "checkpoints")[-1]).check()
    timelines = [event for event in events if event["event"] == "timeline"]
    assert sorted((event["pipeline"], event["stage"], event["rank"]) for event in timelines) == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 3),
        (0, 1, 4),
        (0, 1, 5),
        (1, 0, 2),
    ]
    assert {len(event["operations"]) for event in timelines} == {6, 2}


def sequence_features(plan: Plan, model: ModelSpec) -> set[str]:
    """What of sequence layouts, and of what is around them, a plan is an example of."""
    names = set()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            names |= _of_stage(stage, model)
        for before, after in pairwise(pipeline.stages):
            kinds = [
                "a sequence layout"
                if isinstance(s.parallelism, SequenceParallel)
                else f"TP {len(s.parallelism.replicas[0].devices)}"
                for s in (before, after)
            ]
            names.add(f"{kinds[1]} after " + ("another" if kinds[0] == kinds[1] else kinds[0]))
        names.add(
            "a first sequence layout"
            if isinstance(pipeline.stages[0].parallelism, SequenceParallel)
            else "no first one"
        )
        names.add(
            "a last sequence layout" if isinstance(pipeline.stages[-1].parallelism, SequenceParallel) else "no last one"
        )
    return names


def _of_stage(stage: Stage, model: ModelSpec) -> set[str]:
    if not isinstance(stage.parallelism, SequenceParallel):
        return set()
    layout = stage.parallelism
    sizes = [len(group.devices) for group in layout.groups]
    names = {f"{min(len(sizes), 3)} groups", f"a group of {max(sizes)}", f"{layout.order} over {min(len(sizes), 2)}"}
    names |= {f"{policy} in a sequence layout" for policies in stage.policies() for policy in policies}
    names |= {"groups of different sizes"} if len(set(sizes)) > 1 else set()
    tokens = [count for group in layout.groups for count in group.tokens]
    names |= {"very uneven shards"} if max(tokens) >= 5 * min(tokens) else set()
    for group in layout.groups:
        ranges = head_ranges(group.heads)
        read = [kv_range(heads, model.num_heads, model.num_kv_heads) for heads in ranges]
        names |= {"uneven heads"} if len(set(group.heads)) > 1 else set()
        names |= {"shared key-value heads"} if any(a[1] > b[0] for a, b in pairwise(read)) else set()
    rings = sub_rings(layout, model.num_heads, model.num_kv_heads)
    names |= {"several sub-rings of a device"} if len(sizes) > 1 and len(rings) > max(sizes) else set()
    names |= {"a window"} if model.attention_window is not None and len(tokens) > 1 else set()
    return names


def test_the_few_have_every_feature() -> None:
    def plan_features(seed: int) -> set[str]:
        plan, model, _ = case(seed)
        return features(plan, model) & AROUND | sequence_features(plan, model)

    assert set().union(*map(plan_features, FEW)) == set().union(*map(plan_features, SEEDS)) >= AROUND
