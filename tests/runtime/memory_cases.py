"""Plans whose memory is measured, and the prediction beside: the fullest rank of every stage."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiments.lab.memory import Used, trainee_memory_use
from hexiopt.cost.executors.memory import MEMORY_PARTS, Memory
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from runtime.mapping.times import StepTimes
from runtime.settings import Settings
from runtime.state.weights import DTYPES
from runtime.training.trainee import Trainee, initial_values
from tests.runtime.ranks import TIMEOUT_S, run_ranks
from tests.solvers.problems import cluster

LLAMA = ModelSpec(
    name="small",
    architecture="llama",
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=320,
    vocab_size=512,
    max_positions=4096,
)
SETTINGS = Settings(timeout_s=TIMEOUT_S)


@dataclass(frozen=True)
class Compared:
    """A stage's predicted memory, and that of its fullest rank, by parts."""

    pipeline: int
    stage: int
    predicted: Memory
    measured: Memory
    peak_bytes: int

    def off(self, part: str) -> float:
        """By which share of the measured bytes the predicted ones are more; infinite where nothing is."""
        predicted, measured = getattr(self.predicted, part), getattr(self.measured, part)
        if not measured:
            return 0.0 if not predicted else float("inf")
        return float(predicted / measured - 1)


def measure(plan: Plan, model: ModelSpec, workload: Workload) -> list[tuple[tuple[int, int], Used]]:
    """What each rank uses in a step of the plan, and its pipeline and stage."""
    problem = problem_of(plan, model, workload)

    def work(rank: int) -> Any:
        dtype, times = DTYPES[workload.precision], StepTimes.of_plan(problem, plan)
        trainee = Trainee(problem, plan, SETTINGS, dtype, torch.device("cpu"), partial(initial_values, 1), times=times)

        def sequences(first: int, end: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(first)
            return torch.randint(model.vocab_size, (end - first, workload.seq_len + 1), generator=generator)

        executor = trainee.layout.executor_of[rank]
        return (executor.pipeline, executor.stage), trainee_memory_use(trainee, sequences)

    return run_ranks(len(plan.devices()), work)


def problem_of(plan: Plan, model: ModelSpec, workload: Workload) -> Problem:
    return Problem(cluster(("a", "fast", max(plan.devices()) + 1), fast_gib=64.0), model, workload)


def compare(plan: Plan, model: ModelSpec, workload: Workload) -> list[Compared]:
    """What the plan is predicted to use, and what it does."""
    cost, ranks = PlanPricer(problem_of(plan, model, workload)).price(plan), measure(plan, model, workload)
    comparisons = []
    for p, pipeline in enumerate(cost.pipelines):
        for s, stage in enumerate(pipeline.stages):
            uses: list[Used] = [used for at, used in ranks if at == (p, s)]
            fullest = Memory(**{part: max(getattr(use.parts, part) for use in uses) for part in MEMORY_PARTS})
            comparisons.append(Compared(p, s, stage.memory, fullest, max(use.peak_bytes for use in uses)))
    return comparisons


def even_plan(
    model: ModelSpec,
    schedule: Schedule = ONE_F_ONE_B,
    policy: str = "none",
    *,
    stages: int = 2,
    tp: int = 1,
    pipelines: int = 1,
    batches: int = 4,
    size: int = 1,
    chunks: int = 1,
    zero: int = 0,
) -> Plan:
    """Equal pipelines of equal stages."""
    step = model.num_layers // (stages * chunks)
    plan_pipelines = []
    for p in range(pipelines):
        pipeline_stages = []
        for s in range(stages):
            first = (p * stages + s) * tp
            layers = tuple(((c * stages + s) * step, (c * stages + s + 1) * step) for c in range(chunks))
            pipeline_stages.append(Stage(TensorParallel(tuple(range(first, first + tp))), layers, (policy,)))
        plan_pipelines.append(Pipeline(tuple(pipeline_stages), batches, size))
    return Plan(tuple(plan_pipelines), schedule, Sharding(zero))
