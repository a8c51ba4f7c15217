"""Columns of whole machines and their master program, against all there is on small cases."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.reading import Section
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from hexiopt.solving import Budget
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.column_pool import ColumnPool
from solvers.columns.column_search import ColumnSearch, column_completer
from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.master import ColumnMaster
from solvers.columns.multiset_search import MultisetSearch
from solvers.columns.nearby import near_recipe
from solvers.columns.sketches import drawn_multisets, multisets
from solvers.columns.sync import ChainSync, SharedSync
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.registry import make_solver
from tests.solvers.problems import TINY, cluster, easy

WORST = SharedSync.worst(1, 0)  # of a model of one layer


@cache
def mixed() -> Problem:
    """Five machines of three kinds."""
    machines = (("a", "fast", 2), ("b", "fast", 2), ("c", "slow", 4), ("d", "slow", 4), ("e", "slow", 1))
    return Problem(cluster(*machines), replace(TINY, num_layers=6), Workload(global_batch=64, seq_len=512))


def drawn_columns(rng: random.Random) -> list[ChainColumn]:
    """Columns over two kinds that no machine was asked for."""
    found = []
    for k in range(rng.randint(1, 4)):
        counts = (rng.randint(0, 2), rng.randint(1, 2))
        order = tuple((kind, count) for kind, count in enumerate(counts) if count)
        recipe = ChainRecipe(order, 1, 1 + k % 2, rank=k)
        rate, fill_s, sync_s = rng.uniform(0.5, 3.0), rng.uniform(0.1, 2.0), rng.uniform(0.0, 3.0)
        found.append(ChainColumn(recipe, counts, rate, fill_s, ChainSync(WORST, (((0, 1, (sync_s,)),),))))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_rounding_is_the_best_of_all_multisets(seed: int) -> None:
    rng = random.Random(seed)
    columns, supply, pipelines_s = drawn_columns(rng), np.array([4.0, 5.0]), rng.uniform(3.0, 12.0)
    master, sync_s = ColumnMaster(columns, supply, 1000), max(c.sync.seconds(WORST) for c in columns)
    best = max(
        master.processed([(c, n) for c, n in zip(columns, numbers, strict=True) if n], pipelines_s)
        for numbers in itertools.product(range(6), repeat=len(columns))
        if all(sum(n * c.counts[k] for c, n in zip(columns, numbers, strict=True)) <= supply[k] for k in (0, 1))
    )
    chosen = master.rounded(sync_s, WORST, pipelines_s)
    assert master.processed(chosen, pipelines_s) >= best * (1 - 2e-3)


@pytest.mark.parametrize("seed", range(20))
def test_no_rounding_beats_the_linear_program(seed: int) -> None:
    """In less than its T, no multiset of the columns processes the batch."""
    columns, supply = drawn_columns(random.Random(seed)), np.array([4.0, 5.0])
    master, sync_s = ColumnMaster(columns, supply, 40), max(c.sync.seconds(WORST) for c in columns)
    answer = master.relaxed(sync_s, WORST)
    assert answer is not None
    less_s = answer.pipelines_s * 0.99
    assert master.processed(master.rounded(sync_s, WORST, less_s), less_s) < 40


def test_multisets_are_all_there_are() -> None:
    supply = np.array([2.0, 1.0, 3.0])
    every = {c for c in itertools.product(range(3), range(2), range(4)) if any(c)}
    assert sorted(multisets(supply)) == sorted(every)


def test_drawn_multisets_have_room_for_the_model() -> None:
    supply, room = np.array([40.0, 1.0, 3.0]), np.array([1.0, 0.0, 4.0])
    drawn = list(drawn_multisets(supply, room, 24, (1, 2), random.Random(0)))
    assert drawn
    for counts in drawn:
        assert all(c <= s for c, s in zip(counts, supply, strict=True))
        assert counts[1] == 0
        assert np.array(counts) @ room >= 24
    assert max(map(sum, drawn)) > 32, "longer than those that are listed"


def test_pipelines_of_whole_machines_have_a_recipe_and_others_none() -> None:
    kinds = MachineKinds(mixed())
    pool = ColumnPool(PlanCompleter(Search("t", mixed(), Budget(), 0).pricer), kinds, 1, 2)
    fast = next(k for k, own in enumerate(kinds.machines) if len(own) == 2 and kinds.num_gpus[k] == 2)
    for recipe in (ChainRecipe(((fast, 2),), 1, 2, (1, 1, 1)), ChainRecipe(((fast, 2),), 2, 1, (1, 1, 1))):
        group = pool.pipeline_group(recipe, kinds.machines[fast])
        assert group is not None
        assert pool.recipe_of(group) == recipe
    assert pool.recipe_of(replace(group, stages=(*group.stages[:1], (group.stages[1][0],) * 2))) is None


def test_near_recipes_take_no_machine_that_there_is_not() -> None:
    kinds, rng = MachineKinds(mixed()), random.Random(0)
    recipe = ChainRecipe(((0, 1), (1, 1)), 2, 1, (1, 1, 1))
    near = [near_recipe(recipe, kinds, (1, 2), rng) for _ in range(200)]
    made = {one for one in near if one is not None}
    assert len(made) > 20
    assert {one.width for one in made} >= {1, 2, 4}
    for one in made:
        assert all(0 <= n <= s for n, s in zip(one.counts(len(kinds)), kinds.supply, strict=True))


def test_columns_take_the_machines_they_count() -> None:
    problem = mixed()
    search = ColumnSearch(
        Search("t", problem, Budget(3600.0, 60), 0),
        PlanCompleter(Search("t", problem, Budget(), 0).pricer),
        0,
        random.Random(0),
    )
    search.generate(search.run.until())
    assert search.best(1)
    pool = search.maker.pool
    assert len(pool.columns) > 10
    for column in pool.columns:
        assert column.counts == column.recipe.counts(len(search.maker.kinds))
        assert all(c <= s for c, s in zip(column.counts, search.maker.kinds.supply, strict=True))
        assert column.rate > 0.0 <= column.fill_s


def test_sync_is_two_sends_of_the_gradients_behind_the_interface() -> None:
    kinds = MachineKinds(mixed())
    pool = ColumnPool(PlanCompleter(Search("t", mixed(), Budget(), 0).pricer), kinds, 0, 2)
    column = pool.make(ChainRecipe(((2, 1),), 1, 1, (1, 1, 1)))
    assert column is not None
    assert not kinds.uplinks
    model, workload = mixed().model, mixed().workload
    params = 6 * model.layer_params + model.embedding_params + model.head_params
    sent_s = 2 * params * workload.stored_gradient_bytes / kinds.nic_bytes_per_s[2]
    assert column.sync.seconds(SharedSync.worst(6, 0)) == pytest.approx(sent_s)


@pytest.mark.parametrize(
    "space",
    [
        Space(),
        Space(uneven_structure=False),
        Space(uneven_tp=False),
        Space(uneven_batch=False),
        Space(num_pipelines=2),
        Space(num_stages=2),
        Space(recompute_per_stage=False),
    ],
)
def test_a_plan_in_every_space(space: Space) -> None:
    problem = easy(space)
    result = make_solver("columns").solve(problem, Budget(3600.0, 60))
    assert result.plan is not None, result.reason
    assert violations(problem, result.plan, result.cost) == []


def test_the_same_steps_give_the_same_plan() -> None:
    one, two = (make_solver("columns").solve(mixed(), Budget(3600.0, 50), seed=3) for _ in range(2))
    assert one.plan == two.plan
    assert one.steps == two.steps <= 50 + 20


def test_layers_leave_room_for_the_groups_of_many_pipelines() -> None:
    """With less memory for activations, and only where more pipelines are expected than groups are reserved."""
    problem = replace(easy(), cluster=Cluster.of({"a100_40gb_sxm": 160}, 5), model=replace(TINY, num_layers=400))
    run = Search("columns", problem, Budget(3600.0, 1), 0)
    roomy, group = column_completer(run), run.pricer.tp_group((0,))
    held, shards = in_flight(ONE_F_ONE_B, StagePosition(0, 8, 8)), StateSharding(0, 4)
    most = [own.max_layers(group, True, False, 16, "none", held, shards) for own in (run.pricer, roomy.pricer)]
    assert 0 < most[1] < most[0]
    few = Search("columns", replace(problem, cluster=Cluster.of({"a100_40gb_sxm": 64}, 5)), Budget(3600.0, 1), 0)
    assert column_completer(few).pricer is few.pricer


def two_sites() -> Problem:
    """Two sites of two machines, joined by a link on which syncing would take longer than computing."""
    machines = [
        {"name": name, "gpu": "fast", "num_gpus": 4, "count": 2, "intra_bandwidth_gb_per_s": 100}
        for name in ("east", "west")
    ]
    data = {
        "name": "sites",
        "inter_machine": {"bandwidth_gb_per_s": 10, "latency_us": 10},
        "machines": machines,
        "groups": [{"name": f"of_{name}", "members": [name], "uplink_gb_per_s": 0.05} for name in ("east", "west")],
        "gpus": {"fast": {"tflops": 100, "memory_gib": 16, "hbm_gb_per_s": 1500}},
    }
    model = replace(TINY, num_layers=8)
    return Problem(cluster_from_section(Section(data, "x")), model, Workload(global_batch=64, seq_len=512))


def made(problem: Problem, *recipes: ChainRecipe) -> list[ChainColumn]:
    """Columns in ZeRO-0."""
    pool = ColumnPool(PlanCompleter(Search("t", problem, Budget(), 0).pricer), MachineKinds(problem), 0, 2)
    columns = [pool.make(recipe) for recipe in recipes]
    assert all(columns)
    return [column for column in columns if column is not None]


def test_layers_cross_an_uplink_only_where_both_sides_hold_them() -> None:
    problem = two_sites()
    layer_s = 2 * problem.model.layer_params * problem.workload.stored_gradient_bytes / 0.05e9
    east, west, across = made(
        problem,
        ChainRecipe(((0, 1),), 1, 1, (4, 4)),
        ChainRecipe(((1, 1),), 1, 1, (4, 4)),
        ChainRecipe(((0, 1), (1, 1)), 1, 1, (4, 4)),
    )
    apart = SharedSync.of([across.sync.alone])
    assert apart.inside[0] & apart.outside[0] == 0
    assert across.sync.seconds(apart) < layer_s
    assert east.sync.seconds(apart) == west.sync.seconds(apart) == math.inf  # they hold what stands on one side
    halves = SharedSync.of([across.sync.alone, east.sync.alone])
    assert across.sync.seconds(halves) == pytest.approx(4 * layer_s)
    both = SharedSync.of([east.sync.alone, west.sync.alone])
    assert east.sync.seconds(both) == pytest.approx(8 * layer_s)


def test_chains_that_split_at_the_link_do_not_sync_across() -> None:
    """The search finds them: a step is far shorter than a sync of the model across the link."""
    problem = two_sites()
    result = make_solver("columns").solve(problem, Budget(3600.0, 60))
    assert result.plan is not None
    across_s = 2 * 8 * problem.model.layer_params * problem.workload.stored_gradient_bytes / 0.05e9
    assert result.objective < across_s


@pytest.mark.parametrize("seed", range(10))
def test_annealing_finds_the_best_multiset(seed: int) -> None:
    """Of few columns, the one that all of them show."""
    rng = random.Random(seed)
    columns, supply = drawn_columns(rng), np.array([4.0, 5.0])
    master = ColumnMaster(columns, supply, 40)
    every = [
        [(column, n) for column, n in zip(columns, numbers, strict=True) if n]
        for numbers in itertools.product(range(6), repeat=len(columns))
        if (master.usage @ numbers <= master.supply).all()
    ]
    best_s = min(master.predicted_s(chosen) for chosen in every)
    start = next(chosen for chosen in every if chosen)
    search = MultisetSearch(master, np.ones(2), best_s, rng)
    found = list(search.anneal(start, 600))
    assert found[0][0] == pytest.approx(best_s, rel=1e-4)
    assert [seconds for seconds, _ in found] == sorted(seconds for seconds, _ in found)


def test_each_holder_of_a_ring_sends_what_all_but_one_need() -> None:
    sync_s = 3.0
    recipe = ChainRecipe(((0, 1),), 1, 1)
    column = ChainColumn(recipe, (1,), 1.0, 0.5, ChainSync(WORST, (((0, 1, (sync_s,)),),)))
    master = ColumnMaster([column], np.array([9.0]), 40)
    for copies in (2, 4, 9):
        chosen = [(column, copies)]
        waited_s = master.predicted_s(chosen) - master.pipelines_s(chosen)
        assert waited_s == pytest.approx(sync_s * (copies - 1) / copies)
