"""Sweeps: a grid in processes that goes on where it was killed, loses nothing and runs nothing twice."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.sweep_files import read_status
from hexiopt.numbers.frameworks import default_framework
from hexiopt.solving import Budget
from hexiopt.solving.clock import cpu_time, search_clock_s
from hexiopt.study import workers
from hexiopt.study.jobs import SweepJob, code_sha256, job_from_dict
from hexiopt.study.running import Interrupt
from hexiopt.study.sweep import run_jobs
from tests.conftest import ROOT, Run
from tests.solvers.stranger import install

STRANGER = '''
import os, random, signal, time
from dataclasses import dataclass
from pathlib import Path
from hexiopt.solving import Capabilities
from solvers.heuristics.random_partition import RandomPartition

LOG = Path(os.environ["SWEEP_LOG"])

@dataclass(frozen=True)
class Logged:
    """Random plans; writes down when a search begins."""

    mood: str = "well"
    name = "logged"
    capabilities = Capabilities()

    def solve(self, problem, budget, *, seed=0, pricer=None, on_progress=None):
        with LOG.open("a") as log:
            log.write(f"begins {seed} {os.getpid()}\\n")
        if self.mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood == "fails":
            raise RuntimeError("no mood")
        time.sleep(float(os.environ.get(f"SWEEP_PAUSE_{seed}_S") or os.environ.get("SWEEP_PAUSE_S", "0")))
        result = RandomPartition().solve(problem, budget, seed=seed)
        print("this is no answer")
        return result
'''
OVER = {"seed": range(2), "workload.seq_len": [128, 256]}
MANY = """
import signal, sys, hexiopt as hx
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
problem = hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=8, seq_len=128))
frame = hx.sweep(problem, {"seed": range(24)}, sys.argv[1], solver="logged", max_steps=3, processes=2, progress=False)
print(frame.title)
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stranger's solver `logged`, also for the processes that this one starts."""
    install(monkeypatch, tmp_path / "site", "logged_planner", STRANGER, logged="Logged")
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def problem() -> hx.Problem:
    return hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=8, seq_len=128))


def run_counts(log: Path) -> Counter[str]:
    """How often each seed's search has begun."""
    return Counter(line.split()[1] for line in log.read_text().splitlines()) if log.exists() else Counter()


def sweep(problem: hx.Problem, folder: Path, over: Any = OVER, **more: Any) -> hx.Frame:
    return hx.sweep(problem, over, folder, **{"solver": "logged", "max_steps": 3, "processes": 1, **more})


def test_a_row_a_job_in_order_as_if_solved_one_by_one(problem: hx.Problem, log: Path, tmp_path: Path) -> None:
    rows = list(sweep(problem, tmp_path / "jobs", processes=2))
    assert [(row["seed"], row["workload.seq_len"]) for row in rows] == [(s, t) for s in range(2) for t in (128, 256)]
    assert {row["exit_code"] for row in rows} == {0}
    longer = problem.replace(workload=problem.workload.replace(seq_len=256))
    alone = hx.solve(longer, "random", 600, seed=1, max_steps=3)
    assert rows[-1]["result.step_time_s"] == alone.objective
    assert hx.load_plan(Path(rows[-1]["folder"]) / "plan.json") == alone.plan


def test_what_is_done_is_not_run_again(problem: hx.Problem, log: Path, tmp_path: Path) -> None:
    first = sweep(problem, tmp_path / "jobs")
    assert sum(run_counts(log).values()) == 4
    assert sweep(problem, tmp_path / "jobs") == first
    assert sum(run_counts(log).values()) == 4
    sweep(problem, tmp_path / "jobs", OVER | {"seed": range(3)})
    assert sum(run_counts(log).values()) == 6
    sweep(problem, tmp_path / "jobs", max_steps=4)
    assert sum(run_counts(log).values()) == 10


def test_failures_are_counted_and_run_again(problem: hx.Problem, log: Path, tmp_path: Path) -> None:
    over = {"solver.mood": ["well", "dies", "fails"], "space.num_stages": [5], "constraints.num_stages": [1, 99]}
    frame = sweep(problem, tmp_path / "jobs", over)
    assert frame["exit_code"] == (0, 2, 1, 2, 1, 2)
    assert frame["message"][2] == "its process ended with -9 before the job did"
    assert frame["message"][4] == "unexpected RuntimeError: no mood"
    assert "num_stages: 99 is more than the 4 layers" in frame["message"][1]
    assert frame.title == "6 jobs: 1 done, 3 refused, 2 failed"
    sweep(problem, tmp_path / "jobs", over)
    assert sum(run_counts(log).values()) == 5


