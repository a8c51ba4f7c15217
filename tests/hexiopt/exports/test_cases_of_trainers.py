"""Configurations of torchtitan, DeepSpeed and Accelerate as people published them, read right or refused in a line.

Sources: the Llama 2 70B preset for 64 A100s of an earlier torchtitan, and pytorch/torchtitan#2093; DeepSpeed and
Accelerate files of huggingface/accelerate#2780, #1280, huggingface/transformers#13616 and EleutherAI/gpt-neox#1354; and
deepspeedai/DeepSpeed#5770, Qwen2-1.5B with ZeRO-3 on two nodes of two A10s: 3.5 times as slow as on one.
"""

from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportedPlan
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.test_imported_cases import CASES, layout

TITAN, SPEED, NODES = (
    CASES / name for name in ("torchtitan_toml", "deepspeed_accelerate", "two_nodes_slower_than_one")
)
LLAMA_8B, LLAMA_70B = "llama3_8b", "llama2_70b"


def torchtitan(name: str, cluster: Path, model: str = LLAMA_8B, recompute: str = "auto") -> ImportedPlan:
    """A TOML of torchtitan, with the recompute policy that the command line states."""
    return layout(f"torchtitan_toml/{name}.toml", "torchtitan", cluster, model, Workload(recompute=recompute))


def test_torchtitan_of_2024_is_read_by_its_own_names() -> None:
    """Eight sequences a pipeline and not one, the cut before layer 20 and not in the middle, and FP8."""
    imported_plan = torchtitan("older", CASES / "h100x8.yaml", recompute="full")
    first = imported_plan.plan.pipelines[0]
    assert [stage.layers for stage in first.stages] == [((0, 20),), ((20, 32),)]
    assert (len(imported_plan.plan.pipelines), first.num_micro_batches, first.micro_batch_size) == (4, 8, 1)
    assert (imported_plan.problem.workload.global_batch, imported_plan.problem.workload.precision) == (32, "fp8")
    assert imported_plan.plan.sharding.stage == 2
    assert any("not read: training.compile" in note for note in imported_plan.notes)


def test_what_torchtitan_recomputes_by_operator_is_refused_until_the_user_says_what_to_price() -> None:
    with pytest.raises(InputError, match="selective_ac_option op: keeps the outputs of chosen operators"):
        torchtitan("older", CASES / "h100x8.yaml")


def test_a_batch_of_the_70b_preset_is_sixteen_sequences_a_group() -> None:
    imported_plan = torchtitan("70b_older", TITAN / "a100_64.yaml", LLAMA_70B)
    assert imported_plan.problem.workload.global_batch == 128
    assert (imported_plan.plan.pipelines[0].stages[0].tp, len(imported_plan.plan.pipelines)) == (8, 8)
    assert {stage.recompute for pipeline in imported_plan.plan.pipelines for stage in pipeline.stages} == {("full",)}
    assert imported_plan.plan.sharding.stage == 3


def test_torchtitans_own_rule_gives_the_ends_fewer_layers() -> None:
    """32 layers and two ends on four stages are 9, 9, 8 and 8; every second layer of a stage is recomputed."""
    imported_plan = torchtitan("newer", CASES / "h100x8.yaml")
    stages = imported_plan.plan.pipelines[0].stages
    assert [end - first for stage in stages for first, end in stage.layers] == [8, 9, 8, 7]
    assert stages[1].recompute == ("none", "full") * 4 + ("none",)
    assert imported_plan.problem.workload.precision == "fp8"
    assert any("not read: compile.enable" in note for note in imported_plan.notes)


def test_what_the_gpus_lack_is_refused_with_the_name_of_the_file() -> None:
    with pytest.raises(InputError, match=r"newer\.toml: workload: precision: fp8 is not supported by a100_80gb_sxm"):
        torchtitan("newer", TITAN / "a100_64.yaml")


def test_offload_and_values_left_to_the_script_are_refused_in_one_line() -> None:
    with pytest.raises(InputError) as error:
        layout("deepspeed_accelerate/ds_zero3_offload.json", "deepspeed", SPEED / "cluster.yaml", LLAMA_8B)
    message = str(error.value)
    assert (
        "zero_optimization.offload_optimizer.device 'cpu', zero_optimization.offload_param.device 'cpu': keeps"
        in message
    )
    assert "train_batch_size 'auto', train_micro_batch_size_per_gpu 'auto'" in message
    assert message.count("; also ") == 1
    with pytest.raises(InputError, match=r"offload_param\.device"):
        layout("deepspeed_accelerate/ds_num.json", "deepspeed", SPEED / "cluster.yaml", LLAMA_8B)


def test_autotp_is_the_tp_degree_without_sequence_parallelism() -> None:
    imported_plan = layout("deepspeed_accelerate/ds_tp.json", "deepspeed", CASES / "h100x8.yaml", LLAMA_8B)
    assert (imported_plan.plan.pipelines[0].stages[0].tp, len(imported_plan.plan.pipelines)) == (4, 2)
    assert not imported_plan.problem.workload.sequence_parallel
    assert not any("stages and TP are not in the file" in note for note in imported_plan.notes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("accelerate", "deepspeed_config.offload_optimizer_device 'cpu', deepspeed_config.offload_param_device 'cpu'"),
        ("accelerate_fsdp1", "fsdp_config.fsdp_offload_params True"),
        ("accelerate_noshard", "fsdp_config.fsdp_offload_params True"),
    ],
)
def test_offload_of_accelerate_is_refused(name: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"{name}\.yaml: {key}: keeps states in CPU memory"):
        layout(f"deepspeed_accelerate/{name}.yaml", "accelerate", SPEED / "cluster.yaml", LLAMA_8B)


def test_the_same_files_without_offload_are_zero_3_and_0(tmp_path: Path) -> None:
    stages = {}
    for name in ("accelerate", "accelerate_fsdp1", "accelerate_noshard"):
        text = (SPEED / f"{name}.yaml").read_text()
        text = text.replace("device: cpu", "device: none").replace("offload_params: true", "offload_params: false")
        (tmp_path / f"{name}.yaml").write_text(text)
        imported_plan = layout(str(tmp_path / f"{name}.yaml"), "accelerate", SPEED / "cluster.yaml", LLAMA_8B)
        stages[name] = imported_plan.plan.sharding.stage
        assert len(imported_plan.plan.pipelines) == 5
    assert stages == {"accelerate": 3, "accelerate_fsdp1": 3, "accelerate_noshard": 0}


def test_two_nodes_are_slower_than_one() -> None:
    """Measured 3.5 times; the network is not in the report, and 32 Gbit/s is assumed."""
    times, model = {}, NODES / "qwen2_1_5b" / "config.json"
    for name in ("one", "two32"):
        imported_plan = layout("two_nodes_slower_than_one/ds.json", "deepspeed", NODES / f"{name}.yaml", model)
        assert imported_plan.plan.sharding.stage == 3
        assert imported_plan.plan.pipelines[0].num_micro_batches == 2
        times[name] = hx.price(imported_plan.problem, imported_plan.plan).step_time_s
    assert times["two32"] > 2 * times["one"]
