"""Plans of two unequal pipelines on two machines."""

from dataclasses import replace
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import INTERLEAVED
from hexiopt.schedules.schedule import Schedule
from tests.models import TOY

MODEL = replace(TOY, num_layers=30)
CLUSTER = cluster_from_section(
    Section(
        {
            "name": "lab",
            "inter_machine": {"bandwidth_gb_per_s": 1.25},
            "machines": [
                {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
                {"name": "b", "gpu": "rtx_4090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12},
            ],
        },
        "test",
    )
)
# Two pipelines: TP 2, 1 and 1 over both machines with 12 + 8 + 10 layers; TP 2 and 2 with 15 + 15.
FIRST = Pipeline((Stage.of((0, 1), 0, 12), Stage.of((4,), 12, 20, "full"), Stage.of((2,), 20, 30)), 5, 2)
SECOND = Pipeline((Stage.of((5, 6), 0, 15), Stage.of((7,), 15, 30)), 6)
PLAN = Plan((FIRST, SECOND))
WORK = Workload(global_batch=16, seq_len=128)


def with_stage(stage: Stage, k: int = 1) -> Plan:
    """The first pipeline with another stage k."""
    stages = (*FIRST.stages[:k], stage, *FIRST.stages[k + 1 :])
    return replace(PLAN, pipelines=(replace(FIRST, stages=stages), SECOND))


def interleaved_plan(
    batches: int,
    rest: int = 0,
    schedule: Schedule = INTERLEAVED,
    ranges: Any = (((0, 8), (16, 23)), ((8, 16), (23, 30))),
) -> Plan:
    """Two stages of two ranges, and `rest` sequences on a pipeline of its own."""
    stages = tuple(Stage(TensorParallel((s,)), layers) for s, layers in enumerate(ranges))
    alone = [Pipeline((Stage(TensorParallel((7,)), ((0, 30),)),), rest)] if rest else []
    return Plan((Pipeline(stages, batches), *alone), schedule)


def with_first(**changes: Any) -> Plan:
    return replace(PLAN, pipelines=(replace(FIRST, **changes), SECOND))
