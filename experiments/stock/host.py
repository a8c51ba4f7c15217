"""A training step of one process so small that the host's own time is most of it: torch's modules, and ours.

It is counted in seconds of the processor, which what else the machine does changes little.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.stock.layer import StockLayer
from experiments.stock.turns import OURS, STOCK, Step, compared_model, step_of_ours
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.layout import layout_of
from runtime.settings import AdamW
from runtime.training.trainee import initial_values

SIZE = 1  # process
CLOCK = time.process_time
_MODEL = compared_model(32, 4, 64)
_SEQ_LEN, _MICRO_BATCHES = 8, 4
_SETTINGS = AdamW(lr=1e-3)


def plan() -> Plan:
    """One stage."""
    return Plan((Pipeline((Stage.of((0,), 0, _MODEL.num_layers),), _MICRO_BATCHES),), ONE_F_ONE_B, Sharding(0))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(_MODEL.vocab_size, _MODEL.hidden_size)
        self.layers = nn.ModuleList(StockLayer(_MODEL, _SEQ_LEN) for _ in range(_MODEL.num_layers))
        self.norm = nn.RMSNorm(_MODEL.hidden_size, eps=_MODEL.norm_eps)
        self.lm_head = nn.Linear(_MODEL.hidden_size, _MODEL.vocab_size, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x = self.embed_tokens(tokens_bt)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def _tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(_MODEL.vocab_size, (_MICRO_BATCHES, _SEQ_LEN + 1), generator=generator)


def _stock() -> Step:
    decoder = _Decoder()
    parts = layout_of(plan(), _MODEL).executor_of[0].parts(_MODEL, 0)
    decoder.load_state_dict({part.name.removeprefix("model."): initial_values(0, part) for part in parts})
    kinds = {decays: [p for p in decoder.parameters() if (p.ndim > 1) == decays] for decays in (True, False)}
    groups = [
        {"params": parameters, "weight_decay": _SETTINGS.weight_decay * decays} for decays, parameters in kinds.items()
    ]
    betas = _SETTINGS.beta1, _SETTINGS.beta2
    adam = torch.optim.AdamW(groups, _SETTINGS.lr, betas, _SETTINGS.eps, fused=True)
    assert _SETTINGS.max_norm is not None
    most = _SETTINGS.max_norm

    def step(number: int) -> float:
        adam.zero_grad()
        total = torch.zeros(())
        for tokens in torch.split(_tokens(number), 1):
            logits = decoder(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / _MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(decoder.parameters(), most)
        adam.step()
        return float(total)

    return step


def ways_of(rank: int, *, is_compiled: bool = False) -> dict[str, Step]:
    """Both ways of the one rank; ours may be compiled, as it is on GPUs."""
    ours = step_of_ours(plan(), _MODEL, _SEQ_LEN, _MICRO_BATCHES, _SETTINGS, is_compiled=is_compiled)
    return {OURS: lambda number: ours(_tokens(number)), STOCK: _stock()}
