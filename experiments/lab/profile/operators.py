"""What the operators of a decoder layer take on one device: products of matrices, attention, memory-bound work.

Sizes are those of real layers, from small to as large as the device does within the time given, from both ends: some
kernels take seconds to be made, and what is then left out for want of time is of the middle.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from experiments.lab.devices import free_unused
from experiments.lab.profile.points import MeasuredPoint
from hexiopt.numbers.coefficients import FUSED_ATTENTION_BACKWARD_PASSES
from hexiopt.numbers.optimizers import ADAMW, OPTIMIZERS
from runtime.device import fused_attention, wait_for

_LEAST_SAMPLE_S = 2e-3  # shorter work is queued several times, so that neither the clock nor the wait counts
_WARM_UP = 3
_SAMPLES = (3, 25)
_MOST_QUEUED = 2000


class Timer:
    """Times work on one device, warmed up and repeated. Processes of a CPU share its cores, in turns that are longer
    than most operations: the median knows nothing of the turns of others, which training waits for too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object], budget_s: float) -> float:
        """The median, on a CPU the mean, of as many samples as fit into `budget_s`, at least three."""
        first_s = min(self._once(work, 1) for _ in range(_WARM_UP))
        queued = max(1, min(_MOST_QUEUED, round(_LEAST_SAMPLE_S / max(first_s, 1e-7))))
        sample_s = self._once(work, queued)
        least, most = _SAMPLES
        count = max(least, min(most, int(budget_s / max(sample_s, 1e-7))))
        usual = statistics.fmean if self._device.type == "cpu" else statistics.median
        return usual([self._once(work, queued) for _ in range(count)]) / queued

    def _once(self, work: Callable[[], object], queued: int) -> float:
        wait_for(self._device)
        began = time.perf_counter()
        for _ in range(queued):
            work()
        wait_for(self._device)
        return time.perf_counter() - began


_T = TypeVar("_T")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WIDTHS = (  # hidden and MLP sizes: small test models, GPT-2, TinyLlama, Llama 7B and 70B, and their shares under TP
    (64, 176),
    (128, 352),
    (256, 688),
    (512, 1376),
    (768, 3072),
    (1024, 2816),
    (2048, 5632),
    (4096, 4096),
    (4096, 11008),
    (8192, 8192),
    (8192, 28672),
)
_TOKENS = (128, 512, 2048, 8192)
_HEADS = ((2, 32), (4, 64), (8, 64), (16, 64), (16, 128), (32, 128))  # heads and their size
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_POINTS = {"gemm": 10, "attention": 7, "stream": 8, "adam": 4}
_STREAM_BYTES = [2**k for k in range(16, 29)]
_ADAM_PARAMS = [2**k for k in range(18, 25, 2)]
_LEAST_POINTS, _OVERTIME = 6, 3.0  # of a kind, after which it ends once it has taken so many times its seconds
_SLOW_S = 1e-3
_PRODUCTS = 3  # of a linear layer: forward, the input's gradient, the weight's


