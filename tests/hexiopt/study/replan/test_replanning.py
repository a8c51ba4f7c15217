"""New plans for a changed cluster: what goes on, what moves, and which pays back."""

from dataclasses import replace

import pytest

import hexiopt as hx
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.study.replan.replan import LEAST, MovingPricer, stay
from hexiopt.study.replan.survivors import whole_pipelines
from tests.models import TINY
from tests.solvers.problems import BATCH_OF_4, SMALL_SPACE, cluster

GPUS = cluster(("a", "fast", 2), ("b", "slow", 2), ("c", "slow", 2), network_gb_per_s=1.0)
PROBLEM = Problem(GPUS, TINY, BATCH_OF_4, SMALL_SPACE)
LAYERS = TINY.num_layers


def chain(*devices: int) -> tuple[Stage, ...]:
    half = LAYERS // 2
    return Stage.of(devices[:1], 0, half), Stage.of(devices[1:], half, LAYERS)


def place_plan(*pipelines: Pipeline, zero: int = 0) -> hx.PlacedPlan:
    return hx.PlacedPlan.of(PROBLEM, Plan(pipelines, sharding=Sharding(zero)))


def test_whole_pipelines_go_on_and_share_the_batch() -> None:
    before = place_plan(Pipeline(chain(0, 1), 2), Pipeline(chain(2, 3), 1), Pipeline(chain(4, 5), 1))
    less = PROBLEM.replace(space=SMALL_SPACE.replace(exclude=("c:1",)))
    plan = whole_pipelines(before, PlanPricer(less))
    assert plan is not None
    assert [pipeline.stages for pipeline in plan.pipelines] == [chain(0, 1), chain(2, 3)]
    # The fast pipeline takes a third of a slow one's time for a sequence.
    assert [pipeline.num_micro_batches for pipeline in plan.pipelines] == [3, 1]
    assert whole_pipelines(before, PlanPricer(PROBLEM)) == before
    without_c = PlanPricer(less.replace(space=SMALL_SPACE.replace(exclude=("c",))))
    assert whole_pipelines(place_plan(Pipeline(chain(0, 4), 4)), without_c) is None


def test_like_gpus_are_exchanged_so_that_weights_stay() -> None:
    """The same plan on other devices of the same kinds is the plan itself."""
    before = place_plan(Pipeline(chain(0, 1), 2), Pipeline(chain(2, 3), 1), Pipeline(chain(4, 5), 1))
    exchanged = Plan((Pipeline(chain(1, 0), 2), Pipeline(chain(5, 4), 1), Pipeline(chain(3, 2), 1)))
    assert stay(before, exchanged, PlanPricer(PROBLEM)).pipelines[0].stages == chain(0, 1)
    moved = stay(before, exchanged, PlanPricer(PROBLEM))
    assert {pipeline.stages for pipeline in moved.pipelines} == {chain(0, 1), chain(2, 3), chain(4, 5)}


def test_moving_is_spread_over_the_horizon() -> None:
    before = place_plan(Pipeline(chain(0, 1), 4))
    cost = hx.price(PROBLEM, before)
    for horizon_steps in (10.0, 1000.0):
        price = MovingPricer(PlanPricer(PROBLEM), lambda _: 5.0, horizon_steps).price(before)
        assert price.step_time_s == pytest.approx(cost.step_time_s + 5.0 / horizon_steps)
        assert price.tokens_per_s * price.step_time_s == pytest.approx(cost.tokens_per_s * cost.step_time_s)


def test_the_horizon_decides() -> None:
    """A machine that comes back: a short horizon goes on as before, a long one moves states to it."""
    less = PROBLEM.replace(space=SMALL_SPACE.replace(exclude=("a",)))
    before = hx.solve(less, max_steps=60, time_limit_s=600).found()
    replans = {}
    for horizon_steps in (1e-3, 1e6):
        new = hx.replan(before, PROBLEM, horizon_steps=horizon_steps, max_steps=200, time_limit_s=600, restart_s=1.0)
        replans[horizon_steps] = new
        assert new.replacements[0].moving_s == 0.0
        assert new.replacements[0].plan == before
        times = [(replacement.moving_s, -replacement.cost.step_time_s) for replacement in new.replacements]
        assert times == sorted(times)
        assert all(hx.check(PROBLEM, replacement.plan) == [] for replacement in new.replacements)
        assert new.replacements[-1].cost.step_time_s < before.cost.step_time_s
    assert replans[1e-3].best.name == LEAST
    assert replans[1e6].best.name == replans[1e6].replacements[-1].name != LEAST
    assert new.pays_back_steps(new.replacements[0]) is None
    steps = new.pays_back_steps(new.best)
    assert steps is not None
    assert new.best.total_s(steps) == pytest.approx(new.replacements[0].total_s(steps))


def test_a_lost_device_and_bad_input() -> None:
    before = hx.solve(PROBLEM, max_steps=60, time_limit_s=600).found()
    new = hx.replan(before, lost=["a:0"], max_steps=60, time_limit_s=600)
    assert new.best.plan.problem.space.exclude == ("a:0",)
    assert 0 not in new.best.plan.devices()
    assert str(new).startswith("Plans after the change")
    with pytest.raises(hx.InputError, match="exclude: 'q' is not a machine"):
        hx.replan(before, lost=["q"])
    with pytest.raises(hx.InputError, match="another model"):
        hx.replan(before, PROBLEM.replace(model=replace(TINY, num_layers=LAYERS + 1)))
    with pytest.raises(hx.InputError, match="horizon_steps"):
        hx.replan(before, lost=["a:0"], horizon_steps=0)
