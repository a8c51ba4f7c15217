"""A training step by stock pipelines of torch, and the same one by ours.

Two pipelines of two stages on four processes: `torch.distributed.pipelining` (1F1B) with `DistributedDataParallel` and
`torch.optim.AdamW`, around the same decoder.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.stock.turns import OURS, STOCK, Step, compared_model, step_of_ours
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.layout import layout_of
from runtime.model.decoder import DecoderChunk, empty_weights
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import RankTpGroup
from runtime.settings import AdamW
from runtime.training.trainee import initial_values

SIZE = 4  # processes
_MODEL = compared_model(256, 4, 704)
_SEQ_LEN, _MICRO_BATCHES, _SIZE = 128, 8, 2
_BATCH = 2 * _MICRO_BATCHES * _SIZE
_SETTINGS = AdamW(lr=1e-3, max_norm=None)


def plan() -> Plan:
    """Two equal pipelines of two stages."""
    half = _MODEL.num_layers // 2
    pipelines = [
        Pipeline((Stage.of((2 * p,), 0, half), Stage.of((2 * p + 1,), half, 2 * half)), _MICRO_BATCHES, _SIZE)
        for p in range(2)
    ]
    return Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(0))


class _StockStage(nn.Module):
    """A stage as stock parts want it: samples come first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        executor = layout_of(plan(), _MODEL).executor_of[rank]
        parts = list(executor.parts(_MODEL, rank))
        weights = empty_weights(parts, torch.float32, torch.device("cpu"))
        for part in parts:
            weights[part.name].data.copy_(initial_values(0, part))
        self.held = nn.ParameterList(weights.values())
        tp = RankTpGroup(0, ((0, _SEQ_LEN),))
        shard = executor.shards[0]
        calls = part_calls(_MODEL, shard, tp, [(0, _SEQ_LEN)], torch.empty(0))
        self._chunk = DecoderChunk(_MODEL, executor.chunks[0], shard, tp, calls, weights)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] or hidden states [B, T, H] to hidden states, or logits [B, T, V]."""
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # as gloo sends it
        hidden = self._chunk.hidden(x.transpose(0, 1))
        return (self._chunk.logits(hidden) if self._chunk.chunk.last else hidden).transpose(0, 1).contiguous()


def _stock(rank: int) -> Callable[[Tensor], float]:
    pipeline, position = divmod(rank, 2)
    across = [dist.new_group([position_of, position_of + 2]) for position_of in range(2)]
    along = [dist.new_group([2 * p, 2 * p + 1]) for p in range(2)]
    module = DistributedDataParallel(_StockStage(rank), process_group=across[position])
    stage = PipelineStage(module, position, 2, torch.device("cpu"), group=along[pipeline])

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, _MICRO_BATCHES, loss_fn=loss_of)
    settings = _SETTINGS
    adam = torch.optim.AdamW(
        module.parameters(), settings.lr, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay
    )

    def step(tokens: Tensor) -> float:
        batch = tokens[pipeline * _BATCH // 2 : (pipeline + 1) * _BATCH // 2]
        adam.zero_grad()
        losses: list[Tensor] = []
        if position == 0:
            schedule.step(batch[:, :-1].contiguous())
        else:
            schedule.step(target=batch[:, 1:].contiguous(), losses=losses)
        adam.step()
        mean = torch.stack(losses).mean().detach() / 2 if losses else torch.zeros(())
        dist.all_reduce(mean)
        return float(mean)

    return step


def ways_of(rank: int) -> dict[str, Step]:
    """Both ways of a rank."""

    def on(step: Callable[[Tensor], float]) -> Step:
        def run(number: int) -> float:
            generator = torch.Generator().manual_seed(number)
            return step(torch.randint(_MODEL.vocab_size, (_BATCH, _SEQ_LEN + 1), generator=generator))

        return run

    ours = step_of_ours(plan(), _MODEL, _SEQ_LEN, _BATCH, _SETTINGS)
    return {OURS: on(ours), STOCK: on(_stock(rank))}
