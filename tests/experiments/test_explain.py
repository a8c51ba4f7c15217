"""What binds a plan with sequence stages, as `explain` tells it."""

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.report.explanation import layer_rows, stage_rows, step_rows
from hexiopt.report.facts import PlanFacts
from tests.hexiopt.cost.test_sequence_plans import PROBLEM


def test_the_parts_of_a_sequence_stage_make_its_time() -> None:
    layout = SequenceParallel((SequenceGroup((0, 1), (20, 12), (6, 2)), SequenceGroup((4,), (32,), (8,))), "zigzag")
    plan = Plan((Pipeline((Stage(layout, ((0, 2),), ("selective",)), Stage.of((2, 3), 2, 3)), 4),))
    facts = PlanFacts(PROBLEM, plan, PlanPricer(PROBLEM).price(plan))
    rows = list(stage_rows(facts))
    assert len(rows) == 2
    name, time, memory = rows[0]
    assert name.startswith("0·0 a:0-1, h:0")
    for part in ("attention", "all-to-all", "outside attention", "waiting for keys and other devices"):
        assert part in time
    assert "GiB" in memory
    assert list(step_rows(facts))
    assert len(list(layer_rows(facts))) == 1

    stage = PlanPricer(PROBLEM).stages.sequence_stage(layout, 1)
    layer_s, parts = sum(stage.layer_s("selective")), stage.parts_s("selective")
    assert all(sum(part[d] for part in parts.values()) <= layer_s * (1 + 1e-9) for d in range(3))
