"""Models with experts, and plans whose stages share them in every way."""

import json
import random
from dataclasses import replace
from itertools import pairwise

from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, Replicated, StageParallelism, TensorParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.form import LLAMA
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Recurrent
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from tests.runtime.ranks import random_aligned_plan, random_plan

COUNT = 6  # experts of a layer
SHAPES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "mixtral": ({}, {}),
    "olmoe": ({}, {"norm_topk_prob": False}),
    "qwen2_moe": ({"shared": 7, "shared_gate": True}, {}),
    "qwen3_moe": ({}, {"norm_topk_prob": True}),
    "deepseek_v3": ({"shared": 6}, {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0}),
    "glm4_moe": ({"shared": 5}, {}),
    "gpt_oss": ({"bias": True, "router_bias": True}, {}),
    "granitemoehybrid": ({"shared": 5}, {}),
    "nemotron_h": (
        {"gated": False, "latent": 7, "latent_bias": True, "shared": 8, "shared_bias": True},
        {"n_group": 2, "topk_group": 1},
    ),
    "llama4_text": ({"shared": 5, "scales_input": True}, {}),
}
"""By types of Hugging Face: what their experts have, and what their files state of routers."""
ATTENTIONS: dict[str, dict[str, object]] = {
    "qwen2_moe": {"bias": True},
    "qwen3_moe": {"qk_norm": "head"},
    "deepseek_v3": {"kv_heads": 6, "q_rank": 5, "kv_rank": 3, "rope_dim": 2},
    "gpt_oss": {"bias": True, "output_bias": True, "sinks": True, "window": 3},
}
"""Their attention where it is not plain."""


def expert_model(
    model_type: str, num_layers: int, dense_layers: int = 0, hidden_size: int = 12, inner: int = 5
) -> ModelSpec:
    """A model whose layers have experts, but for the first ones. Of hybrids some have recurrences, and of Nemotron-H
    some have one part alone."""
    fields, router = SHAPES[model_type]
    plain = {"heads": 6, "kv_heads": 3, "qk_dim": 4, "v_dim": 4}
    attention = Attention(**(plain | ATTENTIONS.get(model_type, {})))  # type: ignore[arg-type]
    experts = Experts(count=COUNT, top_k=2, ffn_size=inner, **fields)  # type: ignore[arg-type]
    first = LayerKind((attention,), (Dense(ffn_size=9),))
    both = (attention,), (experts,)
    recurrent = Recurrent(heads=6, groups=3, key_dim=3, value_dim=2, chunk=4)
    kinds = {
        "granitemoehybrid": (LayerKind(*both), LayerKind((recurrent,), (experts,))),
        "nemotron_h": tuple(LayerKind(*parts, norms=1) for parts in (both, ((), (experts,)), ((recurrent,), ()))),
    }.get(model_type, (LayerKind(*both),))
    layers = tuple(first if k < dense_layers else kinds[(k - dense_layers) % len(kinds)] for k in range(num_layers))
    return ModelSpec(
        name=model_type,
        architecture="decoder",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=6,
        num_kv_heads=attention.kv_heads,
        head_dim=4,
        ffn_size=9,
        vocab_size=11,
        max_positions=64,
        form=LLAMA,
        layers=layers,
        router=tuple(router.items()),
        config=json.dumps({"model_type": model_type, **router}),
    )


def random_experts(rng: random.Random, devices: tuple[int, ...], size: int) -> ExpertParallel:
    """Replicas of all sizes that share experts in any numbers, and devices that hold experts alone."""
    count = rng.randint(1, min(len(devices), 3))
    cuts = sorted(rng.sample(range(1, len(devices)), count - 1))
    groups = [devices[a:b] for a, b in pairwise([0, *cuts, len(devices)])]
    with_samples = rng.sample(range(count), rng.randint(1, min(count, size)))
    ends = sorted(rng.sample(range(1, size), len(with_samples) - 1))
    samples = dict(zip(with_samples, (b - a for a, b in pairwise([0, *ends, size])), strict=True))
    alone = sum(len(group) for k, group in enumerate(groups) if k not in samples)
    if alone > COUNT:
        return random_experts(rng, devices, size)
    left = [0 if k in samples else 1 for k, group in enumerate(groups) for _ in group]
    for _ in range(COUNT - sum(left)):
        left[rng.randrange(len(left))] += 1
    numbers, members = iter(left), []
    for k, group in enumerate(groups):
        members.append(ExpertReplica(group, samples.get(k, 0), tuple(next(numbers) for _ in group)))
    return ExpertParallel(tuple(members))


def _parallelism(rng: random.Random, stage: Stage, size: int, *, aligned: bool) -> StageParallelism:
    group = stage.parallelism
    devices, copies = stage.devices, group.parameter_copies
    degrees = [n for n in range(1, len(devices)) if len(devices) % n == 0 and size % (len(devices) // n) == 0]
    if aligned:
        degrees = [n for n in degrees if {n} == set(map(len, copies))]
    draw = rng.random()
    if draw < 0.5 and not aligned:
        return random_experts(rng, devices, size)
    if draw < 0.75 and degrees:
        return TensorParallel(devices, degree=rng.choice(degrees))
    return group


def random_expert_plan(rng: random.Random, model_type: str, max_ranks: int = 6) -> tuple[Plan, ModelSpec, int]:
    """As `random_plan` or `random_aligned_plan`, of a model with experts; some backwards are split."""
    aligned = rng.random() < 0.25
    make = random_aligned_plan if aligned else random_plan
    while True:
        plan, _, batch = make(rng, max_ranks, 4)
        if max(len(stage.devices) for pipeline in plan.pipelines for stage in pipeline.stages) > 1:
            break
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, parallelism=_parallelism(rng, stage, pipeline.micro_batch_size, aligned=aligned))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    split = dict(zip((ONE_F_ONE_B, INTERLEAVED), SPLIT_SCHEDULES, strict=True))
    schedule = plan.schedule
    if not aligned and schedule in split and rng.random() < 0.3:
        schedule = split[schedule]
    num_layers = plan.pipelines[0].num_layers
    parallelisms = [stage.parallelism for pipeline in pipelines for stage in pipeline.stages]
    sharding = plan.sharding
    if any(isinstance(group, ExpertParallel) for group in parallelisms):
        sharding = replace(sharding, groups="all")
    model = expert_model(model_type, num_layers, rng.choice((0, 0, 1)))
    return replace(plan, pipelines=pipelines, schedule=schedule, sharding=sharding), model, batch


def expert_features(plan: Plan, model: ModelSpec) -> set[str]:
    """What of expert parallelism a plan is an example of."""
    features = {model.name, plan.schedule.name, f"ZeRO-{plan.sharding.stage}"}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            features |= {policy for policies in stage.policies() for policy in policies}
            match stage.parallelism:
                case ExpertParallel() as group:
                    features.add("stated experts")
                    features |= {"experts alone"} if 0 in group.shares else set()
                    features |= {"no experts"} if 0 in group.experts else set()
                    features |= {"uneven samples"} if len(set(group.shares) - {0}) > 1 else set()
                    features |= {"TP beside experts"} if any(len(r.devices) > 1 for r in group.replicas) else set()
                case TensorParallel(degree=int()) as group if group.num_replicas > 1:
                    features.add("even experts")
                case TensorParallel() if len(stage.devices) > 1:
                    features.add("one replica")
                case Replicated() if len(stage.parallelism.replicas) > 1:
                    features.add("replicas")
                case _:
                    pass
    return features
