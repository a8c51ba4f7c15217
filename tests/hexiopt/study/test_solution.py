"""What `solve` gives back: it prints, draws, saves and shows itself; and Ctrl-C keeps the best so far."""

import io
import math
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import hexiopt as hx
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.report.progress import SearchProgress
from hexiopt.solving import Budget, Progress
from hexiopt.study.running import Interrupt, in_notebook
from solvers.registry import make_solver
from tests.conftest import ROOT

LONG_S = 600.0


@pytest.fixture(scope="module")
def problem() -> hx.Problem:
    return hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=32, seq_len=256))


@pytest.fixture(scope="module")
def result(problem: hx.Problem) -> hx.Solution:
    return hx.solve(problem, "local_search", LONG_S, max_steps=60, constraints={"num_stages": 2})


def test_it_prints_what_counts_in_ten_lines(result: hx.Solution) -> None:
    lines = str(result).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 120
    labels = {line[:12].strip() for line in lines[1:]}
    assert {"status", "step time", "throughput", "MFU", "lower bound", "plan", "memory"} <= labels
    assert len(repr(result)) < 100


def test_without_a_plan_it_says_why(problem: hx.Problem) -> None:
    hopeless = problem.replace(model=problem.model.replace(num_layers=10_000, hidden_size=8192, head_dim=2048))
    result = hx.solve(hopeless, "random", LONG_S, max_steps=1)
    assert result.plan is None
    assert f"reason       {result.reason}" in str(result)
    for asks in (result.plot, result.found, lambda: hx.plot.timeline(result)):
        with pytest.raises(hx.InputError, match="plan: random found none"):
            asks()
    assert result._repr_html_().startswith("<pre>")  # type: ignore[union-attr]


def test_parts_of_the_step_add_up(result: hx.Solution) -> None:
    assert result.cost is not None
    parts = result.cost.breakdown()
    assert math.isclose(sum(parts["seconds"]), result.cost.step_time_s, rel_tol=1e-9)
    assert math.isclose(sum(parts["share"]), 1.0, rel_tol=1e-9)
    assert "compute" in parts["part"]


def test_it_is_a_result_its_plan_a_plan_and_its_cost_a_cost(problem: hx.Problem, result: hx.Solution) -> None:
    plan = result.found()
    plain = Plan(plan.pipelines, plan.schedule, plan.sharding)
    cost = PlanPricer(problem).price(plain)
    assert (plan, hash(plan)) == (plain, hash(plain))
    assert plain == plan
    assert (result.cost, hash(result.cost)) == (cost, hash(cost))
    assert cost == result.cost
    assert isinstance(result.cost, Cost)
    assert plan.cost == cost
    again = pickle.loads(pickle.dumps(result))
    assert (again, again.plan, again.plan.solver["name"]) == (result, plan, "local_search")


def test_its_problem_has_the_constraints(problem: hx.Problem, result: hx.Solution) -> None:
    assert result.problem.space == hx.Space(num_stages=2)
    assert {len(pipeline.stages) for pipeline in result.found().pipelines} == {2}
    with pytest.raises(hx.InputError, match=r"Space.num_stage: unknown field; did you mean num_stages"):
        hx.solve(problem, constraints={"num_stage": 2})


def test_a_bound_may_be_raised(problem: hx.Problem, result: hx.Solution) -> None:
    assert result.cost is not None
    raised = result.above(result.cost.step_time_s)
    assert (raised.status, raised.gap, raised.found().solver["status"]) == ("optimal", 0.0, "optimal")
    assert result.above(0.0) == result


def test_stages_are_a_table(result: hx.Solution) -> None:
    rows = list(result.found().stages())
    assert [row["num_layers"] for row in rows[:2]] == [s.num_layers for s in result.found().pipelines[0].stages]
    assert all(0.0 < row["memory_gib"] <= row["limit_gib"] for row in rows)


def shown_values(problem: hx.Problem, result: hx.Solution) -> list[Any]:
    cluster = problem.cluster
    parts = [problem, cluster, cluster.machines[0], problem.model, problem.workload, problem.space]
    return [*parts, result, result.plan, result.cost, hx.solvers()]


