"""The ladder of rivals: on what they plan, its rungs, what was lent by us, and ours in the same freedoms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.cases.fleets import FLEETS
from experiments.studies.frame.planners import RIVALS, Planner
from experiments.studies.frame.settings import SETTINGS, TINY, quick
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import AUTO, Workload
from hexiopt.schedules.registry import ONE_F_ONE_B

FIRST, TEN, SPACE, INSIDE = "its first choice", "best of its ten", "best of its space", "ours within its freedoms"
RUNGS: Mapping[str, int | None] = {FIRST: 1, TEN: 10, SPACE: None}
"""How many plans of a rival's own ranking are priced; None: all, and the neighbours of the best."""


@dataclass(frozen=True)
class RivalFreedoms:
    """The smallest plan space of ours with the plans of a rival: switches that are off, and the schedule; `wider` says
    which plans it has beside those, and `lacks` which of the rival's it has not."""

    off: tuple[str, ...]
    wider: str
    schedule: str = ONE_F_ONE_B.name
    lacks: str = ""

    @property
    def keys(self) -> str:
        """As the command line takes it."""
        schedule = [] if self.schedule == AUTO else [f"workload.schedule={self.schedule}"]
        return " ".join([*schedule, *(f"space.{name}=false" for name in self.off)])

    def of(self, problem: Problem) -> Problem:
        """The problem within it."""
        space = replace(problem.space, **dict[str, Any](dict.fromkeys(self.off, False)))
        return problem.replace(space=space, workload=problem.workload.replace(schedule=self.schedule))


_POLICY = ("recompute_per_stage", "recompute_per_layer")
_ALIKE = ("uneven_batch", "uneven_structure")
_ONE_DEGREE = ("replicas", "uneven_tp", *_ALIKE, *_POLICY)
FREEDOMS: Mapping[str, RivalFreedoms] = {
    "metis_atc24": RivalFreedoms((*_ALIKE, *_POLICY), "any devices in a stage, in any order; ZeRO-2 and 3"),
    "amp": RivalFreedoms(_ONE_DEGREE, "devices left out, and in any order; ZeRO-2 and 3"),
    "espresso": RivalFreedoms(_ONE_DEGREE, "several GPU types in a stage; ZeRO-2 and 3"),
    "flashflex": RivalFreedoms(
        ("replicas", *_POLICY),
        "devices left out, pipelines that return to a machine, interleaving, ZeRO-2 and 3",
        AUTO,
    ),
    "sailor": RivalFreedoms(
        ("replicas", "uneven_layers", "uneven_batch", *_POLICY),
        "pipelines of unequally many stages; ZeRO-2 and 3",
        lacks="equal layers where embedding and head count as one each",
    ),
    "galvatron": RivalFreedoms(_ALIKE, "layers, recompute and numbers of GPUs by the speed and memory of each"),
}
"""By solver, of the baselines that have a planner. Megatron-LM and FSDP have none: the best of their space is all."""
LENT: Mapping[str, str] = {
    "Metis (ATC 24)": "our memory model, one recompute policy, ZeRO-1, the network between machines, messages that "
    "overlap, a search without pruning",
    "AMP": "our memory model, one recompute policy, ZeRO-1, the speed of each GPU type, every order of machines",
    "Espresso": "our memory model, time instead of money, TP degree, micro-batch size, recompute policy, ZeRO-1",
    "FlashFlex as published": "our memory model, ZeRO-1, the links inside machines",
    "FlashFlex as released": "the links inside machines",
    "Sailor": "our memory model, one recompute policy, ZeRO-1, messages and gradients that overlap",
    "Galvatron": "our memory model, every set and order of machines",
}
"""What a rival's first choice here already owes to us, by its name in tables."""
PLANNERS: tuple[Planner, ...] = tuple(planner for planner in RIVALS if planner.solver in FREEDOMS)


def _problem(cluster: str, model: str, workload: Workload) -> Problem:
    return Problem(named_cluster(cluster), named_model(model), workload, Space())


def problems() -> dict[str, Problem]:
    """What is planned, by name: HexiScale's settings and case study, the clusters of Sailor's and AMP's papers with a
    model of each, and two irregular clusters; a tiny one if quick."""
    if quick():
        return {setting.label: setting.problem() for setting in TINY}
    campus = next(fleet for fleet in FLEETS if fleet.cluster == "campus")
    return {
        **{setting.label: setting.problem() for setting in SETTINGS if setting.number in ("1", "2", "3")},
        "case study · llama2_13b": _problem("hexiscale_case_study", "llama2_13b", Workload(64)),
        "sailor_mit · gpt_neo_2_7b": _problem("sailor_mit", "gpt_neo_2_7b", Workload(256, 2048, precision="fp16")),
        "amp_heterogeneous · gpt2_345m": _problem(
            "amp_heterogeneous", "gpt2_345m", Workload(256, 1024, precision="fp16")
        ),
        "four_machines · llama2_7b": _problem("four_machines", "llama2_7b", Workload(64)),
        f"campus · {campus.model}": campus.problem(),
    }
