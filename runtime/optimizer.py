"""AdamW over flat buckets, with master weights in float32 or better; with ZeRO-1 each holder steps its own share."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.emulation import Pace, pace_until
from runtime.gradient_sync import Bucket
from runtime.groups import Groups
from runtime.parts import Part
from runtime.settings import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Steps the weights of one rank from the summed gradients of its buckets."""

    def __init__(
        self,
        settings: AdamW,
        buckets: Sequence[Bucket],
        weights: Mapping[str, nn.Parameter],
        groups: Groups,
        pace: Pace | None = None,
    ) -> None:
        self._settings, self._buckets, self._weights, self._groups = settings, buckets, weights, groups
        self._pace = pace
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
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            foreach=True,
        )

    def states(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Per bucket, this rank's share of master weights and moments."""
        for master, bucket in zip(self.masters, self._buckets, strict=True):
            own = self._adam.state.get(master) or {kind: torch.zeros_like(master) for kind in _MOMENTS}
            yield bucket, {"weight": master, **{kind: own[kind] for kind in _MOMENTS}}

    @torch.no_grad()
    def load(self, read: Callable[[str, Part], Tensor], step: int) -> None:
        """Take over master weights and moments after `step` steps: `read(kind, part)`."""
        for master, bucket in zip(self.masters, self._buckets, strict=True):
            moments = {}
            for kind in ("weight", *_MOMENTS):
                flat = torch.zeros(len(bucket.gradient), dtype=master.dtype)
                parts = [read(kind, part).flatten() for part in bucket.parts]
                flat[: sum(map(len, parts))] = torch.cat(parts)
                own = flat[bucket.share].to(master.device)
                if kind == "weight":
                    master.copy_(own)
                else:
                    moments[kind] = own.clone()
            self._adam.state[master] = {"step": torch.tensor(float(step)), **moments}
        self._spread()

    def step(self, lr: float) -> float:
        """Clip, step, and give every holder the new weights. Returns the norm of all gradients before clipping."""
        norm = self._gradient_norm()
        most = self._settings.max_norm
        factor = 1.0 if most is None or norm <= most else most / norm
        for master, bucket in zip(self.masters, self._buckets, strict=True):
            master.grad = bucket.gradient[bucket.share].to(master.dtype) * factor
        for group in self._adam.param_groups:
            group["lr"] = lr
        began = time.time()
        self._adam.step()
        if self._pace is not None:
            pace_until(began, self._pace.optimizer_s)
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
                dist.all_gather_single(whole, flat, group=self._groups.of(bucket.group))
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
