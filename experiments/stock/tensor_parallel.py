"""Tensor-parallel layers by DTensor of torch, and the same ones by ours: forward and backward on two processes.

Both keep hidden states cut along the sequence between attention and MLP (`SequenceParallel` there).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from experiments.stock.layer import StockLayer
from experiments.stock.turns import OURS, STOCK, TIMEOUT_S, Step, compared_model
from runtime.mapping.layout import Chunk
from runtime.mapping.model_parts import stage_parts
from runtime.mapping.parts import shards, split
from runtime.model.decoder import DecoderChunk, empty_weights
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import RankTpGroup
from runtime.network import ProcessGroups
from runtime.training.trainee import initial_values

SIZE = 2  # processes
_MODEL = compared_model(512, 8, 1408)
_SEQ_LEN, _SAMPLES = 256, 2
_CPU = torch.device("cpu")


def _input(number: int) -> Tensor:
    """Hidden states [T, B, H]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(_SEQ_LEN, _SAMPLES, _MODEL.hidden_size, generator=generator)


def _stock(rank: int) -> Step:
    mesh = init_device_mesh("cpu", (SIZE,))
    layers = nn.ModuleList(StockLayer(_MODEL, _SEQ_LEN) for _ in range(_MODEL.num_layers))
    whole = stage_parts(_MODEL, [(0, _MODEL.num_layers)], shards(_MODEL, 1)[0], False, False)
    layers.load_state_dict({part.name.removeprefix("model.layers."): initial_values(0, part) for part in whole})
    to_whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in layers:
        column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        styles = {
            "input_layernorm": SequenceParallel(),
            "self_attn": to_whole,
            "post_attention_layernorm": SequenceParallel(),
            "mlp": to_whole,
        }
        styles |= {f"self_attn.{name}_proj": column for name in "qkv"} | {"self_attn.o_proj": row}
        styles |= {f"mlp.{name}_proj": column for name in ("gate", "up")} | {"mlp.down_proj": row}
        parallelize_module(layer, mesh, styles)
    first, end = split(_SEQ_LEN, SIZE)[rank]

    def step(number: int) -> float:
        layers.zero_grad()
        local = _input(number)[first:end].transpose(0, 1).contiguous()
        x = DTensor.from_local(local, mesh, [Shard(1)])
        for layer in layers:
            x = layer(x)
        return _finish_step(x.to_local().square().sum())

    return step


def _ours(rank: int) -> Step:
    groups = ProcessGroups([tuple(range(SIZE))], TIMEOUT_S)
    tokens = split(_SEQ_LEN, SIZE)
    tp = RankTpGroup(rank, tuple(tokens), groups.of(tuple(range(SIZE))))
    layers, shard = (0, _MODEL.num_layers), shards(_MODEL, SIZE)[rank]
    parts = list(stage_parts(_MODEL, [layers], shard, False, False))
    weights = empty_weights(parts, torch.float32, _CPU)
    for part in parts:
        weights[part.name].data.copy_(initial_values(0, part))
    chunk = Chunk(1, layers, ("none",) * _MODEL.num_layers, False, False)
    calls = part_calls(_MODEL, shard, tp, [(0, _SEQ_LEN)], torch.empty(0))
    decoder = DecoderChunk(_MODEL, chunk, shard, tp, calls, weights)

    def step(number: int) -> float:
        for weight in weights.values():
            weight.grad = None
        local = _input(number)[slice(*tokens[rank])].contiguous()
        return _finish_step(decoder.hidden(local).square().sum())

    return step


def _finish_step(loss_part: Tensor) -> float:
    """The backward of a rank's part of a loss, and the whole loss."""
    loss_part.backward()  # type: ignore[no-untyped-call]
    total = loss_part.detach().clone()
    dist.all_reduce(total)
    return float(total)


def ways_of(rank: int) -> dict[str, Step]:
    """Both ways of a rank."""
    return {OURS: _ours(rank), STOCK: _stock(rank)}
