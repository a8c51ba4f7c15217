"""Steps of buckets are those of torch's optimizers on a whole model, however many ranks take them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from runtime.mapping.moments import RULES, is_whole, moments_of
from runtime.parallel.step_rules import PassNumbers, adamw_pass, compiled_adamw_pass
from runtime.settings import AdamW
from tests.runtime.parallel.test_adapter_training import BOTH
from tests.runtime.parallel.test_compiled import MODEL
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, equal_one_process, trainee, whole
from tests.runtime.ranks import random_plan, run_ranks
from tests.runtime.stream_order import run_in_order

Parameters = Iterable[nn.Parameter]
LR, DECAY, BETA = 0.01, SETTINGS.weight_decay, SETTINGS.beta1
TORCH: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "adamw": lambda parameters, decay: torch.optim.AdamW(parameters, LR, (BETA, SETTINGS.beta2), SETTINGS.eps, decay),
    "adamw_bf16": lambda parameters, decay: torch.optim.AdamW(
        parameters, LR, (BETA, SETTINGS.beta2), SETTINGS.eps, decay
    ),
    "sgd": lambda parameters, decay: torch.optim.SGD(parameters, LR, weight_decay=decay),
    "momentum": lambda parameters, decay: torch.optim.SGD(parameters, LR, BETA, weight_decay=decay),
    "adafactor": lambda parameters, decay: torch.optim.Adafactor(parameters, LR, weight_decay=decay),
    "muon": lambda parameters, decay: torch.optim.Muon(parameters, LR, decay, BETA, adjust_lr_fn="match_rms_adamw"),
}
TINY = replace(MODEL, num_layers=2)


def sequences(model: ModelSpec, step: int, batch: int = 2) -> Callable[[int, int], Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(model.vocab_size, (batch, SEQ_LEN + 1), generator=generator)
    return lambda first, end: tokens[first:end]


def of_torch(optimizer: str, weights: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Torch's optimizers of a whole model: matrices decay; Muon leaves the ends and vectors to AdamW."""
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in weights.items():
        rule = "adamw" if optimizer == "muon" and (parameter.dim() < 2 or "layers" not in name) else optimizer
        groups.setdefault((rule, DECAY if parameter.dim() > 1 else 0.0), []).append(parameter)
    return [TORCH[rule](parameters, decay) for (rule, decay), parameters in groups.items()]


@pytest.mark.parametrize("more", [{}, BOTH], ids=["model", "adapters"])
@pytest.mark.parametrize("optimizer", RULES)
def test_steps_are_those_of_torch(optimizer: str, more: dict[str, Any]) -> None:
    def work(rank: int) -> Any:
        rank_trainee = trainee(whole(TINY, 2), TINY, 2, optimizer=optimizer, **more)
        twins = {name: nn.Parameter(w.detach().clone()) for name, w in rank_trainee.weights.items() if w.requires_grad}
        theirs = of_torch(optimizer, twins)
        for step in range(3):
            rank_trainee.gradients(sequences(TINY, step))
            views = {name: view for bucket in rank_trainee.buckets for name, view, _ in bucket.pieces(bucket.gradient)}
            norm = torch.stack([view.norm() for view in views.values()]).norm()
            for name, twin in twins.items():
                twin.grad = views[name].clone() / (norm / SETTINGS.max_norm).clamp(min=1.0)
            rank_trainee.optimizer.step(LR, torch.zeros(()))
            for twin_optimizer in theirs:
                twin_optimizer.step()
        return {
            name: (rank_trainee.weights[name].detach().numpy(), twin.detach().numpy()) for name, twin in twins.items()
        }

    (weights,) = run_ranks(1, work)
    close = 1e-4 if optimizer == "muon" else 1e-12  # whose products torch rounds to BF16
    for name, (ours, theirs) in weights.items():
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), rtol=close, atol=close, msg=name)


def replicated_case(seed: int) -> tuple[Plan, ModelSpec, int]:
    """A plan without tensor parallelism, and with ZeRO-0."""
    while True:
        plan, model, batch = random_plan(random.Random(seed), 5)
        if not plan.has_tensor_parallelism and len(plan.devices()) > 2:
            return replace(plan, sharding=replace(plan.sharding, stage=0, groups="all")), model, batch
        seed += 100


@pytest.mark.parametrize("optimizer", [name for name in RULES if name != "muon"])
def test_a_plan_steps_as_one_process(optimizer: str) -> None:
    """Sharded where elements are stepped for themselves."""
    case = replicated_case(3) if OPTIMIZERS[optimizer].whole_matrices else random_plan(random.Random(1005), 5)
    equal_one_process(case, 4, SEQ_LEN, run_in_order, both={"optimizer": optimizer})


