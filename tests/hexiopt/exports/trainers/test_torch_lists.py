"""What torch loads of a plan whose backwards are split: no rank waits for ever, and memory holds out.

A small model that is trained by such lists gets the gradients of one process.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.exports.trainers.torch_lists import LETTERS, Lists, TorchAction, check_lists, torch_lists
from hexiopt.numbers.coefficients import FRAGMENTATION
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.in_flight import largest, stages_in_flight
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from tests.hexiopt.exports.random_plans import grid
from tests.hexiopt.exports.trainers.test_trainers_texts import import_context
from tests.slow import slow_but

TORCHTITAN = TRAINERS["torchtitan"]
SEEDS = range(40)


def draw_split_plan(seed: int, policy: str = "none") -> tuple[Problem, Plan]:
    """A random plan of two stages or more whose backwards are split."""
    rng = random.Random(f"lists {seed}")
    while True:
        problem, plan = grid(
            rng, schedules=("1f1b", "interleaved"), policies=(policy,), zeros=(0,), precisions=("bf16",)
        )
        if len(plan.pipelines[0].stages) > 1:
            return problem, replace(plan, schedule=SPLIT_SCHEDULES[plan.pipelines[0].num_chunks > 1])


def lists_of(problem: Problem, plan: Plan) -> Lists:
    return torch_lists(plan, PlanPricer(problem).place_pipelines(plan)).ranks


def load_schedule(text: str, folder: Path, num_stages: int, num_micro_batches: int) -> Any:
    """torch's schedule of the lists, with its messages."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = object.__new__(_PipelineScheduleRuntime)
    schedule.pipeline_order, schedule._stages, schedule._defer_pp_recv = {}, [], False
    schedule.pp_group_size, schedule._num_stages = text.count("\n"), num_stages
    schedule._n_microbatches = num_micro_batches
    (folder / "lists.csv").write_text(text)
    schedule._load_csv(str(folder / "lists.csv"))
    return schedule


@pytest.mark.parametrize("seed", slow_but(SEEDS[::4], SEEDS))
def test_torch_loads_the_lists_and_no_rank_waits_for_ever(seed: int, tmp_path: Path) -> None:
    """Even where a send waits for the other rank to receive."""
    problem, plan = draw_split_plan(seed)
    num_ranks, chunks = len(plan.pipelines[0].stages), plan.pipelines[0].num_chunks
    batches = plan.pipelines[0].num_micro_batches
    program = TORCHTITAN.write(problem, plan)
    assert "with_name('schedule.csv')" in program.files["hexiopt_plan.py"]
    schedule = load_schedule(program.files["schedule.csv"], tmp_path, num_ranks * chunks, batches)
    assert schedule.stage_index_to_group_rank == {k: k % num_ranks for k in range(num_ranks * chunks)}
    assert [[str(action) for action in schedule.pipeline_order[rank]] for rank in range(num_ranks)] == [
        list(map(str, actions)) for actions in lists_of(problem, plan)
    ]
    run_by_meeting(schedule.pipeline_order_with_comms, num_ranks, num_ranks * chunks)


