"""Published spaces as data: every column's rule can be broken, and the documents hold the table as it is."""

from dataclasses import replace

import pytest

from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B, SCHEDULES
from solvers.registry import names
from tests import api_reference
from tests.solvers import problems
from tests.solvers.baselines import published_space as columns
from tests.solvers.baselines.published_space import PublishedSpace
from tests.solvers.baselines.published_spaces import SPACES


def line(*groups: tuple[int, ...], layers: tuple[int, ...], batches: int = 8, size: int = 1) -> Pipeline:
    ends = [sum(layers[: s + 1]) for s in range(len(layers))]
    stages = (Stage.of(group, end - n, end) for group, end, n in zip(groups, ends, layers, strict=True))
    return Pipeline(tuple(stages), batches, size)


# Six layers and 16 sequences on machines a (0, 1), b (2, 3) and c (4 to 7).
PLAIN = Plan((line((0,), (2,), layers=(3, 3)), line((1,), (3,), layers=(3, 3))), ONE_F_ONE_B, Sharding(1))
WIDE = Stage.of_replicas((Replica((0,), 1), Replica((1,), 1)), ((0, 6),))
ANYTHING = PublishedSpace(
    SCHEDULES,
    tuple(Sharding(stage) for stage in range(4)),
    columns.REPLICATED_STAGES,
    columns.ANY_PIPELINES,
    columns.ANY_TP,
    columns.ANY_DEVICES,
    columns.ANY_BATCHES,
    replace(columns.ONE_POLICY, holds=lambda *_: True),
    columns.ANY_LAYERS,
)
BROKEN = {
    "schedules": ((ONE_F_ONE_B,), replace(PLAIN, schedule=GPIPE), "schedule gpipe"),
    "sharding": ((Sharding(0),), PLAIN, "ZeRO-1 over all"),
    "stages": (columns.PLAIN_STAGES, Plan((Pipeline((WIDE,), 8, 2),)), "replicated"),
    "pipelines": (columns.SINGLE_STAGES, PLAIN, "pipeline parallelism"),
    "tp": (columns.ONE_TP, Plan((line((0, 1), (2,), layers=(3, 3), batches=16),)), "unequal TP"),
    "devices": (columns.ALL_DEVICES, PLAIN, "left out"),
    "batches": (
        columns.BATCHES_WITHIN_ONE,
        Plan((line((0,), layers=(6,), batches=10), line((1,), layers=(6,), batches=6))),
        "unequal batches",
    ),
    "recompute": (
        columns.ONE_POLICY,
        Plan((Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6, "full")), 16),)),
        "several recompute policies",
    ),
    "layers": (columns.EQUAL_LAYERS, Plan((line((0,), (1,), layers=(2, 4), batches=16),)), "unequal layers"),
}


@pytest.mark.parametrize("column", BROKEN)
def test_a_plan_breaks_one_column(column: str) -> None:
    value, plan, words = BROKEN[column]
    assert check(problems.easy(), plan) == []
    assert ANYTHING.first_violation(problems.easy(), plan) is None
    bound = replace(ANYTHING, **{column: value})  # type: ignore[arg-type]
    assert words in (bound.first_violation(problems.easy(), plan) or "")


def test_every_column_is_tried() -> None:
    assert {"schedules", "sharding", *ANYTHING.rules()} == set(BROKEN)


def test_every_baseline_states_its_space() -> None:
    assert set(SPACES) == set(names(lambda able: able.kind == "baseline"))


def test_the_documents_hold_the_table() -> None:
    text = api_reference.BASELINES.read_text(encoding="utf-8")
    assert text == api_reference.baselines_page(), "run make reference"
    assert all(f"**`{name}`**" in text for name in names(lambda able: able.kind == "baseline"))
