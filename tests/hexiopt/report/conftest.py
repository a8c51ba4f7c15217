"""Plans to report on: small, mixed, large, with interleaving, with a sequence layout."""

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import read_model
from hexiopt.plan.parallelism import Replica, SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import INTERLEAVED
from tests.conftest import ROOT
from tests.hexiopt.report.pictures import Case
from tests.slow import slow_but

CONF = ROOT / "conf"


def price_case(cluster: Cluster, plan: Plan, model: str = "llama2_7b", global_batch: int = 256) -> Case:
    problem = Problem(cluster, read_model(CONF / f"model/{model}.yaml"), Workload(global_batch=global_batch))
    return problem, plan, PlanPricer(problem).price(plan)


@pytest.fixture(scope="module")
def small() -> Case:
    """One pipeline over all six GPUs; NVLink bridge between old:0 and old:1."""
    stages = (
        Stage.of((0, 1), 0, 13, "full"),
        Stage.of((2, 3), 13, 23, "full"),
        Stage.of((4, 5), 23, 32, "full"),
    )
    return price_case(read_cluster(CONF / "cluster/small_mixed.yaml"), Plan((Pipeline(stages, 32),)), global_batch=32)


@pytest.fixture(scope="module")
def mixed() -> Case:
    """Four unlike pipelines over 31 of 32 GPUs; m3080ti:7 stays unused."""
    of = Stage.of
    first = (
        of((0, 1, 2, 3), 0, 3, "full"),
        of((4, 5, 6), 3, 5, "full"),
        of((8, 9, 10, 11), 5, 15, "full"),
        of((16, 17), 15, 22, "full"),
        of((12, 13, 14, 15), 22, 32, "full"),
    )
    pipelines = (
        Pipeline(first, 60),
        Pipeline((of((18, 19, 20, 21), 0, 20, "full"), of((22, 23), 20, 32, "full")), 52),
        Pipeline((of((24, 25), 0, 32),), 36),
        Pipeline((of((26, 27, 28), 0, 14, "selective"), of((29, 30, 31), 14, 32)), 54, 2),
    )
    plan = Plan(pipelines, sharding=Sharding(1))
    return price_case(read_cluster(CONF / "cluster/hexiscale_setting_2.yaml"), plan)


@pytest.fixture(scope="module")
def large() -> Case:
    """10,240 GPUs: 320 pipelines of two machines in three shapes; half of the machines unused."""
    section = {"name": "large", "synthetic": {"num_machines": 1280, "gpus_per_machine": 8}}
    cluster = cluster_from_section(Section(section, "test"))
    firsts: dict[str, list[int]] = {}
    for machine, first in zip(cluster.machines, cluster.first_device.tolist(), strict=True):
        firsts.setdefault(machine.gpu.name, []).append(first)
    pairs = zip(firsts["a100_80gb_sxm"], firsts["h100_80gb_sxm"], strict=True)
    pipelines = []
    for k, starts in enumerate(pairs):
        a, b = (tuple(range(start, start + 8)) for start in starts)
        cut = 20 + k % 3
        pipelines.append(Pipeline((Stage.of(a, 0, cut, "full"), Stage.of(b, cut, 80, "full")), 8))
    return price_case(cluster, Plan(tuple(pipelines), sharding=Sharding(1)), "llama2_70b", global_batch=2_560)


@pytest.fixture(scope="module")
def unlike() -> Case:
    """1,024 GPUs: 64 pipelines of two machines, no two alike."""
    section = {"name": "unlike", "synthetic": {"num_machines": 128, "gpus_per_machine": 8}}
    cluster = cluster_from_section(Section(section, "test"))
    pipelines = []
    for k in range(64):
        a, b = (tuple(range(8 * m, 8 * m + 8)) for m in (2 * k, 2 * k + 1))
        cut = 8 + k
        pipelines.append(Pipeline((Stage.of(a, 0, cut, "full"), Stage.of(b, cut, 80, "full")), 32))
    return price_case(cluster, Plan(tuple(pipelines), sharding=Sharding(1)), "llama2_70b", global_batch=2048)


@pytest.fixture(scope="module")
def woven() -> Case:
    """A replicated stage before a plain one, two layer ranges each, policies by layer; a pipeline of one stage."""
    fast, slow = Replica((0, 1, 2, 3), 2), Replica((4, 5), 2)
    stages = (
        Stage.of_replicas((fast, slow), ((0, 8), (16, 24)), ("full",) * 10 + ("selective",) * 6),
        Stage(TensorParallel((8, 9, 10, 11)), ((8, 16), (24, 32)), ("full",)),
    )
    pipelines = (Pipeline(stages, 48, 4), Pipeline((Stage.of((24, 25, 26, 27), 0, 32, "full"),), 64))
    plan = Plan(pipelines, INTERLEAVED, Sharding(1))
    return price_case(read_cluster(CONF / "cluster/hexiscale_setting_2.yaml"), plan)


@pytest.fixture(scope="module")
def ragged() -> Case:
    """A sequence stage over two GPU types, before a TP stage."""
    groups = (
        SequenceGroup((0, 1, 2, 3), (700, 600, 500, 596), (8, 8, 8, 8)),
        SequenceGroup((8, 9, 10), (700, 500, 500), (16, 8, 8)),
    )
    first = Stage(SequenceParallel(groups, "zigzag"), ((0, 20),), ("full",))
    pipeline = Pipeline((first, Stage.of((4, 5), 20, 32)), 8)
    cluster = read_cluster(CONF / "cluster" / "hexiseq_testbed.yaml")
    return price_case(cluster, Plan((pipeline,), sharding=Sharding(1)), global_batch=8)


CASES = ["small", "mixed", "large", "woven", "ragged"]


@pytest.fixture(params=slow_but(("small", "mixed", "ragged"), CASES))
def case(request: pytest.FixtureRequest) -> Case:
    priced_case: Case = request.getfixturevalue(request.param)
    return priced_case
