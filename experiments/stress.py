"""Random problems through every solver and baseline: `python -m experiments.stress [--problems 2000] [--seed 0]`.

Some problems allow sequence layouts; oracles that prove nothing about these refuse such problems. Every plan must pass
the check, cost what the event simulation says, and cost no less than the lower bound of all plans; a plan of the plan
space must also cost no less than any bound that a solver proves, and none may exist where one proves that none does. A
result without a plan must state a reason. Prints each violation with the seed that reproduces it, and a summary; exits
with 1 if there is a violation.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from hexiopt.bounds import lower_bound_s
from hexiopt.cores import usable_cores
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.huggingface import model_from_config
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import AUTO, RECOMPUTE_POLICIES, Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import SCHEDULES, schedule_by_name
from hexiopt.solving import Budget
from hexiopt.solving.result import Result, Status
from solvers.registry import baseline, for_any_problem, make_solver, names, of_sequences, small_oracle

NAMES, RIVALS, SEQUENCE, ORACLES = map(names, (for_any_problem, baseline, of_sequences, small_oracle))

GPUS = ("rtx_3090", "rtx_4090", "rtx_3080_ti", "a800_80gb_sxm", "h100_80gb_sxm", "l40s", "t4", "v100_16gb_sxm")
STEPS = 60
TIME_LIMIT_S = 20.0
EXACT_S = 1.0  # for `sequence_exact`, whose steps are long
BOUND_S = 0.3  # for the lower bound of all plans
TOLERANCE = 1e-9
_SMALL = 0.3  # share of the problems that have few GPUs and layers
_SMALL_GPUS, _SMALL_LAYERS = 5, 8
_LAYOUTS = 0.25  # share of those whose stages may have sequence layouts


def random_problem(rng: random.Random) -> Problem:
    """A random problem, often tiny: a mixed cluster of up to 24 GPUs, a small or large decoder, and any switches."""
    small = rng.random() < _SMALL
    machines = _machines(rng, _SMALL_GPUS) if small else _machines(rng, 24)
    cluster = {
        "name": "stress",
        "inter_machine": {"bandwidth_gb_per_s": 10 ** rng.uniform(-2, 2), "latency_us": rng.choice((2, 50, 5000))},
        "machines": machines,
    }
    if len(machines) > 1 and rng.random() < 0.3:
        cluster["links"] = [{"between": ["m0", "m1"], "bandwidth_gb_per_s": 0.05}]
    if len(machines) > 2 and rng.random() < 0.3:
        cluster["groups"] = [{"name": "rack", "members": ["m0", "m1"], "uplink_gb_per_s": 1, "latency_us": 100}]
    heads = rng.choice((4, 6, 8, 32))
    model = {
        "model_type": "llama",
        "hidden_size": heads * rng.choice((16, 64, 128)),
        "num_hidden_layers": rng.randint(1, _SMALL_LAYERS if small else 24),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in (1, 2, heads) if heads % k == 0]),
        "intermediate_size": rng.choice((256, 4096, 14336)),
        "vocab_size": rng.choice((1000, 32000)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    space = Space(
        tp_degrees=rng.choice(("powers_of_two", "all")),
        **{name: rng.random() > 0.1 for name in SWITCHES},  # type: ignore[arg-type]
        sequence=rng.random() < _LAYOUTS,
    )
    schedule = rng.choice((AUTO, AUTO, *map(str, SCHEDULES)))
    late = ("2", "3") if schedule == AUTO or schedule_by_name(schedule).lockstep else ()
    workload = Workload(
        global_batch=rng.choice((1, 3, 8, 12) if small else (1, 3, 8, 64, 250)),
        seq_len=rng.choice((128, 2048, 8192)),
        precision="fp16",
        recompute=rng.choice((AUTO, AUTO, *RECOMPUTE_POLICIES)),
        schedule=schedule,
        optimizer_sharding=rng.choice((AUTO, AUTO, "0", "1", *late)),
        gradient_bytes=rng.choice((2, 4)),
    )
    return Problem(
        cluster_from_section(Section(cluster, "stress")), model_from_config(Section(model, "stress")), workload, space
    )


def _machines(rng: random.Random, most: int) -> list[dict[str, Any]]:
    """One to four machines of at most six GPUs each and `most` GPUs in all."""
    machines: list[dict[str, Any]] = []
    for k in range(rng.randint(1, 4)):
        left = most - sum(machine["num_gpus"] for machine in machines)
        if not left:
            break
        count = min(left, rng.choice((1, 2, 3, 4, 6)))
        machine: dict[str, Any] = {
            "name": f"m{k}",
            "gpu": rng.choice(GPUS),
            "num_gpus": count,
            "network_interfaces": rng.choice([n for n in (1, 2, 3) if count % n == 0]),
        }
        if count > 1:
            machine["intra_bandwidth_gb_per_s"] = rng.choice((5, 20, 300))
            if rng.random() < 0.3:
                machine["intra_links"] = [{"between": [0, 1], "bandwidth_gb_per_s": 50}]
        machines.append(machine)
    return machines


def broken_promises(
    problem: Problem, result: Result, bound_s: float, space_bound_s: float, has_plan: bool
) -> Iterator[str]:
    """The violations in a solver's result, in words.

    `bound_s` is the lower bound of all plans, `space_bound_s` the best that any solver proved for the plan space,
    `has_plan` whether some solver has a plan of that space.
    """
    if result.plan is None or result.cost is None:
        if not result.reason or "\n" in result.reason:
            yield f"no plan, and the reason is {result.reason!r}"
        if result.status is Status.INFEASIBLE and has_plan:
            yield "infeasible is claimed, and another solver has a plan"
        return
    yield from (str(violation) for violation in violations(problem, result.plan, result.cost))
    cost_s = result.cost.step_time_s
    if result.bound_s > cost_s * (1 + TOLERANCE):
        yield f"its bound {result.bound_s} is above its cost {cost_s}"
    if bound_s > cost_s * (1 + TOLERANCE):
        yield f"the cost {cost_s} is below the bound of all plans {bound_s}"
    if in_plan_space(result.plan) and space_bound_s > cost_s * (1 + TOLERANCE):
        yield f"the cost {cost_s} is below a solver's bound of the plan space {space_bound_s}"
    spans = map(partial(PlanPricer(problem).spans, result.plan, result.cost), range(len(result.plan.pipelines)))
    simulated_s = max(span.end_s for span in chain.from_iterable(spans))
    if abs(simulated_s - result.cost.pipeline_s) > TOLERANCE * simulated_s:
        yield f"the simulation ends at {simulated_s}, the cost says {result.cost.pipeline_s}"


def in_plan_space(plan: Plan) -> bool:
    """Whether a valid plan is in the plan space: at most two recompute policies per stage, no stated groups."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return isinstance(plan.sharding.groups, str) and all(len(set(stage.recompute)) <= 2 for stage in stages)


