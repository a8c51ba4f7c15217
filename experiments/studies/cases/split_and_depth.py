"""What searches may use beyond the default: split backwards, free depths, messages in 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.messages import FP8, TRAINING
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from solvers.completion.pricing import price_plan
from solvers.core.zero import LOCKSTEP

NEITHER, DEPTH, SPLIT, BOTH, EIGHT, ALL = "neither", "depth", "split", "both", "8 bits", "both, 8 bits"
SLOW, FAST, SHIPPED = "0.625", "5", "as shipped"  # GB/s between machines


@dataclass(frozen=True)
class SearchMode:
    """What a search allows beyond the default."""

    split: bool = False
    depth: bool = False
    message_precision: str = TRAINING

    def grant(self, problem: Problem) -> Problem:
        """The problem with these freedoms."""
        space = replace(problem.space, split_backward=self.split, depth=self.depth)
        workload = replace(problem.workload, message_precision=self.message_precision)
        return replace(problem, space=space, workload=workload)

    def step_s(self, problem: Problem, plan: Plan) -> float:
        """The shortest step in seconds of what `plan` becomes with these freedoms; NaN where nothing fits."""
        pricer = PlanPricer(self.grant(problem))
        priced = [price_plan(pricer, form) for form in self._forms(plan)]
        return min((form.cost.step_time_s for form in priced if form is not None and form.cost.fits), default=nan)

    def _forms(self, plan: Plan) -> Iterator[Plan]:
        whole = plan.schedule.whole()
        late = [schedule for schedule in SPLIT_SCHEDULES if schedule.whole() == whole]
        schedules = [whole, *(late if self.split and plan.sharding.stage < LOCKSTEP else [])]
        for form in [usual_depths(plan), *([plan] if self.depth and any(plan.other_depths()) else [])]:
            yield from (replace(form, schedule=schedule) for schedule in schedules)


MODES = {
    NEITHER: SearchMode(),
    DEPTH: SearchMode(depth=True),
    SPLIT: SearchMode(split=True),
    BOTH: SearchMode(split=True, depth=True),
    EIGHT: SearchMode(message_precision=FP8),
    ALL: SearchMode(split=True, depth=True, message_precision=FP8),
}


def usual_depths(plan: Plan) -> Plan:
    """The plan with as many micro-batches in flight as its schedule has."""
    pipelines = [
        replace(line, stages=tuple([replace(stage, in_flight=None) for stage in line.stages]))
        for line in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


def problems(quick: bool = False) -> dict[tuple[str, str], Problem]:
    """The problems by name and GB/s between machines."""
    if quick:
        return {("small_mixed", SHIPPED): Problem(named_cluster("small_mixed"), named_model("tiny"), Workload(32, 512))}
    settings = ((1, "llama2_7b"), (2, "llama2_7b"), (3, "llama2_7b"), (3, "llama2_13b"), (3, "llama_30b"))
    tasks = {
        (f"setting {number}, {model}", rate): Problem(
            named_cluster(f"hexiscale_setting_{number}", inter_gb_per_s=float(rate)), named_model(model), Workload()
        )
        for rate in (SLOW, FAST)
        for number, model in settings
        if (number, model, rate) != (3, "llama2_7b", SLOW)  # has the plans of setting 2, whose GPUs it has too
    }
    for cluster, model, batch in (("four_machines", "llama2_7b", 32), ("small_mixed", "llama2_7b", 16)):
        tasks[f"{cluster}, {model}, batch {batch}", SHIPPED] = Problem(
            named_cluster(cluster), named_model(model), Workload(batch)
        )
    tasks["campus, llama2_13b", SHIPPED] = Problem(named_cluster("campus"), named_model("llama2_13b"), Workload())
    return tasks


def step_times(problem: Problem, plan: Plan) -> dict[str, float]:
    """The step of a plan in every mode, in seconds."""
    return {mode: freedoms.step_s(problem, plan) for mode, freedoms in MODES.items()}