@pytest.mark.slow
def test_many_jobs_killed_twice_lose_nothing_and_run_nothing_twice(log: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    environment = {**os.environ, "PYTHONPATH": path, "SWEEP_PAUSE_S": "0.1"}
    command = [sys.executable, "-c", MANY, str(tmp_path / "jobs")]

    def done_seeds() -> set[str]:
        statuses = [json.loads(path.read_text()) for path in tmp_path.glob("jobs/*/status.json")]
        return {status["overrides"][0].removeprefix("seed=") for status in statuses if status["exit_code"] == 0}

    finished_seeds = set[str]()
    for number, most in ((signal.SIGKILL, 4), (signal.SIGINT, 12)):
        before, runs = done_seeds(), run_counts(log)
        running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        while len(done_seeds()) < most:
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(number)
        stderr = running.communicate()[1]
        assert running.returncode != 0
        assert before <= done_seeds()
        assert {seed: run_counts(log)[seed] for seed in before} == {seed: runs[seed] for seed in before}
        finished_seeds = done_seeds()
    assert f"{len(finished_seeds)} of 24 jobs are done in" in stderr
    assert "call sweep again to resume" in stderr
    runs = run_counts(log)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "24 jobs: 24 done"
    assert done_seeds() == {str(seed) for seed in range(24)}
    assert {seed: run_counts(log)[seed] for seed in finished_seeds} == {seed: runs[seed] for seed in finished_seeds}
    assert sum(run_counts(log).values()) - 24 <= 2  # what two processes ran when they were killed; Ctrl-C loses nothing


@pytest.mark.slow
def test_ctrl_c_waits_for_every_running_job(log: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    running = subprocess.Popen(
        [sys.executable, "-c", MANY, str(tmp_path / "jobs")],
        env={**os.environ, "PYTHONPATH": path, "SWEEP_PAUSE_S": "0.1", "SWEEP_PAUSE_0_S": "4"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not {"0", "3"} <= run_counts(log).keys():
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    stderr = running.communicate(timeout=60)[1]
    assert f"{len(run_counts(log))} of 24 jobs are done in" in stderr


@pytest.mark.slow
def test_ctrl_c_keeps_the_running_jobs_best_plan(log: Path, tmp_path: Path) -> None:
    code = MANY.replace('"logged", max_steps=3', '"local_search", time_limit_s=600')
    running = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "jobs")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(6.0)  # two searches are under way; on a slow machine they have not begun, and there is nothing to keep
    running.send_signal(signal.SIGINT)
    stderr = running.communicate(timeout=60)[1]
    assert "0 of 24 jobs are done in" in stderr
    for status in tmp_path.glob("jobs/*/status.json"):
        assert json.loads(status.read_text())["exit_code"] == 130
        assert hx.load_plan(status.parent / "plan.json").cost.fits


ISOLATED = """
import signal, sys, hexiopt as hx
from pathlib import Path
from hexiopt.solving import Budget
from hexiopt.study.jobs import SweepJob
from hexiopt.study.sweep import run_jobs
signal.signal(signal.SIGINT, signal.default_int_handler)
problem = hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=8, seq_len=128))
jobs = [SweepJob((f"seed={seed}",), problem, "portfolio", seed, Budget(600.0)) for seed in range(3)]
run_jobs(jobs, Path(sys.argv[1]), 1, False, isolated=True)
"""


def processes_of(folder: Path) -> set[int]:
    """The processes whose command line names a folder."""
    lines = [(path.parent.name, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return {int(pid) for pid, line in lines if str(folder).encode() in line}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_isolated_jobs_end_with_their_sweep(tmp_path: Path, number: int) -> None:
    """At Ctrl-C the one that runs keeps its best plan; where the sweep is killed, nothing goes on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-c", ISOLATED, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    while len(processes_of(tmp_path)) < 3:  # the sweep, its worker, and the job's fork
        time.sleep(0.1)
    time.sleep(3.0)
    running.send_signal(number)
    running.communicate(timeout=60)
    codes = [json.loads(path.read_text())["exit_code"] for path in tmp_path.glob("*/status.json")]
    assert codes == ([130] if number == signal.SIGINT else [])
    deadline_s = time.monotonic() + 10.0
    while processes_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not processes_of(tmp_path)


def test_it_reads_what_a_multirun_wrote(hexiopt: Run, tmp_path: Path) -> None:
    base = ["cluster=small_mixed", "model=tiny", "solver=random", "solver.max_steps=5", "bound.time_limit_s=0"]
    assert (
        hexiopt("plan", "-m", *base, "seed=0,1", "workload.seq_len=128,100000000000", "hydra.sweep.dir=many").code == 2
    )
    frame = hx.read_sweep("many")
    assert frame["seed"] == (0, 0, 1, 1)
    assert frame["exit_code"] == (0, 2, 0, 2)
    assert frame["result.step_time_s"][0] > 0
    with pytest.raises(hx.InputError, match=r"'nowhere' holds no status.json"):
        hx.read_sweep("nowhere")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"work.seq_len": [1]}, "over: 'work.seq_len': unknown key; "),
        ({"workload.sq_len": [1]}, "over: workload.sq_len: unknown key; did you mean seq_len?"),
        ({"seed": 3}, "over: seed: 3 is not a list; write [3]"),
        ({"seed": "12"}, "over: seed: '12' is not a list; write ['12']"),
        ({"seed": []}, "over: seed: is empty; "),
        ({"seed": [-1]}, "seed: -1 is out of range; "),
        ({"solver.tau": [object]}, "over: solver.tau: <class 'object'> is not a plain value; "),
    ],
)
def test_wrong_grids_are_one_line(problem: hx.Problem, tmp_path: Path, over: Any, message: str) -> None:
    with pytest.raises(hx.InputError) as caught:
        sweep(problem, tmp_path / "jobs", over)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "jobs").exists()


def test_a_job_is_known_by_what_decides_its_plan(problem: hx.Problem) -> None:
    def key(**stated: Any) -> str:
        base: dict[str, Any] = {"overrides": (), "problem": problem, "solver": "random", "seed": 0}
        return SweepJob(**{**base, "budget": Budget(1.0), **stated}).key

    same = key()
    assert key(overrides=("seed=0",)) == same
    others = [key(seed=1), key(solver="portfolio"), key(budget=Budget(2.0)), key(options={"tau": 1})]
    others += [key(pricer="tests.strategies:x"), key(judge="tests.strategies:x"), key(cpu_time=True)]
    plan = hx.solve(problem, "random", 60, max_steps=2).found()
    others += [key(start=plan), key(before=plan)]
    assert len({same, *others}) == 10
    jobs = [SweepJob((), problem, "random", 0, Budget(1.0), judge="a:b", cpu_time=True, before=plan)]
    assert [job_from_dict(json.loads(json.dumps(job.to_dict()))) for job in jobs] == jobs


# --------------------------------------------------- what else a job carries


def widest(problem: hx.Problem, plan: hx.Plan) -> dict[str, float]:
    """A judge: the number of pipelines, and what is no number."""
    return {"pipelines": float(len(plan.pipelines)), "nothing": math.nan}


def slower(problem: hx.Problem) -> PlanPricer:
    """A cost model of a framework that is not ours."""
    return PlanPricer(problem, replace(default_framework(), layer_host_s=0.01))


def test_a_judge_says_more_of_each_plan(problem: hx.Problem, tmp_path: Path) -> None:
    [row] = hx.sweep(problem, {"seed": [0]}, tmp_path, solver="random", max_steps=3, judge=widest, progress=False)
    assert row["judge.pipelines"] == row["num_pipelines"] >= 1
    assert row["judge.nothing"] is None
    assert row["result.cpu_s"] > 0


def test_a_function_of_a_module_prices(problem: hx.Problem, tmp_path: Path) -> None:
    over = {"pricer": [None, slower]}
    _, theirs = hx.sweep(problem, over, tmp_path, solver="random", max_steps=3, progress=False)
    assert theirs["exit_code"] == 0, theirs["message"]
    plan = hx.load_plan(Path(theirs["folder"]) / "plan.json")
    assert theirs["pricer"] == "slower"
    assert theirs["result.step_time_s"] == pytest.approx(slower(problem).price(plan).step_time_s)
    assert theirs["result.step_time_s"] > PlanPricer(problem).price(plan).step_time_s


@pytest.mark.parametrize("argument", ["pricer", "judge"])
def test_functions_that_no_process_imports_are_refused(problem: hx.Problem, tmp_path: Path, argument: str) -> None:
    with pytest.raises(hx.InputError, match=f"^{argument}: .*put it into a file of its own"):
        hx.sweep(problem, {"seed": [0]}, tmp_path / "jobs", **{argument: lambda *_: {}})
    assert not (tmp_path / "jobs").exists()


def test_the_bound_is_a_job(problem: hx.Problem, tmp_path: Path) -> None:
    over = {"solver": ["random", "lower_bound"]}
    plan, bound = hx.sweep(problem, over, tmp_path, time_limit_s=0.3, cpu_time=True, progress=False)
    assert bound["exit_code"] == plan["exit_code"] == 0
    assert bound["result.step_time_s"] is None
    compute_s = hx.lower_bound(problem, time_limit_s=0)
    assert compute_s <= bound["result.lower_bound_s"] <= plan["result.step_time_s"]


def test_cpu_time_is_the_clock_of_a_search(problem: hx.Problem) -> None:
    """While it sleeps, no CPU time passes."""
    with cpu_time():
        began_s = search_clock_s()
        time.sleep(0.2)
        assert search_clock_s() - began_s < 0.1
    began_s = search_clock_s()
    time.sleep(0.2)
    assert search_clock_s() - began_s >= 0.2


def test_a_job_replaces_a_plan(problem: hx.Problem, tmp_path: Path) -> None:
    before = hx.solve(problem, "portfolio", 60, max_steps=10).found()
    changed = problem.replace(space=problem.space.replace(exclude=("old:1",)))
    job = SweepJob((), changed, "portfolio", 0, Budget(60.0, 10), before=before)
    assert job.run(tmp_path, lambda _: True) == 0, read_status(tmp_path / job.key)
    plan = hx.load_plan(tmp_path / job.key / "plan.json")
    names = {changed.cluster.device_name(device) for device in plan.devices()}
    assert "old:1" not in names
    again = hx.replan(before, changed, max_steps=10, time_limit_s=60, restart_s=0, checkpoint_gb_per_s=None)
    assert plan.cost.step_time_s == pytest.approx(again.replacements[-1].cost.step_time_s)


def test_isolated_jobs_crash_and_end_alone(
    problem: hx.Problem, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_PAUSE_2_S", "30")
    moods = ("well", "dies", "well")
    jobs = [
        SweepJob((f"seed={k}",), problem, "logged", k, Budget(1.0, 3), {"mood": mood}) for k, mood in enumerate(moods)
    ]
    monkeypatch.setattr(SweepJob, "longest_s", property(lambda job: 1.0 if job.seed == 2 else 60.0))
    interrupt = Interrupt()
    assert [workers.run_in_fork(job, tmp_path / "jobs", interrupt) for job in jobs] == [0, 1, 3]
    statuses = [read_status(tmp_path / "jobs" / job.key) for job in jobs]
    assert [status["measured"]["status"] for status in statuses] == ["feasible", "failed", "overran"]
    assert statuses[1]["message"] == "its process ended with -9 before the job did"
    assert statuses[2]["message"].startswith("ended after 1 s of 1 s")
    assert len({line.split()[2] for line in log.read_text().splitlines()} | {str(os.getpid())}) == 4
    run_jobs(jobs[:2], tmp_path / "more", 1, False, isolated=True)
    assert hx.read_sweep(tmp_path / "more")["exit_code"].count(0) == 1


def test_other_code_runs_jobs_again(problem: hx.Problem, log: Path, tmp_path: Path) -> None:
    job = SweepJob(("seed=0",), problem, "logged", 0, Budget(1.0, 3))
    for code, runs in ((None, 1), (None, 1), (code_sha256(), 1), ("other", 2)):
        run_jobs([job], tmp_path / "jobs", 1, False, code=code)
        assert sum(run_counts(log).values()) == runs


def test_jobs_that_keep_most_cores_busy_come_first(
    problem: hx.Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, set[str]]] = []

    class Noted:
        def __init__(self, jobs: Sequence[SweepJob], folder: Path, count: int, *_: object, **__: object) -> None:
            batches.append((count, {job.solver for job in jobs}))
            for job in jobs:
                job.finish(folder, 0, "")

        def run(self) -> None: ...

    monkeypatch.setattr("hexiopt.study.sweep.usable_cores", lambda: 2)
    monkeypatch.setattr("hexiopt.study.sweep.JobProcesses", Noted)
    solvers = ("random", "portfolio", "hexiscale", "cp_sat", "lower_bound")
    run_jobs([SweepJob((), problem, name, 0, Budget(1.0)) for name in solvers], tmp_path, None, False)
    assert batches == [(1, {"portfolio", "cp_sat", "lower_bound"}), (2, {"random", "hexiscale"})]
