"""One line for every bad input, and nothing written; what readers say of files is in `tests/golden/bad_input`."""

from pathlib import Path
from typing import Any

import pytest

from experiments import plan
from tests.conftest import Run
from tests.experiments.command_line import QUICK, TINY, V100, refusal
from tests.slow import slow_but

BAD_FILES = {
    "malformed.yaml": "name: [x\n",
    "v100.yaml": f"name: x\nmachines:\n  - {V100}\n",
}
CLUSTER = ("model=tiny", "cluster=file", "solver=random")

BAD_COMMANDS: list[tuple[tuple[str, ...], str]] = [
    ((), "no verb"),
    (("plan", *TINY, "--multrun"), "--multrun: is not a flag; did you mean --multirun?"),
    (("plan", *TINY, "max_tp=8"), "max_tp: unknown key; did you mean constraints.max_tp?"),
    (("pln",), "'pln' is not a verb; did you mean plan?\n"),
    (("plan",), "cluster: is missing; choose"),
    (("plan", "cluster=smal_mixed", "model=tiny"), "did you mean small_mixed"),
    (("plan", *QUICK, "solver=nope"), "solver: 'nope' is not known; known: "),
    (("plan", *QUICK, "solver=megatron", "solver.defects=as_released"), "solver.defects: unknown key; known: "),
    (("plan", *QUICK, "solver=flashflex", "solver.defects=nope"), "known: as_published, as_released"),
    (("plan", *QUICK, "experiment=nope"), "experiment: 'nope' is not known"),
    (("plan", *QUICK, "seed=abc"), "seed: 'abc' is not a whole number"),
    (("plan", *QUICK, "seed=1,2"), "sweep over them with -m"),
    (("plan", *QUICK, "seed=${nope}"), "'nope' not found"),
    (("plan", *QUICK, "seed=???"), "seed: is missing"),
    (("plan", *QUICK, "solver.time_limit=1"), "did you mean time_limit_s?"),
    (("plan", *QUICK, "solver.max_steps=0"), "at least 1"),
    (("plan", *QUICK, "workload=null"), "must be a string"),
    (("plan", *QUICK, "space.uneven_tp=maybe"), "'maybe' is not true or false"),
    (("plan", *QUICK, "constraints.exclude=[olds]"), "did you mean old?"),
    (("plan", *QUICK, "constraints.exclude=5"), "is not a list"),
    (("plan", *QUICK, "cluster.machines.9.num_gpus=3"), "cannot be merged"),
    (("plan", *QUICK, "model.hidden_size=0"), "model=tiny: hidden_size"),
    (
        ("plan", *TINY, "train.steps=3", "emulate.steps=9", "whatif.factor=5"),
        "train.steps: plan does not read it; hexiopt train does; also emulate.steps: plan does not read it; hexiopt "
        "emulate does; also whatif.factor: plan does not read it; hexiopt whatif does\n",
    ),
    (("plan", *TINY, "sweep.resume=true"), "sweep.resume=true: is for sweeps; add -m, or remove it"),
    (("plan", *QUICK, "a b"), "write key=value"),
    (("plan", *QUICK, "+seed=1"), "remove the +"),
    (("plan", *QUICK, "~nope"), "does not exist"),
    (("plan", *QUICK, "--config-dir", "nope"), "is not a folder"),
    (("plan", *TINY, "hydra.run.dir=/proc/nope"), "/proc/nope"),
    (("plan", *CLUSTER, "cluster.path=."), "is not a regular file"),
    (("plan", *CLUSTER, "cluster.path=7"), "7 is not a path"),
    (("plan", *CLUSTER, "cluster.path=malformed.yaml"), "malformed.yaml, line 2"),
    (("plan", *CLUSTER, "cluster.path=v100.yaml"), "choose workload.precision=fp16"),
    (("price",), "plan: is missing"),
    (("price", "plan=nope.json"), "nope.json: the file does not exist"),
    (("compare", *QUICK, "compare.solvers=[]"), "names no solver"),
    (("compare", *QUICK, "compare.solvers=[random,random]"), "appears twice"),
    (("collect",), "there is no sweep in multirun/"),
]


@pytest.mark.parametrize(
    ("command", "message"),
    slow_but(BAD_COMMANDS[::2], BAD_COMMANDS),
    ids=[" ".join(words[-1:]) or "none" for words, _ in BAD_COMMANDS],
)
def test_bad_input_is_one_line_and_writes_nothing(
    hexiopt: Run, tmp_path: Path, command: tuple[str, ...], message: str
) -> None:
    for name, content in BAD_FILES.items():
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    assert message in refusal(hexiopt(*command))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_folder_of_the_user_stays(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    refusal(hexiopt("plan", *TINY, "hydra.run.dir=mine", "seed=-1"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_unexpected_exits_1(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any, **more: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(plan, "search", crash)
    ran = hexiopt("plan", *QUICK)
    assert ran.code == 1
    assert ran.err == "hexiopt: unexpected RuntimeError: two lines; set HEXIOPT_DEBUG=1 for the traceback\n"
    monkeypatch.setenv("HEXIOPT_DEBUG", "1")
    ran = hexiopt("plan", *QUICK)
    assert ran.code == 1
    assert "Traceback" in ran.err


def test_a_failed_picture_leaves_no_half_of_it(hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_halfway(*args: Any) -> None:
        Path(args[-1]).write_bytes(b"half")
        raise RuntimeError("no ink")

    monkeypatch.setattr("hexiopt.report.figure.draw_plan", fail_halfway)
    assert hexiopt("plan", *TINY, "hydra.run.dir=out").code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]
