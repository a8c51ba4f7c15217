"""Devices with more communicators than are reserved: their number, and what the price of a plan adds for them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hexiopt.cost.executors.communicators import RESERVED_GROUPS, Communicators
from hexiopt.cost.extra_communicators import gradient_groups, message_pairs
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.models import TOY

MODEL = replace(TOY, num_layers=24)
CLUSTER = Cluster.of({"a100_80gb_sxm": 32}, 25)


def pipeline(ends: list[int], devices: list[tuple[int, ...]], size: int = 1, count: int = 4) -> Pipeline:
    """Stages of the layers between `ends`, each of its devices."""
    stages = [
        Stage.of(stage_devices, *layers) for stage_devices, layers in zip(devices, pairwise([0, *ends]), strict=True)
    ]
    return Pipeline(tuple(stages), count, size)


def plan(zero: int = 0, groups: str = "all") -> Plan:
    """Device 0 holds all layers, which ten others hold two or three each: it is in a group with each of them."""
    whole = pipeline([24], [(0,)])
    ends = [2, 4, 6, 8, 10, 12, 14, 16, 20, 24]
    return Plan((whole, pipeline(ends, [(k,) for k in range(1, 11)])), ONE_F_ONE_B, Sharding(zero, groups))


@pytest.fixture(scope="module")
def pricer() -> PlanPricer:
    return PlanPricer(Problem(CLUSTER, MODEL, Workload(8, 128)))


def test_a_device_in_many_groups_holds_more(pricer: PlanPricer) -> None:
    crowded_plan = plan()
    assert gradient_groups(crowded_plan, pricer.rings(crowded_plan))[0] == 10
    cost = pricer.price(crowded_plan)
    held = [copy.memory.communicators for line in cost.pipelines for stage in line.stages for copy in stage.copies]
    communicators, gpu = Communicators(CLUSTER), CLUSTER.gpu_of(0)
    assert held == [communicators.total_bytes(gpu, 0.0, RESERVED_GROUPS + 2), *[communicators.least_bytes(gpu, 1)] * 10]
    # Pipelines that are given with the price of before, or without, come to the same.
    assert (
        pricer.price(crowded_plan, pricer.pipelines(crowded_plan)) == pricer.price(crowded_plan, cost.pipelines) == cost
    )


def test_it_is_refused_where_that_does_not_fit(pricer: PlanPricer) -> None:
    """A GPU with a byte less than the plan needs, and with just as much."""
    crowded_plan = plan()
    memory = pricer.price(crowded_plan).pipelines[0].stages[0].memory
    for limit, fits in ((memory.total, True), (memory.total - 1, False)):
        machines = [
            replace(machine, gpu=replace(machine.gpu, process_memory_bytes=limit)) for machine in CLUSTER.machines
        ]
        small = replace(CLUSTER, machines=tuple(machines))
        assert PlanPricer(Problem(small, MODEL, Workload(8, 128))).price(crowded_plan).fits == fits


def test_norms_are_summed_by_all_ranks_of_tp_groups(pricer: PlanPricer) -> None:
    """Two pipelines of TP 2: for each pair of stages that share layers, two groups of matrices and one of norms."""
    first = pipeline([4, 8, 12, 16, 20, 24], [(2 * k, 2 * k + 1) for k in range(6)])
    second = pipeline([24], [(16, 17)])
    two_pipelines = Plan((first, second), ONE_F_ONE_B, Sharding(0))
    groups = gradient_groups(two_pipelines, pricer.rings(two_pipelines))
    assert (groups[0], groups[16]) == (2, 12)


def test_pairs_of_unequal_tp_groups() -> None:
    """From one device to eight, and to one again: each way with each of them."""
    wide = pipeline([8, 16, 24], [(8,), tuple(range(8)), (9,)])
    pairs = message_pairs(wide)
    assert (pairs[8], pairs[9], pairs[0]) == (16, 16, 4)
    assert not message_pairs(pipeline([12, 24], [(0, 1), (2, 3)]))
    assert not message_pairs(pipeline([24], [(0, 1)]))


def test_pairs_beyond_the_reserved_ones_are_counted(pricer: PlanPricer) -> None:
    wide_plan = Plan((pipeline([8, 16, 24], [(8,), tuple(range(8)), (9,)]),), ONE_F_ONE_B, Sharding(0))
    stages = pricer.price(wide_plan).pipelines[0].stages
    communicators, gpu = Communicators(CLUSTER), CLUSTER.gpu_of(0)
    assert stages[0].memory.communicators == communicators.total_bytes(gpu, 0.0, 0, 16)
    assert stages[1].memory.communicators == communicators.least_bytes(gpu, 8)
