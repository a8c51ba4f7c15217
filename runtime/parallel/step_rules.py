"""One step of an optimizer over a flat bucket, in place, by torch's own optimizers.

Masters, gradients and moments are flat; rules that need matrices see each parameter's part of them as one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import _adafactor, _muon
from torch.optim.sgd import sgd

from runtime.mapping.moments import ADAFACTOR, ADAMW, MOMENTUM, MUON, SGD, moment_shape
from runtime.mapping.parts import ParameterPart
from runtime.settings import AdamW

_ADAFACTOR_DEFAULTS: dict[str, Any] = {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0}  # torch's


@dataclass(frozen=True, eq=False)
class BucketStep:
    """A step of the elements of a bucket: flat weights, as exact as they are stepped, their summed gradients, what is
    kept of them, and the number of the step. Gradients are divided by `divisor`, which clips them."""

    parts: Sequence[ParameterPart]
    weight: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    steps: Tensor
    divisor: Tensor
    lr: float
    settings: AdamW
    weight_decay: float

    @property
    def clipped_gradient(self) -> Tensor:
        """The gradients, divided, in the type of the weights."""
        return (self.gradient.to(self.weight.dtype) / self.divisor).to(self.weight.dtype)

    def by_parameter(self, *kinds: str) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Weight, clipped gradient, and moments of these kinds, of each parameter in its shape."""
        shapes = [part.local_shape for part in self.parts]
        weights, gradients = _views(self.weight, shapes), _views(self.clipped_gradient, shapes)
        moments = [_views(self.moments[kind], [moment_shape(kind, shape) for shape in shapes]) for kind in kinds]
        for k, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            yield weight, gradient, [views[k] for views in moments]


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    ends = accumulate(map(prod, shapes), initial=0)
    return [flat[start:end].view(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]


def _step_adamw(step: BucketStep) -> None:
    """One pass over the states, and nothing beside them. The kernel divides by float32 only."""
    settings, in_kernel = step.settings, step.weight.dtype == torch.float32
    torch._fused_adamw_(  # what torch.optim.AdamW(fused=True) calls
        [step.weight],
        [step.gradient.to(step.weight.dtype) if in_kernel else step.clipped_gradient],
        [step.moments["exp_avg"]],
        [step.moments["exp_avg_sq"]],
        [],
        [step.steps],
        lr=step.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=step.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=step.divisor.float() if in_kernel else None,
    )


def _step_sgd(step: BucketStep) -> None:
    buffer = step.moments.get("momentum_buffer")
    sgd(
        [step.weight],
        [step.clipped_gradient],
        [buffer],
        foreach=False,
        weight_decay=step.weight_decay,
        momentum=0.0 if buffer is None else step.settings.beta1,
        lr=step.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _step_adafactor(step: BucketStep) -> None:
    """Torch's reads norms of updates on the host, which waits for the device."""
    for weight, gradient, moments in step.by_parameter(*step.moments):
        rows, columns, squares = [*moments, None] if len(moments) == 2 else [None, None, *moments]
        _adafactor.adafactor(
            [weight],
            [gradient],
            [rows],
            [columns],
            [squares],
            [step.steps - 1],
            foreach=False,
            lr=step.lr,
            weight_decay=step.weight_decay,
            maximize=False,
            **_ADAFACTOR_DEFAULTS,
        )


def _step_muon(step: BucketStep) -> None:
    """Updates as long as AdamW's are (Liu et al., arXiv 2502.16982, section 2.2), so that its learning rates serve."""
    for weight, gradient, moments in step.by_parameter("momentum_buffer"):
        _muon.muon(
            [weight],
            [gradient],
            moments,
            lr=step.lr,
            weight_decay=step.weight_decay,
            momentum=step.settings.beta1,
            nesterov=True,
            ns_coefficients=(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
            ns_steps=_muon.DEFAULT_NS_STEPS,
            eps=_muon.EPS,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )


STEPS: Mapping[str, Callable[[BucketStep], None]] = {
    ADAMW: _step_adamw,
    SGD: _step_sgd,
    MOMENTUM: _step_sgd,
    ADAFACTOR: _step_adafactor,
    MUON: _step_muon,
}
"""What steps a bucket, by rule."""


class PassNumbers(NamedTuple):
    """What a step of AdamW has in common for all buckets: FP32 scalars on the device, so that it is compiled once."""

    lr: Tensor
    divisor: Tensor
    step_size: Tensor  # the learning rate over the bias of the first moment
    root: Tensor  # of the bias of the second one

    @classmethod
    def of(cls, lr: float, steps: Tensor, divisor: Tensor, settings: AdamW) -> "PassNumbers":
        """Those of step number `steps`."""
        count = steps.double()
        size, root = lr / (1 - settings.beta1**count), (1 - settings.beta2**count).sqrt()
        return cls(torch.full_like(steps, lr), divisor.float(), size.float(), root.float())


def adamw_pass(
    rounded: Tensor,
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    numbers: PassNumbers,
    settings: AdamW,
    weight_decay: float,
) -> None:
    """AdamW over flat elements as one pass of a compiled kernel: of a gradient in BF16 or FP32, FP32 master weights and
    moments, in place, and the weights `rounded`: 28 bytes an element in BF16."""
    exp_avg, exp_avg_sq = moments
    clipped = gradient.to(weight.dtype) / numbers.divisor
    first = exp_avg + (1 - settings.beta1) * (clipped - exp_avg)
    second = settings.beta2 * exp_avg_sq + (1 - settings.beta2) * clipped * clipped
    decayed = weight - numbers.lr * weight_decay * weight
    stepped = decayed - numbers.step_size * first / (second.sqrt() / numbers.root + settings.eps)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    weight.copy_(stepped)
    rounded.copy_(stepped)


@cache
def compiled_adamw_pass() -> Callable[..., None]:
    """`adamw_pass`, compiled for buckets of any length."""
    run: Callable[..., None] = torch.compile(adamw_pass, fullgraph=True, dynamic=True)
    return run
