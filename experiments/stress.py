"""Random problems through every solver: `python -m experiments.stress [--problems 500] [--seed 0]`.

Every plan must pass the check, cost what the event simulation says, and stay above the bound; an infeasible
problem must end with a reason. Prints each violation with the seed that makes it again; exits 1 if there is one.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from hexiopt.check import check
from hexiopt.cluster_file import cluster_from_section
from hexiopt.huggingface import model_from_config
from hexiopt.problem import Problem
from hexiopt.reading import Section
from hexiopt.result import Result
from hexiopt.simulate import simulate
from hexiopt.space import Space
from hexiopt.workload import Workload
from solvers.base import Budget
from solvers.registry import NAMES, make_solver

GPUS = ("rtx_3090", "rtx_4090", "rtx_3080_ti", "a800_80gb_sxm", "h100_80gb_sxm", "l40s", "t4", "v100_16gb_sxm")
STEPS = 60
TIME_LIMIT_S = 20.0
TOLERANCE = 1e-9


def random_problem(rng: random.Random) -> Problem:
    """A mixed cluster of up to 24 GPUs, a small or a large decoder, and any switches."""
    machines: list[dict[str, Any]] = []
    for k in range(rng.randint(1, 4)):
        count = rng.choice((1, 2, 3, 4, 6))
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
        "num_hidden_layers": rng.randint(1, 24),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in (1, 2, heads) if heads % k == 0]),
        "intermediate_size": rng.choice((256, 4096, 14336)),
        "vocab_size": rng.choice((1000, 32000)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    switches = ("uneven_layers", "uneven_tp", "uneven_batch", "uneven_structure", "recompute_per_stage")
    space = Space(
        tp_degrees=rng.choice(("powers_of_two", "all")),
        **{name: rng.random() > 0.1 for name in switches},  # type: ignore[arg-type]
    )
    workload = Workload(
        global_batch=rng.choice((1, 3, 8, 64, 250)),
        seq_len=rng.choice((128, 2048, 8192)),
        precision="fp16",
        recompute=rng.choice(("auto", "auto", "none", "full")),
        schedule=rng.choice(("auto", "1f1b", "gpipe")),
        optimizer_sharding=rng.choice(("auto", "0", "1")),
        gradient_bytes=rng.choice((2, 4)),
    )
    return Problem(
        cluster_from_section(Section(cluster, "stress")), model_from_config(Section(model, "stress")), workload, space
    )


def violations(problem: Problem, result: Result) -> Iterator[str]:
    """What is wrong with a solver's answer, in words."""
    if result.plan is None or result.cost is None:
        if not result.reason or "\n" in result.reason:
            yield f"no plan, and the reason is {result.reason!r}"
        return
    yield from (str(violation) for violation in check(problem, result.plan, result.cost))
    if result.bound_s > result.cost.step_time_s * (1 + TOLERANCE):
        yield f"the bound {result.bound_s} is above the cost {result.cost.step_time_s}"
    simulated_s = max(event.end_s for event in simulate(result.plan, result.cost))
    if abs(simulated_s - result.cost.pipeline_s) > TOLERANCE * simulated_s:
        yield f"the simulation ends at {simulated_s}, the cost says {result.cost.pipeline_s}"


def main(argv: list[str] | None = None) -> int:
    """Run, report, and fail on the first class of violations met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solvers", nargs="+", choices=NAMES, default=NAMES)
    options = parser.parse_args(argv)
    console, found, ended = Console(), 0, Counter[str]()
    for seed in track(range(options.seed, options.seed + options.problems), "random problems", console=console):
        problem = random_problem(random.Random(seed))
        for name in options.solvers:
            try:
                result = make_solver(name).solve(problem, Budget(TIME_LIMIT_S, STEPS), seed=seed)
                wrong = list(violations(problem, result))
                ended[f"{name}: {result.status}"] += 1
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            for text in wrong:
                found += 1
                console.print(f"seed {seed}, {name}: {text}", highlight=False)
    for key, count in sorted(ended.items()):
        console.print(f"{key} {count}", highlight=False)
    console.print(f"{sum(ended.values())} runs on {options.problems} random problems, {found} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
