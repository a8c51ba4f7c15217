"""Ranks of a gloo world as forked processes of a test, and the plans that they train."""

import multiprocessing
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers import it at first use: here once, before processes fork
import torch.distributed as dist

from hexiopt.plan.parallelism import ORDERS, Replica, SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from tests.solvers.problems import cluster

TIMEOUT_S = 60.0
# Of the plans' devices, which may make up TP groups across machines here: sharding groups are all that it says.
CLUSTER = cluster(("a", "fast", 3), ("b", "slow", 2), ("c", "fast", 7))


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each rank of a world. The first error of any rank is raised."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ends, processes = [], []
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(work, rank, count, store, there), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        values, errors = [], []
        for rank, end in enumerate(ends):
            try:
                ok, value = end.recv()
            except EOFError:
                ok, value = False, "the process died"
            (values if ok else errors).append(value if ok else f"rank {rank}: {value}")
        for process in processes:
            process.join(10.0)
            process.kill()
    assert not errors, "\n".join(errors)
    return values


def _rank(work: Callable[[int], Any], rank: int, count: int, store: Path, answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
        value = work(rank)
        dist.barrier()
        answer.send((True, value))
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))


def random_model(rng: random.Random, num_layers: int) -> ModelSpec:
    """A decoder with 6 query heads, which no TP degree but 2 and 3 divides."""
    architecture = rng.choice(("llama", "qwen2", "qwen3", "mistral"))
    return ModelSpec(
        name="random",
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=12,
        num_heads=6,
        num_kv_heads=rng.choice((1, 2, 3, 6)),
        head_dim=rng.choice((2, 4)) if architecture in ("llama", "qwen3", "mistral") else 2,
        ffn_size=rng.choice((9, 16)),
        vocab_size=rng.choice((11, 32)),
        max_positions=64,
        tied_embeddings=rng.random() < 0.5,
        attention_bias=architecture == "qwen2" or (architecture == "llama" and rng.random() < 0.5),
        mlp_bias=architecture == "llama" and rng.random() < 0.5,
        attention_window=3 if architecture == "mistral" and rng.random() < 0.5 else None,
    )


def random_plan(rng: random.Random, max_ranks: int = 8, most_layers: int = 6) -> tuple[Plan, ModelSpec, int]:
    """A plan of 2 ranks or more, a model for it, and the global batch."""
    schedule = rng.choice((GPIPE, ONE_F_ONE_B, ONE_F_ONE_B, INTERLEAVED, INTERLEAVED))
    devices = list(range(rng.randint(2, max_ranks)))
    rng.shuffle(devices)
    num_layers, pipelines = rng.randint(4, most_layers), []
    count = rng.randint(1, min(3, len(devices)))
    cuts = sorted(rng.sample(range(1, len(devices)), count - 1))
    for start, end in pairwise([0, *cuts, len(devices)]):
        pipelines.append(_pipeline(rng, devices[start:end], num_layers, schedule))
    zero, model = rng.choice((0, 1)), random_model(rng, num_layers)
    sharding = Sharding(zero, rng.choice(("all", "machine", _lists(rng, devices))) if zero else "all")
    return Plan(tuple(pipelines), schedule, sharding), model, sum(p.num_sequences for p in pipelines)


def random_aligned_plan(rng: random.Random, max_ranks: int = 8, most_layers: int = 6) -> tuple[Plan, ModelSpec, int]:
    """A plan of ZeRO-2 or 3 of 2 ranks or more, a model for it, and the global batch: all pipelines have equally many
    stages, layers and micro-batches and equal TP degrees; sizes, recompute policies and sharding groups are of any
    kind."""
    while True:
        num_layers, count = rng.randint(2, most_layers), rng.randint(1, 3)
        num_stages, tp = rng.randint(1, min(3, num_layers)), [rng.choice((1, 1, 2, 3)) for _ in range(3)]
        replicas = [[rng.choice((1, 1, 2)) for _ in range(num_stages)] for _ in range(count)]
        needed = sum(tp[s] * row[s] for row in replicas for s in range(num_stages))
        if 2 <= needed <= max_ranks and (count > 1 or max(replicas[0]) > 1):
            break
    devices = list(range(needed))
    rng.shuffle(devices)
    left = iter(devices)
    ranges = list(pairwise([0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]))
    heads = [_heads(rng, tp[s]) for s in range(num_stages)]
    batches, pipelines = rng.randint(1, 4), []
    for counts in replicas:
        size, stages = max(max(counts), rng.randint(1, 2)), []
        for s, layers in enumerate(ranges):
            samples = _samples(rng, size, counts[s]) if counts[s] > 1 else [None]
            each = tuple(Replica(tuple(next(left) for _ in range(tp[s])), n, heads[s]) for n in samples)
            policies = tuple(rng.choice(("none", "selective", "full")) for _ in range(layers[1] - layers[0]))
            stages.append(Stage.of_replicas(each, (layers,), policies))
        pipelines.append(Pipeline(tuple(stages), batches, size))
    groups = rng.choice(("all", "all", "machine", _lists(rng, devices)))
    plan = Plan(tuple(pipelines), rng.choice((GPIPE, ONE_F_ONE_B)), Sharding(rng.choice((2, 3, 3)), groups))
    return plan, random_model(rng, num_layers), sum(p.num_sequences for p in pipelines)


