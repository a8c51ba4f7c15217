"""Random small problems whose layers have experts, of one kind or of several."""

import random
from typing import Any

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.kinds import Experts, LayerKind
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.hexiopt.shapes_of_kinds import ATTENTION, DENSE_LAYER, KINDS, model_of

SIZES = ((1, 1), (2,), (2, 1), (1, 1, 1), (3,), (2, 2), (4,), (1, 2))
"""GPUs of each machine."""
TFLOPS = {"fast": 100, "mid": 60, "slow": 40}


def drawn_kind(rng: random.Random) -> LayerKind:
    """Attention, and experts of any number and width."""
    experts = Experts(
        count=rng.choice((4, 16, 64)), top_k=2, ffn_size=rng.choice((128, 512, 2048)), shared=rng.choice((0, 256))
    )
    return LayerKind((ATTENTION,), (experts,))


def drawn_model(rng: random.Random, num_layers: int, *, several: bool) -> ModelSpec:
    """Of equal layers, or of up to three kinds, the first with attention."""
    kind = drawn_kind(rng)
    if not several:
        return model_of(*[kind] * num_layers)
    kinds = [kind, DENSE_LAYER, rng.choice(KINDS)]
    return model_of(rng.choice(kinds[:2]), *rng.choices(kinds, k=num_layers - 1), vocab_size=rng.choice((1000, 20_000)))


def drawn_with_experts(
    number: int,
    *,
    num_layers: int = 2,
    several: bool = False,
    types_apart: bool = False,
    memory_gib: tuple[float, ...] = (0.6, 0.8, 1.5, 16.0),
) -> Problem:
    """The problem of that number: up to four GPUs; `types_apart`: no two machines have the same type."""
    rng = random.Random(number)
    sizes = rng.choice(SIZES)
    gpus = rng.sample(list(TFLOPS), len(sizes)) if types_apart else rng.choices(list(TFLOPS), k=len(sizes))
    machines = list[dict[str, Any]]()
    for k, (size, gpu) in enumerate(zip(sizes, gpus, strict=True)):
        inside = {"intra_bandwidth_gb_per_s": rng.choice((2, 25, 300)), "intra_latency_us": 5} if size > 1 else {}
        machines.append({"name": "abc"[k], "gpu": gpu, "num_gpus": size, **inside})
    gib = rng.choice(memory_gib)
    types = {
        name: {"tflops": tflops, "memory_gib": gib, "hbm_gb_per_s": 15 * tflops} for name, tflops in TFLOPS.items()
    }
    network = {"bandwidth_gb_per_s": rng.choice((0.05, 1.0, 10.0, 100.0, 1000.0)), "latency_us": 20}
    data = {"name": "drawn", "inter_machine": network, "machines": machines, "gpus": types}
    workload = Workload(
        global_batch=rng.choice((1, 2, 4)),
        seq_len=rng.choice((256, 2048)),
        recompute=rng.choice(("auto", "none", "full")),
        schedule=rng.choice(("1f1b", "gpipe", "1f1b", "interleaved")),
        optimizer_sharding=rng.choice(("0", "1", "auto")),
        routing=rng.choice(("natural", "forced")),
    )
    space = Space(max_micro_batch_size=rng.choice((1, 2, 4)), max_chunks=2)
    model = drawn_model(rng, num_layers, several=several)
    return Problem(cluster_from_section(Section(data, "drawn")), model, workload, space)
