"""Layouts as people write them are read right, or refused in a line that names the argument (`tests/cases`)."""

from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.exports.exporting import read_layout
from hexiopt.exports.formats import ImportedPlan
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

CASES = Path(__file__).parents[2] / "cases"
H100X8 = CASES / "h100x8.yaml"


def layout(
    name: str,
    format: str = "megatron",
    cluster: Path = H100X8,
    model: str | Path | None = None,
    workload: Workload | None = None,
    stated_keys: frozenset[str] = frozenset(),
) -> ImportedPlan:
    """The layout in a file of `tests/cases`."""
    shape = None if model is None else hx.model(model)
    return read_layout(
        format, CASES / name, hx.cluster(cluster), shape, workload or Workload(), Space(), None, stated_keys
    )


def degrees(imported_plan: ImportedPlan) -> tuple[int, int, int, int, int]:
    """TP, PP and the number of pipelines, the layers of the model, and the batch."""
    first = imported_plan.plan.pipelines[0]
    workload = imported_plan.problem.workload
    tp, layers = first.stages[0].tp, imported_plan.problem.model.num_layers
    return tp, len(first.stages), len(imported_plan.plan.pipelines), layers, workload.global_batch


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("megatron_shell_idioms/append.sh", (2, 4, 1, 36, 64)),
        ("megatron_shell_idioms/bash_c.sh", (2, 4, 1, 36, 64)),
        ("megatron_shell_idioms/branches.sh", (2, 1, 4, 28, 64)),
    ],
)
def test_a_script_is_followed(name: str, expected: tuple[int, ...]) -> None:
    """Appended variables, a command in quotes, and a branch by the size of the model."""
    imported_plan = layout(name)
    assert degrees(imported_plan) == expected
    policy = "selective" if "append" in name else "none"
    assert {stage.recompute for stage in imported_plan.plan.pipelines[0].stages} == {(policy,)}
    if "branches" in name:
        assert imported_plan.problem.model.num_params == pytest.approx(7.62e9, rel=1e-3)
        assert imported_plan.problem.model.attention_bias


FLAGS = "megatron_flags_ignored"


def step(name: str) -> float:
    """Predicted time of a step of a case, in s."""
    imported_plan = layout(f"{FLAGS}/{name}.sh")
    return hx.price(imported_plan.problem, imported_plan.plan).step_time_s


def test_each_argument_that_matters_changes_the_answer() -> None:
    base = layout(f"{FLAGS}/base.sh")
    assert base.problem.workload.sequence_parallel
    assert (base.problem.workload.precision, base.problem.workload.gradient_bytes) == ("bf16", 4)
    without = layout(f"{FLAGS}/no_sequence_parallel.sh")
    assert not without.problem.workload.sequence_parallel
    assert layout(f"{FLAGS}/fp8.sh").problem.workload.precision == "fp8"
    full = layout(f"{FLAGS}/full_recompute.sh").plan
    assert layout(f"{FLAGS}/checkpoint_activations.sh").plan == full
    assert {stage.recompute for stage in full.pipelines[0].stages} == {("full",)}
    names = ("base", "no_sequence_parallel", "fp8", "full_recompute", "ends_and_vpp", "account")
    assert len({step(name) for name in names}) == len(names)


def test_uneven_stages_are_megatrons() -> None:
    """Layers of the ends with two chunks a stage; an embedding and a loss that count as layers."""
    ends = layout(f"{FLAGS}/ends_and_vpp.sh").plan
    assert str(ends.schedule) == "interleaved"
    assert [stage.layers for stage in ends.pipelines[0].stages] == [((0, 7), (16, 23)), ((7, 16), (23, 32))]
    for name, parts in (("account", [15, 15]), ("account62", [15, 16, 16, 15])):
        stages = layout(f"{FLAGS}/{name}.sh").plan.pipelines[0].stages
        assert [stage.num_layers for stage in stages] == parts


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        (
            f"{FLAGS}/experts.sh",
            "--expert-tensor-parallel-size: is not stated, so that the TP degree 4 cuts experts by columns",
        ),
        (
            f"{FLAGS}/mtp_offload.sh",
            r"--optimizer-cpu-offload: memory of the host",
        ),
        ("throughput_of_70b/pp8_r1.sh", "--distribute-saved-activations: layer inputs split over the TP group"),
    ],
)
def test_what_is_not_modelled_is_refused_by_its_name(name: str, refused: str) -> None:
    with pytest.raises(hx.InputError, match=refused):
        layout(name)


