"""Plans of models with experts in the files of trainers that share them among ranks, and back."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import read_layout, reading_note, write_program
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica, Replicated, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.hexiopt.exports.random_expert_plans import EXPERT_PLANS, TITANS, drawn_plan
from tests.hexiopt.exports.test_expert_groups import arguments_of_config
from tests.hexiopt.exports.test_round_trips import read_back
from tests.hexiopt.shapes_of_kinds import DENSE_LAYER, EQUAL, KINDS, MIXED, model_of

QWEN = TITANS[4]  # the debug model, of 64 experts
OTHERS = ("flashflex", "galvatron")
SCALED = EQUAL.replace(
    layers=tuple(
        kind.with_experts(replace(kind.experts, scales_input=True)) if kind.experts else kind for kind in EQUAL.layers
    )
)
H100S = Cluster.of({"h100_80gb_sxm": 16}, inter_gb_per_s=50)


def read(name: str, text: str, model: ModelSpec, cluster: Cluster = H100S, **workload: Any) -> ImportedPlan:
    devices = tuple(range(cluster.num_devices))
    context = ImportContext("file", cluster, devices, model, Workload(**workload), Space())
    return TRAINERS[name].read(text, context)


# ----------------------------------------------------------------------------- round trips


def states(plan: Plan) -> tuple[object, ...]:
    """A plan up to words for the same: sharding of what one device alone holds, schedules of one layer range."""
    pipelines = tuple(
        (
            pipeline.num_micro_batches,
            pipeline.micro_batch_size,
            tuple((stage.parallelism, stage.layers, stage.policies()) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    first = plan.pipelines[0].stages[0].parallelism
    alone = len(plan.pipelines) * len(first.parameter_copies) == 1
    single = len(plan.pipelines[0].stages) == 1
    return pipelines, None if single else plan.schedule, None if alone else plan.sharding


def assert_read_back(name: str, seed: int, *, priced: bool) -> None:
    problem, plan = drawn_plan(name, seed)
    layout = read_back(name, problem, plan, own_model=True)
    assert states(layout.plan) == states(plan), seed
    assert layout.problem.workload == problem.workload
    # Of one shard, it does not matter when it is gathered.
    unread = [note for note in layout.notes if note.startswith("not read") and "fsdp_reshard_after" not in note]
    assert not unread, seed
    if priced and layout.plan.sharding == plan.sharding:
        costs = [PlanPricer(p).price(a).step_time_s for p, a in ((problem, plan), (layout.problem, layout.plan))]
        assert costs[0] == pytest.approx(costs[1], rel=1e-12), seed


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_plans_of_experts_are_read_back(name: str) -> None:
    for seed in range(12):
        assert_read_back(name, seed, priced=seed < 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_many_plans_of_experts_are_read_back(name: str) -> None:
    for seed in range(500):
        assert_read_back(name, seed, priced=seed % 20 == 0)


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_what_is_imported_from_an_export_breaks_no_rule_of_the_space(name: str) -> None:
    for seed in range(6):
        problem, plan = drawn_plan(name, seed)
        program = TRAINERS[name].write(problem, plan)
        context = ImportContext(name, problem.cluster, program.devices, problem.model, Workload(), Space(), table=True)
        layout = TRAINERS[name].read(next(iter(program.files.values())), context)
        assert not check(layout.problem, layout.plan)


# ----------------------------------------------------------------------------- what is refused


def plan_of(*widths: tuple[int, int], size: int = 4, zero: int = 2, layers: int = 8) -> Plan:
    """Pipelines of one stage each, of so many devices and such a TP degree."""
    pipelines, at = [], 0
    for width, degree in widths:
        group = TensorParallel(tuple(range(at, at + width)), degree=degree)
        pipelines.append(Pipeline((Stage(group, ((0, layers),), ("full",)),), 2, size))
        at += width
    return Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(zero))


def problem_of(plan: Plan, model: ModelSpec = QWEN, **workload: Any) -> Problem:
    return Problem(H100S, model, Workload(sum(p.num_sequences for p in plan.pipelines), **workload))


@pytest.mark.parametrize(
    ("name", "plan", "refusal"),
    [
        (
            "torchtitan",
            plan_of((4, 2), (8, 2), zero=0),
            "has TP degree 8 and 1 replicas, that of pipeline 0 has 4 and 1.*uneven_structure=false",
        ),
        (
            "deepspeed",
            plan_of((4, 2), (4, 1), zero=1),
            'experts by 4×1, that of pipeline 0 by 2×2; state one "degree"',
        ),
        ("torchtitan", plan_of((4, 2), zero=0), "share experts and shard nothing else.*optimizer_sharding=2"),
        ("deepspeed", plan_of((4, 2), zero=3), "shards with ZeRO-3.*optimizer_sharding=1"),
        ("accelerate", plan_of((4, 2)), "shards with ZeRO-2.*optimizer_sharding=3"),
    ],
)
def test_plans_that_a_trainer_cannot_say_are_refused(name: str, plan: Plan, refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        write_program(problem_of(plan), plan, TRAINERS[name])


def test_experts_that_devices_cannot_hold_equally_many_of_are_refused() -> None:
    plan = plan_of((6, 1), size=6, layers=6)
    with pytest.raises(InputError, match="shares 16 experts among 6 devices, which cannot hold equally many"):
        write_program(problem_of(plan, EQUAL), plan, TRAINERS["deepspeed"])


def test_a_pipeline_of_experts_is_none_of_deepspeed() -> None:
    stages = (Stage(TensorParallel((0,)), ((0, 4),)), Stage(TensorParallel((1,)), ((4, 8),)))
    plan = Plan((Pipeline(stages, 2, 1),), ONE_F_ONE_B, Sharding(1))
    with pytest.raises(InputError, match=r"has 2 stages, where AutoEP has one.*constraints.num_stages=1"):
        write_program(problem_of(plan), plan, TRAINERS["deepspeed"])


@pytest.mark.parametrize(
    ("name", "model", "refusal"),
    [
        *((name, EQUAL, f"^export.format: {name} is not written for experts, nor for") for name in OTHERS),
        *(
            (name, model_of(*[KINDS[1], DENSE_LAYER] * 3, *[KINDS[3]] * 2), "is not written for experts")
            for name in (*OTHERS, *EXPERT_PLANS)
        ),
        ("torchtitan", EQUAL, "torchtitan has no model with experts of the shape of kinds; take that of one of deep"),
        ("torchtitan", TITANS[3].replace(extra_layers=TITANS[3].layers[-1:]), "num_nextn_predict_layers=0"),
        ("megatron", SCALED, "weights of a router that multiply what experts read"),
        ("deepspeed", TITANS[7], "AutoEP, which takes gated ones without biases"),
        ("deepspeed", EQUAL.replace(extra_layers=EQUAL.layers[-1:]), "plan without them"),
        ("accelerate", EQUAL.replace(extra_layers=EQUAL.layers[-1:]), "plan without them"),
    ],
)
def test_models_that_a_trainer_cannot_train_are_refused(name: str, model: ModelSpec, refusal: str) -> None:
    plan = Plan((Pipeline((Stage.of((0,), 0, model.num_layers),), 2, 1),), ONE_F_ONE_B, Sharding(0))
    with pytest.raises(InputError, match=refusal):
        write_program(problem_of(plan, model), plan, TRAINERS[name])
    with pytest.raises(InputError, match=r"^space\.preset: "):
        restrict(problem_of(plan, model), TRAINERS[name])


def test_replicas_that_each_hold_all_experts_are_written_without_ep() -> None:
    group = Replicated((Replica((0,), 2), Replica((1,), 2)))
    plan = Plan((Pipeline((Stage(group, ((0, 6),)),), 2, 4),), ONE_F_ONE_B, Sharding(3))
    program = write_program(problem_of(plan, MIXED), plan, TRAINERS["accelerate"])
    assert arguments_of_config(program.files["accelerate.yaml"])["ep_size"] == 1


# ----------------------------------------------------------------------------- what is read

TOML = """
[training]
local_batch_size = 2
[activation_checkpoint]
mode = "none"
[parallelism]
tensor_parallel_degree = 2
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
expert_parallel_degree = 4
"""


def test_ep_of_torchtitan_is_replicas_that_share_experts() -> None:
    layout = read("torchtitan", TOML, QWEN)
    assert [pipeline.stages[0].parallelism for pipeline in layout.plan.pipelines] == [
        TensorParallel(tuple(range(at, at + 4)), degree=2) for at in range(0, 16, 4)
    ]
    assert {pipeline.micro_batch_size for pipeline in layout.plan.pipelines} == {4}
    assert layout.plan.sharding.groups == (tuple(range(8)), tuple(range(8, 16)))
    assert "TP 2, PP 1, VP 1, DP 8, EP 4, CP 1, micro-batch 2" in reading_note(layout.problem, layout.plan)


def with_value(text: str, values: Mapping[str, int]) -> str:
    for key, value in values.items():
        text = re.sub(rf"{key} = \d+", f"{key} = {value}", text)
    return text


@pytest.mark.parametrize(
    ("values", "model", "refusal"),
    [
        ({"expert_parallel_degree": 1}, QWEN, "1: cuts each expert by columns over TP 2.*take a multiple of 2"),
        ({"tensor_parallel_degree": 4, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, QWEN, "parts"),
        ({"expert_parallel_degree": 16}, QWEN, "16: does not divide the 4 × 2 GPUs"),
        ({"data_parallel_shard_degree": 3, "expert_parallel_degree": 6}, QWEN, "6: does not divide 64 experts"),
        ({}, model_of(*[DENSE_LAYER] * 6), "4: shares experts, of which kinds has none"),
    ],
)
def test_ep_that_is_no_plan_is_refused(values: dict[str, int], model: ModelSpec, refusal: str) -> None:
    cluster = Cluster.of({"h100_80gb_sxm": 12 if "6" in refusal else 16}, inter_gb_per_s=50)
    with pytest.raises(InputError, match=refusal):
        read("torchtitan", with_value(TOML, values), model, cluster)


@pytest.mark.parametrize(
    ("name", "text", "refusal"),
    [
        ("deepspeed", {"tensor_parallel": {"autotp_size": 2}}, "autoep_size 1: cuts each expert by columns"),
        ("deepspeed", {"expert_parallel": {"enabled": True, "autoep_size": 3}}, "does not divide the 16 × 1 GPUs"),
        ("deepspeed", {"expert_parallel": {"enabled": True, "comm_backend": "deepep"}}, "otherwise than is priced"),
        ("deepspeed", {"expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}}, "by columns"),
        ("deepspeed", {"use_data_before_expert_parallelism": True}, "consecutive ranks"),
        ("accelerate", "DistributedConfig(tp_size=16, enable_expert_parallel=True)", "all ranks one batch.*ep_size"),
        ("accelerate", "DistributedConfig(tp_size=2, fsdp_size=8)", "ep_size 1: cuts each expert"),
        ("accelerate", "DistributedConfig(fsdp_size=8, ep_size=8)", "has not 16 GPUs in its sizes"),
        ("accelerate", "DistributedConfig(16, ep_size=8)", "other arguments than names with values"),
        ("accelerate", "DistributedConfig(fsdp_size=16, ep_size=8)", "is not what mixed_precision says"),
        ("accelerate", "DistributedConfig(tp_size=16, ep_size=16, ep_implementation='all_reduce')", "take all_to_all"),
    ],
)
def test_other_files_that_are_no_plan_of_experts_are_refused(name: str, text: Any, refusal: str) -> None:
    if name == "deepspeed":
        text = json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **text})
    else:
        text = f"# {text}\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    with pytest.raises(InputError, match=refusal):
        read(name, text, QWEN)


def test_no_argument_of_a_distributed_config_goes_in_silence() -> None:
    def answer(text: str) -> object:
        try:
            layout = TRAINERS["accelerate"].read(text, context)
        except InputError:
            return "refused"
        return layout.plan, layout.problem, sorted(layout.notes)

    for seed in range(8):
        problem, plan = drawn_plan("accelerate", seed)
        program = TRAINERS["accelerate"].write(problem, plan)
        text = program.files["accelerate.yaml"]
        context = ImportContext("f", problem.cluster, program.devices, problem.model, Workload(), Space(), table=True)
        whole = answer(text)
        assert whole != "refused"
        for name, value in arguments_of_config(text).items():
            misspelt = re.sub(rf"\b{name}=", f"{name}s=", text)
            assert answer(misspelt) != whole
            if value not in (1, False):
                assert answer(re.sub(rf"\b{name}=\w+(, )?", "", text)) != whole
        assert answer(text.replace("gradient_checkpointing", "checkpointing")) != whole


def test_routing_that_is_forced_is_read_and_written() -> None:
    forced = TOML.replace("replicate_degree = 2", "replicate_degree = 1") + "[debug]\nmoe_force_load_balance = true\n"
    layout = read("torchtitan", forced, QWEN, Cluster.of({"h100_80gb_sxm": 8}))
    assert layout.problem.workload.routing == "forced"
    assert (
        "moe_force_load_balance = True"
        in TRAINERS["torchtitan"].write(layout.problem, layout.plan).files["hexiopt_plan.py"]
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_formats_without_experts_are_read_where_no_gpus_share_them(tmp_path: Path, tp: int) -> None:
    groups = [[tp], [tp]]
    data = {
        "hetero_configs": groups,
        "layer_partitions": [[8], [8]],
        "hexiopt": {"chunks": [2, 2], "recompute": "none"},
    }
    file = tmp_path / "flashflex.json"
    file.write_text(json.dumps(data | {"hexiopt": {**data["hexiopt"], "global_bsz_size": [4, 4]}}))
    cluster = Cluster.of({"h100_80gb_sxm": 2 * tp})
    layout = ("flashflex", file, cluster, QWEN, Workload(precision="fp16"), Space(), None)
    if tp == 1:
        assert len(read_layout(*layout).plan.pipelines) == 2
    else:
        with pytest.raises(InputError, match="says not which GPUs share the experts of kinds"):
            read_layout(*layout)


COMMAND = """
torchrun --nnodes=2 --nproc_per_node=8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \\
  --training.local_batch_size 4 --training.seq-len=2048 --parallelism.expert_parallel_degree 8 \\
  --parallelism.data_parallel_shard_degree=8 --parallelism.tensor_parallel_degree=2 \\
  --parallelism.no-enable-sequence-parallel --metrics.log_freq 1
