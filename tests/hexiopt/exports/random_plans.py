"""Random problems and plans that each trainer's format expresses."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hexiopt.exports.layout import BlockRecompute, JobLayout, LayoutStage, plan_of_layout
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import layer_ranges, ranges_of
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B

Drawn = tuple[Problem, Plan]
LLAMA_7B = ModelSpec(
    name="llama-7b",
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    ffn_size=11008,
    vocab_size=32000,
    max_positions=4096,
)
GPT = LLAMA_7B.replace(
    name="gpt", architecture="gpt2", attention_bias=True, mlp_bias=True, tied_embeddings=True, activation="gelu_new"
)


def cluster(rng: random.Random, least: int = 1) -> Cluster:
    """Machines of 8 GPUs of two types, with at least so many GPUs."""
    first, second = rng.sample(("rtx_4090", "a100_80gb_sxm", "h100_80gb_sxm", "rtx_3090"), 2)
    most = -(-max(least, 8) // 8)
    counts = {first: 8 * most, second: 8 * rng.randint(1, 2)}
    return Cluster.of(counts, inter_gb_per_s=12.5)


def cuts(rng: random.Random, total: int, parts: int) -> list[int]:
    """`parts` whole numbers from 1 that sum to `total`."""
    at = [0, *sorted(rng.sample(range(1, total), parts - 1)), total]
    return [b - a for a, b in pairwise(at)]


def groups_of(rng: random.Random, where: Cluster, sizes: list[int]) -> list[tuple[int, ...]]:
    """TP groups of these sizes (powers of two up to 8), each inside a machine, no device in two."""
    free = {m: list(range(8 * m, 8 * m + 8)) for m in range(len(where.machines))}
    groups: dict[int, tuple[int, ...]] = {}
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        machine = rng.choice([m for m, devices in free.items() if len(devices) >= sizes[k]])
        groups[k] = tuple(free[machine][: sizes[k]])
        del free[machine][: sizes[k]]
    return [groups[k] for k in range(len(sizes))]


def grid(
    rng: random.Random,
    *,
    models: tuple[ModelSpec, ...] = (LLAMA_7B,),
    schedules: tuple[str, ...] = ("1f1b",),
    zeros: tuple[int, ...] = (0, 1),
    policies: tuple[str, ...] = ("none", "full"),
    blocks: bool = False,
    depths: tuple[int, ...] = (1, 2, 3, 4),
    precisions: tuple[str, ...] = ("bf16", "fp32", "fp16"),
) -> Drawn:
    """Pipelines all alike."""
    model, num_stages, tp = rng.choice(models), rng.choice(depths), rng.choice((1, 2, 4))
    pipelines = rng.randint(1, 3)
    where = cluster(rng, pipelines * num_stages * tp)
    name = rng.choice(schedules) if num_stages > 1 else "1f1b" if "1f1b" in schedules else schedules[0]
    count, chunks = rng.randint(1, 6), 1
    if name == "interleaved":
        count, chunks = count * num_stages, rng.randint(2, 3)
        layers = layer_ranges([n + chunks - 1 for n in cuts(rng, 32 - num_stages * (chunks - 1), num_stages)], chunks)
    else:
        layers = list(ranges_of(cuts(rng, 32, num_stages), num_stages))
    recompute = BlockRecompute(rng.choice(policies))
    if blocks and rng.random() < 0.4:
        recompute = BlockRecompute("full", rng.randint(1, 5))
    elif blocks and rng.random() < 0.3:
        recompute = BlockRecompute("full", together=rng.randint(2, 4))
    flat = groups_of(rng, where, [tp] * (pipelines * num_stages))
    stages = tuple(
        LayoutStage(tuple(flat[s::num_stages]), ranges, recompute.of(ranges)) for s, ranges in enumerate(layers)
    )
    drawn = JobLayout(stages, count, rng.choice((1, 2, 4)) * pipelines)
    schedule = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE, "interleaved": INTERLEAVED}[name]
    zero = rng.choice(zeros)
    if zero >= 2 and not schedule.lockstep:
        zero = min(zeros)
    plan = plan_of_layout(drawn, schedule, zero if zero < 2 or schedule.lockstep else 0)
    workload = Workload(drawn.global_batch, 4096, rng.choice(precisions))
    return Problem(where, model, workload), plan


def chain(
    rng: random.Random,
    *,
    models: tuple[ModelSpec, ...] = (LLAMA_7B,),
    schedules: tuple[str, ...] = ("1f1b",),
    zeros: tuple[int, ...] = (0, 1),
    equal_gpus: bool = False,
    first_layers: bool = True,
) -> Drawn:
    """One chain of stages with TP degrees and replicas of their own."""
    num_stages, model = rng.randint(1, 4), rng.choice(models)
    width = rng.choice((2, 4, 8))
    degrees = []
    for _ in range(num_stages):
        tp = rng.choice((1, 2, 4) if not equal_gpus else [t for t in (1, 2, 4, 8) if t <= width])
        degrees.append((tp, width // tp if equal_gpus else rng.choice((1, 2, 4))))
    if model.tied_embeddings:
        degrees[-1] = degrees[0]
    zero = rng.choice(zeros)
    if zero >= 2:
        degrees = [degrees[0]] * num_stages
    where = cluster(rng, 2 * sum(tp * dp for tp, dp in degrees))
    layers = ranges_of(cuts(rng, 32, num_stages), num_stages)
    flat = groups_of(rng, where, [tp for tp, dp in degrees for _ in range(dp)])
    stages = []
    for (_, dp), ranges in zip(degrees, layers, strict=True):
        replicas, flat = tuple(flat[:dp]), flat[dp:]
        many = ranges[0][1] - ranges[0][0]
        block = rng.choice((None, rng.randint(1, many)))
        policy = BlockRecompute(rng.choice(("none", "full")) if block is None else "full", block).of(ranges)
        if not first_layers and many > 1 and rng.random() < 0.5:
            policy = tuple(rng.choice(("none", "full")) for _ in range(many))
            policy = policy[:1] if len(set(policy)) == 1 else policy
        stages.append(LayoutStage(replicas, ranges, policy))
    size = 8 * rng.randint(1, 2)
    drawn = JobLayout(tuple(stages), rng.randint(1, 6), size)
    schedule = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE}[rng.choice(schedules)]
    return Problem(where, model, Workload(drawn.global_batch)), plan_of_layout(drawn, schedule, zero)


def unequal(rng: random.Random) -> Drawn:
    """Pipelines of any structure and batch, for FlashFlex."""
    pipelines, policy, sizes = [], rng.choice(("none", "full")), []
    for _ in range(rng.randint(1, 3)):
        sizes.append([rng.choice((1, 2, 4)) for _ in range(rng.randint(1, 3))])
    where = cluster(rng, 2 * sum(map(sum, sizes)))
    flat = groups_of(rng, where, [tp for degrees in sizes for tp in degrees])
    for tps in sizes:
        layers = ranges_of(cuts(rng, 32, len(tps)), len(tps))
        stages = tuple(Stage.of(flat.pop(0), *ranges[0], policy) for ranges in layers)
        pipelines.append(Pipeline(stages, rng.randint(1, 9), rng.choice((1, 2, 4))))
    plan = Plan(tuple(pipelines), rng.choice((ONE_F_ONE_B, GPIPE)), Sharding(0))
    workload = Workload(sum(pipeline.num_sequences for pipeline in pipelines), 4096, "fp16")
    return Problem(where, LLAMA_7B, workload), plan


def _lone(rng: random.Random) -> Drawn:
    return grid(rng, schedules=("1f1b",), zeros=(2, 3), depths=(1,))


DRAWN: dict[str, Callable[[random.Random], Drawn]] = {
    "megatron": lambda rng: grid(
        rng,
        models=(LLAMA_7B, GPT, LLAMA_7B.replace(num_kv_heads=8)),
        schedules=("1f1b", "interleaved"),
        policies=("none", "full", "selective"),
        blocks=True,
    ),
    "megatron_bridge": lambda rng: grid(
        rng, schedules=("1f1b", "interleaved"), policies=("none", "full", "selective"), blocks=True
    ),
    "flagscale": lambda rng: chain(rng, models=(LLAMA_7B, GPT)),
    "torchtitan": lambda rng: grid(
        rng, schedules=("1f1b", "interleaved", "gpipe"), zeros=(0, 2, 3), precisions=("bf16",)
    ),
    "flashflex": unequal,
    "galvatron": lambda rng: chain(
        rng, schedules=("1f1b", "gpipe"), zeros=(0, 2, 3), equal_gpus=True, first_layers=False
    ),
    "deepspeed": lambda rng: grid(rng),
    "accelerate": _lone,
}


def draw_case(trainer: str, rng: random.Random) -> Drawn:
    """A random problem and a plan of it that the trainer's format expresses."""
    problem, plan = DRAWN[trainer](rng)
    if trainer == "accelerate":
        problem = replace(problem, workload=replace(problem.workload, precision="bf16"))
    return problem, plan
