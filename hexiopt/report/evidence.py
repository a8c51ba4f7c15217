"""What measured runs say of a predicted speed: an interval, and a grade of evidence."""

from dataclasses import dataclass

from hexiopt.numbers.errors import MANY_TOKENS, Evidence, evidence
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import FULL


def kind_of(problem: Problem) -> str | None:
    """The kind of runs that a problem is like: `adapters` of 16-bit matrices, `full` training by AdamW, or that of a
    model with `experts`; None where no published run is."""
    workload, experts = problem.workload, problem.model.shares_experts
    if workload.adapters is not None:
        return "adapters" if workload.lora.storage == "16bit" and not experts else None
    if workload.training != FULL or workload.optimizer != "adamw":
        return None
    return "experts" if experts else "full"


@dataclass(frozen=True)
class SpeedInterval:
    """Tokens per second between which eight of ten runs of the kind would lie, by `evidence`; None without such runs.

    Grades: A, the cluster's figures were measured on it; B, runs of the kind were, on their own GPUs; C, formulas
    alone.
    """

    grade: str
    evidence: Evidence | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.evidence is None or self.low is None or self.high is None:
            return f"[{self.grade}: {'this cluster was measured; ' * (self.grade == 'A')}no published run of the kind]"
        runs, gpus = len(self.evidence.speed), ", ".join(self.evidence.gpus[:2])
        more = " and others" if len(self.evidence.gpus) > 2 else ""
        where = (
            "this cluster was measured" if self.grade == "A" else f"{runs} published runs of the kind on {gpus}{more}"
        )
        return f"{self.low:,.0f} to {self.high:,.0f} in 8 of 10 cases [{self.grade}: {where}]"


def speed_interval(problem: Problem, plan: Plan, tokens_per_s: float) -> SpeedInterval:
    """The interval of a plan's predicted speed."""
    cluster = problem.cluster
    measured = bool(cluster.profile.entries or cluster.calibrated)
    runs = evidence_of(problem, plan)
    if runs is None:
        return SpeedInterval("A" if measured else "C", None)
    low, high = runs.interval
    return SpeedInterval("A" if measured else "B", runs, low * tokens_per_s, high * tokens_per_s)


def evidence_of(problem: Problem, plan: Plan) -> Evidence | None:
    """The runs of the problem's kind, the most of them where several files have such; None without."""
    kind = kind_of(problem)
    size = min(pipeline.micro_batch_size for pipeline in plan.pipelines)
    many = size * problem.workload.seq_len >= MANY_TOKENS
    rows = [row for row in evidence() if row.kind == kind and row.many_tokens == many]
    return max(rows, key=lambda row: len(row.speed), default=None)
