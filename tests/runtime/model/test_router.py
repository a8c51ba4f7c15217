"""Routers choose what the formulas of their models say, and what balances their experts has the gradient it should."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.problem.execution import OF_CHOSEN, SIGMOID, RouterRule
from runtime.model.router import ExpertLoads, RouterChoice, SequenceBalance, choose, loads, router_logits

pytestmark = pytest.mark.usefixtures("one_thread")


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert choose(logits, RouterRule(), 2).experts.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_choices_are_those_of_a_loop_over_experts(seed: int) -> None:
    """Of a rule of any kind, token by token, in Python's own numbers."""
    rng = random.Random(seed)
    groups = rng.choice((1, 2, 4))
    rule = RouterRule(
        rng.choice(("softmax", SIGMOID, OF_CHOSEN)),
        rng.random() < 0.5,
        rng.choice((1.0, 2.5)),
        groups,
        rng.randint(1, groups),
        rng.random() < 0.5,
    )
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bias = torch.linspace(-0.3, 0.3, 8, dtype=torch.float64) if rule.has_bias else None
    top_k = rng.randint(1, min(3, 8 // groups * rule.top_groups))
    choice = choose(logits, rule, top_k, bias)
    torch.testing.assert_close(choice.shares.sum(1), torch.ones(7, dtype=torch.float64))
    for n in range(7):
        row = logits[n]
        if rule.scores == OF_CHOSEN:
            experts = sorted(range(8), key=lambda e: -float(row[e]))[:top_k]
            weights = row[experts].softmax(0)
        else:
            scores = row.softmax(0) if rule.scores == "softmax" else row.sigmoid()
            wanted = (scores if bias is None else scores + bias).tolist()
            size = 8 // groups
            best = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            eligible = sorted(range(groups), key=lambda g: -best[g])[: rule.top_groups]
            candidates = [e for e in range(8) if e // size in eligible]
            experts = sorted(candidates, key=lambda e: -wanted[e])[:top_k]
            weights = scores[experts]
            if rule.is_normalized:
                weights = weights / weights.sum()
        assert choice.experts[n].tolist() == experts
        torch.testing.assert_close(choice.weights[n], weights * rule.scale)


def test_logits_of_bf16_are_exact_products() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).bfloat16().requires_grad_() for s in ((5, 4), (3, 4), (3,)))
    logits = router_logits(x, weight, bias)
    copies = [tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)]
    expected = functional.linear(*copies)
    torch.testing.assert_close(logits, expected, atol=0, rtol=0)
    logits.square().sum().backward()  # type: ignore[no-untyped-call]
    expected.square().sum().backward()  # type: ignore[no-untyped-call]
    for leaf, copy in zip((x, weight, bias), copies, strict=True):
        assert leaf.grad is not None
        assert copy.grad is not None
        torch.testing.assert_close(leaf.grad, copy.grad.bfloat16(), atol=0, rtol=0)


def test_the_balance_loss_of_a_sequence_has_the_gradient_of_its_formula() -> None:
    """DeepSeek-V3's, of each sequence by itself."""
    tokens, samples, count, top_k, weight = 5, 3, 4, 2, 0.3
    logits = torch.randn(tokens * samples, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rule = RouterRule(SIGMOID)

    def choice_of(leaf: Tensor) -> RouterChoice:
        return choose(leaf, rule, top_k)

    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    x = torch.zeros(tokens, samples, 2, dtype=torch.float64, requires_grad=True)
    through = SequenceBalance(weight, tokens, None).attach_loss(x, choice_of(ours))
    assert torch.equal(through, x)
    through.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))

    choice, total = choice_of(theirs), torch.zeros((), dtype=torch.float64)
    for b in range(samples):
        rows = [t * samples + b for t in range(tokens)]
        for e in range(count):
            often = sum(e in choice.experts[row].tolist() for row in rows) * count / (top_k * tokens)
            total = total + weight * often * choice.shares[rows, e].mean()
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-15, rtol=1e-12)


def test_loads_count_once_a_forward_that_has_a_backward() -> None:
    bias = torch.zeros(3)
    counted = ExpertLoads({"bias": bias})
    experts = torch.tensor([[0, 2], [2, 1]])
    assert loads(experts, 3).tolist() == [[1, 0, 1], [0, 1, 1]]
    with torch.no_grad():
        counted.add(bias, experts)
    counted.add(bias, experts)
    assert counted.take()["bias"].tolist() == [1, 1, 2]
    assert counted.take()["bias"].tolist() == [0, 0, 0]
