"""Files of settings: every key is read with its type, refused with the reason, or named; faults come in one line."""

from itertools import product
from textwrap import dedent
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.python_settings import Computed, python_settings
from hexiopt.exports.settings import FileSettings, flat
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.ledger import Vocabulary
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.random_plans import LLAMA_7B

CLUSTER = Cluster.of({"h100_80gb_sxm": 16}, name="c", inter_gb_per_s=50)


def import_context(num_gpus: int = 8, **stated: Any) -> ImportContext:
    """What an importer is told, with what the command line states of the workload."""
    devices = tuple(range(num_gpus))
    return ImportContext("file", CLUSTER, devices, LLAMA_7B, Workload(**stated), Space(), frozenset(stated))


def read(trainer: str, text: str, num_gpus: int = 8, **stated: Any) -> ImportedPlan:
    """What an importer makes of a file."""
    reader = TRAINERS[trainer].read
    assert reader is not None
    return reader(dedent(text), import_context(num_gpus, **stated))


# ----------------------------------------------------------------------------- settings


def settings(values: dict[str, Any], known: frozenset[str] | None = None) -> FileSettings:
    vocabulary = Vocabulary(frozenset({"log"}), {"offload": "is not modelled; leave it out"})
    return FileSettings(import_context(), values, vocabulary, known)


def test_tables_stay_tables() -> None:
    flat_keys = dict(flat({"a": {"b": 1, "c": {}}, "d": {"b": 2}, "e.b": 3}))
    assert flat_keys == {"a.b": 1, "a.c": {}, "d.b": 2, '"e.b"': 3}


def test_truth_is_no_number_and_depth_has_a_limit() -> None:
    file_settings = settings({"tp": True})
    assert file_settings.whole("tp", 1) == 1
    with pytest.raises(InputError, match="tp True: is not a whole number"):
        file_settings.refuse()
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(InputError, match="nested deeper than 64 levels"):
        dict(flat(deep | {"b": 1}))
    with pytest.raises(InputError, match=r"neither a Python configuration|nested too deeply"):
        python_settings("def f(c):\n  c.a.b = " + "1+" * 5000 + "1\n  return c", "file")


def test_all_faults_of_a_file_come_in_one_line() -> None:
    file_settings = settings({"tp": "x", "pp": "auto", "offload": True, "mode": "fast"})
    assert (file_settings.whole("tp", 1), file_settings.whole("pp", 2), file_settings.whole("dp")) == (1, 2, 1)
    assert file_settings.word("mode", {"slow": 0}, "slow") == 0
    with pytest.raises(InputError) as error:
        file_settings.refuse()
    assert str(error.value) == (
        "file: offload True: is not modelled; leave it out; also tp 'x': is not a whole number from 1 on; write one "
        "out; also pp 'auto': is filled in when the training script runs; write the value that it takes; also dp: is "
        "missing; state it; also mode 'fast': is not modelled; known: slow"
    )


def test_defaults_and_what_was_not_read_are_notes() -> None:
    file_settings = settings({"tp": 2, "odd": 1, "log": 3})
    assert (file_settings.whole("tp", 1), file_settings.whole("pp", 1), file_settings.flag("sp", default=True)) == (
        2,
        1,
        True,
    )
    file_settings.refuse()
    assert file_settings.notes() == ["not read: odd", "not stated, so by default: pp 1, sp true"]


def test_a_closed_format_refuses_keys_that_it_does_not_have() -> None:
    file_settings = settings({"tp": 2, "chunk": 1}, frozenset({"tp", "chunks"}))
    with pytest.raises(InputError, match=r"chunk: is no key of the format; did you mean chunks\?"):
        file_settings.refuse()


def test_two_names_of_one_setting_are_refused() -> None:
    file_settings = settings({"training.batch_size": 2, "training.local_batch_size": 4})
    assert file_settings.name_in_use("training.local_batch_size", "training.batch_size") == "training.local_batch_size"
    with pytest.raises(InputError, match=r"are names of one setting; keep training\.local_batch_size"):
        file_settings.refuse()


# ----------------------------------------------------------------------------- Python