def run_by_meeting(ranks: dict[int, list[Any]], num_ranks: int, num_stages: int) -> None:
    """Run lists with messages, of which each takes place when both ends have come to it."""
    todo = {
        rank: [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in reversed(actions)]
        for rank, actions in ranks.items()
    }
    ended = set[tuple[int, str, int]]()

    def runs(stage: int, kind: str, batch: int) -> bool:
        """Whether the next action of a rank runs now, with its other end if it sends."""
        if kind in ("F", "I"):
            assert stage == (0 if kind == "F" else num_stages - 1) or (stage, f"RECV_{kind}", batch) in ended
        elif kind == "W":
            assert (stage, "I", batch) in ended
        elif kind.startswith("SEND"):
            target, way = (stage + 1, "F") if kind == "SEND_F" else (stage - 1, "I")
            assert (stage, way, batch) in ended
            other = todo[target % num_ranks]
            if other[-1:] != [(target, kind.replace("SEND", "RECV"), batch)]:
                return False
            other.pop()
            ended.add((target, f"RECV_{way}", batch))
        return not kind.startswith("RECV")

    while any(todo.values()):
        ran = False
        for left in todo.values():
            while left and runs(*left[-1]):
                ended.add(left.pop())
                ran = True
        assert ran, f"ranks wait at {[left[-1] for left in todo.values() if left]}"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_torch_holds_fits_where_the_plan_fits(seed: int) -> None:
    """Until its gradients of weights are computed a micro-batch takes all of its activations, or no more of them are
    held than without split backwards."""
    problem, plan = draw_split_plan(seed)
    usual = replace(plan, schedule=INTERLEAVED if plan.pipelines[0].num_chunks > 1 else ONE_F_ONE_B)
    model, ranks = PlanPricer(problem), lists_of(problem, plan)
    cost, placed = model.price(usual), model.place_pipelines(plan)
    num_stages, chunks, batches = len(ranks), plan.pipelines[0].num_chunks, plan.pipelines[0].num_micro_batches
    counts = stages_in_flight(plan.schedule, num_stages, batches, chunks)
    for priced, line in zip(cost.pipelines, placed, strict=True):
        for s, (stage, split) in enumerate(zip(priced.stages, line.stages, strict=True)):
            for whole, executor in zip(stage.executors, split.executors, strict=True):
                stored = executor.footprint.stored
                most = sum(n * b for n, b in zip(largest(counts[s], stored), stored, strict=True))
                room = max(most, most - whole.excess_bytes / (1 + FRAGMENTATION) + executor.footprint.working)
                held, highest = Counter[int](), 0.0
                for action in ranks[s]:
                    held[action.stage // num_stages] += (action.letter == "F") - (action.letter == "W")
                    highest = max(highest, sum(n * stored[c] for c, n in held.items()))
                assert highest <= room * (1 + 1e-9)


def swap(ranks: Lists, a: TorchAction, b: TorchAction) -> Lists:
    """The lists with two actions in each other's place."""
    other = {a: b, b: a}
    return tuple(tuple(other.get(action, action) for action in rank) for rank in ranks)


def test_wrong_lists_are_found() -> None:
    ranks = tuple(
        tuple(TorchAction(stage, letter, k) for k in range(2) for letter in LETTERS.values()) for stage in range(2)
    )
    check_lists(ranks, 2)
    with pytest.raises(AssertionError, match="not once each: 0F2, 0I2, 0W2, 1F2, 1I2, 1W2"):
        check_lists(ranks, 3)
    with pytest.raises(AssertionError, match="not once each: 1W0, 1W1"):
        check_lists((ranks[0], (*ranks[1][:-1], ranks[1][2])), 2)
    for pair in ((TorchAction(1, "F", 0), TorchAction(1, "F", 1)), (TorchAction(1, "I", 0), TorchAction(1, "W", 0))):
        with pytest.raises(AssertionError, match="wait for each other for ever: at 0I0, 1"):
            check_lists(swap(ranks, *pair), 2)


def test_plans_that_recompute_are_refused() -> None:
    problem, plan = draw_split_plan(0, policy="full")
    with pytest.raises(InputError, match=r"each of a layer's weights; plan with workload\.recompute=none"):
        TORCHTITAN.write(problem, plan)


def test_the_file_is_not_read_as_another_schedule() -> None:
    text = TORCHTITAN.write(*draw_split_plan(0)).files["hexiopt_plan.py"]
    with pytest.raises(InputError, match=r"pipeline_parallel_schedule_csv.* is a schedule of its own"):
        TORCHTITAN.read(text, import_context())


def test_torch_recomputes_for_every_weight() -> None:
    """Why plans that recompute are refused."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    from torch.utils.checkpoint import checkpoint

    forwards = 0
    layer = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))

    def forward(x: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return layer(x)

    inputs = torch.ones(2, 4, requires_grad=True)
    output = checkpoint(forward, inputs, use_reentrant=False)
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [inputs], layer.parameters())
    assert forwards == 2
    stage_backward_weight(layer.parameters(), groups)
    assert forwards == 2 + 3


BATCHES, WIDTH = 6, 4


def small_model(num_stages: int) -> list[Any]:
    """A part of a model for each virtual stage."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)]
    return [part.double() for part in parts]


def loss_of(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).sum()


def data() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 2 * BATCHES, WIDTH, dtype=torch.float64)
    return inputs, targets


def train(text: str, folder: Path, num_ranks: int, num_stages: int, rank: int) -> dict[int, list[Any]]:
    """The gradients of a rank's stages after a step by the lists."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    parts = {k: part for k, part in enumerate(small_model(num_stages)) if k % num_ranks == rank}
    stages = [PipelineStage(part, k, num_stages, "cpu") for k, part in parts.items()]
    schedule = _PipelineScheduleRuntime(stages, BATCHES, loss_fn=loss_of, scale_grads=False)
    (folder / f"{rank}.csv").write_text(text)
    schedule._load_csv(str(folder / f"{rank}.csv"))
    inputs, targets = data()
    schedule.step(*([inputs] * (rank == 0)), **({"target": targets} if num_stages - 1 in parts else {}))
    return {k: [weight.grad.tolist() for weight in part.parameters()] for k, part in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_model_that_runs_the_lists_gets_the_gradients_of_one_process(chunks: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.testing import assert_close

    from tests.runtime.ranks import run_ranks

    for seed in range(1000):
        problem, plan = draw_split_plan(seed)
        if (len(plan.pipelines[0].stages), plan.pipelines[0].num_chunks) == (3, chunks):
            break
    pipelines = tuple(replace(pipeline, num_micro_batches=BATCHES) for pipeline in plan.pipelines)
    text = torch_lists(plan, PlanPricer(problem).place_pipelines(replace(plan, pipelines=pipelines))).csv
    gradients = run_ranks(3, partial(train, text, tmp_path, 3, 3 * chunks))
    parts, (inputs, targets) = small_model(3 * chunks), data()
    loss_of(torch.nn.Sequential(*parts)(inputs), targets).backward()
    trained = {k: stage for rank in gradients for k, stage in rank.items()}
    for k, part in enumerate(parts):
        for weight, gradient in zip(part.parameters(), trained[k], strict=True):
            assert_close(torch.tensor(gradient, dtype=torch.float64), weight.grad, rtol=1e-12, atol=1e-12)
