"""Attention of sequence layouts is torch's own, outputs and gradients, however tokens and heads are cut."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.plan.parallelism import ORDERS, SequenceGroup, SequenceParallel
from hexiopt.plan.token_layout import Range, token_ranges
from hexiopt.problem.kinds import Attention
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import layer_kinds
from runtime.model.functions import recompute
from runtime.network import ProcessGroups
from runtime.parallel.ring_attention import SequenceAttention
from tests.conftest import STRESS
from tests.runtime.ranks import TIMEOUT_S, random_sequence, run_ranks

SAMPLES = 2
MODEL = ModelSpec(
    name="attention",
    architecture="mistral",
    num_layers=1,
    hidden_size=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    ffn_size=8,
    vocab_size=8,
    max_positions=100,
)


def layout(order: str, *groups: tuple[tuple[int, ...], tuple[int, ...]]) -> SequenceParallel:
    """Groups as (tokens, heads), whose ranks follow each other downwards."""
    rank, layout_groups = sum(len(tokens) for tokens, _ in groups), []
    for tokens, heads in groups:
        rank -= len(tokens)
        layout_groups.append(SequenceGroup(tuple(range(rank, rank + len(tokens)))[::-1], tokens, heads))
    return SequenceParallel(tuple(layout_groups), order)


STATED = [
    # layout, query heads, key-value heads, window
    (layout("contiguous", ((70, 20, 10), (5, 2, 1))), 8, 2, None),
    (layout("zigzag", ((70, 20, 10), (5, 2, 1))), 8, 4, None),
    (layout("contiguous", ((70,), (8,)), ((20,), (8,)), ((10,), (8,))), 8, 8, None),
    (layout("zigzag", ((70,), (8,)), ((20,), (8,)), ((10,), (8,))), 8, 1, None),
    (layout("contiguous", ((33, 12, 5), (5, 2, 1)), ((50,), (8,))), 8, 2, None),
    (layout("zigzag", ((30, 15, 5), (5, 2, 1)), ((37, 13), (2, 6))), 8, 2, None),
    (layout("zigzag", ((7, 3), (5, 3)), ((60, 5), (1, 7)), ((2, 23), (3, 5))), 8, 4, None),
    (layout("contiguous", ((7, 3), (5, 3)), ((60, 5), (1, 7)), ((2, 23), (3, 5))), 8, 4, 9),
    (layout("zigzag", ((30, 15, 5), (5, 2, 1)), ((37, 13), (2, 6))), 8, 2, 25),
    (layout("zigzag", ((1, 1), (4, 4)), ((1, 97), (7, 1))), 8, 8, None),
]
Case = tuple[SequenceParallel, ModelSpec]


def rank_and_runs(sequence: SequenceParallel) -> dict[int, tuple[Range, ...]]:
    return {
        rank: runs
        for group, group_runs in zip(sequence.groups, token_ranges(sequence), strict=True)
        for rank, runs in zip(group.devices, group_runs, strict=True)
    }


def rows(x: Tensor, runs: tuple[Range, ...]) -> Tensor:
    return torch.cat([x[slice(*run)] for run in runs])


def random_inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and a gradient of what they give."""
    sequence, model = case
    seq_len = sum(sum(group.tokens) for group in sequence.groups)
    torch.manual_seed(1)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    return [torch.randn(seq_len, SAMPLES, n, model.head_dim, dtype=torch.float64).to(dtype) for n in heads]


def reference(case: Case) -> list[Tensor]:
    """Torch's own attention on one process, and its gradients."""
    *inputs, grad = random_inputs(case, torch.float64)
    q, k, v = (x.requires_grad_() for x in inputs)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    mask = (back >= 0) & (back < (case[1].attention_window or len(q)))
    output = functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).permute(2, 0, 1, 3)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad)]


def attention_of(model: ModelSpec) -> Attention:
    (part,) = layer_kinds(model)[0].mixers
    assert isinstance(part, Attention)
    return part


def share_of_rank(case: Case, rank: int, dtype: torch.dtype, again: bool) -> list[Tensor]:
    """What a rank has of the same."""
    sequence, model = case
    groups = sorted({tuple(sorted(group.devices)) for group in sequence.groups})
    everyone = tuple(sorted(rank for group in groups for rank in group))
    all_groups = ProcessGroups([ranks for ranks in {*groups, everyone} if len(ranks) > 1], TIMEOUT_S)
    attention = SequenceAttention(sequence, rank, all_groups, torch.device("cpu"), attention_of(model))
    *inputs, grad = (rows(x, rank_and_runs(sequence)[rank]) for x in random_inputs(case, dtype))
    q, k, v = (x.requires_grad_() for x in inputs)
    output = recompute(attention, q, k, v) if again else attention(q, k, v)
    return [output.detach().unflatten(2, grad.shape[2:]), *torch.autograd.grad(output, (q, k, v), grad.flatten(2))]


def worst(cases: list[Case], dtype: torch.dtype = torch.float64, *, again: bool = False) -> float:
    """The largest relative error of any output and gradient, layouts of as many ranks in one world."""
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[len(rank_and_runs(case[0]))].append(case)
    most = 0.0
    for size, some in by_size.items():

        def work(rank: int, some: list[Case] = some) -> Any:
            return [[x.double().numpy() for x in share_of_rank(case, rank, dtype, again)] for case in some]

        ranks = run_ranks(size, work)
        for k, case in enumerate(some):
            for j, want in enumerate(reference(case)):
                whole = torch.full_like(want, torch.nan)
                for rank, runs in rank_and_runs(case[0]).items():
                    positions = torch.cat([torch.arange(*run) for run in runs])
                    whole[positions] = torch.from_numpy(ranks[rank][k][j])
                most = max(most, float((whole - want).norm() / want.norm()))
    return most


def stated_cases() -> list[Case]:
    return [
        (sequence, replace(MODEL, num_heads=n, num_kv_heads=m, attention_window=window))
        for sequence, n, m, window in STATED
    ]


def test_stated_layouts() -> None:
    assert worst(stated_cases()) <= 1e-10


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    window = rng.choice((None, None, None, 5))
    model = replace(MODEL, num_heads=12, num_kv_heads=rng.choice((1, 2, 3, 4, 6, 12)), attention_window=window)
    ranks = list(range(rng.randint(2, 6)))
    rng.shuffle(ranks)
    return random_sequence(rng, tuple(ranks), rng.randint(12, 40), 12), model


def test_generated_layouts() -> None:
    cases = [random_case(seed) for seed in range(200 if STRESS else 10)]
    assert {case[0].order for case in cases} == set(ORDERS)
    assert {len(case[0].groups) for case in cases} >= {1, 2, 4, 5}
    assert worst(cases) <= 1e-10


def test_recomputing_and_bf16() -> None:
    assert worst(stated_cases()[5:7], again=True) <= 1e-10
    assert 1e-4 < worst(stated_cases()[5:7], torch.bfloat16) < 0.02
