"""The hierarchical partition: TP compositions, and both phases on clusters where the answer is plain."""

import random
from dataclasses import replace
from typing import Any

import pytest

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Search
from solvers.frame.starts import first_choice
from solvers.heuristics import hexiscale
from solvers.heuristics.graph import DeviceGraph
from solvers.heuristics.hexiscale import HexiScale, HierarchicalPartition, compositions
from tests.solvers import problems
from tests.solvers.frame.test_starts import assert_legal


@pytest.mark.parametrize("allowed", [(1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 7, 8), (1,), (1, 2)])
@pytest.mark.parametrize("count", range(1, 9))
def test_compositions(count: int, allowed: tuple[int, ...]) -> None:
    all_parts = compositions(count, allowed)
    assert all_parts
    assert len(all_parts) == len(set(all_parts))
    assert all(sum(parts) == count and set(parts) <= set(allowed) for parts in all_parts)
    assert (1,) * count in all_parts
    if count in allowed:
        assert (count,) in all_parts


def test_compositions_by_hand() -> None:
    assert compositions(6, (1, 2, 4, 8)) == [(4, 2), (2, 2, 2), (1, 1, 1, 1, 1, 1)]
    assert compositions(3, (1, 2)) == [(2, 1), (1, 1, 1)]


def best_partitions(hierarchy: HierarchicalPartition) -> list[Partition]:
    """The best partition for each number of pipelines and each set of recompute policies."""
    return [incumbent.partition for by_number in hierarchy._best for incumbent in by_number.values()]


@pytest.mark.parametrize("exclude", [(), ("a:0", "c:2")])
def test_what_both_phases_keep_is_legal_and_gets_better(exclude: tuple[str, ...]) -> None:
    problem = problems.easy(Space(exclude=exclude))
    search = Search("hexiscale", problem, Budget(3600.0), 0)
    hierarchy = HierarchicalPartition(search, PlanCompleter(search.pricer), random.Random(0))
    bests = []
    for _ in range(80):
        hierarchy.iterate()
        for partition in best_partitions(hierarchy):
            assert_legal(problem, partition)
            bests.append(search.best_s)
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] < bests[0]


def test_it_works_on_from_a_known_partition() -> None:
    """Wide groups are taken apart, and pipelines that an iteration leaves alone stay as they are; GPUs that the
    partition leaves unused find a place."""
    problem = problems.easy()
    search = Search("hexiscale", problem, Budget(3600.0), 0)
    hierarchy = HierarchicalPartition(search, PlanCompleter(search.pricer), random.Random(0))
    first, second, third = problem.usable_by_machine.values()
    groups = PipelineGroup((tuple((device,) for device in first),)), PipelineGroup((((second[0],),), ((second[1],),)))
    known = first_choice(problem, groups)
    hierarchy.begin_at(known)
    [begun] = best_partitions(hierarchy)
    assert [group.width for group in begun.pipeline_groups] == [1] * known.num_pipelines
    assert begun.devices() == known.devices()
    assert search.plan is not None
    with_idle, pipelines_stay = False, False
    for _ in range(80):
        hierarchy.iterate()
        for partition in best_partitions(hierarchy):
            assert_legal(problem, partition)
            with_idle |= bool(partition.devices() & set(third))
            pipelines_stay |= partition != begun and bool(set(partition.pipeline_groups) & set(begun.pipeline_groups))
    assert with_idle
    assert pipelines_stay


@pytest.mark.parametrize("pipelines", [1, 2, 3, 5, 8])
def test_a_fixed_number_of_pipelines(pipelines: int) -> None:
    problem = problems.easy(Space(num_pipelines=pipelines))
    result = HexiScale().solve(problem, Budget(3600.0, 100))
    assert result.plan is not None, result.reason
    assert len(result.plan.pipelines) == pipelines


def test_no_pipeline_crosses_a_dead_slow_network() -> None:
    """Gradients must cross it once a step, activations would for every micro-batch."""
    problem = problems.easy(network_gb_per_s=0.02)
    workload = replace(problem.workload, global_batch=256)
    problem = Problem(problem.cluster, replace(problems.TINY, num_layers=3, vocab_size=1000), workload)
    result = HexiScale().solve(problem, Budget(3600.0, 600))
    assert result.plan is not None
    for pipeline in result.plan.pipelines:
        devices = [device for stage in pipeline.stages for device in stage.devices]
        assert len({int(problem.cluster.machine_of[device]) for device in devices}) == 1


def test_a_cluster_too_large_for_a_complete_graph_is_refused() -> None:
    problem = Problem(problems.cluster(*((f"m{k}", "fast", 64) for k in range(17))), problems.TINY)
    with pytest.raises(InputError, match=r"more than .* solver=portfolio"):
        HexiScale().solve(problem, Budget(1.0))


