"""The command line: what verbs write, exit codes, and one line for every bad input."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import plan
from experiments.app import common
from experiments.app.common import overlay, worst
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.readers.plan_file import read_plan
from tests.conftest import ROOT, Ran, Run

SEARCHED = ("cluster=small_mixed", "model=tiny", "solver=random")
TINY = (*SEARCHED, "solver.max_steps=40", "bound.time_limit_s=0.1")
QUICK = (*TINY, "report=false", "hydra.run.dir=out")

V100 = "{name: v, gpu: v100_16gb_sxm, num_gpus: 2, intra_bandwidth_gb_per_s: 100}"
RTX = "{name: a, gpu: rtx_3090, num_gpus: 2, intra_bandwidth_gb_per_s: 12}"


def in_process(*args: str, env: dict[str, str] | None = None, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.cli", *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Ctrl-C when the first plan is found, also where this runs in the background, where shells let Ctrl-C be ignored.
_PRESSES_CTRL_C = """
import os, signal, sys
from experiments.cli import main
from solvers.core.search import Search
signal.signal(signal.SIGINT, signal.default_int_handler)
offer = Search.offer
def pressing(self, *args):
    Search.offer = offer
    cost = offer(self, *args)
    os.kill(os.getpid(), signal.SIGINT)
    return cost
