"""Random models with experts and layers of several kinds, and plans of them that Megatron-LM's formats express."""

import random

from hexiopt.exports.layout import BlockRecompute, JobLayout, LayoutStage, plan_of_layout
from hexiopt.exports.trainers.megatron_kinds.composition import is_hybrid
from hexiopt.exports.trainers.megatron_kinds.writing import blocks_of_layer
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.form import Form
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind, Mixer, Recurrent
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import layer_ranges, ranges_of
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from tests.hexiopt.exports.random_plans import Drawn, cuts

LAYERS = 16


def mixture(rng: random.Random, *, recurrent: bool = True) -> ModelSpec:
    """A model of layers that GPT models of Megatron-LM have."""
    latent = rng.random() < 0.3
    biased = not latent and rng.random() < 0.3
    rms, gated = biased or rng.random() < 0.8, rng.random() < 0.7
    attention = _latent(rng) if latent else _attention(rng, biased, rms)
    experts = _experts(rng, biased, gated)
    dense = Dense(ffn_size=rng.choice((1024, 3072)), gated=gated, bias=biased)
    first, window = rng.choice((0, 0, 1, 3)), rng.choice((None, 128, 1000))
    windowed = rng.choice((lambda n: n % 2 == 0, lambda n: n % 4 != 3, lambda n: True, lambda n: rng.random() < 0.5))
    delta = _delta(rng) if recurrent and not biased and not latent and rng.random() < 0.3 else None
    layers = []
    for n in range(LAYERS):
        mixer: Mixer = attention
        if delta is not None and n % 4 != 3:
            mixer = delta
        elif isinstance(mixer, Attention) and not latent and window is not None and windowed(n):
            mixer = Attention(**{**vars(mixer), "window": window})
        layers.append(LayerKind((mixer,), (dense if n < first else experts,)))
    positions = rng.choice(("rope", "rope", "learned", "none"))
    extra = layers[-1:] * rng.choice((0, 0, 1, 2)) if positions != "learned" else []
    rope = rng.choice(("default", "yarn") if latent else ("default", "default" if extra else "yarn", "llama3"))
    return _model(rng, layers, extra, gated, "rms" if rms else "layer", positions, rope)


def hybrid(rng: random.Random, *, whole: bool = False) -> ModelSpec:
    """A model of blocks with Mamba-2, or of `whole` layers of two blocks."""
    gated = rng.random() < 0.5
    attention, experts = _attention(rng, False, True), _experts(rng, False, gated)
    mamba = Recurrent(heads=16, groups=rng.choice((1, 8)), key_dim=64, value_dim=32)
    dense = Dense(ffn_size=2048, gated=gated)
    if whole:
        layers = [LayerKind((attention if n % 5 == 4 else mamba,), (experts,)) for n in range(LAYERS)]
        return _model(rng, layers, [], gated, "rms", "none", "default")
    blocks = {"M": LayerKind((mamba,), (), 1), "*": LayerKind((attention,), (), 1)}
    blocks |= {"E": LayerKind((), (experts,), 1), "-": LayerKind((), (dense,), 1)}
    letters = ["M", "*", "E", *rng.choices("MMME-*", k=LAYERS - 3)]
    rng.shuffle(letters)
    extra = [LayerKind((attention,), (experts,))] * rng.choice((0, 1, 2))
    return _model(rng, [blocks[letter] for letter in letters], extra, gated, "rms", "none", "default")


def _attention(rng: random.Random, biased: bool, rms: bool) -> Attention:
    norm = "none" if biased else rng.choice(("none", "head", "plain"))
    return Attention(
        heads=16,
        kv_heads=rng.choice((2, 8, 16)),
        qk_dim=(width := rng.choice((64, 128))),
        v_dim=width,
        bias=biased or rng.random() < 0.3,
        output_bias=biased,
        qk_norm=norm,
        qk_norm_vectors=2 if norm == "head" and not rms else 1,
        gated=rng.random() < 0.2,
        sinks=rng.random() < 0.2,
    )


def _latent(rng: random.Random) -> Attention:
    content, rope = rng.choice((64, 128)), rng.choice((32, 64))
    return Attention(
        heads=16,
        kv_heads=16,
        qk_dim=content + rope,
        v_dim=rng.choice((64, 128)),
        q_rank=rng.choice((0, 384)),
        kv_rank=256,
        rope_dim=rope,
    )


def _delta(rng: random.Random) -> Recurrent:
    width = rng.choice((64, 128))
    return Recurrent(heads=16, groups=8, key_dim=width, value_dim=width, conv_bias=False, chunk=64, delta=True)


def _experts(rng: random.Random, biased: bool, gated: bool) -> Experts:
    shared = 0 if biased else rng.choice((0, 512, 1024))
    return Experts(
        count=rng.choice((16, 32, 64)),
        top_k=rng.randint(1, 8),
        ffn_size=rng.choice((256, 768)),
        shared=shared,
        gated=gated,
        bias=biased,
        router_bias=biased,
        shared_gate=bool(shared) and rng.random() < 0.5,
        latent=0 if biased else rng.choice((0, 0, 256)),
    )


