"""Ranks share experts as devices do in the plan, by the rules of trainers and by their code, where it is installed."""

import ast
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from hexiopt.exports.formats import Program
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.exports.trainers.torchtitan_models import MODELS
from tests.hexiopt.exports.random_expert_plans import EXPERT_PLANS, TITANS, drawn_plan
from tests.hexiopt.exports.random_plans import draw_case


def degrees_of(name: str, program: Program) -> dict[str, int]:
    """Degrees as a trainer's file has them: `ep`, `tp` and `stages`."""
    text = next(iter(program.files.values()))
    if name == "torchtitan":
        degrees = dict(re.findall(r"parallelism\.(\w+)_parallel_degree = (\d+)", text))
        return {"ep": int(degrees["expert"]), "tp": int(degrees["tensor"]), "stages": int(degrees["pipeline"])}
    if name == "deepspeed":
        data = json.loads(text)
        tp = data.get("tensor_parallel", {}).get("autotp_size", 1)
        return {"ep": data["expert_parallel"]["autoep_size"], "tp": tp, "stages": 1}
    sizes = arguments_of_config(text)
    return {"ep": sizes["ep_size"], "tp": sizes["tp_size"], "stages": 1}


def group_experts(devices: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


def arguments_of_config(text: str) -> dict[str, Any]:
    match = re.search(r"DistributedConfig\(.*?\)", text)
    assert match is not None
    call = ast.parse(match[0], mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize("name", EXPERT_PLANS)
def test_ranks_share_experts_and_tp_as_devices_do_in_the_plan(name: str) -> None:
    """All three form EP groups, and TP groups, of consecutive ranks of a stage."""
    for seed in range(40):
        problem, plan = drawn_plan(name, seed)
        program = TRAINERS[name].write(problem, plan)
        degrees = degrees_of(name, program)
        stages = [stage.parallelism for pipeline in plan.pipelines for stage in pipeline.stages]
        assert set(group_experts(program.devices, degrees["ep"])) == {group.executors[0] for group in stages}
        assert set(group_experts(program.devices, degrees["tp"])) == {
            devices for group in stages for devices in group.parameter_copies
        }
        of_stage = group_experts(program.devices, len(program.devices) // degrees["stages"])
        for s, devices in enumerate(of_stage):
            assert set(devices) == {d for pipeline in plan.pipelines for d in pipeline.stages[s].devices}
        assert (f"EP {degrees['ep']}: " in " ".join(program.notes)) == (degrees["ep"] > degrees["tp"])


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_forms_these_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folding = pytest.importorskip("deepspeed.module_inject.auto_ep_folding", reason="deepspeed is missing")
    config = pytest.importorskip("deepspeed.module_inject.auto_ep_config")
    for seed in range(12):
        problem, plan = drawn_plan("deepspeed", seed)
        program = TRAINERS["deepspeed"].write(problem, plan)
        data, degrees = json.loads(program.files["deepspeed.json"]), degrees_of("deepspeed", program)
        parsed = config.parse_autoep_config(data["expert_parallel"])
        zero, world = data["zero_optimization"]["stage"], len(program.devices)
        config.validate_autoep_config(parsed, world, 1, degrees["tp"], 1, zero_stage=zero)
        spec = folding.build_folding_spec(world_size=world, pp_size=1, tp_size=degrees["tp"], ep_size=degrees["ep"])
        tables = folding.expected_folding_group_tables(spec)
        assert (
            data["train_batch_size"]
            == spec.dp_size * data["train_micro_batch_size_per_gpu"] * (data["gradient_accumulation_steps"])
        )
        groups = [pipeline.stages[0].parallelism for pipeline in plan.pipelines]
        assert {tuple(program.devices[r] for r in ranks) for ranks in tables.ep_groups} == {
            group.executors[0] for group in groups
        }
        assert {tuple(program.devices[r] for r in ranks) for ranks in tables.tp_groups} == {
            devices for group in groups for devices in group.parameter_copies
        }


def test_transformers_takes_the_configuration() -> None:
    module = pytest.importorskip("transformers.distributed.configuration_utils", reason="transformers is missing")
    if "ep_size" not in module.DistributedConfig.__dataclass_fields__:
        pytest.skip("transformers is older than its EP groups of several batches")
    for seed in range(12):
        problem, plan = drawn_plan("accelerate", seed)
        program = TRAINERS["accelerate"].write(problem, plan)
        config = module.DistributedConfig(**arguments_of_config(program.files["accelerate.yaml"]))
        copies = [devices for p in plan.pipelines for devices in p.stages[0].parallelism.parameter_copies]
        assert config.dp_size == len(copies)
        assert config.tp_size == len(copies[0])
        assert config.efsdp_size == len(plan.pipelines)
        size = int(re.findall(r"per_device_train_batch_size=(\d+)", program.notes[-1])[0])
        assert size * config.dp_size == sum(pipeline.micro_batch_size for pipeline in plan.pipelines)


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_takes_the_degrees() -> None:
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", reason="torchtitan is missing")
    for seed in range(12):
        problem, plan = drawn_plan("torchtitan", seed)
        program = TRAINERS["torchtitan"].write(problem, plan)
        degree = re.compile(r"parallelism\.(?:data_parallel_)?(\w+?)(?:_parallel)?_degree = (\d+)")
        stated = {name: int(value) for name, value in degree.findall(program.files["hexiopt_plan.py"])}
        parallel_dims = dims.ParallelDims(
            dp_replicate=stated["replicate"],
            dp_shard=stated["shard"],
            cp=1,
            tp=stated["tensor"],
            pp=stated["pipeline"],
            ep=stated["expert"],
            world_size=len(program.devices),
        )
        assert parallel_dims.dp_shard * parallel_dims.tp % parallel_dims.ep == 0


# Parameters that torchtitan 0.3.0 has, built by its registry on the meta device.
PARAMETERS = {
    "deepseek_v3_debugmodel": 33_014_016,
    "deepseek_v3_16b": 15_706_484_224,
    "236B": 235_741_434_880,
    "deepseek_v3_671b": 671_026_404_352,
    "qwen3_moe_debug": 315_758_848,
    "qwen3_30b_a3b": 30_532_122_624,
    "235B-A22B": 235_093_634_560,
    "gpt_oss_debugmodel": 81_489_440,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}


def test_models_of_torchtitan_have_its_parameters() -> None:
    assert {titan.flavor or titan.function: m.num_params for titan, m in zip(MODELS, TITANS, strict=True)} == PARAMETERS


@pytest.mark.filterwarnings("ignore")
def test_accelerates_launcher_would_set_the_environment(tmp_path: Any) -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is missing")
    utils = pytest.importorskip("accelerate.utils.launch")
    rngs = [random.Random(f"environment {seed}") for seed in range(8)]
    for problem, plan in [
        *map(EXPERT_PLANS["accelerate"], rngs[:4]),
        *(draw_case("accelerate", rng) for rng in rngs[4:]),
    ]:
        if len(plan.devices()) == 1:
            continue
        program = TRAINERS["accelerate"].write(problem, plan)
        path = tmp_path / "accelerate.yaml"
        path.write_text(program.files["accelerate.yaml"])
        arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        parsed, *_ = launch._validate_launch_command(arguments)
        variables = utils.prepare_multi_gpu_env(parsed)
        assert program.environment.items() <= variables.items()