def test_a_python_function_is_followed() -> None:
    values, bases = python_settings(
        dedent("""
        LENGTH = 4096

        def base():
            return Trainer.Config(
                training=TrainingConfig(seq_len=LENGTH, steps=10),
                activation_checkpoint=SelectiveAC.Config(),
                model_spec=registry("8B", converters=[Float8LinearConverter.Config(emulate=True)]),
            )

        def ours():
            config = base()
            p = config.parallelism
            p.tensor_parallel_degree = 2
            config.training.steps = 5
            config.activation_checkpoint = FullAC.Config()
            config.training.local_batch_size = 2 * 4
            if True:
                config.training.seq_len = 1
            setattr(config.training, "dtype", "x")
            return config
        """),
        "file",
    )
    assert bases == []
    assert values["parallelism.tensor_parallel_degree"] == 2
    assert values["training.steps"] == 5
    assert values["activation_checkpoint"] == "FullAC"
    assert values["model_spec.converters"] == ["Float8LinearConverter"]
    assert isinstance(values["training.local_batch_size"], Computed)
    assert isinstance(values["training.seq_len"], Computed)
    assert "setattr(config.training, 'dtype', 'x')" in values


def test_several_configurations_are_refused() -> None:
    text = "def a():\n  c.x.y = 1\n  return c\ndef b():\n  c.x.y = 2\n  return c\n"
    with pytest.raises(InputError, match="makes 2 configurations, a, b; leave the one that runs"):
        python_settings(text, "file")


def test_a_value_that_is_computed_is_refused_where_it_matters_and_named_elsewhere() -> None:
    text = """
    def ours():
        config = llama3_8b()
        config.activation_checkpoint = None
        config.parallelism.tensor_parallel_degree = {}
        config.odd.thing = f(2)
        return config
    """
    with pytest.raises(InputError, match=r"tensor_parallel_degree 2 \* 1: is not a whole number"):
        read("torchtitan", text.format("2 * 1"))
    imported_plan = read("torchtitan", text.format("2"))
    assert any(note.startswith("llama3_8b() is not in the file") for note in imported_plan.notes)
    assert any("not read: odd.thing" in note for note in imported_plan.notes)


# ----------------------------------------------------------------------------- torchtitan


def test_a_key_of_one_table_is_not_that_of_another() -> None:
    imported_plan = read(
        "torchtitan", "validation.seq_len = 64\ntraining.seq_len = 1024\nactivation_checkpoint.mode = 'none'"
    )
    assert imported_plan.problem.workload.seq_len == 1024


@pytest.mark.parametrize(
    ("stages", "ends", "chunks", "parts"),
    [
        (3, (1, 1), 1, [11, 11, 10]),
        (4, (0, 0), 1, [8, 8, 8, 8]),
        (4, (2, 4), 1, [8, 10, 9, 5]),
        (2, (1, 1), 2, [8, 9, 8, 7]),
    ],
)
def test_layers_are_divided_by_torchtitans_rule(
    stages: int, ends: tuple[int, int], chunks: int, parts: list[int]
) -> None:
    """The ends count as so many layers; what is left over goes to the first stages, and two chunks are the default."""
    text = f"""
    [parallelism]
    data_parallel_shard_degree = 1
    pipeline_parallel_degree = {stages}
    pipeline_parallel_schedule = "{"Interleaved1F1B" if chunks > 1 else "1F1B"}"
    pipeline_parallel_first_stage_less_layers = {ends[0]}
    pipeline_parallel_last_stage_less_layers = {ends[1]}
    [activation_checkpoint]
    mode = "none"
    """
    imported_plan = read("torchtitan", text, stages)
    ranges = sorted(layers for stage in imported_plan.plan.pipelines[0].stages for layers in stage.layers)
    assert [end - first for first, end in ranges] == parts


def test_replicas_shard_within_themselves() -> None:
    text = """
    [parallelism]
    data_parallel_replicate_degree = 2
    data_parallel_shard_degree = 4
    [activation_checkpoint]
    mode = "full"
    """
    imported_plan = read("torchtitan", text)
    assert imported_plan.plan.sharding.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert PlanPricer(imported_plan.problem).price(imported_plan.plan).step_time_s > 0


def test_what_drains_several_times_a_step_is_refused() -> None:
    text = """
    [training]
    local_batch_size = 4
    global_batch_size = 64
    [parallelism]
    pipeline_parallel_degree = 2
    [activation_checkpoint]
    mode = "none"
    """
    with pytest.raises(InputError, match=r"training.global_batch_size 64: .* which drain after each"):
        read("torchtitan", text)
    assert read("torchtitan", text.replace("64", "16")).plan.pipelines[0].num_micro_batches == 4


