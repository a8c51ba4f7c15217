"""Links that columns know: inside machines, and uplinks that chains cross at the same layers."""

from dataclasses import replace

import numpy as np
import pytest

from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section
from hexiopt.reading import Section
from hexiopt.solving import Budget
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.column_pool import ColumnPool
from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.master import Relaxed
from solvers.columns.sketches import sketched
from solvers.columns.splits import best_splits
from solvers.columns.sync import SharedSync
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from tests.solvers.problems import TINY

LAYERS = 8


def problem(inside_gb_per_s: float, uplink_gb_per_s: float) -> Problem:
    """Two sites of two machines with four GPUs each; interfaces send 10 GB/s."""
    names = ("east", "west")
    link = {"intra_bandwidth_gb_per_s": inside_gb_per_s}
    data = {
        "name": "sites",
        "inter_machine": {"bandwidth_gb_per_s": 10, "latency_us": 10},
        "machines": [{"name": name, "gpu": "fast", "num_gpus": 4, "count": 2, **link} for name in names],
        "groups": [{"name": f"of_{name}", "members": [name], "uplink_gb_per_s": uplink_gb_per_s} for name in names],
        "gpus": {"fast": {"tflops": 100, "memory_gib": 16, "hbm_gb_per_s": 1500}},
    }
    model = replace(TINY, num_layers=LAYERS)
    return Problem(cluster_from_section(Section(data, "x")), model, Workload(global_batch=64, seq_len=512))


def pool_of(one: Problem) -> ColumnPool:
    """Columns in ZeRO-0."""
    return ColumnPool(PlanCompleter(Search("t", one, Budget(), 0).pricer), MachineKinds(one), 0, 2)


def four_side_by_side(one: Problem) -> ChainColumn:
    """Four pipelines of a GPU each, in one machine."""
    column = pool_of(one).make(ChainRecipe(((0, 1),), 4, 1, (1, 1)))
    assert column is not None
    return column


def test_copies_in_a_machine_sync_over_its_links() -> None:
    slow, fast = problem(1, 100), problem(100, 100)
    model = slow.model
    params = LAYERS * model.layer_params + model.embedding_params + model.head_params
    sent_bytes = 2 * params * slow.workload.stored_gradient_bytes
    assert four_side_by_side(slow).sync.alone_s == pytest.approx(sent_bytes / 1e9)
    assert four_side_by_side(fast).sync.alone_s == pytest.approx(sent_bytes / 10e9)  # the interface is slower
    assert four_side_by_side(fast).sync.lone_s == pytest.approx(sent_bytes / 100e9)


def test_a_pipeline_alone_in_its_machine_uses_no_link_inside() -> None:
    alone = pool_of(problem(1, 100)).make(ChainRecipe(((0, 1),), 1, 1, (1, 1)))
    assert alone is not None
    assert alone.sync.inner == ()
    assert alone.sync.lone_s == 0.0


def test_chains_of_a_split_are_cut_where_few_layers_cross() -> None:
    one = problem(100, 0.05)
    kinds, pool = MachineKinds(one), pool_of(one)
    sketches = sketched(PlanCompleter(Search("t", one, Budget(), 0).pricer), kinds, pool.shards)
    assert sketches is not None
    hope = Relaxed(3.0, 2.2 * float(sketches.layer_s[0]), 10 * float(sketches.fill_s.max()) + 1.0, np.array([1.0, 1.0]))
    splits = best_splits(kinds, sketches, hope, SharedSync.worst(LAYERS, 2), 4)
    assert splits
    for split in splits:
        assert max(split.context.crossing) <= 2
        assert sorted(split.kinds) == [0, 1]
        assert sketches.within(hope.sync_s, split.context)[split.sketches].all()
        assert (sketches.counts[split.sketches] <= kinds.supply).all()
    assert [split.sequences for split in splits] == sorted((split.sequences for split in splits), reverse=True)


def test_no_splits_where_the_whole_model_crosses_in_time() -> None:
    one = problem(100, 0.05)
    kinds = MachineKinds(one)
    sketches = sketched(PlanCompleter(Search("t", one, Budget(), 0).pricer), kinds, pool_of(one).shards)
    assert sketches is not None
    hope = Relaxed(3.0, LAYERS * float(sketches.layer_s[0]), 100.0, np.array([1.0, 1.0]))
    assert best_splits(kinds, sketches, hope, SharedSync.worst(LAYERS, 2), 4) == []
