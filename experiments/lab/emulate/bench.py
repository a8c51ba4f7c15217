"""Steps of plans on an emulated cluster: the stand-in trained by each plan, at the plan's own pace and links."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.lab.emulate.fabric import Fabric
from experiments.lab.emulate.pace import Pace, write_paces
from experiments.lab.emulate.stand_in import narrow, paces
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import plan_file_to_dict, write_text
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.operation import OperationKind
from runtime.events import Event
from runtime.launch.head import AGENT, AfterFaults, training_events
from runtime.mapping.layout import layout_of
from runtime.settings import Settings
from runtime.training.settings import TrainingRun

_SETUP_S = 600.0  # for whatever a plan's processes do at the pace of this machine
_SLOWEST = 10  # times the predicted step, until a step counts as hung


@dataclass(frozen=True)
class Steps:
    """What an emulated training took: seconds of each step after the first, as the cluster would count them; and how
    much longer the slowest rank computed than it was given, as a share, because this machine is not fast enough."""

    seconds: tuple[float, ...]
    late: float


class EmulationBench:
    """Trains the stand-in of a problem, narrower by `divisor`, in `folder`. Raises InputError, TrainingFailedError."""

    def __init__(self, folder: Path, problem: Problem, divisor: int, seed: int) -> None:
        self._folder, self._problem, self._divisor, self._seed = folder, problem, divisor, seed
        self._small = narrow(problem, divisor)
        self._tokens = folder / "tokens.npy"
        drawn = np.random.default_rng(seed).integers(self._small.model.vocab_size, size=2 * self._small.workload.tokens)
        np.save(self._tokens, drawn.astype(np.int32))

    def unpaced_s(self, plan: Plan) -> float:
        """Seconds of a step as fast as this machine goes, links as they are."""
        return self._train(plan, 1, _SETUP_S, None)[0][-1]

    def paced_steps(self, plan: Plan, cost: Cost, steps: int, dilation: float, *, shaped: bool) -> Steps:
        """So many steps after a first one, slower by `dilation`; on links of the cluster if `shaped`."""
        rank_paces = paces(self._problem, plan, cost, dilation)
        devices = layout_of(plan, self._problem.model).devices
        slowdown = self._divisor**2 * dilation
        with Fabric(self._problem.cluster, devices, slowdown) if shaped else nullcontext() as fabric:
            if fabric is not None:
                rank_paces = [
                    replace(p, namespace=fabric.namespaces[d]) for p, d in zip(rank_paces, devices, strict=True)
                ]
            path = self._folder / "paces.json"
            write_paces(path, rank_paces)
            timeout_s = _SETUP_S + _SLOWEST * dilation * cost.step_time_s
            seconds, timelines = self._train(plan, steps + 1, timeout_s, path)
        late = max(_lateness(rank_paces[timeline["rank"]], timeline) for timeline in timelines)
        return Steps(tuple(step_s / dilation for step_s in seconds[1:]), late)

    def _train(self, plan: Plan, steps: int, timeout_s: float, pace: Path | None) -> tuple[list[float], list[Event]]:
        """Seconds of every step, and the timelines of all ranks."""
        folder, small = self._folder, self._small
        content = plan_file_to_dict(small, plan, PlanPricer(small).price(plan), {"name": "emulated"})
        write_text(folder / "plan.json", json.dumps(content))
        settings = Settings(steps=steps, seed=self._seed, checkpoint_every=steps, timeout_s=timeout_s)
        run = TrainingRun("emulated", folder / "plan.json", self._tokens, folder / "checkpoints", settings)
        seconds: list[float] = []
        timelines: list[Event] = []
        agent = AGENT if pace is None else ("-m", f"{__package__}.agent", str(pace))
        for event in training_events(run, folder, AfterFaults("stop", lambda *_: run.plan, 0), agent=agent):
            if event["event"] == "step":
                seconds.append(event["seconds"])
            elif event["event"] == "timeline":
                timelines.append(event)
        return seconds, timelines


def _lateness(pace: Pace, timeline: Event) -> float:
    """By which share of the time that a rank was given its computing took longer. First forwards wait for weights, too,
    and do not count."""
    given_s = spent_s = 0.0
    for kind, chunk, micro_batch, began_s, ended_s in timeline["operations"]:
        if micro_batch == 0 and kind == OperationKind.FORWARD.value:
            continue
        given_s += pace.operation_s(OperationKind[kind.upper()], chunk)
        spent_s += ended_s - began_s
    return max(0.0, spent_s / given_s - 1)
