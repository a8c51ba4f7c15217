"""The optimizer over flat buckets, with master weights in float32 or better where it keeps them; from ZeRO-1 on each
holder steps its own share.

Weights that are exact themselves need no masters beside them: they are stepped where they are, in the `weight` of their
bucket. Those of a bucket without one are laid out flat while it is stepped, and so are, exactly, those in 16 bits that
have no masters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.numbers.optimizers import OPTIMIZERS
from runtime.mapping.buckets import forward_turn
from runtime.mapping.moments import ADAMW, is_whole, moment_shape, moments_of, rule_of
from runtime.model.functions import exact_dtype
from runtime.parallel.gradient_sync import Bucket
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.parallel.step_rules import STEPS, BucketStep, PassNumbers, compiled_adamw_pass
from runtime.parallel.weight_store import WeightStore
from runtime.settings import AdamW


class Optimizer:
    """Steps the weights of one rank from the summed gradients of its buckets, as the optimizer `kind` does
    (`hexiopt/numbers/optimizers.py`); AdamW with masters perhaps by one compiled pass over a bucket."""

    def __init__(
        self,
        settings: AdamW,
        buckets: Sequence[Bucket],
        store: WeightStore,
        hooks: Hooks = NO_HOOKS,
        *,
        kind: str = ADAMW,
        keeps_masters: bool = True,
        in_one_pass: bool = False,
    ) -> None:
        self._settings, self._buckets, self._store = settings, buckets, store
        self._hooks, self._kind, self._in_one_pass = hooks, kind, in_one_pass
        self._dtype, self._device = store.dtype, store.device
        # Those first that a forward needs first; of all ranks in one order.
        self._turns = sorted(range(len(buckets)), key=lambda k: (forward_turn(buckets[k].parts), buckets[k].number))
        self._steps = torch.zeros((), device=self._device)  # here, so that no step waits for a copy of it
        self.masters: list[Tensor | None] = [
            self._lay_out(bucket) if keeps_masters and self._stepped_dtype(bucket) != self._dtype else None
            for bucket in buckets
        ]
        """The rank's share of each bucket; None where weights are exact, or have none."""
        self.moments = [self._moments(bucket) for bucket in buckets]

    def _stepped_dtype(self, bucket: Bucket) -> torch.dtype:
        """That of weights and moments while they are stepped."""
        return self._dtype if OPTIMIZERS[self._kind].moment_widths else exact_dtype(bucket.gradient.dtype)

    def _moments(self, bucket: Bucket) -> dict[str, Tensor]:
        """What is kept of the rank's share, flat, before the first step."""
        sizes = {
            moment: sum(prod(moment_shape(moment, part.local_shape)) for part in bucket.parts)
            if is_whole(moment)
            else _length(bucket)
            for moment in moments_of(self._kind, bucket.parts[0])
        }
        dtype, device = self._stepped_dtype(bucket), self._device
        return {moment: torch.zeros(size, dtype=dtype, device=device) for moment, size in sizes.items()}

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> Tensor:
        """The rank's share of the weights, flat, as they are stepped: where they are both, themselves."""
        if bucket.own_weight is not None:
            return bucket.own_weight.to(self._stepped_dtype(bucket))
        flat = torch.zeros(bucket.length, dtype=self._stepped_dtype(bucket), device=self._device)
        self._store.lay_out(bucket, flat)
        return flat[bucket.share].clone() if bucket.is_sharded else flat

    def _all(self, turns: Iterable[int]) -> Iterator[tuple[Bucket, Tensor, dict[str, Tensor]]]:
        """Per bucket, this rank's share of exact weights, and moments."""
        for k in turns:
            bucket, master = self._buckets[k], self.masters[k]
            yield bucket, self._lay_out(bucket) if master is None else master, self.moments[k]

    def states(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Per bucket, this rank's share of master weights and moments. Waits for weights that are gathered."""
        self._store.finish()
        for bucket, master, moments in self._all(range(len(self._buckets))):
            yield bucket, {"weight": master, **moments}

    @torch.no_grad()
    def load(self, fill: Callable[[Bucket, Mapping[str, Tensor]], None], step: int) -> None:
        """Take over master weights and moments after `step` steps: `fill(bucket, states)` writes this rank's share."""
        for bucket, state in self.states():
            fill(bucket, state)
            self._store.give(bucket, state["weight"])
        self._store.finish()
        self._steps.fill_(step)

    @torch.no_grad()
    def step(
        self, lr: float, own_loss: Tensor, moves: Mapping[str, Tensor] = MappingProxyType({}), *, stops: bool = False
    ) -> Tensor:
        """Clip, step, and begin to give every holder the new weights, those first that a forward needs first. The host
        waits for nothing. `moves` are added to parameters that no gradient moves, whole and by name.

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
        numbers = PassNumbers.of(lr, self._steps, divisor, self._settings) if self._in_one_pass else None
        for bucket, master, moments in self._all(self._turns):
            _move(bucket, master, moves)  # before the step, which leaves them alone and gives weights their types
            began_s, weight = self._hooks.now_s(), bucket.own_weight
            rule, settings = rule_of(self._kind, bucket.parts[0]), self._settings
            gradient, decay = bucket.summed_gradient, settings.weight_decay if bucket.decays else 0.0
            if numbers is not None and rule == ADAMW and weight is not None and weight.dtype != master.dtype:
                compiled_adamw_pass()(weight, master, gradient, tuple(moments.values()), numbers, settings, decay)
                master = weight
            else:
                STEPS[rule](
                    BucketStep(bucket.parts, master, gradient, moments, self._steps, divisor, lr, settings, decay)
                )
            self._hooks.on_optimizer_step(began_s, len(master) / elements)
            self._store.give(bucket, master)
        return torch.cat([sums, held.view(1)])

    def _squares(self) -> tuple[Tensor, Tensor]:
        """Squared Euclidean norms of this rank's share of the gradients: of those that it counts for all their holders,
        and of all."""
        counted = torch.zeros((), dtype=torch.float64, device=self._device)
        held = torch.zeros_like(counted)
        for bucket in self._buckets:
            norm = torch.linalg.vector_norm(bucket.summed_gradient, dtype=exact_dtype(bucket.gradient.dtype))
            squares = norm.double().square()
            held += squares
            if bucket.counts:
                counted += squares
        return counted, held


def _move(bucket: Bucket, master: Tensor, moves: Mapping[str, Tensor]) -> None:
    """Add to the rank's share of the exact weights of a bucket."""
    share = bucket.share
    for name, place in bucket.places.items():
        low, high = max(place.at.start, share.start), min(place.at.stop, share.stop)
        if name in moves and low < high:
            first = place.at.start
            master[low - share.start : high - share.start] += moves[name][low - first : high - first].to(master.dtype)


def _length(bucket: Bucket) -> int:
    """Elements of the rank's share."""
    return len(bucket.summed_gradient)
