"""The layers with experts of one rank: how their tokens are routed and exchanged, and what balances the experts."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.problem.kinds import Experts
from hexiopt.problem.model import ModelSpec
from runtime.mapping.layout import RankExecutor
from runtime.mapping.model_parts import BALANCE, execution_of, layer_kinds, layer_prefix
from runtime.mapping.parts import RankShard
from runtime.model.experts_part import ExpertsPart
from runtime.model.router import ExpertLoads, SequenceBalance
from runtime.model.tensor_parallel import RankTpGroup
from runtime.network import ProcessGroups
from runtime.parallel.token_exchange import CellExchange
from runtime.settings import ExpertTraining


class RankExperts:
    """Makes the parts with experts of a rank, and knows the loads of its experts by tokens of the rank.

    `executors` are all of its stage, `batch` the sequences of a step and their tokens.
    """

    def __init__(
        self,
        model: ModelSpec,
        executor: RankExecutor,
        executors: Sequence[RankExecutor],
        tp: RankTpGroup,
        groups: ProcessGroups,
        weights: Mapping[str, Tensor],
        settings: ExpertTraining,
        batch: tuple[int, int],
    ) -> None:
        self._model, self._executor, self._tp, self._groups = model, executor, tp, groups
        self._settings, self._rank = settings, dist.get_rank()
        self._batch, self._seq_len = batch
        self._device = next((weight.device for weight in weights.values()), torch.device("cpu"))
        self._shard: RankShard = executor.shards[executor.ranks.index(self._rank)]
        self._tokens = {
            of_rank: member.num_samples * sum(end - first for first, end in runs)
            for member in executors
            for of_rank, runs in zip(member.ranks, member.tokens(self._seq_len), strict=True)
        }
        layers = enumerate(layer_kinds(model))
        with_experts = [(layer, part) for layer, kind in layers if (part := kind.experts) is not None]
        router = execution_of(model).router
        has_biases = router is not None and router.has_bias and settings.expert_bias_rate > 0
        self._count = with_experts[0][1].count if with_experts else 0
        self._biases = [f"{layer_prefix(layer)}{BALANCE}" for layer, _ in with_experts] if has_biases else []
        self._loads = ExpertLoads({name: weights[name] for name in self._biases if name in weights})

    def part(self, part: Experts) -> ExpertsPart:
        """What the rank computes of the experts of a layer."""
        settings, executor, cell = self._settings, self._executor, self._executor.cell
        ranks = (self._rank,) if cell is None else cell.ranks
        exchange = CellExchange(
            ((0, part.count),) if cell is None else cell.experts(part.count),
            ranks.index(self._rank),
            self._groups.of(ranks),
            self._device,
            capacity=settings.expert_capacity,
            num_tokens=[self._tokens[rank] for rank in ranks],
            top_k=part.top_k,
        )
        balance = None
        if settings.sequence_balance and not self._shard.hosts:
            weight, group = settings.sequence_balance / self._batch, self._groups.of(executor.ranks)
            balance = SequenceBalance(weight, self._seq_len, group)
        execution, activation = execution_of(self._model), self._model.activation
        loads, hosts = self._loads if self._biases else None, self._shard.hosts
        return ExpertsPart(part, execution, activation, exchange, self._tp, balance, loads, hosts)

    def bias_moves(self) -> dict[str, Tensor]:
        """What a step adds to the biases that balance the rank's layers, by name: `expert_bias_rate` where an expert
        has had less than the mean load of all tokens, the opposite where more. Asked by all ranks together."""
        if not self._biases:
            return {}
        counts = self._loads.take()
        none = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        total = torch.stack([counts.get(name, none) for name in self._biases])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        above = total * total.shape[1] - total.sum(1, keepdim=True)
        moves = -self._settings.expert_bias_rate * above.sign()
        return {name: moves[k] for k, name in enumerate(self._biases) if name in counts}
