"""The small languages of trainers' files: layouts, shell arguments, rules without a parser, and what is refused."""

import itertools
import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext
from hexiopt.exports.presets import restrict
from hexiopt.exports.shell.scripts import read_script
from hexiopt.exports.trainers.pipeline_layout import layout_text, read_layout
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.exports.random_plans import LLAMA_7B, cuts, draw_case

CLUSTER = Cluster.of({"a100_80gb_sxm": 8}, name="c")


@pytest.mark.parametrize("name", ["megatron", "megatron_bridge", "flagscale", "deepspeed"])
def test_trainers_that_spread_a_tied_matrix_less_than_is_priced_say_so(name: str) -> None:
    """Not with a matrix for each end, without ZeRO-1, or where one stage is both ends."""
    trainer, tied = TRAINERS[name], replace(LLAMA_7B, tied_embeddings=True)
    for model, zero, stages in itertools.product((tied, LLAMA_7B), (1, 0), (2, 1)):
        problem = restrict(Problem(CLUSTER, model, Workload(8, 2048)), trainer)
        ends = [k * LLAMA_7B.num_layers // stages for k in range(stages + 1)]
        pipelines = (
            Pipeline(tuple(Stage.of((2 * p + s,), *span, "full") for s, span in enumerate(pairwise(ends))), 4)
            for p in range(2)
        )
        program = trainer.write(problem, Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(zero)))
        has_note = any("tied matrix" in note for note in program.notes)
        assert has_note == (model is tied and zero == 1 and stages == 2), (model.tied_embeddings, zero, stages)


def test_layouts_are_read_back() -> None:
    rng = random.Random(1)
    for _ in range(300):
        parts = cuts(rng, rng.randint(8, 60), rng.randint(1, 8))
        assert read_layout(layout_text(parts), "x") == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Et*16|t*16L", [16, 16]),
        ("Ett,tt | ttL", [4, 2]),
        ("Et|(tt|)*3tL", [1, 2, 2, 2, 1]),
        ("E(t*2|)*2(tt)*2L", [2, 2, 4]),
    ],
)
def test_layouts_may_repeat(text: str, parts: list[int]) -> None:
    assert read_layout(text, "x") == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t*4|tL", "must begin with its one E"),
        ("Et|tLL", "end with its one L"),
        ("Et||tL", "no decoder layer in part 1"),
        ("E|t*8L", "no decoder layer in part 0"),
        ("Et*4|tmL", "has 1 m, for 0 layers that predict further tokens"),
        ("Ex|tL", "'x'"),
        ("E(t*9999)*9999L", "longer than"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_layout(text, "x")


def test_arguments_of_a_script() -> None:
    text = """
    # --not this
    TP=4; export PP=2
    ARGS=(
      --tensor-model-parallel-size $TP   # two
      --pipeline_model_parallel_size=${PP}
      --bf16
    )
    python x.py ${ARGS[@]} --seq-length ${LEN:-2048} --split 949,50,1 --micro-batch-size 1 \\
        --micro-batch-size 2 && echo --done | tee $LOG
    """
    arguments = read_script(text, "x.sh", ["micro-batch-size"]).arguments
    assert arguments["tensor-model-parallel-size"] == ["4"]
    assert arguments["pipeline-model-parallel-size"] == ["2"]
    assert arguments["seq-length"] == ["2048"]
    assert arguments["micro-batch-size"] == ["2"]
    assert arguments["bf16"] == []
    assert "not" not in arguments


@pytest.mark.parametrize("text", ["", "echo hello", "--x 'open"])
def test_what_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^x\.sh: "):
        read_script(text, "x.sh", ["micro-batch-size"])


def import_context(model: ModelSpec | None = LLAMA_7B) -> ImportContext:
    return ImportContext("file", CLUSTER, tuple(range(8)), model, Workload(), Space())


MEGATRON = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1 --global-batch-size 64 "


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("megatron", MEGATRON + "--tensor-model-parallel-size 3", "8 GPUs are not divided by TP 3 times PP 1"),
        ("megatron", MEGATRON.replace("64", "12") + "--bf16", "12 is not divided by 8 pipelines"),
        ("megatron", MEGATRON.replace("32", "30"), "is not that of model llama-7b"),
        (
            "megatron",
            MEGATRON + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*9|t*9L",
            "18 layers",
        ),
        ("megatron_bridge", "a=b", "has no override"),
        ("flagscale", "a: b", "hetero_process_meshes: is not a list"),
        ("flagscale", "- a", "is not a mapping"),
        ("torchtitan", "import os; os.remove('x')", "assigns no"),
        ("torchtitan", "((", "neither a Python configuration nor TOML"),
        (
            "torchtitan",
            "def f(c):\n  c.parallelism.tensor_parallel_degree = 3\n  return c",
            "TP 3 times PP 1 .* do not divide 8 GPUs",
        ),
        ("flashflex", "{}", "hetero_configs: is missing"),
        ("flashflex", '{"hetero_configs": [[4]], "layer_partitions": [[32]]}', "runs on 4 GPUs, and there are 8"),
        ("galvatron", '{"pp_deg": "x"}', "pp_deg"),
        ("deepspeed", "{}", "train_micro_batch_size_per_gpu: is missing"),
        ("deepspeed", '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 1}', "train_batch_size 9: is not"),
        ("accelerate", "a: b", "a: is no key .* distributed_type: is missing"),
    ],
)
def test_what_no_plan_expresses_is_refused(name: str, text: str, message: str) -> None:
    read = TRAINERS[name].read
    assert read is not None
    with pytest.raises(InputError, match=message):
        read(text, import_context())


