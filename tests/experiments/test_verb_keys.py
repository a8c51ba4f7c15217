"""Which keys of the configuration each verb reads, found by running it: the table that checks its command line."""

import atexit
import socket
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from experiments.app import hydra_app
from experiments.app.config import READS, Config, Keys, schema
from experiments.app.verb_help import refuse_unread
from experiments.app.verbs import VERBS
from hexiopt.errors import InputError
from runtime.launch.head import AfterFaults
from tests.conftest import ROOT, Run
from tests.experiments.command_line import SEARCHED, refusal
from tests.slow import slow_but

SEARCH = (*SEARCHED, "solver.max_steps=20", "workload=small", "workload.global_batch=4", "hydra.run.dir=out")
PLAN = ("plan=first/plan.json", "hydra.run.dir=out")
TAKEN = socket.create_server(("127.0.0.1", 0))  # which `page` cannot have, so that it serves nothing
atexit.register(TAKEN.close)
COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "plan": ((*SEARCH, "bound.time_limit_s=0", "alone=true"),),
    "compare": ((*SEARCH, "compare.solvers=[random]", "bound.time_limit_s=0"),),
    "fit": ((*SEARCH[:1], "model=llama2_7b", *SEARCH[2:], "fit.precision=1", "print=full"),),  # its limits are near
    "page": ((f"page.port={TAKEN.getsockname()[1]}",),),
    "whatif": ((*SEARCH, "bound.time_limit_s=0"),),
    "price": ((*PLAN, "constraints.memory_headroom=0.1", "workload.seq_len=64"),),
    "replan": ((*PLAN, "lost=[old:0]", "workload.seq_len=64", "space.replicas=false", "constraints.max_tp=1"),),
    "train": ((*PLAN, "train.on_failure=replan"), (*SEARCH, "train.on_failure=replan")),
    "emulate": ((*SEARCH, "emulate.solvers=[random]", "emulate.steps=1", "emulate.dilation=0.1"),),
    "export": ((*PLAN, "export.format=ranks"),),
    "import": (
        ("cluster=small_mixed", "format=megatron", "file=megatron.sh", "solver.max_steps=5", "hydra.run.dir=out"),
        (*SEARCH, "format=megatron", "file=megatron.sh"),
    ),
    "explain": (PLAN, SEARCH),
    "validate": (("data=runs.csv",),),
    "calibrate": (("run=nowhere",), ("run=nowhere", "data=runs.csv")),
    "profile": (("profile.seconds=0.02", "profile.processes=1"),),
    "discover": (("discover.hostfile=hosts",),),
    "collect": (("collect.folders=[swept]",),),
}
SCRIPT = """\
torchrun --nproc_per_node 6 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --fp16 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --recompute-activations
"""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys that jobs read from here on."""
    read_keys, keys = set[str](), {field.name for field in fields(Config)}
    run_verb = hydra_app.run_verb  # type: ignore[attr-defined]
    looked_up = Keys.__getattribute__
    listening = [False]

    def note_key(self: Keys, name: str) -> Any:
        value = looked_up(self, name)
        if listening[0] and name in keys:
            read_keys.add(name)
        return value

    def run(verb: str, start: Any) -> Any:
        def start_listening() -> Any:
            job = start()
            listening[0] = True
            return job

        try:
            return run_verb(verb, start_listening)
        finally:
            listening[0] = False

    monkeypatch.setattr(hydra_app, "run_verb", run)
    monkeypatch.setattr(Keys, "__getattribute__", note_key)
    return read_keys


@pytest.mark.parametrize("verb", slow_but(("price", "export", "discover"), VERBS))
def test_a_verb_reads_what_the_table_says(
    verb: str, hexiopt: Run, tmp_path: Path, read: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hexiopt("plan", *SEARCH[:-1], "bound.time_limit_s=0", "report=false", "hydra.run.dir=first").code == 0
    if verb == "collect":
        assert hexiopt("plan", "-m", *SEARCH[:-1], "seed=0", "hydra.sweep.dir=swept").code == 0
    runs = (ROOT / "experiments" / "data" / "measured_training_throughput.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "runs.csv").write_text("\n".join(runs[:3]), encoding="utf-8")
    (tmp_path / "hosts").write_text("a slots=2\n")
    (tmp_path / "megatron.sh").write_text(SCRIPT)

    def loses(run: Any, folder: Path, faults: AfterFaults, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        faults.replan(["old:0"], run.plan, None)
        yield from ()

    if verb == "train":
        monkeypatch.setattr("runtime.launch.head.training_events", loses)
        monkeypatch.setattr("experiments.train.show_training", lambda job, *_: (job.pictures, None)[1])
    read.clear()
    for words in COMMANDS[verb]:
        hexiopt(verb, *words)
    assert read == {key.partition(".")[0] for key in READS[verb]} - {"sweep"}, "`sweep` is read before a job runs"


def test_every_key_has_a_verb_and_every_verb_its_keys() -> None:
    assert list(READS) == list(VERBS)
    assert {key.partition(".")[0] for keys in READS.values() for key in keys} == {
        field.name for field in fields(Config)
    }
    for verb in VERBS:
        assert {field.name for field in fields(schema(verb))} == {key.partition(".")[0] for key in READS[verb]}
    assert list(vars(schema("price")().constraints)) == ["memory_headroom"], "of a section, what the verb reads"
    assert vars(schema("plan")().constraints) == vars(Config().constraints)


@pytest.mark.parametrize("verb", slow_but(("plan", "discover"), VERBS))
def test_the_configuration_of_a_verb_has_its_keys_alone(verb: str, hexiopt: Run) -> None:
    ran = hexiopt(verb, "--cfg", "job")
    assert ran.code == 0, ran.err
    shown = {line.partition(":")[0] for line in ran.out.splitlines() if line and line[0] not in " -"}
    assert shown == {key.partition(".")[0] for key in READS[verb]}


@pytest.mark.parametrize("verb", VERBS)
def test_a_key_of_another_verb_is_refused_with_the_verb_that_has_it(verb: str) -> None:
    keys = {key.partition(".")[0] for key in READS[verb]}
    for key in (field.name for field in fields(Config)):
        for override in (f"{key}=1", f"++{key}.x=1,2", f"~{key}"):
            if key in keys:
                if key != "constraints":
                    refuse_unread(verb, [override])
            else:
                with pytest.raises(
                    InputError, match=rf"^{key}(\.x)?: {verb} does not read it; hexiopt [a-z, ]+ (does|do)$"
                ):
                    refuse_unread(verb, [override])
    refuse_unread(verb, ["hydra.run.dir=out", "experiment=even", "sweep.resume=true", "unknown=1"])


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("train:\n  steps: 3\n", "train: plan does not read it; hexiopt train does"),
        ("seed: 3\nspace:\n  replica: false\n", "space.replica: unknown key; did you mean replicas?"),
        ("defaults:\n  - override /sweep: nope\n", "sweep: 'nope' is not known; known: "),
    ],
)
def test_a_wrong_key_of_an_experiment_is_one_line(hexiopt: Run, tmp_path: Path, stated: str, message: str) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{stated}")
    assert message in refusal(hexiopt("plan", *SEARCH, "experiment=mine", "--config-dir", "own"))


def test_a_key_that_nobody_reads_cannot_be_added(hexiopt: Run) -> None:
    for key in ("nope", "solver.nope", "workload.lora.nope"):
        assert refusal(hexiopt("plan", *SEARCH, f"+{key}=1")).startswith(f"hexiopt: {key}: unknown key; remove it")
    assert "cluster=small_mixed: nope: unknown key" in refusal(hexiopt("plan", *SEARCH, "cluster.nope=1"))


def test_a_primary_configuration_of_ones_own(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - price\n  - _self_\nprint: full\n")
    (tmp_path / "bare.yaml").write_text("seed: 3\n")
    named = ("--config-dir", ".", "--config-name")
    ran = hexiopt("price", *named, "mine", "--cfg", "job")
    assert ran.code == 0, ran.err
    assert "print: full" in ran.out
    assert "nope.json: the file does not exist" in refusal(hexiopt("price", *named, "mine", "plan=nope.json"))
    assert refusal(hexiopt("price", *named, "bare")) == (
        "hexiopt: --config-name: 'bare' is not a configuration of price; begin its defaults with - price\n"
    )