Search.offer = pressing
sys.exit(main(sys.argv[1:]))
"""


def interrupted(*args: str, cwd: Path) -> Ran:
    """A search in a process of its own that gets Ctrl-C long before its time limit."""
    command = [sys.executable, "-c", _PRESSES_CTRL_C, *args, *SEARCHED, "solver.time_limit_s=36000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def planned(hexiopt: Run, tmp_path: Path, *overrides: str) -> Path:
    ran = hexiopt("plan", *QUICK, *overrides)
    assert ran.code == 0, ran.err
    return tmp_path / "out" / "plan.json"


def edit(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data)
    del data["problem_sha256"]
    path.write_text(json.dumps(data))
    return path


def refused(ran: Ran) -> str:
    """The one line of a refusal."""
    assert ran.code == 2, (ran.out, ran.err)
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("hexiopt: ")
    assert "Traceback" not in ran.out + ran.err
    assert len(ran.err) < 1200
    return ran.err


# ------------------------------------------------------------------------------------- verbs


def test_plan_writes_its_files_and_says_where(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("plan", *TINY)
    assert (ran.code, ran.err) == (0, "")
    names = ["plan.json", "plan.png", "timeline.json", "report.html"]
    written = [Path(line) for line in ran.out.splitlines()[-4:]]
    assert [path.name for path in written] == names
    assert all(path.parts[0] == "outputs" and path.stat().st_size > 500 for path in written)
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    assert "tokens/s" in ran.out
    file = read_plan(written[0])
    cost = PlanPricer(file.problem).price(file.plan)
    assert violations(file.problem, file.plan, cost) == []
    stored = json.loads(written[0].read_text())
    assert stored["prediction"]["step_time_s"] == cost.step_time_s
    assert written[1].read_bytes()[:4] == b"\x89PNG"
    assert json.loads(written[2].read_text())["traceEvents"]
    assert "hexiopt plan cluster=small_mixed" in written[3].read_text()


def test_price_gives_the_same_price(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    ran = hexiopt("price", f"plan={path.relative_to(tmp_path)}", "hydra.run.dir=priced")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads((tmp_path / "priced" / "plan.json").read_text()) == json.loads(path.read_text())


def test_price_beyond_memory_exits_3(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    small = {name: {"usable_memory_gib": 0.3} for name in ("rtx_3090", "rtx_4090")}
    edit(path, lambda data: data["problem"]["cluster"].update(gpus=small))
    ran = hexiopt("price", f"plan={path}", "hydra.run.dir=priced")
    assert ran.code == 3
    assert ran.err.count("\n") == 1
    assert "GiB too much" in ran.err
    assert "does not fit" in ran.out


def test_price_of_a_broken_plan_exits_2(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    edit(path, lambda data: data["pipelines"][0].update(num_micro_batches=1000))
    assert "the global batch is 256" in refused(hexiopt("price", f"plan={path}", "hydra.run.dir=priced"))
    assert not (tmp_path / "priced").exists()


def test_price_refuses_overrides_of_the_problem(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    for override in ("cluster=small_mixed", "workload.seq_len=128", "seed=3", "cluster.name=x"):
        message = refused(hexiopt("price", f"plan={path}", override))
        assert override in message
        assert "whole problem" in message


def test_explain_of_a_file_and_of_a_search(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(hexiopt, tmp_path)
    for ran in (hexiopt("explain", f"plan={path}"), hexiopt("explain", *TINY)):
        assert (ran.code, ran.err) == (0, "")
        for word in (
            "rtx_3090: bf16 peak",
            "new: inside",
            "what binds",
            "gemm_backward_passes",
            "whitepaper",
        ):
            assert word in ran.out
    assert not (tmp_path / "outputs").exists(), "explain writes no files"


def test_a_replicated_interleaved_plan_is_priced_and_explained(hexiopt: Run, tmp_path: Path) -> None:
    """Two stages of two layer ranges, the first on two replicas, a recompute policy for each of its layers."""
    path = planned(hexiopt, tmp_path, "workload.global_batch=8")

    def weave(data: Any) -> None:
        replicas = [{"devices": ["old:0"], "samples": 3}, {"devices": ["old:1"], "samples": 1}]
        one = {"replicas": replicas, "layers": [[0, 1], [2, 3]], "recompute": ["none", "full"]}
        two = {"devices": ["new:0"], "layers": [[1, 2], [3, 4]], "recompute": "full"}
        pipeline = {"num_micro_batches": 2, "micro_batch_size": 4, "stages": [one, two]}
        data |= {"schedule": "interleaved", "sharding": {"stage": 1}, "pipelines": [pipeline]}

    ran = hexiopt("price", f"plan={edit(path, weave)}", "hydra.run.dir=priced")
    assert ran.code == 0, ran.err
    data = json.loads((tmp_path / "priced" / "plan.json").read_text())
    assert data["pipelines"][0]["stages"][0]["replicas"][0] == {"devices": ["old:0"], "samples": 3}
    memory = data["prediction"]["memory_gib"]
    assert set(memory) == {"old:0", "old:1", "new:0"}
    assert memory["old:0"]["activations"] > memory["old:1"]["activations"] > 0
    assert memory["old:0"]["weights"] == memory["old:1"]["weights"]
    ran = hexiopt("explain", f"plan={path}")
    assert ran.code == 0, ran.err
    assert "0·0.1" in ran.out
    assert "interleaved" in ran.out

    def break_it(data: Any) -> None:
        data["pipelines"][0] |= {"num_micro_batches": 1, "micro_batch_size": 8}
        data["problem_sha256"] = ""

    message = refused(hexiopt("price", f"plan={edit(path, break_it)}"))
    assert "8 sequences into 3 + 1" in message


def test_explain_gives_every_coefficient_a_source() -> None:
    from hexiopt.calibration.coefficients import COEFFICIENTS
    from hexiopt.report.explanation import coefficient_rows

    rows = list(coefficient_rows())
    assert {name.upper() for name, _, _ in rows} == set(COEFFICIENTS)
    assert all(source for _, _, source in rows)


def test_an_old_name_is_told_in_one_line(hexiopt: Run) -> None:
    pytest.importorskip("pymetis")
    ran = hexiopt("plan", *QUICK, "solver=metis", "solver.max_steps=5")
    assert ran.code == 0
    assert ran.err == "hexiopt: solver: metis is now called hexiscale; the old name goes soon\n"
    assert "hexiscale" in ran.out


@pytest.mark.parametrize("verb", ["compare", "emulate"])
def test_a_solvers_options_hold_where_several_run(hexiopt: Run, verb: str) -> None:
    """Each named solver has the options that it takes: Espresso's money needs prices, which TINY's cluster lacks."""
    command = (verb, *TINY, f"{verb}.solvers=[random,espresso]", "workload.optimizer_sharding=1")
    ran = hexiopt(*command, "solver=espresso", "solver.objective=money", "solver.deadline_s=60")
    assert ran.code == 2
    assert "price_per_hour" in ran.err
    ran = hexiopt(*command, "solver=flashflex", "solver.defects=as_released")
    assert ran.code == 2
    assert ran.err == (
        "hexiopt: solver.defects: none of random, espresso accepts it; name one that does, or remove it\n"
    )


def test_compare_writes_a_row_a_solver(hexiopt: Run, tmp_path: Path) -> None:
    steps = ("solver.time_limit_s=59", "solver.max_steps=150")
    ran = hexiopt("compare", *TINY[:3], *steps, "compare.solvers=[random,local_search]", "hydra.run.dir=out")
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "out" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "out" / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["solver"] for row in rows] == ["random", "local_search"]
    assert min(float(row["over_best"]) for row in rows) == 0
    assert all(float(row["lower_bound_s"]) <= float(row["step_time_s"]) for row in rows)
    with (tmp_path / "out" / "operators.csv").open() as file:
        operators = list(csv.DictReader(file))
    assert {row["solver"] for row in operators} == {"local_search"}  # `random` has none
    assert all(int(row["proposed"]) >= int(row["valid"]) >= int(row["accepted"]) for row in operators)


def test_no_plan_exits_3_with_the_shortfall(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(f"name: small\nmachines:\n  - {RTX}\n")
    file = ("cluster=file", "cluster.path=small.yaml", "model=llama2_70b", "solver.max_steps=40")
    for verb in ("plan", "explain"):
        ran = hexiopt(verb, *file, "solver=random")
        assert ran.code == 3
        assert ran.err.count("\n") == 1
        assert "GiB" in ran.err
    ran = hexiopt("compare", *file, "compare.solvers=[random,local_search]")
    assert ran.code == 3
    assert ran.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


# ------------------------------------------------------------------------------- user's files


def test_a_users_cluster_under_overrides(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        f"name: '${{oc.env:HOME}}'\ninter_machine: {{bandwidth_gb_per_s: 10}}\nmachines:\n  - {RTX}\n"
        "  - {name: b, gpu: rtx_4090, num_gpus: 1}\n"
    )
    path = planned(
        hexiopt,
        tmp_path,
        "cluster=file",
        "cluster.path=conf/mine.yaml",
        "cluster.inter_machine.bandwidth_gb_per_s=0.625",
        "+cluster.inter_machine.latency_us=70",
        "cluster.machines.0.num_gpus=4",
        "+cluster.links=[{between:[a,b],bandwidth_gb_per_s:0.5}]",
    )
    cluster = read_plan(path).problem.cluster
    assert cluster.name == "${oc.env:HOME}", "a file is data"
    assert [machine.num_gpus for machine in cluster.machines] == [4, 1]
    assert cluster.inter_bandwidth_bytes_per_s == 0.625e9
    assert cluster.inter_latency_s == pytest.approx(70e-6)
    assert cluster.links[0].bandwidth_bytes_per_s == 0.5e9


def test_a_named_cluster_under_overrides(hexiopt: Run, tmp_path: Path) -> None:
    path = planned(
        hexiopt, tmp_path, "cluster.inter_machine.bandwidth_gb_per_s=0.625", "constraints.exclude=[old:0,new]"
    )
    problem = read_plan(path).problem
    assert problem.cluster.inter_bandwidth_bytes_per_s == 0.625e9
    assert len(problem.usable_devices) == 3


def test_a_users_model(hexiopt: Run, tmp_path: Path) -> None:
    config = str(ROOT / "experiments" / "data" / "config.json")
    path = planned(hexiopt, tmp_path, "model=hf", f"model.path={config}", "model.num_hidden_layers=8")
    assert read_plan(path).problem.model.num_layers == 8


def test_overlay_merges_mappings_and_list_items() -> None:
    assert overlay({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    assert overlay([{"a": 1}, 2], {"0": {"a": 5}}) == [{"a": 5}, 2]
    assert overlay({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}
    with pytest.raises(InputError, match="not an index"):
        overlay([1], {"1": 2})


# ------------------------------------------------------------------------------------- errors

BAD_FILES = {
    "malformed.yaml": "name: [x\n",
    "tag.yaml": "name: !!python/object/apply:os.system ['touch pwned']\n",
    "anchor.yaml": "name: &a x\nmachines: *a\n",
    "nan.yaml": f"name: x\ninter_machine: {{bandwidth_gb_per_s: .nan}}\nmachines:\n  - {RTX}\n",
    "twice.yaml": "name: x\nname: y\n",
    "list.yaml": "- a\n",
    "empty.yaml": "",
    "latin.yaml": b"name: \xff\xfe\n",
    "v100.yaml": f"name: x\nmachines:\n  - {V100}\n",
    "gpu.yaml": f"name: x\nmachines:\n  - {RTX.replace('3090', '3091')}\n",
    "key.yaml": f"name: x\nmachines:\n  - {RTX.replace('num_gpus', 'gpus')}\n",
    "null.yaml": f"name: x\nmachines:\n  - {RTX.replace('12', 'null')}\n",
    "malformed.json": '{"model_type": "llama", ',
    "nan.json": '{"model_type": "llama", "hidden_size": NaN}',
    "moe.json": '{"model_type": "mixtral"}',
}
CLUSTER = ("model=tiny", "cluster=file", "solver=random")
MODEL = ("cluster=small_mixed", "model=hf", "solver=random")

BAD_COMMANDS: list[tuple[tuple[str, ...], str]] = [
    ((), "no verb"),
    (("fly",), "known: plan, compare, price, train, emulate, export, explain, validate, profile, discover, collect"),
    (("plan",), "cluster: is missing; choose"),
    (("plan", "cluster=small_mixed"), "model: is missing; choose"),
    (("plan", "cluster=smal_mixed", "model=tiny"), "did you mean small_mixed"),
    (("plan", *QUICK, "solver=nope"), "solver: 'nope' is not known; known: "),
    (("plan", *QUICK, "solver.name=nope"), "solver: 'nope' is not known; known: "),
    (("plan", *QUICK, "solver=megatron", "solver.defects=as_released"), "solver.defects: unknown key; known: "),
    (("plan", *QUICK, "solver=flashflex", "solver.defects=nope"), "known: as_published, as_released"),
    (("plan", *QUICK, "experiment=nope"), "experiment: 'nope' is not known"),
    (("plan", *QUICK, "hydra/launcher=nope"), "hydra/launcher: 'nope' is not known"),
    (("plan", *QUICK, "seed=abc"), "seed: 'abc' is not a whole number"),
    (("plan", *QUICK, "seed=1.5"), "not a whole number"),
    (("plan", *QUICK, "seed=-1"), "from 0 to"),
    (("plan", *QUICK, "seed=1,2"), "sweep over them with -m"),
    (("plan", *QUICK, "seed=range(3)"), "sweep over them with -m"),
    (("plan", *QUICK, "seed=${nope}"), "'nope' not found"),
    (("plan", *QUICK, "seed=???"), "seed: is missing"),
    (("plan", *QUICK, "sed=1"), "did you mean seed?"),
    (("plan", *QUICK, "solver.time_limit=1"), "did you mean time_limit_s?"),
    (("plan", *QUICK, "solver.time_limit_s=0"), "above 0"),
    (("plan", *QUICK, "solver.time_limit_s=nan"), "not finite"),
    (("plan", *QUICK, "solver.max_steps=0"), "at least 1"),
    (("plan", *QUICK, "workload=null"), "must be a string"),
    (("plan", *QUICK, "workload.seq_len=0"), "at least 1"),
    (("plan", *QUICK, "workload.precision=bf17"), "did you mean bf16?"),
    (("plan", *QUICK, "workload.schedule=interleave"), "did you mean interleaved?"),
    (("plan", *QUICK, "space.tp_degrees=some"), "known: all, powers_of_two"),
    (("plan", *QUICK, "space.uneven_tp=maybe"), "'maybe' is not true or false"),
    (("plan", *QUICK, "constraints.exclude=[olds]"), "did you mean old?"),
    (("plan", *QUICK, "constraints.exclude=5"), "is not a list"),
    (("plan", *QUICK, "constraints.num_stages=9"), "at most 4"),
    (("plan", *QUICK, "cluster.inter_machine.bandwidth_gb_per_s=nan"), "not finite"),
    (("plan", *QUICK, "cluster.inter_machine.bandwidth_gb_per_s=-1"), "above 0"),
    (("plan", *QUICK, "cluster.inter_machine.bandwith_gb_per_s=1"), "unknown key; did you mean bandwidth"),
    (("plan", *QUICK, "cluster.machines.9.num_gpus=3"), "cannot be merged"),
    (("plan", *QUICK, "model.hidden_size=0"), "model=tiny: hidden_size"),
    (("plan", *QUICK, "plan=x.json"), "does not apply to plan"),
    (("plan", *QUICK, "a b"), "write key=value"),
    (("plan", *QUICK, "seed=[1,"), "write key=value"),
    (("plan", *QUICK, "+seed=1"), "remove the +"),
    (("plan", *QUICK, "~nope"), "does not exist"),
    (("plan", *QUICK, "--nope"), "unrecognized arguments"),
    (("plan", *QUICK, "--config-dir", "nope"), "is not a folder"),
    (("plan", *TINY, "hydra.run.dir=/proc/nope"), "/proc/nope"),
    (("plan", *CLUSTER), "cluster.path: is missing"),
    (("plan", *CLUSTER, "cluster.path=nope.yaml"), "nope.yaml: the file does not exist"),
    (("plan", *CLUSTER, "cluster.path=."), "is not a regular file"),
    (("plan", *CLUSTER, "cluster.path=/dev/zero"), "is not a regular file"),
    (("plan", *CLUSTER, "cluster.path=7"), "7 is not a path"),
    (("plan", *CLUSTER, "cluster.path=huge.yaml"), "larger than 1 MiB"),
    (("plan", *CLUSTER, "cluster.path=malformed.yaml"), "malformed.yaml, line 2"),
    (("plan", *CLUSTER, "cluster.path=tag.yaml"), "tag"),
    (("plan", *CLUSTER, "cluster.path=anchor.yaml"), "anchors"),
    (("plan", *CLUSTER, "cluster.path=nan.yaml"), "inter_machine.bandwidth_gb_per_s: nan is not finite"),
    (("plan", *CLUSTER, "cluster.path=twice.yaml"), "appears twice"),
    (("plan", *CLUSTER, "cluster.path=list.yaml"), "not a mapping"),
    (("plan", *CLUSTER, "cluster.path=empty.yaml"), "not a mapping"),
    (("plan", *CLUSTER, "cluster.path=latin.yaml"), "UTF-8"),
    (("plan", *CLUSTER, "cluster.path=v100.yaml"), "choose workload.precision=fp16"),
    (("plan", *CLUSTER, "cluster.path=gpu.yaml"), "did you mean rtx_3090"),
    (("plan", *CLUSTER, "cluster.path=key.yaml"), "num_gpus"),
    (("plan", *CLUSTER, "cluster.path=null.yaml"), "unknown (null)"),
    (("plan", *MODEL), "model.path: is missing"),
    (("plan", *MODEL, "model.path=malformed.json"), "malformed.json: malformed JSON"),
    (("plan", *MODEL, "model.path=nan.json"), "NaN is not a number of JSON"),
    (("plan", *MODEL, "model.path=moe.json"), "mixtral"),
    (("price",), "plan: is missing"),
    (("price", "plan=nope.json"), "nope.json: the file does not exist"),
    (("price", "plan=malformed.json"), "malformed JSON"),
    (("price", "plan=moe.json"), "format: is missing"),
    (("explain", "plan=nope.json"), "does not exist"),
    (("compare", *QUICK, "compare.solvers=[]"), "names no solver"),
    (("compare", *QUICK, "compare.solvers=[nope]"), "'nope' is not known"),
    (("compare", *QUICK, "compare.solvers=[random,random]"), "appears twice"),
    (("collect",), "there is no sweep in multirun/"),
    (("collect", "collect.folders=[nope]"), "holds no status.json"),
]


@pytest.mark.parametrize(("command", "said"), BAD_COMMANDS, ids=[" ".join(c[-1:]) or "none" for c, _ in BAD_COMMANDS])
def test_bad_input_is_one_line_and_writes_nothing(
    hexiopt: Run, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    for name, content in BAD_FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(100 * 2**20)
    before = sorted(tmp_path.rglob("*"))
    assert said in refused(hexiopt(*command))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_folder_of_the_user_stays(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    refused(hexiopt("plan", *TINY, "hydra.run.dir=mine", "seed=-1"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_unexpected_exits_1(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(plan, "solver_of", broken)
    ran = hexiopt("plan", *QUICK)
    assert ran.code == 1
    assert ran.err == "hexiopt: unexpected RuntimeError: two lines; set HEXIOPT_DEBUG=1 for the traceback\n"
    monkeypatch.setenv("HEXIOPT_DEBUG", "1")
    ran = hexiopt("plan", *QUICK)
    assert ran.code == 1
    assert "Traceback" in ran.err


def test_a_failed_picture_leaves_no_half_of_it(hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        Path(args[-1]).write_bytes(b"half")
        raise RuntimeError("no ink")

    monkeypatch.setattr("hexiopt.report.figure.draw_plan", broken)
    assert hexiopt("plan", *TINY, "hydra.run.dir=out").code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]


# ------------------------------------------------------------------------------- the program


def test_help_and_version(hexiopt: Run) -> None:
    ran = hexiopt("--help")
    assert ran.code == 0
    assert all(verb in ran.out for verb in ("plan", "compare", "price", "explain", "collect"))
    assert hexiopt("--version").out.startswith("hexiopt ")
    assert hexiopt("plan", "--version").out.startswith("hexiopt ")
    ran = hexiopt("plan", "--help")
    assert ran.code == 0
    for word in ("hexiscale_setting_1", "llama2_7b", "portfolio", "time_limit_s"):
        assert word in ran.out
    ran = hexiopt("plan", "--cfg", "job", *QUICK)
    assert ran.code == 0
    assert "seed: 0" in ran.out


def test_shell_completion(hexiopt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "complete -o nospace" in hexiopt("plan", "-sc", "install=bash").out
    for line, completed in {
        "hexiopt pr": ["price", "profile"],
        "hexiopt plan model=llama3": ["model=llama3_70b", "model=llama3_8b"],
        "hexiopt plan solver.ti": ["solver.time_limit_s="],
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert hexiopt("-sc", "query=bash").out.split() == completed


def test_help_starts_without_hydra(tmp_path: Path) -> None:
    code = "import sys; from experiments.cli import main; main(['--help']); assert 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_process_exits_with_the_code(tmp_path: Path) -> None:
    process = in_process("plan", "cluster=nope", "model=tiny", cwd=tmp_path)
    out, err = process.communicate(timeout=600)
    refused(Ran(process.returncode, out, err))
    assert list(tmp_path.iterdir()) == []
    verb = subprocess.run(
        [sys.executable, "-m", "experiments.price"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "plan: is missing" in refused(Ran(verb.returncode, verb.stdout, verb.stderr))


def test_ctrl_c_keeps_the_best_plan_so_far(tmp_path: Path) -> None:
    ran = interrupted("plan", "report=false", "hydra.run.dir=out", cwd=tmp_path)
    assert (ran.code, ran.err) == (130, "hexiopt: interrupted; the best plan so far is kept\n")
    assert (tmp_path / "out" / "plan.json").is_file()


def test_ctrl_c_ends_a_sweep(tmp_path: Path) -> None:
    ran = interrupted("plan", "-m", "seed=0,1", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert (ran.code, ran.err) == (130, "hexiopt: interrupted\n")
    assert not list(tmp_path.rglob("status.json"))


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    process = in_process("explain", *TINY, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=600) == 0, err
    assert err == ""


def test_worst_code_of_a_sweep() -> None:
    assert worst([0, 3, 0]) == 3
    assert worst([3, 2, 0]) == 2
    assert worst([3, 2, 1, 0]) == 1
    assert worst([]) == 0


def test_interrupt_outside_the_main_thread_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with common.interrupt.caught():
        pass
    assert signal.getsignal(signal.SIGINT) is before
