"""`hx.export` and `hx.import_plan`: what is written is read back as the plan, and refusals write nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.exports.exporting import write_program
from hexiopt.exports.presets import restrict
from hexiopt.exports.trainers.registry import EXECUTOR, TRAINERS
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.models import TINY
from tests.solvers.problems import cluster

GPUS = cluster(("a", "fast", 2), ("b", "fast", 2))


def test_a_plan_comes_back_from_the_files_of_another_trainer(tmp_path: Path) -> None:
    workload = Workload(4, 512, gradient_bytes=4)  # as Megatron-LM sums gradients
    problem = restrict(Problem(GPUS, TINY, workload), TRAINERS["megatron"])
    plan = hx.solve(problem, max_steps=40, time_limit_s=600, progress=False).found()
    written = hx.export(plan, "slurm", tmp_path / "job", "megatron", minutes=90)
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"plan.json", *written.files}
    assert "sbatch" in written.start
    assert "--time=90" in written.files["job.sbatch"]
    assert "--time" not in hx.export(plan, "slurm", tmp_path / "own").files["job.sbatch"]
    ranks = tmp_path / "job" / "ranks.tsv"
    again = hx.import_plan("megatron", tmp_path / "job" / "megatron.sh", GPUS, TINY, ranks=ranks)
    assert again.pipelines == plan.pipelines
    assert again.cost.step_time_s == pytest.approx(plan.cost.step_time_s)
    assert again.solver["name"] == "megatron (imported)"


OTHERS = [name for name, trainer in TRAINERS.items() if name != EXECUTOR and trainer.is_launched]


TWO_STAGES = (Pipeline((Stage.of((0, 1), 0, 16), Stage.of((2, 3), 16, 32)), 4),)
TWO_COPIES = tuple(Pipeline((Stage.of((2 * d, 2 * d + 1), 0, 32),), 2) for d in range(2))
ONE_STAGE = (Pipeline((Stage.of((0, 1), 0, 32),), 4),)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("key", "value", "only", "pipelines"),
    [
        ("message_precision", "fp8", "training", TWO_STAGES),
        ("gradient_precision", "fp8", "training", TWO_COPIES),
        ("training", "lora", "full", ONE_STAGE),
        ("optimizer", "lion", "adamw", ONE_STAGE),
    ],
)
def test_what_no_other_trainer_does_is_refused(
    name: str, key: str, value: str, only: str, pipelines: tuple[Pipeline, ...]
) -> None:
    """A plan is refused where it has messages, copies or a step of the kind, a search before it begins."""
    workload = Workload(4, 4096, "fp16", **{key: value})  # type: ignore[arg-type]
    problem, plan = Problem(GPUS, hx.model("llama2_7b"), workload), Plan(pipelines)
    with pytest.raises(hx.InputError, match=rf"^export.format: .*workload.{key}={only}\b"):
        write_program(problem, plan, TRAINERS[name])
    with pytest.raises(hx.InputError, match=rf"^workload.{key}: {value} does not go with space.preset.*{only}"):
        restrict(problem, TRAINERS[name])
    trained = replace(problem, workload=replace(workload, precision="fp32"))  # as our executor does
    if key != "optimizer":
        assert restrict(trained, TRAINERS[EXECUTOR]).workload == trained.workload
        assert write_program(trained, plan, TRAINERS[EXECUTOR]).command
        return
    with pytest.raises(hx.InputError, match=r"^export.format: hexiopt: workload.optimizer: lion cannot be trained"):
        write_program(trained, plan, TRAINERS[EXECUTOR])
    with pytest.raises(hx.InputError, match=r"^space.preset: hexiopt: workload.optimizer: lion cannot be trained"):
        restrict(trained, TRAINERS[EXECUTOR])


def test_a_plan_without_messages_may_have_any_precision_of_them() -> None:
    problem = Problem(GPUS, TINY, Workload(4, 512, message_precision="fp8"))
    alone = Plan((Pipeline((Stage.of((0, 1), 0, TINY.num_layers),), 4),))
    assert write_program(problem, alone, TRAINERS["megatron"]).files


def test_what_cannot_be_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    problem, last = Problem(GPUS, TINY, Workload(4, 512)), TINY.num_layers
    uneven = (Pipeline((Stage.of((0, 1), 0, last),), 3), Pipeline((Stage.of((2,), 0, last),), 1))
    plan = hx.PlacedPlan.of(problem, Plan(uneven, sharding=Sharding(1)))
    for format, trainer, message in (
        ("megatron", None, r"megatron cannot express the plan.*space\.preset=megatron"),
        ("slrum", None, "'slrum' is not known; did you mean slurm"),
        ("slurm", "megatorn", "'megatorn' is not known; did you mean megatron"),
        ("megatron", "flagscale", "does not go with export.format=megatron"),
    ):
        with pytest.raises(hx.InputError, match=message):
            hx.export(plan, format, tmp_path / "job", trainer)
        assert not (tmp_path / "job").exists()
    with pytest.raises(hx.InputError, match="'slurm' is not read"):
        hx.import_plan("slurm", "job.sbatch", GPUS, TINY)
    (tmp_path / "layout.json").write_text("{}")
    with pytest.raises(hx.InputError, match="model: is missing"):
        hx.import_plan("galvatron", tmp_path / "layout.json", GPUS)
