"""Two ways of doing the same, on the same processes in turns, so that what else the machine does meets both."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers import it at first use: here once, before processes fork
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import MAX_GPUS_PER_MACHINE
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.network import join_world
from runtime.settings import AdamW, Settings
from runtime.training.trainee import Trainee, initial_values

TIMEOUT_S = 120.0
Step = Callable[[int], float]  # of a number of the step, to its loss
OURS, STOCK = "hexiopt", "torch"


def compared_model(hidden_size: int, num_heads: int, ffn_size: int) -> ModelSpec:
    """A Llama of four layers that a CPU computes in a second; two query heads to each key-value head."""
    return ModelSpec(
        name="compared",
        architecture="llama",
        num_layers=4,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=hidden_size // num_heads,
        ffn_size=ffn_size,
        vocab_size=512,
        max_positions=512,
    )


def step_of_ours(
    plan: Plan, model: ModelSpec, seq_len: int, batch: int, settings: AdamW, *, is_compiled: bool = False
) -> Callable[[Tensor], float]:
    """Our way, in float32: a step of the rank on the tokens of a batch [batch, seq_len + 1], to its loss."""
    cluster = Cluster.of({"a100_40gb_sxm": max(plan.devices()) + 1}, gpus_per_machine=MAX_GPUS_PER_MACHINE)
    problem = Problem(cluster, model, Workload(batch, seq_len, precision="fp32"))
    run = Settings(adam=settings, timeout_s=TIMEOUT_S, compile_layers=is_compiled)
    trainee = Trainee(problem, plan, run, torch.float32, torch.device("cpu"), partial(initial_values, 0))
    return lambda tokens: trainee.step(lambda first, end: tokens[first:end], settings.lr)[0]


@dataclass(frozen=True)
class StepComparison:
    """Median seconds of a step, and the loss of the first one, by way."""

    step_s: Mapping[str, float]
    first_loss: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Our time over that of stock parts."""
        return self.step_s[OURS] / self.step_s[STOCK]


Clock = Callable[[], float]  # seconds of a process


def take_turns(
    size: int, ways_of: Callable[[int], Mapping[str, Step]], rounds: int, steps: int, clock: Clock = time.perf_counter
) -> StepComparison:
    """Run the ways of every rank, `steps` steps of each in every round, of which the first one is not counted."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, Path(folder) / "store", ways_of, rounds, steps, clock, there)
        started = [fork.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
        for process in started:
            process.start()
        there.close()
        for process in started:
            process.join()
        try:
            comparison: StepComparison = here.recv()
        except EOFError:
            raise RuntimeError("a process of the comparison has failed; its traceback stands above") from None
    return comparison


def _rank(
    rank: int,
    size: int,
    store: Path,
    ways_of: Callable[[int], Mapping[str, Step]],
    rounds: int,
    steps: int,
    clock: Clock,
    to: Any,
) -> None:
    torch.set_num_threads(1)
    meeting = FileStore(str(store), size)
    join_world(torch.device("cpu"), rank, size, TIMEOUT_S, store=meeting, interface="lo")
    step_by_name = ways_of(rank)
    seconds: dict[str, list[float]] = {name: [] for name in step_by_name}
    first: dict[str, float] = {}
    for number in range(rounds):
        for name, step in step_by_name.items():
            for k in range(number * steps, (number + 1) * steps):
                dist.barrier()
                began = clock()
                loss = step(k)
                dist.barrier()
                first.setdefault(name, loss)
                if number:
                    seconds[name].append(clock() - began)
    if rank == 0:
        to.send(StepComparison({name: statistics.median(times_s) for name, times_s in seconds.items()}, first))
    dist.destroy_process_group()
