"""A walk over candidates: moves drawn by weight, accepted by Metropolis' rule (Metropolis et al., J. Chem. Phys. 21,
1953), the threshold drawn before the candidate is evaluated, so that most are rejected by a bound."""

from typing import Any, NamedTuple

import numpy as np

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.state import copy_rows, copy_state, forget_touched
from solvers.compiled.step import evaluate
from solvers.loop import pipeline_moves, rebuild, stage_moves
from solvers.loop.dice import chance

# Names of the moves, in the order of `propose`, and how often each is drawn at first, of about a hundred.
MOVES = (
    ("move_stage", 12),
    ("swap_stages", 12),
    ("reorder_stages", 8),
    ("change_degree", 4),
    ("cut_stage", 4),
    ("join_stages", 4),
    ("use_idle", 6),
    ("leave_idle", 2),
    ("swap_machines_of_stages", 4),
    ("swap_machines", 3),
    ("swap_for_idle", 3),
    ("leave_machines", 1),
    ("resize_micro_batches", 3),
    ("change_sharding", 1),
    ("cut_pipeline", 2),
    ("join_pipelines", 2),
    ("reorder_alike", 3),
    ("recut_alike", 2),
    ("swap_alike", 3),
    ("move_alike", 2),
    ("copy_pipelines", 5),
    ("deal_again", 3),
    ("build_anew", 4),
    ("convert_alike", 1),
)
PROPOSED, CHANGED, ACCEPTED, IMPROVED = range(4)  # columns of `Kit.tally`
GAIN, WORK = range(2)  # columns of `Kit.yields`


class Kit(NamedTuple):
    """What a walk draws from and writes down.

    `dice` [1]; `listed`, `others` [pipelines or kinds]; `chain` [2 + 2 · stages] and `catalogue` [chains, 2 + 2 ·
    stages] (`rebuild.build`); `odds` [moves]: sums of their weights; `tally` [moves, 4]; `yields` [moves, 2]: by how
    much the logarithm of the walk's best objective fell, and candidates and pipelines evaluated for it.
    """

    dice: Any
    listed: Any
    others: Any
    chain: Any
    catalogue: Any
    odds: Any
    tally: Any
    yields: Any


@kernel
def propose_stage_move(tables: Any, work: Any, state: Any, kit: Any, move: int) -> bool:
    """Change the candidate by one of the first moves of `MOVES`."""
    if move == 0:
        return stage_moves.move_stage(tables, work, state, kit)
    if move == 1:
        return stage_moves.swap_stages(tables, work, state, kit)
    if move == 2:
        return stage_moves.reorder_stages(tables, work, state, kit)
    if move == 3:
        return stage_moves.change_degree(tables, work, state, kit)
    if move == 4:
        return stage_moves.cut_stage(tables, work, state, kit)
    if move == 5:
        return stage_moves.join_stages(tables, work, state, kit)
    if move == 6:
        return stage_moves.use_idle(tables, work, state, kit)
    if move == 7:
        return stage_moves.leave_idle(tables, work, state, kit)
    if move == 8:
        return stage_moves.swap_machines_of_stages(tables, work, state, kit)
    if move == 9:
        return stage_moves.swap_machines(tables, work, state, kit)
    if move == 10:
        return stage_moves.swap_for_idle(tables, work, state, kit)
    return stage_moves.leave_machines(tables, work, state, kit)


@kernel
def propose(tables: Any, work: Any, state: Any, kit: Any, move: int) -> Any:
    """Change the candidate by a move; False where it does not apply."""
    if move < 12:
        return propose_stage_move(tables, work, state, kit, move)
    if move == 12:
        return pipeline_moves.resize_micro_batches(tables, work, state, kit)
    if move == 13:
        return pipeline_moves.change_sharding(tables, work, state, kit)
    if move == 14:
        return pipeline_moves.cut_pipeline(tables, work, state, kit)
    if move == 15:
        return pipeline_moves.join_pipelines(tables, work, state, kit)
    if move == 16:
        return pipeline_moves.reorder_alike(tables, work, state, kit)
    if move == 17:
        return pipeline_moves.recut_alike(tables, work, state, kit)
    if move == 18:
        return pipeline_moves.swap_alike(tables, work, state, kit)
    if move == 19:
        return pipeline_moves.move_alike(tables, work, state, kit)
    if move == 20:
        return rebuild.copy_pipelines(tables, work, state, kit)
    if move == 21:
        return rebuild.deal_again(tables, work, state, kit)
    if move == 22:
        return rebuild.build_anew(tables, work, state, kit)
    return rebuild.convert_alike(tables, work, state, kit)


@entry
def walk(tables: Any, work: Any, states: Any, kit: Any, count: int, heat: float, objectives: Any) -> None:
    """Try `count` candidates from `states[0]`, to which `states[1]` is equal; the best that was met is in `states[2]`.

    `heat`: the share by which an objective may rise where one of e draws is accepted. `objectives` [2]: that of the
    first state and of the best, kept in step.
    """
    now, trial, best = states
    moves = len(kit.odds)
    forget_touched(work)
    for _ in range(count):
        drawn, move = chance(kit.dice) * kit.odds[moves - 1], 0
        while kit.odds[move] <= drawn:
            move += 1
        tally, yields = kit.tally[move], kit.yields[move]
        tally[PROPOSED] += 1
        changed = False
        if trial.plan[0].num_pipelines > 0 or move >= 21:
            changed = propose(tables, work, trial, kit, move)
        yields[WORK] += 1.0
        if changed:
            tally[CHANGED] += 1
            limit = objectives[0] * (1.0 - heat * np.log(max(1e-12, chance(kit.dice))))
            objective = evaluate(tables, work, trial, limit)
            yields[WORK] += work.listed[0]
            if objective <= limit:
                tally[ACCEPTED] += 1
                objectives[0] = objective
                copy_rows(work, trial, now)
                if objective < objectives[1] * (1.0 - 1e-9):
                    yields[GAIN] += np.log(objectives[1] / objective)
                    tally[IMPROVED] += 1
                    objectives[1] = objective
                    copy_state(trial, best)
                forget_touched(work)
                continue
        copy_rows(work, now, trial)
        forget_touched(work)