@pytest.mark.parametrize("name", ["megatron_bridge", "torchtitan", "flashflex", "galvatron", "deepspeed", "accelerate"])
def test_a_model_is_asked_for_where_the_file_has_none(name: str) -> None:
    problem, plan = draw_case(name, random.Random(1))
    text = next(iter(TRAINERS[name].write(problem, plan).files.values()))
    read = TRAINERS[name].read
    assert read is not None
    with pytest.raises(InputError, match="give model=NAME"):
        read(text, import_context(None))


def test_what_flashflex_enforces_holds() -> None:
    """Layers per pipeline, TP dividing heads, the world, whole micro-batches, TP degrees dividing their largest."""
    for seed in range(25):
        problem, plan = draw_case("flashflex", random.Random(seed))
        program = TRAINERS["flashflex"].write(problem, plan)
        data = json.loads(program.files["flashflex.json"])
        assert all(sum(layers) == problem.model.num_layers for layers in data["layer_partitions"])
        assert [len(tps) for tps in data["hetero_configs"]] == [len(layers) for layers in data["layer_partitions"]]
        degrees = [tp for tps in data["hetero_configs"] for tp in tps]
        assert sum(degrees) == len(program.devices)
        assert all(problem.model.num_heads % tp == 0 and max(degrees) % tp == 0 for tp in degrees)
        section = data["hexiopt"]
        assert all(
            total % count == 0 for total, count in zip(section["global_bsz_size"], section["chunks"], strict=True)
        )
        stages = [[len(devices) for devices in pipeline] for pipeline in data["devices_id"]]
        assert stages == data["hetero_configs"]


def test_what_galvatron_enforces_holds() -> None:
    """Lists as long as the layers, TP dividing a stage's GPUs, the division, whole batches."""
    for seed in range(25):
        problem, plan = draw_case("galvatron", random.Random(seed))
        program = TRAINERS["galvatron"].write(problem, plan)
        data = json.loads(program.files["galvatron.json"])
        lists = {
            key: [int(v) for v in data[key].split(",")]
            for key in data
            if isinstance(data[key], str) and "," in data[key]
        }
        layers = problem.model.num_layers
        assert {len(values) for key, values in lists.items() if key != "pp_division"} == {layers}
        width, rest = divmod(len(program.devices), data["pp_deg"])
        assert rest == 0
        assert all(width % tp == 0 for tp in lists["tp_sizes_enc"])
        assert sum(int(v) for v in data["pp_division"].split(",")) == layers
        assert data["global_bsz"] % (width // min(lists["tp_sizes_enc"])) == 0
