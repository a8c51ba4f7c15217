"""Backwards of their own are those of autograd, and of differences; and they keep no more than they say."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.model.functions import ACTIVATIONS, activate, clamped_gate, recompute, rms_norm, rotate
from runtime.model.tensor_parallel import RankTpGroup

UNSHARDED = RankTpGroup(0, ((0, 3),), adapter_scale=1.5)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


TABLES = draw(3, 1, 1, 6), draw(3, 1, 1, 6).flip(-1)  # any numbers in place of cosines and sines


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 0.1)


def plain_rotation(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """As transformers has it, with the sines of a first half not negated."""
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    both = [x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin for x in (q, k)]
    return torch.cat(both, dim=2)


def plain_clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """As transformers has it of gpt-oss, with a limit that some values are beyond."""
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.7))


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 0.1), plain_norm, (draw(3, 2, 5), draw(5))),
    "norm without weights": (
        lambda x: rms_norm(x, None, 0.1),
        lambda x: functional.rms_norm(x, (x.shape[-1],), None, 0.1),
        (draw(3, 2, 5),),
    ),
    "norm of heads": (lambda x, w: rms_norm(x, w, 0.1), plain_norm, (draw(3, 2, 4, 6), draw(6))),
    **{
        f"gated by {name}": (
            partial(activate, name),
            partial(lambda act, gate, up: act(gate) * up, act),
            (draw(3, 2, 5), draw(3, 2, 5)),
        )
        for name, (act, _) in ACTIVATIONS.items()
    },
    **{name: (partial(activate, name), act, (draw(3, 2, 5),)) for name, (act, _) in ACTIVATIONS.items()},
    "clamped gate": (partial(clamped_gate, 1.7, 0.5), plain_clamped_gate, (draw(3, 2, 5), draw(3, 2, 5).flip(0))),
    "norm of one plus weights": (
        lambda x, w: rms_norm(x, w, 0.1, is_unit=True),
        lambda x, w: plain_norm(x, 1 + w),
        (draw(3, 2, 5), draw(5)),
    ),
    "rotation": (
        lambda q, k: torch.cat(rotate(*TABLES, q, k), dim=2),
        lambda q, k: plain_rotation(*TABLES, q, k),
        (draw(3, 2, 4, 6), draw(3, 2, 2, 6)),
    ),
    "columns": (
        lambda x, a, b, bias: torch.cat(UNSHARDED.columns(x, [a, b], [bias, None]), dim=-1),
        lambda x, a, b, bias: torch.cat([functional.linear(x, a, bias), functional.linear(x, b)], dim=-1),
        (draw(3, 2, 5), draw(4, 5), draw(7, 5), draw(4)),
    ),
    "rows of what is not contiguous": (
        lambda x, a: UNSHARDED.rows(x.transpose(0, 1), a),
        lambda x, a: functional.linear(x.transpose(0, 1), a),
        (draw(2, 3, 5), draw(4, 5)),
    ),
    "columns with an adapter": (
        lambda x, a, b, down, up: torch.cat(UNSHARDED.columns(x, [a, b], [None, None], [None, (down, up)]), dim=-1),
        lambda x, a, b, down, up: torch.cat([functional.linear(x, a), functional.linear(x, b + 1.5 * up @ down)], -1),
        (draw(3, 2, 5), draw(4, 5), draw(7, 5), draw(2, 5), draw(7, 2)),
    ),
    "rows with an adapter": (
        lambda x, a, down, up: UNSHARDED.rows(x, a, (down, up)),
        lambda x, a, down, up: functional.linear(x, a + 1.5 * up @ down),
        (draw(3, 2, 5), draw(4, 5), draw(2, 5), draw(4, 2)),
    ),
    "recomputed": (
        lambda x, w: recompute(lambda a, b: (a * b).tanh() * a, x, w),
        lambda x, w: (x * w).tanh() * x,
        (draw(3, 2, 5), draw(5)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_autograd(case: str) -> None:
    ours, theirs, inputs = CASES[case]
    given = [x.clone().requires_grad_() for x in inputs]
    torch.testing.assert_close(ours(*given), theirs(*given), rtol=1e-12, atol=1e-12)
    weight = draw(*theirs(*given).shape)
    gradients, expected = (torch.autograd.grad(function(*given), given, weight) for function in (ours, theirs))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, given)


def test_gradients_of_what_is_closed_over_come_too() -> None:
    x, w = draw(3, 5).requires_grad_(), draw(5).requires_grad_()
    recompute(lambda a: (a * w).sin(), x).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(w.grad, ((x * w).cos() * x).sum(dim=0).detach())
    torch.testing.assert_close(x.grad, ((x * w).cos() * w).detach())


def test_what_is_recomputed_is_run_once_without_gradients() -> None:
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return x.sin()

    x = draw(3).requires_grad_()
    with torch.no_grad():
        recompute(run, x)
    assert runs == [False]
    recompute(run, x).sum().backward()  # type: ignore[no-untyped-call]
    assert runs == [False, False, True]


def saved_elements(run: Callable[[], Tensor]) -> int:
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(sizes.values())


def test_what_is_kept() -> None:
    x, up, weight = (draw(*shape).requires_grad_() for shape in ((3, 2, 5), (3, 2, 5), (5,)))
    assert saved_elements(lambda: rms_norm(x, weight, 0.1)) == 30 + 5 + 6
    assert saved_elements(lambda: activate("silu", x, up)) == 60
    assert saved_elements(lambda: clamped_gate(1.7, 0.5, x, up)) == 60
    assert saved_elements(lambda: recompute(lambda a: a.sin().exp(), x)) == 30
    q, k = draw(3, 2, 4, 6).requires_grad_(), draw(3, 2, 2, 6).requires_grad_()
    assert saved_elements(lambda: rotate(*TABLES, q, k)[0]) == 18 + 18
    a, b = draw(4, 5).requires_grad_(), draw(7, 5).requires_grad_()
    assert saved_elements(lambda: UNSHARDED.columns(x, [a, b], [None, None])[0]) == 30 + 20 + 35
    assert saved_elements(lambda: UNSHARDED.rows(x.transpose(0, 1), a)) == 30 + 20


def test_frozen_matrices_keep_no_input_and_norms_make_no_gradient() -> None:
    x, a, b, weight = draw(3, 2, 5).requires_grad_(), draw(4, 5), draw(7, 5), draw(5)
    down, up = draw(2, 5).requires_grad_(), draw(7, 2).requires_grad_()
    assert saved_elements(lambda: UNSHARDED.columns(x, [a, b], [None, None])[0]) == 20 + 35
    with_one = saved_elements(lambda: UNSHARDED.columns(x, [a, b], [None, None], [None, (down, up)])[0])
    assert with_one == 30 + 20 + 35 + 10 + 14 + 6 * 2
    (UNSHARDED.columns(rms_norm(x, weight, 0.1), [a], [None])[0]).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is a.grad is None
    assert x.grad is not None
