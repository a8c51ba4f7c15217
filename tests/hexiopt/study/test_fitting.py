"""What fits: every limit comes with a plan that proves it, and a refusal says whether it is proved."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.cost.cost import violations
from hexiopt.files.plan_file import read_plan
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Capabilities, OnProgress, Pricer
from hexiopt.solving.result import Result, Status
from hexiopt.study.bisection import largest
from hexiopt.testing import problems
from tests.conftest import Run

SMALL = hx.Problem(
    hx.Cluster.of({"rtx_4090": 2, "rtx_3090": 2}, inter_gb_per_s=5),
    hx.model("llama2_7b").replace(num_layers=4),
    hx.Workload(global_batch=8, seq_len=1024),
)


@given(
    limit=st.integers(0, 5000),
    first=st.integers(1, 6000),
    grain=st.sampled_from([1, 7, 128]),
    precision=st.sampled_from([0.0, 0.03]),
)
def test_bisection_ends_between_what_fits_and_what_does_not(
    limit: int, first: int, grain: int, precision: float
) -> None:
    asked: dict[int, bool] = {}

    def fits(value: int) -> bool:
        assert value not in asked
        asked[value] = value <= limit
        return asked[value]

    top = 4096
    most = largest(fits, min(first, top), grain, top, precision)
    assert len(asked) <= 40
    if most is None:
        assert limit < grain
        return
    assert asked[most]
    refused = [value for value, fitted in asked.items() if not fitted]
    assert most == top if not refused else min(refused) - most <= max(2 * grain, precision * most)


def test_every_limit_has_a_plan_that_proves_it() -> None:
    fit = hx.fit(SMALL, "random", max_steps=10, time_limit_s=600, precision=0.3)
    assert fit["devices"] == ("all", "rtx_4090", "rtx_3090")
    assert fit["gpus"] == (4, 2, 2)
    for fitting in fit.fittings:
        assert fitting.fits == "yes"
        for limit in fitting.limits:
            plan = limit.plan
            assert plan is not None
            assert not check(plan.problem, plan)
            assert not violations(plan.problem, plan, plan.cost)
            assert limit.impossible is not None
            assert limit.without_plan is not None
            assert limit.most is not None
            assert limit.most < limit.without_plan <= limit.impossible
        context, layers = (limit.plan.problem for limit in fitting.limits if limit.plan)
        assert context.workload.seq_len == fitting.limits[0].most
        assert layers.model.num_layers == fitting.limits[1].most
        assert layers.workload == SMALL.workload
        widest = fitting.micro_batch_plan
        assert widest is not None
        assert {pipeline.micro_batch_size for pipeline in widest.pipelines} == {fitting.micro_batch}
        assert widest.problem.workload.seq_len == SMALL.workload.seq_len
        assert hx.check(widest.problem, widest) == []
    # The devices of one type hold no more than all devices do.
    assert fit["num_layers"][0] >= max(fit["num_layers"][1:])
    assert max(map(len, str(fit).splitlines())) <= 80


@pytest.mark.slow
def test_steps_give_the_same_answers() -> None:
    first, second = (hx.fit(SMALL, "portfolio", max_steps=20, time_limit_s=600) for _ in range(2))
    assert first == second
    assert first.fittings == second.fittings


class Unlucky:
    """Finds the plan of `other` for short sequences only, and proves nothing below 8,192 tokens."""

    name, capabilities = "unlucky", Capabilities()

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
    ) -> Result:
        length = problem.workload.seq_len
        if length > 2048 or problem.model.num_layers > problems()["two GPU types"].model.num_layers:
            status = Status.INFEASIBLE if length >= 8192 else Status.NOT_FOUND
            return Result("unlucky", status, seed, 0.0, 0, reason="no plan: out of luck; try again")
        return hx.solve(problem, "local_search", max_steps=5, time_limit_s=600, seed=seed)


def test_a_refusal_says_whether_it_is_proved() -> None:
    (problem,) = [problems()["two GPU types"]]
    problem = problem.replace(workload=problem.workload.replace(seq_len=512))
    told = hx.fit(problem, Unlucky, max_steps=5)
    context = told.fittings[0].limits[0]
    # A plan of 2,048 tokens may fit beyond what the solver is asked; it then is the proof.
    assert context.most is not None
    assert context.most >= 2048
    if context.without_plan is not None and context.without_plan < 8192:
        assert context.impossible is not None
        assert context.impossible >= 8192
        assert "not found" in str(told)
    assert "out of luck" in context.reason
    refused = hx.fit(problem.replace(workload=problem.workload.replace(seq_len=4096)), Unlucky, max_steps=5)
    assert refused["fits"][0] == "not found"
    assert "try again" not in str(refused)


def test_a_model_that_fits_nowhere_is_proved_so(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("name: one\nmachines: [{name: a, gpu: rtx_3090, num_gpus: 1}]\n")
    ran = hexiopt("fit", "cluster=one.yaml", "model=gpt_70b", "solver=random", "solver.max_steps=2")
    assert ran.code == 3, ran.err
    assert "impossible: no plan fits: all devices together have room for at most" in ran.err
    assert ran.out.startswith("DOES NOT FIT  gpt_70b")


def test_the_verb_writes_plans_that_prove_its_table(hexiopt: Run, tmp_path: Path) -> None:
    asked = ("model=opt_350m", "cluster=small_mixed", "workload.seq_len=1024", "solver=random")
    ran = hexiopt("fit", *asked, "solver.max_steps=5", "fit.precision=1", "print=full", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    proof = read_plan(tmp_path / "out" / "all-seq_len.json")
    assert proof.problem.workload.seq_len == 2048, "the positions that OPT has learned"
    assert "2,048 fits" in ran.out
    assert "a model cannot have more" in ran.out
    assert json.loads((tmp_path / "out" / "all-num_layers.json").read_text())["format"]
    assert (tmp_path / "out" / "fit.csv").read_text().startswith("devices,gpus,fits,micro_batch,seq_len,num_layers")


@pytest.mark.parametrize("precision", [-1, 2, "wide"])
def test_a_precision_out_of_range_is_refused(precision: float) -> None:
    with pytest.raises(hx.InputError, match="precision"):
        hx.fit(SMALL, precision=precision)
