"""What to change of a problem that does not fit: changes that were seen to fit, the cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hexiopt.errors import InputError
from hexiopt.numbers.gpus import Gpu, catalogue
from hexiopt.numbers.links import through_host_gb_per_s
from hexiopt.numbers.products import is_amd
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import LORA
from hexiopt.study.fitting.capacity import SEQ_LEN_GRAIN, Capacity, is_exact, longest_context, proof
from hexiopt.study.solution import PlacedPlan
from hexiopt.units import GB, GIB, MICROSECOND

_MOST = 3
_SHORTEST = 512  # tokens: a shorter context is no cure
_LATENCY_S = 15 * MICROSECOND


@dataclass(frozen=True)
class Cure:
    """A change, as it is written on the command line or in words, and the plan that fits then."""

    change: str
    plan: PlacedPlan

    def __str__(self) -> str:
        return f"{self.change}: fits, {self.plan.cost.tokens_per_s:,.0f} tokens/s in one pipeline"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"change": self.change, "tokens_per_s": self.plan.cost.tokens_per_s}


def cures(problem: Problem) -> Iterator[Cure]:
    """Up to three changes with plans that fit: of storage, training and optimizer, then a shorter context under the
    best of these, then a card more. Each plan is one pipeline, so a search may find faster ones."""
    if is_exact(problem):
        yield from islice(_all(problem), _MOST)


def _all(problem: Problem) -> Iterator[Cure]:
    smallest, plan = problem, None
    for smallest in _other_states(problem):
        if (plan := _plan(smallest)) is not None:
            yield Cure(_overrides(problem, smallest), plan)
            break  # what follows saves more and costs more
    for changed in (problem,) if plan is not None else (problem, smallest):
        if (shorter := _shorter(changed)) is not None:
            length = f"workload.seq_len={shorter.problem.workload.seq_len}"
            yield Cure(f"{_overrides(problem, changed)} {length}".strip(), shorter)
            break
    yield from _another_card(problem)
    if plan is None and smallest != problem:
        for cure in _another_card(smallest):
            yield replace(cure, change=f"{_overrides(problem, smallest)} and {cure.change}")


def _other_states(problem: Problem) -> Iterator[Problem]:
    """The problem with ever fewer bytes a parameter."""
    workload = problem.workload
    if workload.adapters is None:
        if workload.optimizer == "adamw":
            yield problem.replace(workload=workload.replace(optimizer="adamw_8bit"))
        workload = workload.replace(training=LORA, optimizer="adamw")
        yield problem.replace(workload=workload)
    if workload.lora.storage == "16bit":
        yield problem.replace(workload=workload.replace(lora=replace(workload.lora, storage="nf4")))


def _overrides(problem: Problem, changed: Problem) -> str:
    """The overrides that make `changed` of `problem`."""
    before, after = problem.workload, changed.workload
    words = [
        f"workload.{key}={getattr(after, key)}"
        for key in ("training", "optimizer")
        if getattr(before, key) != getattr(after, key)
    ]
    return " ".join([*words, *[f"workload.lora.storage={after.lora.storage}"] * (before.lora != after.lora)])


def _plan(problem: Problem) -> PlacedPlan | None:
    try:
        return proof(problem)
    except InputError:  # of a plan space or a model that does not go with the change
        return None


def _shorter(problem: Problem) -> PlacedPlan | None:
    """The longest context below the one asked."""
    if problem.workload.seq_len <= _SHORTEST:
        return None
    least = problem.replace(workload=problem.workload.replace(seq_len=max(_SHORTEST, SEQ_LEN_GRAIN)))
    plan = longest_context(least) if Capacity(least).fits else None
    return plan if plan is not None and plan.problem.workload.seq_len < problem.workload.seq_len else None


def _another_card(problem: Problem) -> Iterator[Cure]:
    """The card of least memory, and the slowest of these, with which the problem fits: of the makers that are there."""
    precision = problem.workload.precision
    makers = {is_amd(gpu) for gpu in problem.cluster.types}
    cards = [
        gpu
        for gpu in catalogue().values()
        if gpu.link.startswith("pcie") and gpu.peak_flops(precision) and is_amd(gpu) in makers
    ]
    have = {gpu.name for gpu in problem.cluster.types}
    key: Callable[[Gpu], Any] = lambda gpu: (gpu.name not in have, gpu.memory_bytes, gpu.peak_flops(precision))  # noqa: E731
    for gpu in sorted(cards, key=key):
        changed = with_card(problem, gpu)
        plan = _plan(changed) if changed is not None and Capacity(changed).fits else None
        if plan is not None:
            yield Cure(f"1 {gpu.name} more ({gpu.memory_bytes / GIB:g} GiB)", plan)
            return


def with_card(problem: Problem, gpu: Gpu) -> Problem | None:
    """The problem with one more card in its first machine's computer; None where its network does not say how."""
    cluster = problem.cluster
    rate = through_host_gb_per_s(gpu) * GB
    like = cluster.machines[0]
    nic = min(rate, like.nic_bandwidth_bytes_per_s)
    card = like.replace(
        name="more",
        spec_name="more",
        gpu=gpu,
        num_gpus=1,
        intra_links=(),
        num_interfaces=1,
        slow=(),
        nic_bandwidth_bytes_per_s=nic,
        nic_latency_s=max(_LATENCY_S, like.nic_latency_s),
        price_per_hour=None,
        host=None,
    )
    groups = tuple(
        replace(group, members=(*group.members, card.name)) if like.spec_name in group.members else group
        for group in cluster.groups
    )
    try:
        return problem.replace(cluster=cluster.replace(machines=(*cluster.machines, card), groups=groups))
    except InputError:
        return None
