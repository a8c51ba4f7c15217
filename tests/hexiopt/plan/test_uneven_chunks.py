"""Interleaved stages whose layer ranges have any lengths: where they are allowed, what they hold, what is proven."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import read_layout, write_program
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.plan_file import read_plan, write_plan
from hexiopt.files.problem_file import space_to_dict
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, layer_ranges, ranges_of, with_equal_chunks
from hexiopt.problem.workload import Workload
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.registry import INTERLEAVED
from hexiopt.schedules.schedule import StagePosition
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import PricedPlan
from solvers.heuristics.operators.plans import PlanNeighbourhood, shift_chunk_layer, shift_layer
from solvers.registry import make_solver
from tests.models import TOY
from tests.strategies import compositions

CLUSTER = Cluster.of({"a100_80gb_sxm": 2}, inter_gb_per_s=25, gpus_per_machine=2, name="c")
MODEL = replace(TOY, num_layers=12)
WORKLOAD = Workload(16, 512, schedule="interleaved")
UNEVEN = Problem(CLUSTER, MODEL, WORKLOAD, Space(uneven_chunks=True))


def plan_of(parts: list[int], policies: tuple[str, ...] = ("none",), count: int = 16) -> Plan:
    """Two stages with virtual stages of so many layers, in the order of the model."""
    stages = [Stage(TensorParallel((s,)), ranges, policies) for s, ranges in enumerate(ranges_of(parts, 2))]
    return Plan((Pipeline(tuple(stages), count),), INTERLEAVED, Sharding(1))


def test_the_switch_allows_them() -> None:
    plan = plan_of([2, 2, 3, 3, 1, 1])
    assert check(UNEVEN, plan) == []
    [violation] = check(replace(UNEVEN, space=Space()), plan)
    assert violation.rule == "layers"
    assert violation.text.endswith("longer ones first: 2 + 2 + 2, or allow others with space.uneven_chunks=true")
    assert check(replace(UNEVEN, space=Space(uneven_chunks=True, uneven_layers=False)), plan) == []
    lopsided = plan_of([2, 3, 2, 3, 1, 1])
    [violation] = check(replace(UNEVEN, space=Space(uneven_chunks=True, uneven_layers=False)), lopsided)
    assert violation.rule == "space.uneven_layers"


@given(st.lists(st.integers(3, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_equal_chunks_are_those_of_the_space(counts: list[int], chunks: int) -> None:
    ranges = layer_ranges(counts, chunks)
    assert with_equal_chunks(ranges) == ranges


def test_files_state_the_switch_only_where_it_is_on(tmp_path: Path) -> None:
    assert "uneven_chunks" not in space_to_dict(Space())
    assert space_to_dict(Space(uneven_chunks=True))["uneven_chunks"] is True
    plan = plan_of([1, 5, 2, 2, 1, 1])
    write_plan(tmp_path / "plan.json", UNEVEN, plan, PlanPricer(UNEVEN).price(plan), {})
    file = read_plan(tmp_path / "plan.json")
    assert (file.problem, file.plan) == (UNEVEN, plan)


@given(st.integers(2, 3).flatmap(lambda chunks: compositions(12, 2 * chunks)), st.sampled_from((2, 6, 16)))
def test_a_stage_holds_what_its_operations_leave(parts: list[int], count: int) -> None:
    """Its operations one after another: a forward stores what the range's layers keep, a backward gives it back."""
    problem = replace(UNEVEN, workload=replace(WORKLOAD, global_batch=count))
    plan, pricer = plan_of(parts, count=count), PlanPricer(problem)
    pipeline, cost = plan.pipelines[0], pricer.price(plan)
    activations = pricer.stages.memory_model(pricer.tp_group((0,)), 1).activations
    for s, stage in enumerate(pipeline.stages):
        sizes = [(end - first) * activations.layer_bytes("none") for first, end in stage.layers]
        if s == 0:
            sizes[0] += activations.token_ids
        if s == 1:
            sizes[-1] += activations.final_norm + activations.loss
        held = most = 0.0
        for turns, repeats in INTERLEAVED.programme(StagePosition(s, 2, count, pipeline.num_chunks)):
            for turn in turns * repeats:
                held += sizes[turn.chunk] if turn.kind is OperationKind.FORWARD else -sizes[turn.chunk]
                most = max(most, held)
        memory = cost.pipelines[0].stages[s].memory
        assert memory.activations + memory.logits - (s == 1) * activations.logits == pytest.approx(most)


