"""Draws the inputs of golden prices and plans anew: `python -m tests.golden.draw`, then `make golden`.

Nobody else needs this file: inputs are stored, and `make golden` keeps them. It may go when it no longer runs.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import chain, zip_longest
from random import Random
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from experiments.app.configurations import named_cluster, named_model
from experiments.validation.cases import case_of
from experiments.validation.predict import Case, cost_model
from experiments.validation.rows import read_rows
from experiments.validation.shapes import InexpressibleError
from experiments.validation.shipped import RUNS, shipped_measurements
from hexiopt.files.plan_file import plan_to_dict
from hexiopt.files.problem_file import problem_sha256, problem_to_dict
from hexiopt.numbers.frameworks import frameworks
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from solvers import registry
from tests.golden import files, outcome
from tests.hexiopt.plan.layouts import with_layouts
from tests.solvers import problems as small
from tests.solvers.sequence import small_layouts
from tests.strategies import plans, problems, roomy_problems

RANDOM, REFUSED, PUBLISHED, SEED = 500, 40, 40, 7
T = TypeVar("T")
Data = dict[str, Any]
Drawn = tuple[str, Problem, Data, str]  # source, problem, plan, framework
CLUSTERS = (
    *(("four_machines", "opt_350m"), ("amp_heterogeneous", "gpt2_345m"), ("hexiscale_setting_2", "llama2_7b")),
    *(("homogeneous_2x8_a800_pcie", "llama3_8b"), ("sailor_mit", "gpt_neo_2_7b"), ("hexiseq_testbed", "llama_30b")),
)


def spread(items: Iterable[T], key: Callable[[T], Any], most: int) -> list[T]:
    """At most so many items, as evenly from all kinds as they go, kinds by `key`."""
    kinds: dict[Any, list[T]] = {}
    for item in items:
        kinds.setdefault(key(item), []).append(item)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [item for item in turns if item is not None][:most]


def published_cases() -> list[Case]:
    """Published runs on up to 64 GPUs, of all sources, frameworks and schedules."""
    measured, found = shipped_measurements(), []
    for row in read_rows(RUNS):
        if row.gpus is not None and row.gpus <= 64:
            try:
                found.append(case_of(row, measured))
            except InexpressibleError:
                continue
    return spread(found, lambda c: (c.row.source, c.framework, c.plan.schedule, c.plan.sharding.stage), PUBLISHED)


def kind(drawn: Drawn) -> tuple[Any, ...]:
    """What a plan has of the features that plans may have."""
    source, _, plan, framework = drawn
    stages = [stage for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    return (
        *(plan["schedule"], plan["sharding"]["stage"], source == "random", framework == "hexiopt"),
        type(plan["sharding"].get("groups")),
        any("replicas" in stage for stage in stages),
        any("sequence" in stage for stage in stages),
        any(isinstance(stage["layers"][0], list) for stage in stages),
        any(isinstance(stage["recompute"], list) for stage in stages),
    )


def random_plans(published: list[Problem]) -> Iterator[Drawn]:
    """Plans of random problems, of shipped clusters and of published runs with measured profiles, some with layouts."""
    shipped = []
    for cluster, model in CLUSTERS:
        own = named_cluster(cluster)
        precision = "bf16" if all(gpu.peak_flops("bf16") for gpu in own.types) else "fp16"
        work = Workload(96, 1024 if model.startswith("gpt2") else 2048, precision)
        shipped.append(Problem(own, named_model(model), work))
    at = st.sampled_from
    sources = {"random": problems() | roomy_problems(), "shipped": at(shipped), "measured": at(published)}
    names = ("hexiopt", "hexiopt", *frameworks())
    found: list[Drawn] = []

    @seed(SEED)
    @settings(
        max_examples=4000,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        source = data.draw(at([*sources]))
        problem = data.draw(sources[source])
        pair = problem, data.draw(plans(problem))
        if data.draw(st.integers(0, 2)) == 0:
            zero = pair[1].sharding.stage
            problem, plan = data.draw(with_layouts(st.just(pair)))
            pair = problem, replace(plan, sharding=replace(plan.sharding, stage=zero))
        found.append((source, pair[0], plan_to_dict(pair[1], problem.cluster), data.draw(at(names))))

    draw()
    yield from {json.dumps([drawn[2], problem_sha256(drawn[1])]): drawn for drawn in found}.values()


def wrong(drawn: Iterable[Drawn], rng: Random) -> Iterator[Drawn]:
    """Plans that are not priced, each changed in one place."""

    def change(plan: Data) -> None:
        pipeline = rng.choice(plan["pipelines"])
        stage = rng.choice(pipeline["stages"])
        if "replicas" in stage and rng.random() < 0.4:
            rng.choice(stage["replicas"])["samples"] += 1
            return
        ways: list[Callable[[], Any]] = [
            lambda: plan.update(sharding={"stage": rng.choice((2, 3))}),
            lambda: plan.update(schedule=rng.choice(("gpipe", "1f1b", "interleaved"))),
            lambda: pipeline.update(num_micro_batches=pipeline["num_micro_batches"] + 1),
            lambda: stage.update(recompute=["none", "full", "none", "full", "none"]),
            lambda: stage.update(layers=[stage["layers"], stage["layers"]]),
            lambda: stage.update(heads=[1]),
            lambda: plan["sharding"].update(groups=[["a:0"]]),
        ]
        rng.choice(ways)()

    for source, problem, plan, framework in drawn:
        changed = deepcopy(plan)
        change(changed)
        if "refusal" in outcome.price(outcome.pricer(problem, framework), changed, False):
            yield source, problem, changed, framework


def prices() -> Data:
    """The inputs of `prices.json.gz`; outcomes are for `make golden`."""
    cases = published_cases()
    models = [cost_model(case).problem for case in cases]  # rates of links as calibrated
    measured = [p for p in models if p.cluster.num_devices <= 32 and any(_is_measured(p))]
    drawn = list(random_plans(measured))
    Random(SEED).shuffle(drawn)
    priced = [d for d in drawn if "refusal" not in outcome.price(outcome.pricer(d[1], d[3]), d[2], False)]
    refused = wrong(drawn, Random(SEED))
    chosen = spread(priced, kind, RANDOM - REFUSED)
    chosen += spread(refused, _refusal, REFUSED)
    for case, problem in zip(cases, models, strict=True):
        plan = plan_to_dict(case.plan, problem.cluster)
        chosen.append((f"published line {case.row.line}", problem, plan, case.framework))
    profiles: list[Data] = []
    listed: dict[str, tuple[int, Data]] = {}
    entries = []
    for source, problem, plan, framework in chosen:
        data = json.loads(json.dumps(problem_to_dict(problem)))
        profile = data["cluster"].get("profile")
        if profile:
            if profile not in profiles:
                profiles.append(profile)
            data["cluster"]["profile"] = profiles.index(profile)
        number = listed.setdefault(problem_sha256(problem), (len(listed), data))[0]
        entries.append({"source": source, "problem": number, "framework": framework, "plan": plan})
    return {"profiles": profiles, "problems": [{"problem": data} for _, data in listed.values()], "plans": entries}


def _refusal(drawn: Drawn) -> str:
    """A refusal without its place, values and numbers."""
    text = str(outcome.price(outcome.pricer(drawn[1], drawn[3]), drawn[2])["refusal"])
    return re.sub(r"\d+|'[^']*'|\[.*\]", "", text.rpartition(": ")[2])


def _is_measured(problem: Problem) -> Iterator[bool]:
    model, workload = problem.model, problem.workload
    sizes = model.hidden_size, model.num_heads, model.ffn_size, model.vocab_size, workload.seq_len
    for entry in problem.cluster.profile.entries:
        s = entry.shape
        yield (s.hidden_size, s.num_heads, s.ffn_size, s.vocab_size, s.seq_len) == sizes and any(
            gpu.name == entry.gpu for gpu in problem.cluster.types
        )


def solver_plans() -> Data:
    """The inputs of `plans.json`: problems by name, and for each solver those that it is run on."""
    half = replace(named_model("opt_350m"), num_layers=8)
    plain = {
        **{name: make() for name, make in small.TINY_PROBLEMS.items()},
        "easy": small.easy(),
        "hopeless": small.hopeless(),
        "fixed": small.easy(Space(num_pipelines=2, exclude=("a:0",))),
        "real": Problem(named_cluster("four_machines"), half, Workload(32, 1024)),
    }
    long = {f"sequence_{name}": make() for name, make in list(small_layouts.SMALL_LAYOUTS.items())[::7]}
    rest = {"sequence_loose": replace(small.loose(), space=replace(small.SMALL_SPACE, sequence=True))}
    task = {**plain, **long, **rest}
    of_layouts = registry.names(lambda able: able.sequence == "only")
    solvers = {name: [*long, *rest] if name in of_layouts else list(plain) for name in registry.names()}
    return {
        "max_steps": 15,
        "seed": SEED,
        "problems": {name: json.loads(json.dumps(problem_to_dict(problem))) for name, problem in task.items()},
        "solvers": {solver: dict.fromkeys(names) for solver, names in solvers.items()},
    }


if __name__ == "__main__":
    for path, draw_inputs in ((files.PRICES, prices), (files.PLANS, solver_plans)):
        if not sys.argv[1:] or path.name.split(".")[0] in sys.argv[1:]:
            files.write(path, draw_inputs())