def _lists(rng: random.Random, devices: list[int]) -> tuple[tuple[int, ...], ...]:
    cuts = sorted(rng.sample(range(1, len(devices)), rng.randint(1, min(2, len(devices) - 1))))
    return tuple(tuple(devices[a:b]) for a, b in pairwise([0, *cuts, len(devices)]))


def _pipeline(rng: random.Random, devices: list[int], num_layers: int, schedule: Schedule) -> Pipeline:
    chunks = rng.choice((1, 2)) if schedule == INTERLEAVED else 1
    num_stages = rng.randint(1, min(4, len(devices), num_layers // chunks))
    chunks = chunks if num_stages > 1 else 1
    cuts = sorted(rng.sample(range(1, len(devices)), num_stages - 1))
    slots = [tuple(devices[a:b]) for a, b in pairwise([0, *cuts, len(devices)])]
    groups = [_groups(rng, slot) for slot in slots]
    size = max(max(map(len, groups)), rng.randint(1, 3))
    layer_cuts = sorted(rng.sample(range(1, num_layers), num_stages * chunks - 1))
    ranges = list(pairwise([0, *layer_cuts, num_layers]))
    stages = []
    for s, stage_groups in enumerate(groups):
        layers = tuple(ranges[c * num_stages + s] for c in range(chunks))
        recompute = tuple(policy for run in layers for policy in _policies(rng, *run))
        replicas = tuple(
            Replica(group, n, _heads(rng, len(group)))
            for group, n in zip(stage_groups, _samples(rng, size, len(stage_groups)), strict=True)
        )
        if len(replicas) == 1:
            replicas = (Replica(stage_groups[0], None, replicas[0].heads),)
        stages.append(Stage.of_replicas(replicas, layers, recompute))
    batches = rng.randint(1, 4)
    if chunks > 1:
        batches = num_stages * rng.randint(1, 2)
    return Pipeline(tuple(stages), batches, size)


def _policies(rng: random.Random, first: int, end: int) -> list[str]:
    """Recompute policies of a range of layers. Of those that are full one after another, every run that begins at an
    even layer is recomputed together."""
    policies: list[str] = []
    for layer in range(first, end):
        policy = rng.choice(("none", "selective", "full"))
        follows = policies and policies[-1] in ("full", "joined") and policy == "full"
        begins_even = policies and (policies[-1] == "joined" or (layer - 1) % 2 == 0)
        policies.append("joined" if follows and begins_even else policy)
    return policies


def _groups(rng: random.Random, slot: tuple[int, ...]) -> list[tuple[int, ...]]:
    """TP groups of at most four devices."""
    groups, at = [], 0
    while at < len(slot):
        tp = rng.randint(1, min(4, len(slot) - at))
        groups.append(slot[at : at + tp])
        at += tp
    return groups


def _samples(rng: random.Random, size: int, count: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, size), count - 1))
    return [b - a for a, b in pairwise([0, *cuts, size])]


def _heads(rng: random.Random, tp: int) -> tuple[int, ...] | None:
    if tp == 1 or rng.random() < 0.5:
        return None
    return tuple(_samples(rng, 6, tp))


def random_sequence(rng: random.Random, devices: tuple[int, ...], seq_len: int, num_heads: int) -> SequenceParallel:
    """A sequence layout over the devices: groups of any size, tokens and heads cut anywhere."""
    cuts = sorted(rng.sample(range(1, len(devices)), rng.randint(0, len(devices) - 1)))
    tokens, groups = iter(_samples(rng, seq_len, len(devices))), []
    for a, b in pairwise([0, *cuts, len(devices)]):
        for first in range(a, b, num_heads):
            members = devices[first : min(b, first + num_heads)]
            heads = _samples(rng, num_heads, len(members))
            groups.append(SequenceGroup(members, tuple(next(tokens) for _ in members), tuple(heads)))
    return SequenceParallel(tuple(groups), rng.choice(ORDERS))


def random_sequence_plan(
    rng: random.Random, seq_len: int, max_ranks: int = 6, most_layers: int = 4
) -> tuple[Plan, ModelSpec, int]:
    """As `random_plan`, but a stage of several devices has a sequence layout, and perhaps other stages have: of those
    with one layer range, as layouts are not interleaved.
    """
    wanted = rng.randint(1, 2)  # stages of several devices
    while True:
        plan, model, batch = random_plan(rng, max_ranks, most_layers)
        plain = [stage for pipeline in plan.pipelines for stage in pipeline.stages if len(stage.layers) == 1]
        several = [stage for stage in plain if len(stage.devices) > 1]
        if len(several) >= wanted:
            break
    sequence_stage = rng.choice(several)

    def change(stage: Stage) -> Stage:
        if len(stage.layers) > 1:
            return stage
        if stage is not sequence_stage and rng.random() < (0.9 if len(stage.devices) == 1 else 0.5):
            return stage
        return replace(stage, parallelism=random_sequence(rng, stage.devices, seq_len, model.num_heads))

    pipelines = tuple(replace(p, stages=tuple(map(change, p.stages))) for p in plan.pipelines)
    return replace(plan, pipelines=pipelines), model, batch