def test_versions_before_03_train_in_float32_where_nothing_is_sharded() -> None:
    text = "parallelism.tensor_parallel_degree = 8\nactivation_checkpoint.mode = 'none'"
    assert read("torchtitan", text).problem.workload.precision == "fp32"
    assert read("torchtitan", text.replace("8", "4")).problem.workload.precision == "bf16"


# ----------------------------------------------------------------------------- DeepSpeed


def test_the_batch_is_what_deepspeed_makes_of_any_two_of_three() -> None:
    """Against DeepSpeed's own cases, for all that is stated of batch 32, micro-batch 2 and 2 of them on 8 GPUs."""
    whole = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    for mask in product((True, False), repeat=3):
        keys = {key: value for (key, value), stays in zip(whole.items(), mask, strict=True) if stays}
        text = str(keys).replace("'", '"')
        if not mask[0] and not mask[1]:
            with pytest.raises(InputError, match="train_micro_batch_size_per_gpu: is missing"):
                read("deepspeed", text)
            continue
        pipeline = read("deepspeed", text).plan.pipelines[0]
        alone: dict[tuple[bool, ...], tuple[int, int]] = {(True, False, False): (1, 4), (False, True, False): (1, 2)}
        assert (pipeline.num_micro_batches, pipeline.micro_batch_size) == alone.get(mask, (2, 2)), keys


def test_a_batch_tells_how_many_gpus_a_job_has() -> None:
    text = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}'
    with pytest.raises(InputError, match="runs on 16 GPUs, and there are 8 to use"):
        read("deepspeed", text)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}', "shards inside groups of ranks"),
        ('"zero_optimization": {"stage": 3, "zero_quantized_weights": true}', "quantised weights"),
        ('"sequence_parallel_size": 2', "Ulysses"),
        ('"optimizer": {"type": "OneBitAdam"}', "other states than Adam"),
        ('"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}', "in different widths"),
        ('"bf16": {"enabled": true}, "fp16": {"enabled": true}', "are both true"),
    ],
)
def test_what_deepspeed_does_otherwise_is_refused(key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read("deepspeed", '{"train_micro_batch_size_per_gpu": 1, ' + key + "}")


# ----------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [
        ("FULL_SHARD", (3, "all")),
        ("SHARD_GRAD_OP", (2, "all")),
        ("NO_SHARD", (0, "all")),
        ("HYBRID_SHARD", (3, "machine")),
        (1, (3, "all")),
        (2, (2, "all")),
        (3, (0, "all")),
        (5, (2, "machine")),
    ],
)
def test_strategies_of_fsdp_1_are_zero_stages(strategy: str | int, sharding: tuple[int, str]) -> None:
    text = f"""
    distributed_type: FSDP
    mixed_precision: bf16
    num_processes: 16
    fsdp_config: {{fsdp_sharding_strategy: {strategy}, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}}
    """
    imported_plan = read("accelerate", text, 16)
    assert (imported_plan.plan.sharding.stage, imported_plan.plan.sharding.groups) == sharding


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: XLA", "distributed_type 'XLA': is not modelled"),
        ("distributed_type: MULTI_GPU\nnum_processes: 4", "runs on 4 GPUs, and there are 8"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}", "import that file"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_auto_wrap_policy: NO_WRAP}", "does not shard by layer"),
        ("distributed_type: FSDP\nmixed_precison: bf16\nfsdp_config: {}", "did you mean mixed_precision"),
    ],
)
def test_what_accelerate_configures_otherwise_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read("accelerate", text)


def test_the_command_line_goes_before_the_file() -> None:
    imported_plan = read(
        "accelerate", "distributed_type: MULTI_GPU\nmixed_precision: bf16", precision="fp16", recompute="full"
    )
    assert imported_plan.problem.workload.precision == "fp16"
    assert {stage.recompute for stage in imported_plan.plan.pipelines[0].stages} == {("full",)}
    assert any(
        "workload.precision=fp16 of the command line replaces bf16 of the file" in note for note in imported_plan.notes
    )


# ----------------------------------------------------------------------------- FlashFlex


def test_machines_of_flashflex_are_checked_up_to_their_names() -> None:
    text = '{{"hetero_configs": [[4], [4]], "layer_partitions": [[32], [32]], "devices_id": [[[{}]], [[{}]]]}}'
    with pytest.raises(InputError, match="puts ranks on other machines"):
        read("flashflex", text.format("0,0,0,0", "1,1,1,1"), precision="fp16")
    assert len(read("flashflex", text.format("7,7,7,7", "7,7,7,7")).plan.pipelines) == 2
