"""The recursion over chains of stages against every chain, and its plans against the price."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.problem.workload import LORA, Workload
from hexiopt.study.fitting.capacity import Capacity, PipelineLimits, is_exact, proof

MODEL = hx.model("llama2_70b").replace(num_layers=4)  # layers of 1.7 GB: few fit
_MOST = 60  # layers, beyond what any two cards here hold
CARDS = ("rtx_3060_12gb", "rtx_4060_ti_16gb", "rtx_3090")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few cards in a few machines."""
    sizes = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) <= 3))
    machines = [
        {"name": f"m{k}", "gpu": draw(st.sampled_from(CARDS)), "num_gpus": size, "intra_bandwidth_gb_per_s": 12}
        for k, size in enumerate(sizes)
    ]
    inter = {"bandwidth_gb_per_s": 12}
    cluster = hx.cluster({"name": "drawn", "inter_machine": inter, "machines": machines})
    more = {"training": LORA} if draw(st.booleans()) else {"optimizer": "adamw_8bit"}
    batch, seq_len = draw(st.sampled_from([1, 2, 6])), draw(st.sampled_from([512, 2048]))
    recompute = draw(st.sampled_from(["auto", "none", "full"]))
    return Problem(cluster, MODEL, Workload(batch, seq_len, recompute=recompute, **more))


def chains(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every ordered choice of disjoint groups of devices, those of a machine cut in order."""
    cuts = []
    for devices in problem.usable_by_machine.values():
        ways: list[list[tuple[int, ...]]] = [[]]
        for first in devices:
            longer = [[*way, (first,)] for way in ways if all(first not in group for group in way)]
            pairs = [[*way, (first, first + 1)] for way in ways if first + 1 in devices]
            ways += [way for way in longer + pairs if len({d for g in way for d in g}) == sum(map(len, way))]
        cuts.append(ways)
    for choice in product(*cuts):
        yield from permutations([group for way in choice for group in way])


def most_by_price(problem: Problem, chain: tuple[tuple[int, ...], ...]) -> int:
    """The most layers of a chain by the prices of plans: of each stage beside stages of one layer."""
    policies = recompute_policies(problem.workload)
    total = 0
    for s in range(len(chain)):

        def too_many(layers: int, s: int = s) -> bool:
            return not any(fits(problem, chain, s, layers, policy) for policy in policies)

        most = bisect_left(range(1, _MOST), True, key=too_many)
        if not most:
            return -1
        total += most
    return total


def fits(problem: Problem, chain: tuple[tuple[int, ...], ...], s: int, layers: int, policy: str) -> bool:
    """Whether stage `s` of the chain fits with so many layers under a policy."""
    counts = [layers if k == s else 1 for k in range(len(chain))]
    ends = [sum(counts[: k + 1]) for k in range(len(chain))]
    stages = [Stage.of(group, end - n, end, policy) for group, n, end in zip(chain, counts, ends, strict=True)]
    sized = problem.replace(model=MODEL.with_num_layers(ends[-1]))
    plan = Plan((Pipeline(tuple(stages), problem.workload.global_batch, 1),), problem.default_schedule, Sharding(0))
    (line,) = PlanPricer(sized).place_pipelines(plan)
    return line.stages[s].excess_bytes <= 0


@settings(max_examples=6, deadline=None)
@given(problems())
def test_the_recursion_finds_what_the_best_of_all_chains_holds(problem: Problem) -> None:
    assert is_exact(problem)
    best = max((most_by_price(problem, chain) for chain in chains(problem) if chain), default=-1)
    assert Capacity(problem).most_layers == max(best, -1)


@settings(max_examples=15, deadline=None)
@given(problems(), st.integers(1, 24))
def test_what_fits_has_a_plan_that_obeys_every_rule(problem: Problem, layers: int) -> None:
    sized = problem.replace(model=MODEL.with_num_layers(layers))
    capacity = Capacity(sized)
    plan = capacity.plan()
    assert (plan is not None) == capacity.fits == (proof(sized) is not None)
    if plan is not None:
        assert not hx.check(sized, plan)


def test_limits_of_a_pc_by_its_neighbours() -> None:
    """Each limit fits, and the next value does not."""
    lora = Workload(32, 2048, training=LORA)
    problem = Problem(hx.cluster("pc_3090_4090"), hx.model("qwen3_8b"), lora)
    limits = PipelineLimits.of(problem)
    assert limits.seq_len is not None
    assert limits.micro_batch is not None
    assert limits.num_layers is not None
    longest = limits.seq_len.problem.workload.seq_len
    assert not Capacity(problem.replace(workload=lora.replace(seq_len=longest + 128))).fits
    most = limits.num_layers.problem.model.num_layers
    assert not Capacity(problem.replace(model=problem.model.with_num_layers(most + 1))).fits
    size = limits.micro_batch.pipelines[0].micro_batch_size
    assert not Capacity(problem.replace(space=problem.space.replace(max_micro_batch_size=64)), 2 * size).fits
    for plan in (limits.seq_len, limits.micro_batch, limits.num_layers):
        assert not hx.check(plan.problem, plan)


def test_many_equal_machines_are_one_kind() -> None:
    cluster = hx.Cluster.of({"rtx_3090": 12}, 12, gpus_per_machine=2)
    problem = Problem(cluster, hx.model("llama2_70b"), Workload(32, 2048, training=LORA))
    assert is_exact(problem)
    assert Capacity(problem).most_layers >= 80
    assert not hx.check(problem, proof(problem))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "space", [{"num_stages": 2}, {"num_pipelines": 2}, {"uneven_layers": False}, {"sequence": True}], ids=str
)
def test_it_does_not_answer_for_other_spaces(space: dict[str, Any]) -> None:
    problem = Problem(hx.cluster("pc_3090_4090"), hx.model("qwen3_8b"), Workload(32, 2048))
    assert is_exact(problem)
    assert not is_exact(problem.replace(space=problem.space.replace(**space)))
    assert not is_exact(problem.replace(model=hx.model("mixtral_8x7b")))