def test_layers_by_type_are_deepspeeds() -> None:
    """5, 6 x 10, 5 layers in 12 stages, two embeddings counted; 48 nodes of 8 GPUs, states divided over replicas."""
    folder = CASES / "megatron_deepspeed_bloom"
    imported_plan = layout(
        "megatron_deepspeed_bloom/train.slurm", cluster=folder / "cluster.yaml", model=folder / "gpt70" / "config.json"
    )
    assert degrees(imported_plan) == (4, 12, 8, 70, 2048)
    assert [stage.num_layers for stage in imported_plan.plan.pipelines[0].stages] == [5, *[6] * 10, 5]
    assert imported_plan.plan.sharding.stage == 1
    assert hx.price(imported_plan.problem, imported_plan.plan).fits
    assert any("not read: --embed-layernorm" in note for note in imported_plan.notes)
    assert any("last one of its ramp" in note for note in imported_plan.notes)
    with pytest.raises(
        hx.InputError, match="--pp-partition-method: 12 stages do not divide 72 layers and 2 embeddings"
    ):
        layout(
            "megatron_deepspeed_bloom/train72.slurm",
            cluster=folder / "cluster.yaml",
            model=folder / "gpt72" / "config.json",
        )


BRIDGE = "bridge_uneven_interleaved"


@pytest.mark.parametrize(
    ("name", "expected", "layers"),
    [
        ("uniform.overrides", (4, 8, 2, 80, 128), [10] * 8),
        ("layout.overrides", (4, 8, 2, 80, 128), [10, 10, 10, 11, 10, 10, 10, 9]),
        ("recipe.txt", (2, 4, 8, 80, 128), [20] * 4),
    ],
)
def test_bridge_is_interleaved_where_it_says_so(name: str, expected: tuple[int, ...], layers: list[int]) -> None:
    imported_plan = layout(f"{BRIDGE}/{name}", "megatron_bridge", CASES / BRIDGE / "cluster.yaml", "llama3_70b")
    assert degrees(imported_plan) == expected
    assert str(imported_plan.plan.schedule) == "interleaved"
    assert imported_plan.plan.pipelines[0].num_chunks == (4 if name == "recipe.txt" else 5)
    assert [stage.num_layers for stage in imported_plan.plan.pipelines[0].stages] == layers
    assert any("space.uneven_chunks=true" in note for note in imported_plan.notes) == (name == "layout.overrides")
    assert not any(violation.rule == "layers" for violation in hx.check(imported_plan.problem, imported_plan.plan))
    # What a recipe's base returns is not in the file.
    assert any("base" in note for note in imported_plan.notes) == (name == "recipe.txt")


def test_flagscale_over_two_vendors() -> None:
    imported_plan = layout(
        "flagscale_two_vendors/hetero.yaml", "flagscale", CASES / "flagscale_two_vendors" / "cluster.yaml"
    )
    assert degrees(imported_plan) == (1, 2, 8, 56, 2048)
    assert imported_plan.problem.model.num_params == pytest.approx(10.6e9, rel=5e-3)
    assert (imported_plan.plan.sharding.stage, imported_plan.problem.workload.gradient_bytes) == (1, 4)
    assert any("not read: use_partial_reduce_for_shared_embedding" in note for note in imported_plan.notes)


