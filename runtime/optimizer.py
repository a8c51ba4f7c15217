"""AdamW over flat buckets, with master weights in float32 or better; with ZeRO-1 each holder steps its own share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.gradient_sync import Bucket
from runtime.groups import Groups


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters (Loshchilov and Hutter, arXiv 1711.05101); the norm of all gradients is clipped to `max_norm`,
    if any. Norms and biases do not decay."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float | None = 1.0


class Optimizer:
    """Steps the weights of one rank from the summed gradients of its buckets."""

    def __init__(
        self, settings: AdamW, buckets: Sequence[Bucket], weights: Mapping[str, nn.Parameter], groups: Groups
    ) -> None:
        self._settings, self._buckets, self._weights, self._groups = settings, buckets, weights, groups
        self.masters: list[Tensor] = []
        example = next(iter(weights.values()))
        self._dtype, self._device = example.dtype, example.device
        for bucket in buckets:
            flat = torch.zeros_like(bucket.gradient, dtype=_exact(bucket.gradient.dtype))
            for part, view in _pieces(bucket, flat):
                view.copy_(weights[part][bucket.views[part][1]].detach())
            self.masters.append(flat[bucket.share].clone())
        decays = [[m for m, b in zip(self.masters, buckets, strict=True) if b.decays is want] for want in (True, False)]
        self._adam = torch.optim.AdamW(
            [
                {"params": decays[0], "weight_decay": settings.weight_decay},
                {"params": decays[1], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            foreach=True,
        )

    def step(self, lr: float) -> float:
        """Clip, step, and give every holder the new weights. Returns the norm of all gradients before clipping."""
        norm = self._gradient_norm()
        most = self._settings.max_norm
        factor = 1.0 if most is None or norm <= most else most / norm
        for master, bucket in zip(self.masters, self._buckets, strict=True):
            master.grad = bucket.gradient[bucket.share].to(master.dtype) * factor
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._spread()
        return norm

    def _gradient_norm(self) -> float:
        """Euclidean norm over all parameters, each counted once, whoever holds it."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for bucket in self._buckets:
            if bucket.counts:
                total += bucket.gradient[bucket.share].to(_exact(bucket.gradient.dtype)).square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    @torch.no_grad()
    def _spread(self) -> None:
        for master, bucket in zip(self.masters, self._buckets, strict=True):
            flat = master.detach().to(self._dtype)
            if bucket.sharded:
                whole = flat.new_empty(len(bucket.gradient))
                dist.all_gather_single(whole, flat, group=self._groups.of(bucket.ranks))
                flat = whole
            for name, view in _pieces(bucket, flat):
                self._weights[name][bucket.views[name][1]].copy_(view)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _pieces(bucket: Bucket, flat: Tensor) -> list[tuple[str, Tensor]]:
    """The elements of every parameter in `flat`, which is laid out as the bucket."""
    found, at = [], 0
    for name, (view, _) in bucket.views.items():
        found.append((name, flat[at : at + view.numel()].view(view.shape)))
        at += view.numel()
    return found
