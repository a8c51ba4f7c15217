"""On a GPU, where there is one: the gradients of one process are those that a CPU finds in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.lab.processes import run_processes
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.device import take_device
from runtime.launch.torchrun import torchrun_place
from runtime.mapping.parts import ParameterPart
from runtime.network import join_world
from runtime.settings import Settings
from runtime.training.trainee import Trainee, initial_values

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or not list(Path("/dev").glob("nvidia[0-9]*")), reason="no GPU"
)

LLAMA = ModelSpec(
    name="small",
    architecture="llama",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=176,
    vocab_size=128,
    max_positions=64,
)
MISTRAL = replace(LLAMA, architecture="mistral", attention_window=5)
QWEN3 = replace(LLAMA, architecture="qwen3", attention_bias=True)
SEQ_LEN, BATCH, TIMEOUT_S = 48, 4, 240.0


@dataclass(frozen=True)
class Case:
    """What is computed: `has_documents` says whether attention keeps to documents, `chunk` of how many tokens the loss
    has the logits at once."""

    model: ModelSpec
    policies: tuple[str, ...] = ("none", "none", "none")
    is_compiled: bool = False
    has_documents: bool = False
    chunk: int | None = None


def rounded_weights(part: ParameterPart) -> Tensor:
    """Initial weights that bf16 has, too."""
    return initial_values(1, part).bfloat16().float()


def compute(tell: Callable[[str], None], case: Case, kind: str, dtype: torch.dtype) -> Any:
    """The loss, all gradients, and what a step finds, in float64."""
    device, place = take_device(kind, 0, 1), torchrun_place()
    assert place is not None
    join_world(device, 0, 1, TIMEOUT_S, address=place.master)
    layers = (0, case.model.num_layers)
    stage = Stage.of_replicas(Stage.of((0,), *layers).parallelism.replicas, (layers,), case.policies)
    workload = Workload(BATCH, SEQ_LEN, gradient_bytes=4, loss_chunk_tokens=case.chunk)
    settings = Settings(timeout_s=TIMEOUT_S, compile_layers=case.is_compiled)
    problem = Problem(Cluster.of({"h200_141gb_sxm": 1}), case.model, workload)
    trainee = Trainee(problem, Plan((Pipeline((stage,), 2, 2),)), settings, dtype, device, rounded_weights)
    tokens = torch.randint(case.model.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    at = {(0, 2): [0, 7, 48, 60, 96], (2, 4): [0, 48, 49, 96]}  # of documents in the samples of a micro-batch

    def borders(first: int, last: int) -> Tensor:
        return torch.tensor(at[first, last], dtype=torch.int32, device=device)

    given = (partial(samples, tokens.to(device)), borders if case.has_documents else None)
    loss = trainee.gradients(*given)
    gradients = np.concatenate([bucket.gradient.double().cpu().numpy() for bucket in trainee.buckets])
    return loss, gradients, trainee.begin_step(given[0], 1e-3, given[1]).read()


def samples(tokens: Tensor, first: int, last: int) -> Tensor:
    return tokens[first:last]


def compute_on(case: Case, kind: str, dtype: torch.dtype) -> Any:
    (answer,) = run_processes(1, kind, compute, case, kind, dtype)
    return answer


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)],  # the last by flash attention
)
@pytest.mark.parametrize(
    "case",
    [
        Case(LLAMA),
        Case(LLAMA, ("none", "selective", "full"), is_compiled=True, chunk=40),
        Case(MISTRAL, ("full", "selective", "none")),
        Case(MISTRAL, is_compiled=True, has_documents=True),
        Case(QWEN3, has_documents=True, chunk=40),
    ],
    ids=["plain", "compiled", "window", "documents in windows, compiled", "documents, biases and norms"],
)
def test_gradients_are_those_of_a_cpu(
    case: Case, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    loss, gradients, step = compute_on(case, "cuda", dtype)
    of_loss, wanted, of_step = compute_on(replace(case, is_compiled=False), "cpu", torch.float64)
    assert np.linalg.norm(gradients - wanted) <= most * np.linalg.norm(wanted)
    assert loss == pytest.approx(of_loss, rel=most)
    assert step == pytest.approx(of_step, rel=most)