def test_memory_without_sequence_parallelism_is_more() -> None:
    """The run of 16 GPUs a pipeline that ran out of memory: much more of it than with sequence parallelism."""
    folder = CASES / "throughput_of_70b"
    peaks = []
    for name in ("pp2_sp", "pp2_nosp"):
        imported_plan = layout(f"throughput_of_70b/{name}.sh", cluster=folder / "cluster.yaml")
        stages = hx.price(imported_plan.problem, imported_plan.plan).pipelines[0].stages
        peaks.append(max(stage.memory.total for stage in stages))
    assert peaks[1] > 1.3 * peaks[0]


def test_one_input_is_kept_of_so_many_layers(tmp_path: Path) -> None:
    """`--recompute-num-layers 5` with method uniform: less memory than one input of each layer."""
    folder = CASES / "throughput_of_70b"
    text = (folder / "pp8_r5.sh").read_text().replace("--distribute-saved-activations", "")
    peaks = []
    for name, script in (("r5", text), ("r1", text.replace("num-layers 5", "num-layers 1"))):
        path = tmp_path / f"{name}.sh"
        path.write_text(script)
        imported_plan = read_layout(
            "megatron", path, hx.cluster(folder / "cluster.yaml"), None, Workload(), Space(), None
        )
        stage = imported_plan.plan.pipelines[0].stages[0]
        assert stage.recompute == (("full", *["joined"] * 4) * 2 if name == "r5" else ("full",))
        assert ("recompute full of 5 layers together" in imported_plan.notes[0]) == (name == "r5")
        peaks.append(hx.price(imported_plan.problem, imported_plan.plan).pipelines[0].stages[0].memory.activations)
    assert peaks[0] < peaks[1]


# ----------------------------------------------------------------------------- the job's own size


def test_the_jobs_own_size_decides() -> None:
    folder = CASES / "job_of_two_nodes"
    with pytest.raises(
        hx.InputError, match=r"runs on 16 GPUs, and there are 32 to use; .*exclude=\[gpu-a100-01,gpu-a100-02\]"
    ):
        layout("job_of_two_nodes/today120.sh", cluster=folder / "c32.yaml")
    space = Space(exclude=("gpu-a100-01", "gpu-a100-02"))
    cluster = hx.cluster(folder / "c32.yaml")
    imported_plan = read_layout("megatron", folder / "today120.sh", cluster, None, Workload(), space, None)
    assert degrees(imported_plan) == (8, 2, 1, 80, 120)
    assert not any("number of GPUs" in note for note in imported_plan.notes)


def test_the_command_line_goes_before_the_file_with_a_note() -> None:
    name = f"{FLAGS}/base.sh"
    asked = Workload(global_batch=32, precision="fp8", recompute="full", optimizer_sharding="0")
    imported_plan = layout(name, workload=asked)
    assert imported_plan.problem.workload.global_batch == imported_plan.plan.pipelines[0].num_sequences == 32
    assert {stage.recompute for stage in imported_plan.plan.pipelines[0].stages} == {("full",)}
    assert (imported_plan.problem.workload.precision, imported_plan.plan.sharding.stage) == ("fp8", 0)
    for key, new, old in (
        ("global_batch", 32, 64),
        ("precision", "fp8", "bf16"),
        ("recompute", "full", "none"),
        ("optimizer_sharding", 0, 1),
    ):
        assert f"workload.{key}={new} of the command line replaces {old} of the file" in imported_plan.notes
    same = layout(name, workload=Workload(), stated_keys=frozenset({"precision", "gradient_bytes"}))
    assert same.problem.workload.gradient_bytes == 2
    assert sum("command line" in note for note in same.notes) == 1
    with pytest.raises(hx.InputError, match="global_batch=7 is not divided by the 2 sequences"):
        layout(name, workload=Workload(global_batch=7))


def test_the_first_note_is_what_was_read() -> None:
    assert layout(f"{FLAGS}/ends_and_vpp.sh").notes[0] == (
        "read: imported of 7.24 B parameters in 32 layers, TP 4, PP 2, VP 2, DP 1, EP 1, CP 1, stages of 14 + 18 "
        "layers, micro-batch 2, batch 64, sequence 4096, recompute none, bf16 with gradients of 4 bytes, ZeRO-1, "
        "sequence parallelism on, no offload"
    )