@dataclass(frozen=True)
class OperatorBench:
    """Where and how: a device, a precision, about how many seconds each kind of operator may take, and how many bytes
    of the device's memory it may hold."""

    device: torch.device
    precision: str
    seconds: float
    most_bytes: float

    def points(self, tell: Callable[[str], None]) -> list[MeasuredPoint]:
        """Every kind of operator over its sizes; `tell` hears which is next."""
        points: list[MeasuredPoint] = []
        for kind, measure in (
            ("launch", self._launch),
            ("gemm", self._gemms),
            ("attention", self._attentions),
            ("stream", self._streams),
            ("adam", self._adam),
        ):
            tell(kind)
            began, least = time.perf_counter(), len(points) + _LEAST_POINTS
            for point in measure():
                points.append(point)
                if len(points) >= least and time.perf_counter() - began > _OVERTIME * self.seconds:
                    break  # a machine that others use too takes longer than was foreseen
            free_unused(self.device)
        return points

    def peak(self, precision: str) -> MeasuredPoint | None:
        """The fastest product of large matrices in any precision; None where torch cannot do it."""
        flops_per_s = self._speed(precision)
        if flops_per_s is None:
            return None
        size = min((n for n in (128, 256, 512, 1024, 2048, 4096, 8192) if 2 * n**3 > 0.02 * flops_per_s), default=8192)
        a, b = self._random((size, size), precision), self._random((size, size), precision)
        seconds = self._timer.seconds(partial(torch.matmul, a, b), self.seconds / 4)
        return MeasuredPoint(f"peak_{precision}", {"flops": 2.0 * size**3}, seconds)

    @property
    def _timer(self) -> Timer:
        return Timer(self.device)

    def _random(self, shape: tuple[int, ...], precision: str | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(DTYPES[precision or self.precision])

    def _speed(self, precision: str) -> float | None:
        """About how many FLOP/s products do, as far as is needed to choose sizes; None where torch has none."""
        speed = 0.0
        for size in (128, 512, 2048):
            try:
                a = self._random((size, size), precision)
                seconds = self._timer.seconds(partial(torch.matmul, a, a), 0.0)
            except RuntimeError:
                return None
            speed = max(speed, 2 * size**3 / seconds)
            if seconds > _SLOW_S:  # the next one takes 64 times as long
                break
        return speed

    def _launch(self) -> Iterator[MeasuredPoint]:
        """The least time of an operator that is issued from Python."""
        x, y = self._random((64,)), self._random((64,))
        for name, work in (("add", lambda: x + y), ("multiply", lambda: x * y), ("rsqrt", lambda: x.rsqrt())):
            yield MeasuredPoint("launch", {}, self._timer.seconds(work, self.seconds / 20), (name,))

    def _gemms(self) -> Iterator[MeasuredPoint]:
        """A linear layer's three products, each a point."""
        speed = self._speed(self.precision) or 1.0
        shapes = sorted(product(_TOKENS, _WIDTHS), key=lambda shape: _gemm_flops(*shape))
        fitting = [
            shape
            for shape in shapes
            if _gemm_flops(*shape) < speed * self.seconds / 4 and 8.0 * _elements(*shape) < self.most_bytes
        ]
        chosen = sample_evenly(fitting or shapes[:1], _POINTS["gemm"])
        share_s = self.seconds / len(chosen) / _PRODUCTS
        for tokens, (inner, outer) in from_both_ends(chosen):
            x, w, dy = (self._random(shape) for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
            size = {"tokens": tokens, "in": inner, "out": outer, "flops": _gemm_flops(tokens, (inner, outer))}
            products: dict[str, Callable[[], Tensor]] = {
                "forward": partial(functional.linear, x, w),
                "input": partial(torch.matmul, dy, w),
                "weight": partial(torch.matmul, dy.t(), x),
            }
            for name, work in products.items():
                yield MeasuredPoint("gemm", size, self._timer.seconds(work, share_s), (name,))

    def _attentions(self) -> Iterator[MeasuredPoint]:
        """Causal attention of one sequence, forward and backward, by the kernels that training asks for."""
        speed = self._speed(self.precision) or 1.0
        shapes = sorted(product(_LENGTHS, _HEADS), key=lambda shape: _attention_flops(*shape))
        fitting = [
            shape
            for shape in shapes
            if _attention_flops(*shape) < speed * self.seconds / 20
            and 40.0 * shape[0] * shape[1][0] * shape[1][1] < self.most_bytes
        ]
        chosen = sample_evenly(fitting or shapes[:1], _POINTS["attention"])
        for tokens, (heads, width) in from_both_ends(chosen):
            q, k, v, dy = (self._random((1, heads, tokens, width)) for _ in range(4))
            for x in (q, k, v):
                x.requires_grad_()

            def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, dy: Tensor = dy) -> None:
                with fused_attention(self.device, q.dtype, q.shape[-1]):
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(out, (q, k, v), dy)

            flops = _attention_flops(tokens, (heads, width))
            size = {"tokens": tokens, "heads": heads, "head_size": width, "flops": flops}
            yield MeasuredPoint("attention", size, self._timer.seconds(both, self.seconds / len(chosen)))

    def _streams(self) -> Iterator[MeasuredPoint]:
        """Two arrays read and one written, element by element."""
        fitting = [size for size in _STREAM_BYTES if 2.0 * size < self.most_bytes]
        for num_bytes in from_both_ends(sample_evenly(fitting or _STREAM_BYTES[:1], _POINTS["stream"])):
            count = num_bytes // 3 // DTYPES[self.precision].itemsize
            x, y, out = (torch.ones(count, dtype=DTYPES[self.precision], device=self.device) for _ in range(3))
            add = partial(torch.add, x, y, out=out)
            seconds = self._timer.seconds(add, self.seconds / _POINTS["stream"])
            yield MeasuredPoint("stream", {"bytes": 3.0 * count * x.element_size()}, seconds)

    def _adam(self) -> Iterator[MeasuredPoint]:
        """A step of AdamW with FP32 master weights by torch's fused kernel, with which training steps where it does not
        compile; bytes as the cost model counts them."""
        for count in from_both_ends([n for n in _ADAM_PARAMS if 24.0 * n < self.most_bytes] or _ADAM_PARAMS[:1]):
            weight, gradient = self._random((count,)), self._random((count,))
            master = weight.float().clone()
            adam = torch.optim.AdamW([master], lr=1e-4, fused=True)

            def step(w: Tensor = weight, g: Tensor = gradient, m: Tensor = master, a: Any = adam) -> None:
                m.grad = g.to(m.dtype)
                a.step()
                w.copy_(m)

            width = weight.element_size()
            num_bytes = count * float(OPTIMIZERS[ADAMW].states(width, width).step_bytes)
            seconds = self._timer.seconds(step, self.seconds / _POINTS["adam"])
            yield MeasuredPoint("adam", {"params": count, "bytes": num_bytes}, seconds)


def sample_evenly(items: Sequence[_T], count: int) -> list[_T]:
    """Up to `count` of the items, from the first to the last, evenly."""
    if len(items) <= count:
        return list(items)
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def from_both_ends(items: Sequence[_T]) -> Iterator[_T]:
    """The last one, the first one, the last but one, and so on."""
    left = deque(items)
    while left:
        yield left.pop()
        if left:
            yield left.popleft()


def _gemm_flops(tokens: int, widths: tuple[int, int]) -> float:
    return 2.0 * tokens * widths[0] * widths[1]


def _elements(tokens: int, widths: tuple[int, int]) -> float:
    return float(tokens * sum(widths) + widths[0] * widths[1])


def _attention_flops(tokens: int, heads: tuple[int, int]) -> float:
    """Two products of tokens × tokens × width, of which the causal mask needs half; and the backward's."""
    return 4.0 * tokens**2 * heads[0] * heads[1] * 0.5 * (1 + FUSED_ATTENTION_BACKWARD_PASSES)
