"""The phases of a price: each is entered once, and hands its result on."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hexiopt
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan, Sharding
from tests.hexiopt.cost.test_sharding import PROBLEM, data_parallel

ONCE = ("sharding_groups", "plan_context", "gradient_rings", "parameter_holders", "step_cost")
OF_STAGES = tuple(f"StageModel.{name}" for name in ("layer_s", "ends_s", "sequence_stage", "executors"))


def calls_of_a_price(plan: Plan) -> list[str]:
    """The functions of the core that a price calls, in order."""
    pricer, root, names = PlanPricer(PROBLEM), str(Path(hexiopt.__file__).parent), list[str]()

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(record_call)
    try:
        pricer.price(plan)
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(1), Sharding(1, "machine"), Sharding(2), Sharding(3, "machine")], ids=str
)
def test_each_phase_is_entered_once(sharding: Sharding) -> None:
    calls = calls_of_a_price(data_parallel(tuple(range(8)), sharding.stage, sharding.groups))
    counts = Counter(calls)
    assert {name: counts[name] for name in ONCE} == dict.fromkeys(ONCE, 1)
    assert counts["apply_lockstep"] == (sharding.stage >= 2)
    if sharding.stage >= 2:  # what executors take was said when they were placed
        assert not set(OF_STAGES) & set(calls[calls.index("apply_lockstep") :])