def test_everything_shows_itself_in_a_notebook(problem: hx.Problem, result: hx.Solution) -> None:
    for value in shown_values(problem, result):
        page = value._repr_html_()
        assert page.startswith("<"), value
        assert page.count("<table>") == page.count("</table>")
        assert len(repr(value).splitlines()[0]) <= 250
    assert "data:image/png;base64," in result.found()._repr_html_()  # type: ignore[operator]
    assert "rtx_4090" in problem._repr_html_()  # type: ignore[operator]


def test_everything_is_changed_by_a_copy(problem: hx.Problem, result: hx.Solution) -> None:
    longer = problem.replace(workload=problem.workload.replace(seq_len=512))
    assert (problem.workload.seq_len, longer.workload.seq_len) == (256, 512)
    for value in shown_values(problem, result)[:-1]:
        assert value.replace() == value
        with pytest.raises(hx.InputError, match="unknown field"):
            value.replace(nothing=1)
        with pytest.raises(AttributeError):
            value.anything = 1
    with pytest.raises(hx.InputError, match="problem: model: 'tiny' is not a ModelSpec; give hexiopt"):
        problem.replace(model="tiny")


PANELS: list[Callable[..., Any]] = [hx.plot.timeline, hx.plot.memory, hx.plot.layers, hx.plot.cluster]


@pytest.mark.parametrize("draw", PANELS)
def test_panels_are_drawn_on_given_axes_with_room_for_their_labels(
    draw: Callable[..., Any], result: hx.Solution
) -> None:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 3)).subplots()
    assert draw(result, ax=axes) is axes
    assert axes.get_position().x0 * 8 >= 0.15
    plan_axes = draw(result.plan)
    assert plan_axes.figure._repr_png_().startswith(b"\x89PNG")
    assert not any(text.get_text().startswith("(") for text in plan_axes.texts)
    with pytest.raises(hx.InputError, match="plot: 3 is neither a result nor a plan"):
        draw(3)


def test_a_result_is_a_picture(result: hx.Solution) -> None:
    assert result.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


