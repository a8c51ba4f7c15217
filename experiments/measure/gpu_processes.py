"""What `make gpu` tries with several processes of a toy model: a rank that is killed, the memory of communicators, and
orders of launch. On a machine of one GPU they share it, and also try every way of communicating."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

from experiments.app.configurations import named_model
from experiments.lab.processes import ProcessFailedError
from experiments.lab.trials.communicators import GroupMemory, group_memory
from experiments.lab.trials.killed import LIMIT_S as KILL_LIMIT_S
from experiments.lab.trials.killed import KilledRank, kill_rank
from experiments.lab.trials.plans import TrialPlan, trial_plans
from experiments.lab.trials.trial import Trial, TrialRequest, try_plan
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.units import GB, GIB
from runtime.device import num_gpus

Table = tuple[str, tuple[str, ...], list[list[str]]]  # title, header, rows

_PROCESSES = 4
_LIMIT_S = 60.0  # of each trial
_STEPS = 2
_LOSS_TOLERANCE = 1e-3  # products of FP32 may be of TF32 on GPUs
_SEVERAL_GROUPS = ("2 pipelines of 2 stages, ZeRO-1", "2 interleaved stages")  # which are under way at once
_NO_MEMORY = "no device memory"


def toy_model() -> ModelSpec:
    """A model that a CPU computes in milliseconds."""
    return replace(
        named_model("llama3_8b"),
        name="toy",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        vocab_size=512,
    )


def toy_workload(precision: str) -> Workload:
    """Four short sequences."""
    return Workload(4, 64, precision=precision, loss_chunk_tokens=32)


@dataclass(frozen=True)
class OrderTrial:
    """A plan to try, with or without NCCL's launch order."""

    plan: TrialPlan
    launch_order: bool = True

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.plan.name if self.launch_order else f"{self.plan.name}, no launch order"


def order_trials(cluster: Cluster, gpus: int) -> list[OrderTrial]:
    """What a machine like the first of `cluster`, but with so many GPUs, is tried with at toy size: plans whose groups
    are under way at once, with and without a launch order, and on one GPU all others. gloo has no such order."""
    if gpus == 0:
        return []
    (first, *_), model = cluster.machines, toy_model()
    whole = replace(first, num_gpus=_PROCESSES, intra_bandwidth_bytes_per_s=GB, intra_links=(), slow=())
    four = replace(cluster, machines=(replace(whole, name=whole.spec_name),))
    plans = trial_plans(four, [], model, toy_workload("fp32"))
    several = [plan for plan in plans if plan.name.endswith(_SEVERAL_GROUPS)]
    others = [plan for plan in plans if plan not in several] if gpus == 1 else []
    orders = [OrderTrial(plan, launch_order) for plan in several for launch_order in (True, False)]
    return orders + [OrderTrial(plan) for plan in others]


@dataclass
class ProcessTrials:
    """What came of several processes."""

    killed: KilledRank | None = None
    groups: list[GroupMemory] = field(default_factory=list)
    trials: list[tuple[str, Trial]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "killed": None if self.killed is None else self.killed.to_dict(),
            "communicators": [group.to_dict() for group in self.groups],
            "processes": [{"name": name, "measured": trial.to_dict()} for name, trial in self.trials],
        }

    def tables(self) -> Iterator[Table]:
        """What is shown."""
        if self.killed is not None:
            killed = self.killed
            lost = _NO_MEMORY if killed.lost_bytes is None else f"{killed.lost_bytes / GIB:.3g}"
            ended = "–" if killed.ended_s is None else f"{killed.ended_s:.2f}"
            cells = [killed.backend, ended, lost, killed.trouble or killed.line]
            yield "A rank killed", ("Backend", "Others ended after, s", "GiB not given back", "Said"), [cells]
        if self.groups:
            rows = [[group.kind, _mib(group.measured_bytes), _mib(group.model_bytes)] for group in self.groups]
            yield "Communicators of two ranks, MiB on each", ("Communicator", "Measured", "priced"), rows
        if self.trials:
            rows = [[name, _outcome(trial)] for name, trial in self.trials]
            yield "Several processes at toy size", ("Plan", "Loss"), rows


def exchange_table(trials: Iterable[tuple[str, Trial]]) -> Table:
    """How long rank 0 exchanged with others in a traced step, and the share of that in which it also computed."""
    rows = [
        [name, f"{1e3 * spent.total_s:.3g}", f"{spent.hidden_s / spent.total_s:.0%}"]
        for name, trial in trials
        if (spent := trial.exchange).total_s
    ]
    return "Exchange in a traced step", ("Plan", "ms", "beside compute"), rows


def try_processes(
    folder: Path, cluster: Cluster, tell: Callable[[str], None], has_time: Callable[[float], bool]
) -> ProcessTrials:
    """Try all, in `folder`, on machines like those of `cluster`, for as long as `has_time` for a trial of so many
    seconds."""
    outcome, gpus = ProcessTrials(), num_gpus()
    if has_time(KILL_LIMIT_S):
        tell("a rank is killed")
        outcome.killed = kill_rank(folder / "killed", cluster.machines[0], toy_model(), toy_workload("fp32"))
        if outcome.killed.trouble is not None:
            outcome.troubles.append(outcome.killed.trouble)
    else:
        outcome.left_out.append("a rank that is killed")
    if has_time(_LIMIT_S):
        tell("memory of communicators")
        try:
            outcome.groups = group_memory(cluster, _LIMIT_S)
        except ProcessFailedError as error:
            outcome.troubles.append(f"memory of communicators: {error}")
    else:
        outcome.left_out.append("memory of communicators")
    for order_trial in order_trials(cluster, gpus):
        if not has_time(_LIMIT_S):
            outcome.left_out.append(order_trial.name)
            continue
        tell(order_trial.name)
        path, problem = folder / "processes.json", order_trial.plan.problem
        write_plan(path, problem, order_trial.plan.plan, PlanPricer(problem).price(order_trial.plan.plan), {})
        request = TrialRequest(path, _STEPS, False, _LIMIT_S, gpus < _PROCESSES, order_trial.launch_order)
        outcome.trials.append((order_trial.name, try_plan(request)))
    outcome.troubles += _troubles(outcome.trials)
    return outcome


def _troubles(trials: Sequence[tuple[str, Trial]]) -> list[str]:
    """What was not as it must be: a trial that failed, or losses that are not the first one's."""
    troubles, first = [], next((trial.losses for _, trial in trials if trial.losses), ())
    for name, trial in trials:
        if trial.trouble is not None:
            troubles.append(f"{name}: {trial.trouble}")
        elif not all(isclose(a, b, rel_tol=_LOSS_TOLERANCE) for a, b in zip(trial.losses, first, strict=True)):
            troubles.append(f"{name}: losses {trial.losses} are not {first}, as of the first plan")
    return troubles


def _outcome(trial: Trial) -> str:
    return trial.trouble or f"{trial.losses[0]:.4f} → {trial.losses[-1]:.4f}"


def _mib(num_bytes: float | None) -> str:
    return _NO_MEMORY if num_bytes is None else f"{num_bytes / 2**20:.4g}"
