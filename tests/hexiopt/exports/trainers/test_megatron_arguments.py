"""What becomes of each argument of Megatron-LM: read, harmless by name, refused with the reason, or noted."""

import pytest

import hexiopt as hx
from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.shell.scripts import LAUNCH, read_script
from hexiopt.exports.trainers.megatron import CORE, import_arguments, read_precision
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments, vocabulary
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload

CLUSTER = Cluster.of({"h100_80gb_sxm": 8}, name="c")
SHAPE = (
    "torchrun --nproc-per-node 8 t.py --num-layers 32 --hidden-size 1024 --ffn-hidden-size 2816 "
    "--num-attention-heads 16 --max-position-embeddings 2048 --seq-length 2048 --vocab-size 32000 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 --global-batch-size 64 "
)


def context() -> ImportContext:
    """Eight GPUs, and nothing stated beside the file."""
    return ImportContext("x.sh", CLUSTER, tuple(range(8)), None, Workload(), Space())


def read(text: str) -> ImportedPlan:
    """The layout of a script."""
    reader = TRAINERS["megatron"].read
    assert reader is not None
    return reader(text, context())


def test_no_argument_has_two_places() -> None:
    """What is harmless or always refused is not read, and the launcher's arguments are none of the run's."""
    known = vocabulary()
    values = (
        {name: ["2"] for name in CORE}
        | {"global-batch-size": ["64"]}
        | {"seq-length": ["64"], "max-position-embeddings": ["64"], "num-attention-heads": ["2"]}
    )
    arguments = MegatronArguments(context(), {**values, **{name: [] for name in known.harmless}})
    import_arguments(arguments, context(), None)
    assert not arguments._read & known.harmless
    assert not any("not read" in note for note in arguments.notes())
    assert not set(known.refused) & known.harmless
    assert not LAUNCH & known.harmless


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--fp8-format hybrid", "fp8"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "fp8"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", "mxfp8"),
        ("--fp8-hybrid", "fp8"),
        ("--fp4-format e2m1", "nvfp4"),
    ],
)
def test_recipes_of_low_precision(more: str, expected: str) -> None:
    arguments = MegatronArguments(context(), read_script(f"--bf16 {more}", "x.sh", CORE).arguments)
    assert read_precision(arguments, context()) == (expected, 4)


@pytest.mark.parametrize(
    ("more", "stage"),
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp", 3),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
        ("--deepspeed --zero-stage 0", 1),
        ("--deepspeed --zero-stage 2", 2),
    ],
)
def test_who_shards_what(more: str, stage: int) -> None:
    assert read(SHAPE + more).plan.sharding.stage == stage


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", [[4, 4]] * 4),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", [[2, 2, 2, 2]] * 4),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5", [[5], [9], [9], [9]]),
        ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 14", [[18], [14]]),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'", [[7, 9], [9, 7]]),
    ],
)
def test_how_layers_are_divided(more: str, parts: list[list[int]]) -> None:
    stages = read(SHAPE + more).plan.pipelines[0].stages
    assert [[end - first for first, end in stage.layers] for stage in stages] == parts


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size: 3 stages do not divide 32 layers"),
        (
            "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
            "2 stages do not divide 32 layers and --account-for-loss-in-pipeline-split",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3",
            "--num-virtual-.*: 3 chunks do not",
        ),
        ("--context-parallel-size 2", "--context-parallel-size 2: context parallelism is not modelled"),
        ("--optimizer muon --cpu-offloading", "--optimizer muon: .*; also --cpu-offloading: memory of the host"),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp",
            "--recompute-modules: mlp: is not modelled",
        ),
        ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe: 'custom' is not read"),
        (
            "--tensor-model-parallel-size $TP",
            r"--tensor-model-parallel-size: is \$TP, and that is not set in the script",
        ),
        ("--micro-batch-size 0", "--micro-batch-size: 0 is below 1"),
        (
            "--deepspeed --pipeline-model-parallel-size 2 --pp-partition-method uniform",
            "--pp-partition-method: 'uniform'",
        ),
    ],
)
def test_faults_are_said_by_their_argument(more: str, refused: str) -> None:
    with pytest.raises(InputError, match=refused):
        read(SHAPE + more)


def test_what_a_condition_decides_is_refused_with_it() -> None:
    branch = 'if [ "$BIG" = 1 ]; then T=4; else T=2; fi\n'
    with pytest.raises(
        InputError, match=r'is 4 or 2, and that depends on \[ "\$BIG" = 1 \], which the script does not'
    ):
        read(branch + SHAPE + "--tensor-model-parallel-size $T")
    imported_plan = read(branch + SHAPE + "--save-interval $T --odd-one $T")  # of what is harmless it does not matter
    assert "not read: --odd-one" in imported_plan.notes


def test_what_stands_nowhere_is_noted() -> None:
    imported_plan = read(
        SHAPE + "--tp-comm-overlap --attention-backend flash --transformer-impl local --log-throughput $MORE"
    )
    assert "not read: --tp-comm-overlap, --transformer-impl" in imported_plan.notes
    assert "not read: $MORE, which is not set in the script" in imported_plan.notes


def test_the_vocabulary_is_padded_as_megatron_does() -> None:
    assert read(SHAPE + "--tensor-model-parallel-size 8").problem.model.vocab_size == 32768
    assert read(SHAPE + "--make-vocab-size-divisible-by 1").problem.model.vocab_size == 32000
    assert read(SHAPE + "--padded-vocab-size 32001").problem.model.vocab_size == 32001


def test_a_model_that_is_given_goes_with_the_arguments() -> None:
    model = hx.model("llama2_7b")
    reader = TRAINERS["megatron"].read
    assert reader is not None
    asked = ImportContext("x.sh", CLUSTER, tuple(range(8)), model, Workload(), Space())
    with pytest.raises(InputError, match=r"--hidden-size: 1024 is not that of model llama2_7b \(4096\)"):
        reader(SHAPE, asked)
    shape = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --global-batch-size 64 --bf16"
    notes = reader(shape, asked).notes
    assert any("--swiglu is absent, which model llama2_7b has otherwise" in note for note in notes)
