"""AdamW over flat buckets, with master weights in float32 or better; from ZeRO-1 on each holder steps its own share.

Weights that are exact themselves need no masters beside them: they are stepped where they are, in the `weight` of their
bucket. Those of a bucket without one are laid out flat while it is stepped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.mapping.buckets import forward_turn
from runtime.parallel.gradient_sync import Bucket
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.parallel.weight_gathers import WeightGathers

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
        gathers: WeightGathers,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self._settings, self._buckets, self._gathers = settings, buckets, gathers
        self._hooks = hooks
        example = next(iter(weights.values()))
        self._dtype, self._device = example.dtype, example.device
        # Those first that a forward needs first; of all ranks in one order.
        self._turns = sorted(range(len(buckets)), key=lambda k: (forward_turn(buckets[k].parts), buckets[k].number))
        self._steps = torch.zeros((), device=self._device)  # here, so that no step waits for a copy of it
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
        """The rank's share of the weights, flat and exact: where they are flat and exact, themselves."""
        if bucket.own_weight is not None:
            return bucket.own_weight.to(self._exact(bucket))
        flat = torch.zeros(bucket.length, dtype=self._exact(bucket), device=self._device)
        self._gathers.lay_out(bucket, flat)
        return flat[bucket.share].clone() if bucket.sharded else flat

    def _all(self, turns: Iterable[int]) -> Iterator[tuple[Bucket, Tensor, dict[str, Tensor]]]:
        """Per bucket, this rank's share of exact weights, and moments."""
        for k in turns:
            bucket, master = self._buckets[k], self.masters[k]
            yield bucket, self._laid_out(bucket) if master is None else master, self.moments[k]

    def states(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Per bucket, this rank's share of master weights and moments. Waits for weights that are gathered."""
        self._gathers.finish()
        for bucket, master, moments in self._all(range(len(self._buckets))):
            yield bucket, {"weight": master, **moments}

    @torch.no_grad()
    def load(self, fill: Callable[[Bucket, Mapping[str, Tensor]], None], step: int) -> None:
        """Take over master weights and moments after `step` steps: `fill(bucket, states)` writes this rank's share."""
        for bucket, own in self.states():
            fill(bucket, own)
            self._gathers.begin(bucket, own["weight"], self._dtype)
        self._gathers.finish()
        self._steps.fill_(step)

    @torch.no_grad()
    def step(self, lr: float, own_loss: Tensor, *, stops: bool = False) -> Tensor:
        """Clip, step, and begin to give every holder the new weights, those first that a forward needs first. The host
        waits for nothing.

        Returns, in float64, the sum of all ranks' `own_loss` (a scalar), the squared norm of all gradients before
        clipping, the number of ranks that asked for a stop, and the squared norm of the gradients that this rank holds.
        """
        counted, held = self._squares()
        sums = torch.stack([own_loss.to(counted.dtype), counted, torch.full_like(counted, float(stops))])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        most = self._settings.max_norm
        divisor = torch.ones_like(counted) if most is None else (sums[1].sqrt() / most).clamp_(min=1.0)
        elements = sum(map(_length, self._buckets))
        self._steps += 1
        for bucket, master, moments in self._all(self._turns):
            began_s = self._hooks.now_s()
            self._step_bucket(bucket, master, moments, lr, divisor)
            self._hooks.stepped(began_s, len(master) / elements)
            self._gathers.begin(bucket, master, self._dtype)
        return torch.cat([sums, held.view(1)])

    def _step_bucket(
        self, bucket: Bucket, master: Tensor, moments: Mapping[str, Tensor], lr: float, divisor: Tensor
    ) -> None:
        """One pass over the states, and nothing beside them. The kernel divides by float32 only."""
        settings, gradient = self._settings, bucket.summed.to(master.dtype)
        in_kernel = master.dtype == torch.float32
        torch._fused_adamw_(  # what torch.optim.AdamW(fused=True) calls
            [master],
            [gradient if in_kernel else gradient / divisor],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [self._steps],
            lr=lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay if bucket.decays else 0.0,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor.float() if in_kernel else None,
        )

    def _squares(self) -> tuple[Tensor, Tensor]:
        """Squared Euclidean norms of this rank's share of the gradients: of those that it counts for all their holders,
        and of all."""
        counted = torch.zeros((), dtype=torch.float64, device=self._device)
        held = torch.zeros_like(counted)
        for bucket in self._buckets:
            norm = torch.linalg.vector_norm(bucket.summed, dtype=self._exact(bucket))
            squares = norm.double().square()
            held += squares
            if bucket.counts:
                counted += squares
        return counted, held


def _length(bucket: Bucket) -> int:
    """Elements of the rank's share."""
    return len(bucket.summed)
