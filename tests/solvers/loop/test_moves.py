"""Every move leaves a candidate: no device in two stages, none outside its machine, none lost."""

from typing import Any

import numpy as np

from hexiopt.cost.pricer import PlanPricer
from solvers.compiled.state import new_state, new_work
from solvers.compiled.tables import tables_of
from solvers.loop.edits import count_devices, lowest, pick
from solvers.loop.starts import Catalogue, deal_out
from solvers.loop.tempering import Walk, new_kit
from solvers.loop.walk import ACCEPTED, CHANGED, MOVES, walk
from tests.solvers.drawn import drawn_problem
from tests.solvers.loop.candidates import check_devices

LEAVE_IDLE = [name for name, _ in MOVES].index("leave_idle")
ANYTHING = 1e12  # a temperature at which every candidate is accepted


def tally_of_moves(number: int) -> Any:
    """What became of each move, drawn with idle devices alone, from random candidates of a drawn problem; each result
    is checked."""
    tables = tables_of(PlanPricer(drawn_problem(number)))
    work, state = new_work(tables), new_state(tables)
    kit = new_kit(tables, state, Catalogue(tables, work).chains, number, 0)
    walker = Walk((new_state(tables), new_state(tables), new_state(tables)), kit, np.zeros(2))
    for _ in range(4):
        for move in range(len(MOVES)):
            walker.begin_at(state, deal_out(tables, work, state, kit))
            weights = np.eye(len(MOVES))[move] + 0.2 * np.eye(len(MOVES))[LEAVE_IDLE]
            kit.odds[:] = np.cumsum(weights)
            walk(tables, work, walker.states, kit, 25, ANYTHING, walker.objectives)
            for each in walker.states:
                check_devices(tables, each)
    return kit.tally


def test_moves_keep_every_device_once() -> None:
    """And each applies to some candidates of some problem, all of which are gone on from at this temperature."""
    tally = sum(tally_of_moves(number) for number in (6, 8, 13, 14, 15))
    assert (tally[:, CHANGED] == tally[:, ACCEPTED]).all()
    assert [name for (name, _), changed in zip(MOVES, tally[:, CHANGED], strict=True) if not changed] == []


def test_devices_of_a_mask() -> None:
    assert [count_devices(mask) for mask in (0, 1, 0b1011, (1 << 62) - 1)] == [0, 1, 3, 62]
    assert [lowest(0b1101, n) for n in (1, 2, 3, 4)] == [0b1, 0b101, 0b1101, 0]
    assert pick(0b11110, 2) == 0b1100  # aligned before lowest
    assert pick(0b1010, 2) == 0b1010
    assert pick(0b1, 2) == 0