INTERRUPTED = """
import os, signal, threading, hexiopt as hx
from hexiopt.solving import Progress
from hexiopt.report.progress import SearchProgress

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

def press(self, progress):  # once there is a plan
    if progress.best_s < float("inf"):
        os.kill(os.getpid(), signal.SIGINT)
    return True

SearchProgress.__call__ = press
problem = hx.Problem(hx.cluster("hexiscale_setting_2"), hx.model("llama2_7b"))
result = hx.solve(problem, "SOLVER", time_limit_s=600, progress=True)
assert result.plan is not None and result.runtime_s < 300, result
print(result.status)
compared = hx.compare(problem, ["SOLVER", "random"], seeds=2, time_limit_s=600, progress=True)
print(len(compared.results), compared.best.plan is not None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["local_search", "portfolio"])
def test_ctrl_c_gives_the_best_so_far(solver: str) -> None:
    code = INTERRUPTED.replace("SOLVER", solver)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["feasible", "1 True"]


def test_an_interrupt_inside_the_context_of_another_is_that_one() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    outer = Interrupt()
    with outer.caught(), Interrupt().caught() as inner:
        assert inner is outer
        signal.raise_signal(signal.SIGINT)
        assert outer.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_ctrl_c_ends_a_bound(problem: hx.Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_ctrl_c(*_: object) -> float:
        signal.raise_signal(signal.SIGINT)
        return 1e9

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    monkeypatch.setattr("hexiopt.study.price.bound_under_s", press_ctrl_c)
    bound_s = hx.lower_bound(problem, 60)
    monkeypatch.undo()
    signal.signal(signal.SIGINT, before)
    assert bound_s == hx.lower_bound(problem, 0)


def test_progress_in_a_notebook_overwrites_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr("hexiopt.report.progress.NOTEBOOK_INTERVAL_S", 0.0)
    with SearchProgress(1000, Console(file=io.StringIO()), notebook=True) as listen:
        for steps in (1, 2):
            assert listen(Progress("mine", 1.0, 10.0, steps, 0.5, 0.25))
    lines = told.getvalue().split("\r")
    assert lines[1].startswith("mine: 1 of 10 s · 1 step")
    assert "gap 50.0%" in lines[2]
    assert not lines[-1]
    assert set(lines[-2]) == {" "}


def test_a_class_or_an_object_is_a_solver_too(problem: hx.Problem) -> None:
    by_name = hx.solve(problem, "random", LONG_S, max_steps=20, seed=4)
    instance = make_solver("random")
    for solver in (instance, type(instance.solver), hx.solver("random")):  # type: ignore[attr-defined]
        assert hx.solve(problem, solver, LONG_S, max_steps=20, seed=4).plan == by_name.plan
    with pytest.raises(hx.InputError, match="is already constructed"):
        hx.solve(problem, instance, tau=3)
    with pytest.raises(hx.InputError, match="problem: 3 is not a Problem"):
        hx.solve(3)  # type: ignore[arg-type]


def test_solvers_are_a_table() -> None:
    known = hx.solvers()
    assert known["hexiseq"].capabilities.sequence == "only"
    assert known["sailor"].parameters["objective"] == "time"
    assert "portfolio" in known
    rows = {row["name"]: row for row in known.frame}
    assert rows["sequence_exact"]["max_devices"] == 6
    assert rows["sailor"]["parameters"] == "top_k=None, objective='time', deadline_s=None"
    assert re.search(r"^portfolio +planner", repr(known), re.MULTILINE)
    with pytest.raises(hx.InputError, match="did you mean portfolio"):
        known["portfoli"]


def test_another_cost_model_steers_the_search(problem: hx.Problem, tmp_path: Path) -> None:
    class Twice:
        """A step takes twice as long."""

        def __init__(self, problem: hx.Problem) -> None:
            self._ours = PlanPricer(problem)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ours, name)

        def price(self, plan: Plan, pipelines: Any = None) -> Cost:
            cost = self._ours.price(plan, pipelines)
            return Cost(
                **{name: getattr(cost, name) for name in Cost.__slots__} | {"step_time_s": 2 * cost.step_time_s}
            )

    result = hx.solve(problem, "random", LONG_S, max_steps=20, pricer=Twice)
    assert result.cost is not None
    assert result.cost == result.found().cost
    assert result.cost.step_time_s == 2 * hx.price(problem, result.found()).step_time_s
    assert (result.bound_s, result.gap, result.found().solver["pricer"]) == (0.0, 1.0, "Twice")
    assert "cost model   Twice" in str(result)
    assert "lower bound" not in str(result)
    with pytest.raises(hx.InputError, match="is priced by Twice"):
        result.plot()
    result.found().save(tmp_path / "plan.json")
    read = hx.load_plan(tmp_path / "plan.json")  # from now on the plan is ours to price
    assert read.cost == hx.price(problem, result.found())
    assert not {"pricer", "status", "lower_bound_s", "gap"} & set(read.solver)
    with pytest.raises(hx.InputError, match="pricer: PlanPricer was made for another problem"):
        hx.solve(problem, pricer=PlanPricer(problem.replace(workload=problem.workload.replace(global_batch=8))))
    with pytest.raises(hx.InputError, match="only our own cost model has"):
        result.cost.breakdown()
    assert result.cost._repr_html_() == f"<pre>{result.cost!r}</pre>"
    with pytest.raises(hx.InputError, match="pricer: 'nobody' is not known"):
        hx.solve(problem, pricer="nobody")


def test_the_same_steps_give_the_same_plan_as_the_solver_alone(problem: hx.Problem) -> None:
    alone = make_solver("local_search").solve(problem, Budget(LONG_S, 30), seed=1)
    assert hx.solve(problem, "local_search", LONG_S, seed=1, max_steps=30).plan == alone.plan


@pytest.mark.parametrize(("shell", "watched"), [(None, False), ("terminal", False), ("kernel", True)])
def test_a_notebook_is_known_by_its_kernel(shell: str | None, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(**({shell: object()} if shell else {}))
    module = SimpleNamespace(get_ipython=lambda: made if shell else None)
    monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
    assert in_notebook() is watched