def test_a_plan_steps_with_muon_nearly_as_one_process() -> None:
    """Products are rounded to BF16: what one rank rounds otherwise than another is told in losses."""
    plan, model, batch = replicated_case(3)

    def work(rank: int, of: Plan) -> Any:
        rank_trainee = trainee(of, model, batch, optimizer="muon")
        return [rank_trainee.step(sequences(model, step % 2, batch), LR)[0] for step in range(8)]

    (alone,) = run_ranks(1, lambda rank: work(rank, whole(model, batch)))
    for losses in run_ranks(len(plan.devices()), lambda rank: work(rank, plan)):
        assert losses == pytest.approx(alone, rel=1e-3)
    assert alone[-2] < alone[0] - 0.05


@pytest.mark.parametrize("optimizer", RULES)
def test_states_in_bf16_are_as_wide_as_is_priced(optimizer: str) -> None:
    def work(rank: int) -> Any:
        rank_trainee = trainee(whole(TINY, 2), TINY, 2, torch.bfloat16, torch.bfloat16, optimizer=optimizer)
        losses = [rank_trainee.step(sequences(TINY, 0), LR)[0] for _ in range(12)]
        kind = OPTIMIZERS[optimizer]
        for bucket, master, moments in zip(
            rank_trainee.buckets, rank_trainee.optimizer.masters, rank_trainee.optimizer.moments, strict=True
        ):
            assert (master is not None) == kind.master
            in_layers = bucket.decays and all("layers" in part.name.split(".") for part in bucket.parts)
            states = (kind if kind.ends is None or in_layers else OPTIMIZERS[kind.ends]).states(2, 2)
            assert tuple(moments) == moments_of(optimizer, bucket.parts[0])
            if not any(map(is_whole, moments)) and optimizer != "adafactor":
                assert sum(moment.nbytes for moment in moments.values()) == states.moment * bucket.length
            assert {weight.dtype for weight in rank_trainee.weights.values()} == {torch.bfloat16}
        return losses

    (losses,) = run_ranks(1, work)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------ one pass


@pytest.mark.parametrize(
    ("gradient_dtype", "compiled"),
    [
        (torch.bfloat16, False),
        (torch.float32, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_one_pass_of_adamw_is_the_fused_kernel(gradient_dtype: torch.dtype, compiled: bool) -> None:
    """Masters to 6e-8 of their size, weights in BF16 equal but where rounding has a tie."""
    settings, size = AdamW(), 4097
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(size, generator=generator) * 0.02
    theirs, ours = ([master.clone(), torch.zeros(size), torch.zeros(size)] for _ in range(2))
    rounded, steps, divisor = master.bfloat16(), torch.zeros(()), torch.tensor(1.7, dtype=torch.float64)
    run = compiled_adamw_pass() if compiled else adamw_pass
    for step in range(5):
        gradient = (torch.randn(size, generator=generator) * 0.01).to(gradient_dtype)
        steps += 1
        lr = 3e-3 / (step + 1)
        numbers = PassNumbers.of(lr, steps, divisor, settings)
        with torch.no_grad():
            run(rounded, ours[0], gradient, (ours[1], ours[2]), numbers, settings, settings.weight_decay)
        torch._fused_adamw_(
            [theirs[0]],
            [gradient.float()],
            [theirs[1]],
            [theirs[2]],
            [],
            [steps],
            lr=lr,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor.float(),
        )
        assert float((ours[0] - theirs[0]).abs().max()) <= 6e-8
    assert float((rounded == theirs[0].bfloat16()).float().mean()) > 0.999
    assert torch.equal(rounded, ours[0].bfloat16())


@pytest.mark.parametrize("zero", [0, 1])
def test_a_run_in_one_pass_has_the_same_masters_and_weights(zero: int) -> None:
    """In BF16 over three ranks, as on GPUs, but for the compiler."""
    plan, model, batch = replicated_case(3)
    plan = replace(plan, sharding=replace(plan.sharding, stage=zero))

    def work(rank: int, in_one_pass: bool) -> Any:
        rank_trainee = trainee(plan, model, batch, torch.bfloat16, torch.bfloat16)
        rank_trainee.optimizer._in_one_pass = in_one_pass
        counted = Mock(side_effect=adamw_pass)
        with patch("runtime.parallel.optimizer.compiled_adamw_pass", lambda: counted):
            losses = [rank_trainee.step(sequences(model, step, batch), LR)[0] for step in range(3)]
        assert bool(counted.call_count) == in_one_pass
        rank_trainee.finish()
        masters = [master.numpy() for master in rank_trainee.optimizer.masters if master is not None]
        return losses, masters, {name: weight.detach().float().numpy() for name, weight in rank_trainee.weights.items()}

    count = len(plan.devices())
    for (losses, masters, weights), (of_kernel, others, theirs) in zip(
        run_ranks(count, lambda rank: work(rank, True)), run_ranks(count, lambda rank: work(rank, False)), strict=True
    ):
        assert losses == pytest.approx(of_kernel, rel=1e-3)
        assert len(masters) == len(others) > 0
        for array, other in zip(masters, others, strict=True):
            torch.testing.assert_close(torch.from_numpy(array), torch.from_numpy(other), rtol=1e-3, atol=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(torch.from_numpy(weight), torch.from_numpy(theirs[name]), rtol=1e-2, atol=1e-3)
