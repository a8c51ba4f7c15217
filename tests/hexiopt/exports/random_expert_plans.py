"""Random problems and plans of models with experts that each trainer's format expresses."""

import random
from collections.abc import Callable

from hexiopt.exports.trainers.torchtitan_models import MODELS
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, layer_ranges, ranges_of
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from tests.hexiopt.exports.random_plans import Drawn, cluster, cuts, groups_of
from tests.hexiopt.shapes_of_kinds import EQUAL, EXPERTS, KINDS, LATENT, MIXED, model_of

LATENT_EXPERTS = model_of(*[kind for kind in KINDS if kind.attention == LATENT and kind.experts == EXPERTS] * 4)
TITANS = tuple(model_of(*titan.layers, hidden_size=titan.hidden_size, vocab_size=titan.vocab_size) for titan in MODELS)


def expert_grid(
    rng: random.Random,
    models: tuple[ModelSpec, ...],
    zeros: tuple[int, ...],
    *,
    schedules: tuple[Schedule, ...] = (ONE_F_ONE_B,),
    most_stages: int = 1,
    least_zero_of_replicas: int = 0,
    most_zero_of_tp: int = 3,
) -> Drawn:
    """Pipelines all alike, whose stages are groups of 1 to 8 devices of one machine that share experts, with one TP
    degree; ZeRO from `least_zero_of_replicas` on where groups have several replicas, up to `most_zero_of_tp` where
    there is TP."""
    model, num_stages = rng.choice(models), rng.randint(1, most_stages)
    tp, replicas = rng.choice([(t, r) for t in (1, 2, 4) for r in (1, 2, 4, 8) if t * r <= 8])
    num_pipelines, schedule, chunks = rng.randint(1, 3), rng.choice(schedules), 1
    zero = rng.choice(zeros)
    if replicas > 1:
        zero = max(zero, least_zero_of_replicas)
    if tp > 1:
        zero = min(zero, most_zero_of_tp)
    if num_stages == 1 or model.num_layers < 2 * num_stages or zero >= 2:
        schedule = rng.choice(schedules[:2])
    count = rng.randint(1, 4)
    if schedule is INTERLEAVED:
        count, chunks = count * num_stages, 2
        layers = layer_ranges([n + 1 for n in cuts(rng, model.num_layers - num_stages, num_stages)], 2)
    else:
        layers = list(ranges_of(cuts(rng, model.num_layers, num_stages), num_stages))
    where = cluster(rng, 8 * num_stages * num_pipelines)
    groups = groups_of(rng, where, [tp * replicas] * (num_stages * num_pipelines))
    size = replicas * rng.choice((1, 2))
    policy = (rng.choice(("none", "full")),)
    pipelines = []
    for p in range(num_pipelines):
        stages = tuple(
            Stage(TensorParallel(group, degree=tp if len(group) > 1 else None), ranges, policy)
            for group, ranges in zip(groups[p * num_stages : (p + 1) * num_stages], layers, strict=True)
        )
        pipelines.append(Pipeline(stages, count, size))
    plan = Plan(tuple(pipelines), schedule if chunks > 1 else schedule.plain(), Sharding(zero))
    batch = sum(pipeline.num_sequences for pipeline in pipelines)
    return Problem(where, model, Workload(batch, 4096, "bf16"), Space(max_micro_batch_size=64)), plan


SCHEDULES: tuple[Schedule, ...] = (ONE_F_ONE_B, GPIPE, INTERLEAVED)
EXPERT_PLANS: dict[str, Callable[[random.Random], Drawn]] = {
    "torchtitan": lambda rng: expert_grid(
        rng, TITANS, (0, 2, 3), schedules=SCHEDULES, most_stages=3, least_zero_of_replicas=2
    ),
    "deepspeed": lambda rng: expert_grid(rng, (EQUAL, MIXED, LATENT_EXPERTS), (0, 1, 2, 3), most_zero_of_tp=2),
    "accelerate": lambda rng: expert_grid(rng, (EQUAL, MIXED, LATENT_EXPERTS), (3,)),
}


def drawn_plan(name: str, seed: int) -> Drawn:
    """A random problem and a plan of experts that a trainer's format expresses."""
    return EXPERT_PLANS[name](random.Random(f"experts {name} {seed}"))