@pytest.mark.parametrize("gib", [0.6, 0.7])
def test_plans_of_one_policy_are_found_where_the_fastest_does_not_fit(gib: float) -> None:
    """Pipelines are judged by the best policy for each, so that memory for the fastest does not decide."""
    base = problems.easy(Space(recompute_per_stage=False), fast_gib=1.2 * gib, slow_gib=gib)
    problem = replace(base, workload=Workload(global_batch=16, seq_len=4096))
    result = HexiScale().solve(problem, Budget(3600.0, 200), seed=1)
    assert result.plan is not None, result.reason
    policies = {stage.recompute for pipeline in result.plan.pipelines for stage in pipeline.stages}
    assert policies == {("full",)}


@pytest.mark.parametrize("seed", range(3))
def test_what_fits_with_recomputation_does_not_lead_away_from_fewer_devices_without(seed: int) -> None:
    """Two fast GPUs hold the model without recomputation; all devices together hold it only with, and take 7 s."""
    machines = [
        {"name": name, "gpu": gpu, "num_gpus": count, "intra_bandwidth_gb_per_s": rate, "network_interfaces": nics}
        for name, gpu, count, rate, nics in (
            ("m0", "v100_16gb_sxm", 4, 300, 1),
            ("m1", "v100_16gb_sxm", 1, 300, 1),
            ("m2", "v100_16gb_sxm", 6, 20, 2),
            ("m3", "h100_80gb_sxm", 2, 300, 1),
        )
    ]
    network = {"bandwidth_gb_per_s": 0.5, "latency_us": 5000}
    cluster = cluster_from_section(Section({"name": "c", "inter_machine": network, "machines": machines}, "test"))
    model = replace(
        problems.TINY,
        num_layers=48,
        hidden_size=128,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=14336,
        vocab_size=1000,
        max_positions=32768,
    )
    workload = Workload(16, 16384, precision="fp16", schedule="1f1b", optimizer_sharding="0", gradient_bytes=2)
    space = Space(recompute_per_stage=False, uneven_tp=False)
    result = HexiScale().solve(Problem(cluster, model, workload, space), Budget(3600.0, 200), seed=seed)
    assert result.objective < 3.0


# ------------------------------------------------------------------------------ ablations


@pytest.fixture
def graph_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of GPUs of every graph that phase 1 lets METIS partition."""
    sizes, asked = list[int](), hexiscale.partition_graph  # type: ignore[attr-defined]

    def record_size(graph: DeviceGraph, count: int, *rest: Any, **how: Any) -> list[list[int]]:
        if "shares" in how:  # phase 2 weighs all GPUs alike
            sizes.append(len(graph.devices))
        return asked(graph, count, *rest, **how)

    monkeypatch.setattr(hexiscale, "partition_graph", record_size)
    return sizes


def test_without_partition_pipelines_have_nearly_equally_many_gpus(graph_sizes: list[int]) -> None:
    problem = problems.easy(Space(num_pipelines=3))
    plan = HexiScale(partition=False).solve(problem, Budget(3600.0, 20)).plan
    assert plan is not None
    assert not graph_sizes
    sizes = [sum(len(stage.devices) for stage in pipeline.stages) for pipeline in plan.pipelines]
    assert max(sizes) - min(sizes) <= 1


def test_without_construction_stages_stand_as_the_cluster_does() -> None:
    problem = problems.easy(Space())
    plan = HexiScale(construction=False).solve(problem, Budget(3600.0, 30)).plan
    assert plan is not None
    for pipeline in plan.pipelines:
        machines = [int(problem.cluster.machine_of[stage.devices[0]]) for stage in pipeline.stages]
        assert machines == sorted(machines)


def test_without_iteration_every_pass_begins_anew(graph_sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that METIS always sees GPUs of the whole cluster, never those of some pipelines only."""
    monkeypatch.setattr(hexiscale, "_SOME_MACHINES", -1.0)
    problem = problems.easy(Space())
    HexiScale(iteration=False).solve(problem, Budget(3600.0, 30))
    assert set(graph_sizes) == {problem.cluster.num_devices}
    graph_sizes.clear()
    HexiScale().solve(problem, Budget(3600.0, 30))
    assert min(graph_sizes) < problem.cluster.num_devices


@pytest.mark.parametrize("tau", [0, 65, 1.5])
def test_tau_in_range(tau: float) -> None:
    with pytest.raises(InputError, match=r"solver\.tau"):
        HexiScale(tau=tau)  # type: ignore[arg-type]