"""


def command(text: str) -> ImportedPlan:
    devices, workload = tuple(range(16)), Workload(recompute="full")
    context = ImportContext("file", H100S, devices, TITANS[1], workload, Space(), frozenset({"recompute"}))
    return TRAINERS["torchtitan"].read(text, context)


def test_a_command_of_torchtitan_is_read_with_its_overrides() -> None:
    layout = command(COMMAND)
    assert [pipeline.stages[0].parallelism for pipeline in layout.plan.pipelines] == [
        TensorParallel(tuple(range(at, at + 8)), degree=2) for at in (0, 8)
    ]
    assert (layout.problem.workload.seq_len, layout.problem.workload.sequence_parallel) == (2048, False)
    assert "deepseek_v3.deepseek_v3_16b() is not in the file, and what it sets is not read" in layout.notes


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        ("--config deepseek_v3_16b", "", "names no configuration by --config"),
        ("nproc_per_node=8", "nproc_per_node=4", "are of 16 GPUs, and the command starts 8"),
        ("size 4", "size $X", "is not a whole number from 1 on"),
        ("tensor_parallel_degree=2", "tensor_parallel_degree=16", "8: parts the TP groups of 16"),
    ],
)
def test_a_command_that_is_no_layout_is_refused(before: str, after: str, refusal: str) -> None:
    with pytest.raises(InputError, match=refusal):
        command(COMMAND.replace(before, after))


# ----------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_plans_of_experts_under_a_preset_are_exported(name: str) -> None:
    model = QWEN if name == "torchtitan" else MIXED
    cluster = Cluster.of({"h100_80gb_sxm": 4, "a100_80gb_sxm": 4}, inter_gb_per_s=12.5, gpus_per_machine=4)
    exported = 0
    for seed, batch in enumerate((16, 48)):
        problem = restrict(Problem(cluster, model, Workload(batch, 1024)), TRAINERS[name])
        result = make_solver("portfolio").solve(problem, Budget(3600.0, 30), seed=seed)
        if result.plan is None:
            continue
        assert write_program(problem, result.plan, TRAINERS[name]).devices
        exported += 1
    assert exported
