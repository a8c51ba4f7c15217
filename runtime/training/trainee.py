"""One rank of a training run, assembled: its part of the model, its messages and its optimiser."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan, prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.numbers.messages import BLOCK, TRAINING
from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.kinds import Attention
from hexiopt.problem.problem import Problem
from runtime.device import DeviceClock, Reading, clock_of
from runtime.mapping.actions import forward_actions, rank_actions, unit_buckets
from runtime.mapping.adapters import Adapters
from runtime.mapping.buckets import bucket_parts
from runtime.mapping.layout import layout_of
from runtime.mapping.parts import ParameterPart
from runtime.mapping.times import StepTimes
from runtime.model.attention import AttentionCall
from runtime.model.block_attention import Scores
from runtime.model.decoder import DecoderChunk, HostChunk
from runtime.model.functions import exact_dtype
from runtime.model.layer import compiled_layer_run, layer_run
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import LateProducts, RankTpGroup
from runtime.network import ProcessGroups
from runtime.parallel.expert_parts import RankExperts
from runtime.parallel.gradient_sync import GradientSync, buckets
from runtime.parallel.hooks import NO_HOOKS, Hooks
from runtime.parallel.messages import StageMessages
from runtime.parallel.optimizer import Optimizer
from runtime.parallel.pipeline import Batch, Borders, Sequences, StageRunner
from runtime.parallel.ring_attention import SequenceAttention
from runtime.parallel.weight_store import WeightStore
from runtime.settings import Settings

_INITIAL_STD = 0.02  # of matrices, as in Llama and GPT-2
_BLOCK_ELEMENTS = 2**18  # of a matrix drawn at a time: 1 ms, against some 10 µs to begin one


class Trainee:
    """The part of a checked plan for `problem` that one process of an initialised `torch.distributed` world executes.

    Models compute in `dtype`, on `device`. `initial` gives the first values of each part that the process holds. Layers
    may be compiled, by default on GPUs, all of a rank together. `times` of rank 0 count, where it has any.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
        initial: Callable[[ParameterPart], Tensor],
        *,
        hooks: Hooks = NO_HOOKS,
        times: StepTimes | None = None,
    ) -> None:
        model, workload, zero = problem.model, problem.workload, plan.sharding.stage
        seq_len, splits = workload.seq_len, plan.schedule.splits
        adapters = Adapters.of(workload, settings.lora_alpha)
        self.layout, rank = layout_of(plan, model, problem.cluster, adapters), dist.get_rank()
        assert self.layout.world_size == dist.get_world_size(), "a process for each device of the plan"
        self._tokens, self._device, self._clock = workload.tokens, device, clock_of(device)
        self._groups = groups = ProcessGroups(
            self.layout.groups(), settings.timeout_s, self.layout.pairs(seq_len), device, self.layout.channels(seq_len)
        )
        line, executor = self.layout.line_of[rank], self.layout.executor_of[rank]
        at = executor.ranks.index(rank)
        reads, shard = executor.reads(rank, seq_len), executor.shards[at]
        parts = list(executor.parts(model, rank, adapters))
        shared = bucket_parts(self.layout.held, zero, workload.optimizer)
        of_units, like = unit_buckets(executor, rank, shared, model), torch.empty(0, dtype=dtype, device=device)
        trained_dtype = dtype if adapters is None else _adapter_dtype(dtype, adapters)
        gradient_dtype = exact_dtype(trained_dtype) if workload.states.gradient == 4 else trained_dtype
        is_quantized = workload.gradient_precision != TRAINING
        self.buckets = buckets(shared, parts, gradient_dtype, device, BLOCK if is_quantized else 1)
        self.store = store = WeightStore(self.buckets, parts, initial, of_units, groups, like, trained_dtype)
        self.weights = store.parameters

        scale = 0.0 if adapters is None else adapters.scale
        attend: Callable[[Attention, Scores], AttentionCall] | None = None
        match executor.sequence:
            case None:
                tokens = tuple(span for (span,) in executor.tokens(seq_len))
                late, is_async = LateProducts() if splits else None, settings.async_tp and device.type == "cuda"
                tp = RankTpGroup(at, tokens, groups.of(executor.ranks), late, scale, is_async)
            case layout:
                tp = RankTpGroup(0, reads, adapter_scale=scale)
                attend = partial(SequenceAttention, layout, rank, groups, device)
        stage, batch = line.stages[executor.stage], (workload.global_batch, seq_len)
        of_experts = settings.experts if adapters is None else replace(settings.experts, expert_bias_rate=0.0)
        self._experts = RankExperts(model, executor, stage, tp, groups, self.weights, of_experts, batch)
        calls = part_calls(model, shard, tp, reads, like, attend, self._experts.part)
        self.calls = tuple(calls.values())
        is_compiled = device.type == "cuda" if settings.compile_layers is None else settings.compile_layers
        # Attention over the tokens of several ranks sends messages, which no graph can hold, nor what a split backward
        # puts off, nor the sizes of exchanges; and under ZeRO-3 what parameters hold comes and goes.
        is_whole = not executor.parts_tokens and not splits and not model.shares_experts and zero < 3
        run = compiled_layer_run(tp) if is_compiled and is_whole else layer_run
        chunks = [
            HostChunk(model, chunk, shard, tp, calls, self.weights, like)
            if shard.hosts
            else DecoderChunk(model, chunk, shard, tp, calls, self.weights, workload.loss_chunk_tokens, run)
            for chunk in executor.chunks
        ]

        self.sync = sync = GradientSync(self.buckets, self.weights, groups, quantized=is_quantized)
        self.messages = messages = StageMessages(
            line, executor, rank, seq_len, model.hidden_size, like, groups, workload.message_precision, hooks
        )
        expected = times or StepTimes.even(self.layout, plan.schedule)
        agreed = StepTimes.of_data(_of_rank_0(expected.to_data(), device))
        actions = rank_actions(self.layout, plan.schedule, model, seq_len, shared, agreed)[rank]
        forwards = forward_actions(actions, executor, of_units)
        self.pipeline = StageRunner(
            actions, forwards, line, executor, reads, chunks, messages, sync, store, self._clock, hooks
        )
        self.optimizer = Optimizer(
            settings.adam,
            self.buckets,
            store,
            hooks,
            kind=workload.optimizer,
            keeps_masters=OPTIMIZERS[workload.optimizer].master and adapters is None,
            in_one_pass=is_compiled and device.type == "cuda",
        )
        # Ranks of a TP group have the same loss, those of a sequence layout each that of their own tokens.
        self._counts_loss = at == 0 or executor.parts_tokens

    def gradients(self, sequences: Sequences, borders: Borders | None = None) -> float:
        """Sum the gradients of a global batch in the buckets. Returns its mean loss per token, on every rank."""
        return self._mean(self.pipeline.step(Batch(sequences, self._tokens, borders)))

    def loss(self, sequences: Sequences, borders: Borders | None = None) -> float:
        """The mean loss per token of a global batch, on every rank; nothing is trained."""
        return self._mean(self.pipeline.evaluate(Batch(sequences, self._tokens, borders)))

    def _mean(self, own_loss: Tensor) -> float:
        total = self._counted_loss(own_loss)
        dist.all_reduce(total)
        return float(total)

    def _counted_loss(self, own_loss: Tensor) -> Tensor:
        return own_loss if self._counts_loss else torch.zeros_like(own_loss)

    def begin_step(
        self, sequences: Sequences, lr: float, borders: Borders | None = None, *, stops: bool = False
    ) -> "StepOutcome":
        """Enqueue one optimiser step; the host never waits for the device in here. With `borders`, attention keeps to
        documents. Every rank's outcome says whether any `stops`: all learn it after the same step."""
        began = self._clock.mark()
        own_loss = self.pipeline.step(Batch(sequences, self._tokens, borders))
        moves = self._experts.bias_moves()
        sums = self.optimizer.step(lr, self._counted_loss(own_loss), moves, stops=stops)
        self._groups.step_ended()
        return StepOutcome(Reading(torch.cat([sums, own_loss.view(1)])), self._clock, began, self._clock.mark())

    def step(self, sequences: Sequences, lr: float) -> tuple[float, float]:
        """One optimiser step. Returns the mean loss per token and the norm of the gradients."""
        return self.begin_step(sequences, lr).read()

    def finish(self) -> None:
        """Wait for weights that are gathered beside the next forwards: before they are read outside of a step."""
        self.store.finish()

    def blame(self, outcome: "StepOutcome") -> list[int]:
        """The ranks whose own loss of a step is no finite number, or else those that hold such gradients.

        Asked by all ranks together.
        """
        *_, squares, loss = outcome.numbers.read()
        facts = [not isfinite(loss), not isfinite(squares)]
        rank_flags = torch.tensor(facts, dtype=torch.float32, device=self._device)
        flags = rank_flags.new_empty(2 * self.layout.world_size)
        dist.all_gather_single(flags, rank_flags)
        by_loss, by_gradients = flags.view(-1, 2).T
        return [int(rank) for rank in (by_loss if by_loss.any() else by_gradients).nonzero()]


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What a step has found and how long it took, once the device is done with it; the first question waits for that.

    The `numbers` on their way are the mean loss per token, the squared norm of all gradients, how many ranks asked for
    a stop, the squared norm of the gradients which this rank holds, and the loss of its own tokens.
    """

    numbers: Reading
    clock: DeviceClock
    began: Any
    ended: Any

    def read(self) -> tuple[float, float]:
        """The mean loss per token, and the norm of the gradients."""
        loss, squares, *_ = self.numbers.read()
        return loss, sqrt(squares) if squares >= 0 else nan

    @property
    def seconds(self) -> float:
        """From the step's first operation to its last one."""
        return self.clock.between_s(self.began, self.ended)

    @property
    def stops(self) -> bool:
        """Whether a rank asked for a stop."""
        return self.numbers.read()[2] > 0


