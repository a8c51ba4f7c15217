"""`hexiopt export` and `import`: files of every format, refusals whose remedy works, and runs of what is written."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.exports.formats import Launcher, Trainer
from hexiopt.exports.launchers.registry import LAUNCHERS
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.plan_file import plan_file_to_dict
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.conftest import ROOT, Run
from tests.experiments.command_line import refusal
from tests.hexiopt.exports.launchers.test_torchrun_lines import free_port, machines_of, start_all
from tests.slow import slow_but

BUDGET = ("solver=portfolio", "solver.max_steps=40", "report=false")
QUICK = (*BUDGET, "bound.time_limit_s=0.1")
WORK = ("workload.global_batch=12", "workload.seq_len=128", "workload.precision=bf16")
CLUSTER = ("cluster=small_mixed", "model=tiny")
UNEVEN = ("constraints.num_pipelines=2", "constraints.num_stages=3")  # all of a machine of 2 and one of 4


def plan(hexiopt: Run, folder: str, *overrides: str) -> str:
    ran = hexiopt("plan", *CLUSTER, *WORK, *QUICK, *overrides, f"hydra.run.dir={folder}")
    assert ran.code == 0, ran.err
    return f"plan={folder}/plan.json"


def export(hexiopt: Run, plan: str, format: str, *overrides: str, folder: str = "out") -> str:
    ran = hexiopt("export", plan, f"export.format={format}", *overrides, f"hydra.run.dir={folder}")
    assert ran.code == 0, ran.err
    return ran.out


@pytest.fixture
def uneven_plan(hexiopt: Run, tmp_path: Path) -> str:
    """A plan whose pipelines differ in stages and batch."""
    problem = Problem(named_cluster("small_mixed"), named_model("tiny"), Workload(12, 128, optimizer_sharding="1"))
    last = problem.model.num_layers
    plan = Plan(
        (
            Pipeline((Stage.of((0, 1), 0, last),), 5),
            Pipeline((Stage.of((2, 3), 0, 1), Stage.of((4, 5), 1, last)), 7),
        ),
        sharding=Sharding(1),
    )
    text = json.dumps(plan_file_to_dict(problem, plan, PlanPricer(problem).price(plan), {}))
    (tmp_path / "uneven.json").write_text(text)
    return "plan=uneven.json"


@pytest.mark.parametrize("format", ["ranks", *LAUNCHERS])
def test_launchers_take_every_plan_with_our_trainer(
    hexiopt: Run, tmp_path: Path, uneven_plan: str, format: str
) -> None:
    output = export(hexiopt, uneven_plan, format)
    listed = [line for line in output.splitlines() if line.startswith("out/")]
    assert {tmp_path / name for name in listed} == set((tmp_path / "out").iterdir())
    rows = [line.split("\t") for line in (tmp_path / "out" / "ranks.tsv").read_text().splitlines()]
    assert rows[0][:3] == ["rank", "machine", "cuda_index"]
    devices = {f"{machine}:{index}" for _, machine, index, *_ in rows[1:]}
    pipelines = json.loads((tmp_path / "uneven.json").read_text())["pipelines"]
    assert devices == {name for pipeline in pipelines for stage in pipeline["stages"] for name in stage["devices"]}


REFUSING = ("megatron", "megatron_bridge", "torchtitan", "galvatron", "deepspeed", "flagscale", "accelerate")


@pytest.mark.parametrize("name", slow_but(("megatron",), REFUSING))
def test_the_remedy_of_a_refusal_works(hexiopt: Run, tmp_path: Path, uneven_plan: str, name: str) -> None:
    """Refused, planned again as the refusal says, exported by a launcher, and read back at the same price."""
    line = refusal(hexiopt("export", uneven_plan, f"export.format={name}", "hydra.run.dir=refused"))
    assert not (tmp_path / "refused").exists()
    [remedy] = re.findall(r"plan again with (space\.preset=\w+)", line)
    made = plan(hexiopt, "again", remedy)
    export(hexiopt, made, "torchrun", f"export.trainer={name}")
    files = sorted((tmp_path / "out").iterdir(), reverse=True)  # .yaml before .sh
    trainer_file = next(path for path in files if path.stem in (name, "hexiopt_plan"))
    command = ("import", f"format={name}", f"file={trainer_file}", "ranks=out/ranks.tsv", *CLUSTER, *WORK, *BUDGET)
    # The files do not say in which precision gradients are summed, which trainers do in FP32.
    ran = hexiopt(*command, "workload.gradient_bytes=2", "solver.max_steps=5", "hydra.run.dir=imported")
    assert ran.code == 0, ran.err
    times = [
        json.loads((tmp_path / folder / "plan.json").read_text())["prediction"]["step_time_s"]
        for folder in ("again", "imported")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)
    assert "without limits" in ran.out


def test_what_does_not_go_together_is_refused(hexiopt: Run, uneven_plan: str) -> None:
    assert "give plan=path/plan.json" in refusal(hexiopt("export", "export.format=slurm"))
    assert "with huggingface" in refusal(hexiopt("export", uneven_plan))
    assert "did you mean megatron" in refusal(hexiopt("export", uneven_plan, "export.format=megatrn"))
    line = refusal(hexiopt("export", uneven_plan, "export.format=megatron", "export.trainer=flagscale"))
    assert "export.trainer=flagscale" in line
    assert "is not host:port" in refusal(hexiopt("export", uneven_plan, "export.format=torchrun", "export.master=a"))
    assert "is not known" in refusal(hexiopt("plan", *CLUSTER, *BUDGET, "space.preset=megatrn"))
    assert "file: is missing" in refusal(hexiopt("import", "format=megatron", *CLUSTER))
    assert "format: is missing" in refusal(hexiopt("import", "file=x.sh", *CLUSTER))


def test_every_format_has_a_row_in_the_documentation() -> None:
    """The tables of docs/exports.md are those of the code: name, target with versions, what it expresses."""
    text = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(" `"): [cell.strip() for cell in cells[2:4]] for cells in map(_cells, text.splitlines()) if cells
    }
    formats: dict[str, Trainer | Launcher] = {**TRAINERS, **LAUNCHERS}
    assert {name: rows.get(name) for name in formats} == {
        name: [entry.target, entry.expresses] for name, entry in formats.items()
    }


def _cells(line: str) -> list[str]:
    return line.split("|") if line.startswith("| `") else []


def losses(text: Sequence[str]) -> list[float]:
    """The losses that steps told, in order."""
    events = [json.loads(line) for output in text for line in output.splitlines() if line.startswith("{")]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.slow
def test_exported_lines_train_to_the_losses_of_a_local_run(hexiopt: Run, tmp_path: Path) -> None:
    """Two machines of 2 and 4 processes, started by the exported launch.sh, against all processes started here."""
    pytest.importorskip("torch")
    ran = hexiopt(
        *("plan", *CLUSTER, "workload=small", "workload.global_batch=6", "workload.seq_len=32", *QUICK, *UNEVEN),
        *("workload.optimizer_sharding=1", "hydra.run.dir=p"),
    )
    assert ran.code == 0, ran.err
    plan_file = f"plan={tmp_path / 'p' / 'plan.json'}"
    train = ("train.steps=3", "train.device=cpu", "train.force=true", "train.timeout_s=240")
    ran = hexiopt("train", plan_file, *train, "report=false", "hydra.run.dir=local")
    assert ran.code == 0, ran.err
    local = losses([(tmp_path / "local" / "metrics.jsonl").read_text()])
    export(hexiopt, plan_file, "torchrun", f"export.master=127.0.0.1:{free_port()}")
    folder = tmp_path / "out"
    machines = machines_of(folder)
    assert len(machines) == 2
    outputs = start_all(folder, machines, *train, env={"PYTHONPATH": str(ROOT)})
    assert losses(outputs) == pytest.approx(local, rel=1e-6)
    assert len(local) == 3


EXAMPLE = """
GPUS_PER_NODE=6
SEQ=2048
MODEL_ARGS=(
    --num-layers 24   # a comment
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length $SEQ
    --max-position-embeddings ${SEQ}
)
TRAINING_ARGS=(--micro-batch-size 2 --global-batch-size 64 --fp16 --lr 6.0e-5)
PARALLEL="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} $PARALLEL --recompute-activations
"""


def test_somebodys_script_is_priced_and_drawn(hexiopt: Run, tmp_path: Path) -> None:
    """Model and plan come from the script alone; the pictures are drawn."""
    (tmp_path / "train.sh").write_text(EXAMPLE)
    ran = hexiopt(
        *("import", "format=megatron", "file=train.sh", "cluster=small_mixed", "solver.max_steps=10"),
        "hydra.run.dir=out",
    )
    assert ran.code == 0, ran.err
    whole = json.loads((tmp_path / "out" / "plan.json").read_text())
    [pipeline] = whole["pipelines"]
    assert [stage["layers"] for stage in pipeline["stages"]] == [[0, 8], [8, 16], [16, 24]]
    assert [stage["recompute"] for stage in pipeline["stages"]] == ["selective"] * 3
    assert (pipeline["num_micro_batches"], pipeline["micro_batch_size"]) == (32, 2)
    assert whole["problem"]["workload"]["seq_len"] == 2048
    assert {"plan.png", "report.html", "better.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "50257, that of GPT-2's tokenizer, is assumed" in " ".join(ran.out.split())


@pytest.mark.slow
def test_beside_a_layout_that_does_not_fit_what_fits_is_better(hexiopt: Run, tmp_path: Path) -> None:
    """Printed, written and drawn, though it is slower; what was read stands first, and the notes in every file."""
    cases = ROOT / "tests" / "cases"
    ran = hexiopt(
        *("import", "format=megatron", f"file={cases / 'import_does_not_fit' / 'train.sh'}"),
        *(f"cluster={cases / 'h100x8.yaml'}", "solver.max_steps=30", "hydra.run.dir=out"),
    )
    assert ran.code == 3
    assert "GiB too much" in ran.err
    words = " ".join(ran.out.split())
    assert words.startswith("read: imported of 8.03 B parameters in 32 layers, TP 1, PP 1, VP 1, DP 8, ")
    assert "Yours does not fit" in words
    assert "these do: The best plan found within what megatron expresses" in words
    note = "the file does not state its number of GPUs: all 8 are taken"
    assert f"note: {note}" in words
    assert {"better.json", "better.png", "better_same_trainer.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    whole, better = (json.loads((tmp_path / "out" / name).read_text()) for name in ("plan.json", "better.json"))
    assert better["prediction"]["step_time_s"] > whole["prediction"]["step_time_s"]
    assert note in whole["solver"]["notes"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert note in page
    assert "read: imported of 8.03 B" in page


def test_names_of_the_scheduler(hexiopt: Run, tmp_path: Path, uneven_plan: str) -> None:
    export(hexiopt, uneven_plan, "slurm", "export.gpu_names={rtx_4090: ada, rtx_3090: ampere-24}")
    script = (tmp_path / "out" / "job.sbatch").read_text()
    assert "--gpus-per-node=ada:2" in script
    assert "--gpus-per-node=ampere-24:4" in script
    ran = hexiopt("export", uneven_plan, "export.format=slurm", "export.gpu_names=ada", "hydra.run.dir=none")
    assert (ran.code, "is no mapping of GPU types to names" in ran.err) == (2, True)
