"""Every move leaves a candidate: no device in two stages, none outside its machine, none lost."""

import numpy as np
import pytest

from hexiopt.cost.pricer import PlanPricer
from solvers.compiled.state import new_state, new_work
from solvers.compiled.tables import tables_of
from solvers.loop.edits import count_devices, lowest, pick
from solvers.loop.starts import Catalogue, deal_out
from solvers.loop.tempering import Walk, new_kit
from solvers.loop.walk import ACCEPTED, CHANGED, MOVES, walk
from tests.solvers.drawn import drawn_problem
from tests.solvers.loop.candidates import check_devices

ANYTHING = 1e12  # a temperature at which every candidate is accepted


@pytest.mark.parametrize("number", [6, 8, 13, 14])
def test_moves_keep_every_device_once(number: int) -> None:
    """Each move alone, from candidates that the moves before have left."""
    tables = tables_of(PlanPricer(drawn_problem(number)))
    work, state = new_work(tables), new_state(tables)
    kit = new_kit(tables, state, Catalogue(tables, work).chains, number, 0)
    own = Walk((new_state(tables), new_state(tables), new_state(tables)), kit, np.zeros(2))
    own.begin_at(state, deal_out(tables, work, state, kit))
    check_devices(tables, state)
    for _ in range(4):
        for move in range(len(MOVES)):
            own.begin_at(state, deal_out(tables, work, state, kit))
            kit.odds[:] = (np.arange(len(MOVES)) >= move).astype(float)
            walk(tables, work, own.states, kit, 25, ANYTHING, own.objectives)
            for each in own.states:
                check_devices(tables, each)
            assert own.states[0].stages["machine"].max() < len(tables.machines)
    several = len(tables.machines) > 1
    for (name, _), row in zip(MOVES, kit.tally.tolist(), strict=True):
        assert row[CHANGED] == row[ACCEPTED], name
        assert row[CHANGED] > 0 or not several or name in {"swap_machines", "change_sharding"}, name


def test_devices_of_a_mask() -> None:
    assert [count_devices(mask) for mask in (0, 1, 0b1011, (1 << 62) - 1)] == [0, 1, 3, 62]
    assert [lowest(0b1101, n) for n in (1, 2, 3, 4)] == [0b1, 0b101, 0b1101, 0]
    assert pick(0b11110, 2) == 0b1100  # aligned before lowest
    assert pick(0b1010, 2) == 0b1010
    assert pick(0b1, 2) == 0