@given(st.integers(2, 3).flatmap(lambda chunks: compositions(12, 2 * chunks)))
def test_only_the_compute_bound_is_stated_and_it_holds(parts: list[int]) -> None:
    pricer = PlanPricer(UNEVEN)
    assert lower_bound_s(pricer, 5.0) == compute_bound_s(pricer) <= pricer.price(plan_of(parts)).step_time_s


def test_the_best_plan_of_equal_chunks_is_not_the_best() -> None:
    """Why there is a switch: a proof over all equal chunks says nothing of this plan, whose short first ranges fill the
    pipeline sooner."""
    few = replace(UNEVEN, workload=replace(WORKLOAD, global_batch=2))
    pricer, equal_s = PlanPricer(few), []
    for chunks in (1, 2, 3):
        for first in range(chunks, 13 - chunks):
            parts = [
                end - start
                for turn in zip(*layer_ranges([first, 12 - first], chunks), strict=True)
                for start, end in turn
            ]
            equal_s.append(pricer.price(plan_of(parts, count=2)).step_time_s)
    assert pricer.price(plan_of([1, 1, 3, 3, 3, 1], count=2)).step_time_s < 0.99 * min(equal_s)


@pytest.mark.parametrize("name", ["exact", "cp_sat"])
def test_oracles_decline(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} proves nothing about chunks of uneven length; take space.uneven"):
        make_solver(name).solve(UNEVEN, Budget(5, 10))


def test_searches_move_layers_between_ranges() -> None:
    completer = PlanCompleter(PlanPricer(UNEVEN))
    near, plan, rng = PlanNeighbourhood(completer), plan_of([3, 3, 3, 3]), random.Random(0)
    met = set[tuple[int, ...]]()
    for operator in (shift_chunk_layer, shift_layer):
        for _ in range(100):
            priced = PricedPlan(plan, completer.pricer.price(plan))
            moved = operator(near, priced, rng)
            if moved is None:
                continue
            assert check(UNEVEN, moved) == []
            counts = [[stage.num_layers for stage in version.pipelines[0].stages] for version in (plan, moved)]
            assert (counts[0] == counts[1]) == (operator is shift_chunk_layer)
            plan = moved
            met.add(tuple(end - first for stage in plan.pipelines[0].stages for first, end in stage.layers))
    assert len(met) > 30


def test_a_search_of_all_chunks_is_not_called_optimal() -> None:
    """`portfolio` proves small problems; here it may not, unless a plan reaches the compute bound."""
    result = make_solver("portfolio").solve(UNEVEN, Budget(20, 60))
    assert result.plan is not None
    assert result.status is Status.FEASIBLE
    assert result.bound_s == pytest.approx(compute_bound_s(PlanPricer(UNEVEN)))


def test_a_public_layout_of_80_layers_is_read_and_written(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge, pull request 5391: Llama 3 70B on 64 H100, TP 4, PP 8, five chunks a stage."""
    cluster = Cluster.of({"h100_80gb_sxm": 64}, inter_gb_per_s=400, gpus_per_machine=8, name="h64")
    text = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
    (tmp_path / "run.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 128256 "
        "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --sequence-parallel "
        "--micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 4 "
        f"--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout '{text}'\n"
    )
    imported_plan = read_layout("megatron", tmp_path / "run.sh", cluster, None, Workload(), Space(), None)
    pipeline = imported_plan.plan.pipelines[0]
    assert imported_plan.plan.schedule == INTERLEAVED
    lengths = [[end - first for first, end in stage.layers] for stage in pipeline.stages]
    assert lengths == [[2] * 5] * 3 + [[2, 2, 2, 2, 3]] + [[2] * 5] * 3 + [[2, 2, 2, 2, 1]]
    assert imported_plan.problem.space == Space(uneven_chunks=True)
    assert any("space.uneven_chunks=true" in note for note in imported_plan.notes)
    assert check(imported_plan.problem, imported_plan.plan) == []
    equal = layer_ranges([10] * 8, 5)
    even = replace(
        imported_plan.plan,
        pipelines=tuple(
            replace(
                line,
                stages=tuple(replace(stage, layers=ranges) for stage, ranges in zip(line.stages, equal, strict=True)),
            )
            for line in imported_plan.plan.pipelines
        ),
    )
    pricer = PlanPricer(imported_plan.problem)
    assert pricer.price(imported_plan.plan).step_time_s < pricer.price(even).step_time_s  # the point of the layout
    program = write_program(imported_plan.problem, imported_plan.plan, TRAINERS["megatron"])
    (tmp_path / "again.sh").write_text("torchrun pretrain_gpt.py $MODEL $PLAN\n" + program.files["megatron.sh"])
    assert "t*3|t*2|t*2|t*2|tL" in program.files["megatron.sh"]
