"""AdamW over flat buckets, with master weights in float32 or better; from ZeRO-1 on each holder steps its own share.

Weights that are exact themselves need no masters beside them: they are laid out flat while their bucket is stepped.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from runtime.mapping.parts import ParameterPart
from runtime.network import ProcessGroups
from runtime.pace import Pace, pace_until
from runtime.parallel.gradient_sync import Bucket

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101. The norm of all gradients is clipped to `max_norm`, if any; norms and
    biases do not decay."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float | None = 1.0


class Optimizer:
    """Steps the weights of one rank from the summed gradients of its buckets."""

    def __init__(
        self,
        settings: AdamW,
        buckets: Sequence[Bucket],
        weights: Mapping[str, nn.Parameter],
        groups: ProcessGroups,
        pace: Pace | None = None,
    ) -> None:
        self._settings, self._buckets, self._weights, self._groups = settings, buckets, weights, groups
        self._pace = pace
        example = next(iter(weights.values()))
        self._dtype, self._device = example.dtype, example.device
        self._steps = 0
        self.masters: list[Tensor | None] = [
            None if self._exact(bucket) == self._dtype else self._laid_out(bucket) for bucket in buckets
        ]
        """The rank's share of each bucket; None where weights are exact."""
        self.moments = [
            {kind: torch.zeros(_length(bucket), dtype=self._exact(bucket), device=self._device) for kind in _MOMENTS}
            for bucket in buckets
        ]

    def _exact(self, bucket: Bucket) -> torch.dtype:
        return torch.promote_types(bucket.gradient.dtype, torch.float32)

    @torch.no_grad()
    def _laid_out(self, bucket: Bucket) -> Tensor:
        """The rank's share of the weights, flat and exact: what ZeRO-3 keeps of them itself, if that is exact."""
        if bucket.weight is not None:
            return bucket.weight.to(self._exact(bucket))
        flat = torch.zeros(bucket.length, dtype=self._exact(bucket), device=self._device)
        for name, view, where in bucket.pieces(flat):
            view.copy_(self._weights[name][where])
        return flat[bucket.share].clone() if bucket.sharded else flat

    def _all(self) -> Iterator[tuple[Bucket, Tensor, dict[str, Tensor]]]:
        """Per bucket, this rank's share of exact weights, and moments."""
        for bucket, master, moments in zip(self._buckets, self.masters, self.moments, strict=True):
            yield bucket, self._laid_out(bucket) if master is None else master, moments

    def states(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Per bucket, this rank's share of master weights and moments."""
        for bucket, master, moments in self._all():
            yield bucket, {"weight": master, **moments}

    @torch.no_grad()
    def load(self, read: Callable[[str, ParameterPart], Tensor], step: int) -> None:
        """Take over master weights and moments after `step` steps: `read(kind, part)`."""
        for bucket, own in self.states():
            for kind, values in own.items():
                flat = torch.zeros(bucket.length, dtype=values.dtype)
                parts = [read(kind, part).flatten() for part in bucket.parts]
                flat[: sum(map(len, parts))] = torch.cat(parts)
                values.copy_(flat[bucket.share])
            self._spread(bucket, own["weight"])
        self._steps = step

    def step(self, lr: float) -> float:
        """Clip, step, and give every holder the new weights. Returns the norm of all gradients before clipping."""
        norm = self._gradient_norm()
        most = self._settings.max_norm
        factor = 1.0 if most is None or norm <= most else most / norm
        elements = sum(map(_length, self._buckets))
        for bucket, master, moments in self._all():
            began = time.time()
            adamw(
                [master],
                [bucket.summed.to(master.dtype) * factor],
                [moments["exp_avg"]],
                [moments["exp_avg_sq"]],
                [],
                [torch.tensor(float(self._steps), device=self._device)],
                fused=True,  # one pass, and nothing beside the states
                amsgrad=False,
                beta1=self._settings.beta1,
                beta2=self._settings.beta2,
                lr=lr,
                weight_decay=self._settings.weight_decay if bucket.decays else 0.0,
                eps=self._settings.eps,
                maximize=False,
            )
            if self._pace is not None:
                pace_until(began, self._pace.optimizer_s * len(master) / elements)
            self._spread(bucket, master)
        self._steps += 1
        return norm

    def _gradient_norm(self) -> float:
        """Euclidean norm over all parameters, each counted once, whoever holds it."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for bucket in self._buckets:
            if bucket.counts:
                total += bucket.summed.to(self._exact(bucket)).square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    @torch.no_grad()
    def _spread(self, bucket: Bucket, master: Tensor) -> None:
        """Give every holder the new weights; under ZeRO-3, its share."""
        if bucket.weight is not None:
            bucket.weight.copy_(master)
            return
        flat = master.to(self._dtype)
        if bucket.sharded:
            whole = flat.new_empty(bucket.length)
            dist.all_gather_single(whole, flat, group=self._groups.of(bucket.group))
            flat = whole
        for name, view, where in bucket.pieces(flat):
            self._weights[name][where].copy_(view)


def _length(bucket: Bucket) -> int:
    """Elements of the rank's share."""
    return len(bucket.summed)