@dataclass
class Tally:
    """A tally of a solver's runs: by status, by distance to the best plan of each problem, and violations."""

    ended: Counter[str] = field(default_factory=Counter)
    over: list[float] = field(default_factory=list)
    violations: int = 0

    def add(self, other: "Tally") -> None:
        """Count the runs of another."""
        self.ended += other.ended
        self.over += other.over
        self.violations += other.violations


def run(
    seed: int, solvers: Sequence[str], steps: int, exact_s: float = EXACT_S, bound_s: float = BOUND_S
) -> tuple[dict[str, Tally], list[str]]:
    """Run `solvers` on the random problem `seed`; returns their tallies, and each violation in words."""
    problem = random_problem(random.Random(seed))
    tallies = {name: Tally() for name in solvers}
    results: dict[str, Result] = {}
    wrong: list[tuple[str, str]] = []
    for name in solvers:
        try:
            budget = Budget(exact_s if name == "sequence_exact" else TIME_LIMIT_S, steps)
            results[name] = make_solver(name).solve(problem, budget, seed=seed)
        except InputError:
            tallies[name].ended["refused"] += 1
        except Exception as error:
            wrong.append((name, f"{type(error).__name__}: {error}"))
    best_s = min((result.objective for result in results.values()), default=float("inf"))
    least_s = lower_bound_s(PlanPricer(problem), bound_s)
    space_bound_s = max((result.bound_s for result in results.values()), default=0.0)
    has_plan = any(result.plan is not None and in_plan_space(result.plan) for result in results.values())
    for name, result in results.items():
        tallies[name].ended[result.status] += 1
        if result.cost is not None:
            tallies[name].over.append(result.objective / best_s - 1)
        wrong += [(name, text) for text in broken_promises(problem, result, least_s, space_bound_s, has_plan)]
    for name, _ in wrong:
        tallies[name].violations += 1
    return tallies, [f"seed {seed}, {name}: {text}" for name, text in wrong]


def summary(tallies: Mapping[str, Tally]) -> Table:
    """One row a solver."""
    table = Table(title="random problems", title_justify="left")
    columns = (
        "solver",
        "runs",
        *(str(status) for status in Status),
        "refused",
        "mean over best",
        "worst",
        "violations",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "solver" else "right")
    for name, tally in tallies.items():
        counts = [str(tally.ended[key]) for key in (*Status, "refused")]
        over = [f"{sum(tally.over) / len(tally.over):.1%}", f"{max(tally.over):.1%}"] if tally.over else ["", ""]
        table.add_row(name, str(tally.ended.total()), *counts, *over, str(tally.violations))
    return table


def main(argv: list[str] | None = None) -> int:
    """Run, report, and return 1 if there is a violation."""
    known = (*ORACLES, *NAMES, *RIVALS, *SEQUENCE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; the others count up from it")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every solver")
    parser.add_argument("--solvers", nargs="+", choices=known, default=known, metavar="SOLVER")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="problems at the same time (default: cores)")
    options = parser.parse_args(argv)
    console, num_violations = Console(width=None if sys.stdout.isatty() else 150), 0
    tallies: dict[str, Tally] = {name: Tally() for name in options.solvers}
    seeds = range(options.seed, options.seed + options.problems)
    run_seed = partial(run, solvers=options.solvers, steps=options.steps)
    with ProcessPoolExecutor(options.jobs) as pool:
        for seed_tallies, wrong in track(
            pool.map(run_seed, seeds), "random problems", options.problems, console=console
        ):
            for name, tally in seed_tallies.items():
                tallies[name].add(tally)
            num_violations += len(wrong)
            for text in wrong:
                console.print(text, highlight=False, markup=False)
    console.print(summary(tallies))
    console.print(f"{options.problems} random problems, {num_violations} violations", highlight=False)
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