def _model(
    rng: random.Random,
    layers: list[LayerKind],
    extra: list[LayerKind],
    gated: bool,
    norm: str,
    positions: str,
    rope_type: str,
) -> ModelSpec:
    attention = next(kind.attention for kind in layers if kind.attention is not None)
    form = Form(
        gated_mlp=gated,
        norm=norm,
        norm_vectors=2 if norm == "layer" else 1,
        positions=positions,
        qk_norm=attention.qk_norm,
        qk_norm_vectors=attention.qk_norm_vectors,
        output_bias=attention.output_bias,
    )
    channels = [part for kind in layers for part in kind.channels]
    return ModelSpec(
        name="imported",
        architecture=DECODER,
        num_layers=len(layers),
        hidden_size=1024,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.qk_dim,
        ffn_size=max(part.ffn_size for part in channels),
        vocab_size=32_000,
        max_positions=4096,
        tied_embeddings=rng.random() < 0.3,
        attention_bias=attention.bias,
        mlp_bias=any(part.bias for part in channels),
        activation="silu" if gated else rng.choice(("relu2", "gelu")),
        norm_eps=1e-6,
        rope_theta=5e5 if positions == "rope" else 1e4,
        rope_type=rope_type if positions == "rope" else "default",
        form=form,
        layers=tuple(layers),
        extra_layers=tuple(extra),
    )


def grid_of_cells(rng: random.Random, model: ModelSpec) -> Drawn:
    """Equal pipelines, each stage of which is replicas that share experts; cells may be of two machines."""
    num_stages, cell, copies = rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8)), rng.randint(1, 2)
    tp = rng.choice(_degrees(model))
    count, chunks = rng.randint(1, 4), 1
    interleaved = num_stages > 1 and rng.random() < 0.4
    layers = list(ranges_of(cuts(rng, model.num_layers, num_stages), num_stages))
    if interleaved:
        count, chunks = count * num_stages, 2
        parts = [n + 1 for n in cuts(rng, model.num_layers - num_stages, num_stages)]
        layers = layer_ranges(parts, chunks)
    recompute = BlockRecompute(rng.choice(("none", "full", "selective")))
    if rng.random() < 0.3 and (not is_hybrid(model) or blocks_of_layer(model)):
        recompute = rng.choice((BlockRecompute("full", rng.randint(1, 3)), BlockRecompute("full", together=2)))
    where = Cluster.of({"h100_80gb_sxm": 8 * -(-tp * cell * copies * num_stages // 8)}, inter_gb_per_s=50)
    devices = iter(range(where.num_devices))
    stages = tuple(
        LayoutStage(
            tuple(tuple(next(devices) for _ in range(tp)) for _ in range(cell * copies)),
            ranges,
            recompute.of(ranges),
            cell,
        )
        for ranges in layers
    )
    drawn = JobLayout(stages, count, rng.choice((1, 2)) * cell * copies)
    plan = plan_of_layout(drawn, INTERLEAVED if chunks > 1 else ONE_F_ONE_B, rng.choice((0, 1)))
    routing = rng.choice(("natural", "forced"))
    return Problem(where, model, Workload(drawn.global_batch, 4096, "bf16", routing=routing)), plan


def _degrees(model: ModelSpec) -> tuple[int, ...]:
    """TP degrees that divide the groups of recurrences."""
    groups = [kind.recurrent.groups for kind in model.layers if kind.recurrent is not None]
    return (1,) if 1 in groups else (1, 2)


def chain_of_cells(rng: random.Random, model: ModelSpec) -> Drawn:
    """One chain whose stages share experts by degrees of their own."""
    num_stages = rng.choice((1, 2, 3))
    copies, shares = rng.choice((1, 2)), rng.random() < 0.7
    degrees = [(rng.choice((1, 2)), rng.choice((2, 4) if shares else (1,))) for _ in range(num_stages)]
    if not shares:
        degrees = [(1, 1)] * num_stages
    if model.tied_embeddings or model.extra_layers:
        degrees[-1] = degrees[0]
    where = Cluster.of({"h100_80gb_sxm": 8 * -(-sum(t * r for t, r in degrees) * copies // 8)}, inter_gb_per_s=50)
    devices, stages = iter(range(where.num_devices)), []
    for (tp, cell), ranges in zip(degrees, ranges_of(cuts(rng, model.num_layers, num_stages), num_stages), strict=True):
        block = BlockRecompute("full", rng.choice((None, rng.randint(1, ranges[0][1] - ranges[0][0]))))
        replicas = tuple(tuple(next(devices) for _ in range(tp)) for _ in range(cell * copies))
        stages.append(LayoutStage(replicas, ranges, block.of(ranges), cell))
    drawn = JobLayout(tuple(stages), rng.randint(1, 4), 8 * copies)
    workload = Workload(drawn.global_batch, 4096, "bf16", routing=rng.choice(("natural", "forced")))
    return Problem(where, model, workload), plan_of_layout(drawn, ONE_F_ONE_B, rng.choice((0, 1)))