def _of_rank_0(data: Any, device: torch.device) -> Any:
    """What rank 0 has of plain data, so that all ranks have the same. Asked by all together."""
    text = b"" if dist.get_rank() else json.dumps(data).encode()
    length = torch.tensor(len(text), device=device)
    dist.all_reduce(length)
    sent = torch.zeros(int(length), dtype=torch.uint8, device=device)
    sent[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.all_reduce(sent)  # others have zeros
    return json.loads(bytes(sent.tolist()))


def _adapter_dtype(dtype: torch.dtype, adapters: Adapters) -> torch.dtype:
    """That of adapters of a model in `dtype`."""
    if dtype == torch.float64:
        return dtype
    return torch.float32 if adapters.lora.adapter_bytes == 4 else torch.bfloat16


def initial_values(seed: int, part: ParameterPart, device: torch.device | None = None) -> Tensor:
    """Initial values that do not depend on the plan: a matrix is drawn in blocks along the dimension in which it is
    cut, each by the seed, the name and its number, so that a rank draws little beside its own part.

    Matrices are normal, norms one, biases zero; float32. Of adapters A is uniform, as torch's linear layers are (He et
    al., arXiv 1502.01852), and B zero, so that they begin as nothing. All are drawn on the CPU; on a `device` faster,
    and otherwise than there.
    """
    if part.initial == "log_of_number":
        return torch.arange(part.start + 1, part.end + 1, dtype=torch.float32, device=device).log()
    if isinstance(part.initial, float | int):
        return torch.full(part.local_shape, float(part.initial), device=device)
    if not part.decays:
        return torch.full(part.local_shape, 0.0 if part.name.endswith("bias") else 1.0, device=device)
    total, others = part.shape[part.dim], (*part.shape[: part.dim], *part.shape[part.dim + 1 :])
    size = max(1, _BLOCK_ELEMENTS // prod(others))
    values = torch.empty(part.local_shape, device=device)
    draw = torch.rand if part.initial == "uniform" else torch.randn
    for number in range(part.start // size, -(-part.end // size)):
        first, end = number * size, min((number + 1) * size, total)
        digest = hashlib.sha256(f"{seed} {part.name} {number}".encode()).digest()
        generator = torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        block = draw((end - first, *others), generator=generator, device=device).movedim(0, part.dim)
        low, high = max(first, part.start), min(end, part.end)
        piece = block.narrow(part.dim, low - first, high - low)
        values.narrow(part.dim, low - part.start, high - low).copy_(piece)
    if part.initial == "uniform":  # between ± 1 / √inputs
        return values.mul_(2.0).sub_(1.0).div_(sqrt(part.shape[1]))
    return values.mul_(_INITIAL_STD)
