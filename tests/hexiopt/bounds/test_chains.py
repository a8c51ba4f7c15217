"""The recursions over chains against looking at every chain."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hexiopt.bounds.box_stages import Multipliers
from hexiopt.bounds.chains import Boxes, Chains, ScheduleFamily
from hexiopt.bounds.columns import BoundColumns
from hexiopt.bounds.stages import StageTypes
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import SCHEDULES, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import BoundTerms
from tests.solvers.problems import TINY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LAYERS = 4
BOUNDED = tuple(schedule for schedule in SCHEDULES if schedule.is_bounded)


def types_of(bandwidth_gb_per_s: float, sharding: str) -> StageTypes:
    """Two machines of two GPUs of different kinds, micro-batches of one sequence."""
    machines = [
        {"name": name, "gpu": gpu, "num_gpus": 2, "intra_bandwidth_gb_per_s": 20}
        for name, gpu in (("a", "rtx_4090"), ("b", "rtx_3090"))
    ]
    network = {"bandwidth_gb_per_s": bandwidth_gb_per_s, "latency_us": 20}
    cluster = cluster_from_section(Section({"name": "two", "inter_machine": network, "machines": machines}, "test"))
    workload = Workload(64, 2048, optimizer_sharding=sharding)
    space = Space(max_micro_batch_size=1, replicas=False)
    return StageTypes(PlanPricer(Problem(cluster, replace(TINY, num_layers=LAYERS), workload, space)))


TYPES = {(rate, stage): types_of(rate, stage) for rate in (0.05, 1.0, 20.0) for stage in ("1", "2")}


def late_of(types: StageTypes) -> bool:
    """Whether all types are those of ZeRO-2; else none is."""
    (late,) = set(types.late.tolist())
    return bool(late)


def test_no_stage_type_stands_for_those_of_another_sharding() -> None:
    """A plan has one ZeRO stage: types of ZeRO-2 and 3, which need less memory, do not replace those up to ZeRO-1."""
    cluster = cluster_from_section(
        Section(
            {
                "name": "one",
                "machines": [{"name": "a", "gpu": "a100_40gb_sxm", "num_gpus": 4, "intra_bandwidth_gb_per_s": 200}],
            },
            "test",
        )
    )
    early_types = {}
    for sharding in ("auto", "1"):
        problem = Problem(cluster, replace(TINY, num_layers=LAYERS), Workload(64, 2048, optimizer_sharding=sharding))
        types = StageTypes(PlanPricer(problem))
        early = types.numbers(False)
        early_types[sharding] = [types.devices[early].tolist(), types.seconds(False, 0, BoundTerms(0, 1, 1)).tolist()]
    assert early_types["auto"] == early_types["1"]
    assert early_types["1"][0]


def family(types: StageTypes, m: int, *, split: bool) -> ScheduleFamily:
    """Pipelines of one range a stage; of m micro-batches under ZeRO-2."""
    schedules = (*BOUNDED, *SPLIT_SCHEDULES) if split else BOUNDED
    return ScheduleFamily(schedules, 1, 1, 1, LAYERS, m if late_of(types) else None)


def stage_price(types: StageTypes, prices: Multipliers, rows: Ints, n: int, m: float, slack_s: Floats) -> Floats:
    """Of stages of n layers, of the types `rows` [chains], by the rows of the program: devices, slots, longest; the
    modes that leave time; few holders."""
    kind, batch = types.kind[rows], types.global_batch
    machines, type_prices = types.devices[rows] / types.machine_devices[kind], []
    for j, most in enumerate(prices.most_shared):
        base = types.devices[rows] * prices.device[kind, j] + n * m / batch * prices.slot[kind, j]
        type_prices.append(base + machines * n * prices.longest[kind, j])
        less = base + machines * max(0.0, n - most) * prices.longest[kind, j]
        type_prices.append(np.where(types.lockstep[rows] | (prices.tail_s[kind, j] <= slack_s), less, np.inf))
    inner_s = types.inner_s[rows]
    alone = np.where(inner_s > 0.0, n - slack_s / np.where(inner_s > 0.0, inner_s, 1.0), 0.0)
    price: Floats = np.min(type_prices, axis=0) + prices.holder / types.share[rows] * np.maximum(0.0, alone)
    return price


def flight(after: int, m: int, *, split: bool) -> BoundTerms:
    """Of 1F1B: no more than there are micro-batches."""
    held = min(after + 1, m)
    return BoundTerms(after, held, held, split=split)


def every_price(
    types: StageTypes, prices: Multipliers, step_s: float, m: int, low_s: float, high_s: float, *, split: bool
) -> float:
    """The least price of all chains that obey the conditions of 1F1B with Σ in the box; of journeys without weight
    gradients and recomputation, and with the forwards alone of the stages before, where backwards may be `split`."""
    best, late = np.inf, late_of(types)
    terms = [flight(after, m, split=split) for after in range(LAYERS)]
    table_s = [types.seconds(late, after, term) for after, term in enumerate(terms)]
    for count in range(1, LAYERS + 1):
        rows = np.array(list(itertools.product(range(len(types.kind)), repeat=count)))
        for cuts in itertools.combinations(range(1, LAYERS), count - 1):
            layers = np.diff((0, *cuts, LAYERS))  # from the last stage to the first
            t = np.stack([table_s[a][rows[:, a], n] for a, n in enumerate(layers)], axis=1)
            journeys_s = t
            if split:
                journeys_s = layers * (types.layer_s - types.late_s)[rows]
                journeys_s[:, 0] += types.head_s[rows[:, 0]]
            whole_s, price = journeys_s.sum(axis=1), np.zeros(len(rows))
            allowed = (low_s <= whole_s) & (whole_s <= high_s)
            for after, n in enumerate(layers.tolist()):
                row, first = rows[:, after], after == count - 1
                head_s = types.head_forward_s[row] if after == 0 else 0.0
                ahead_s = min(after, m - 1) * (types.forward_s[1, 1][row, n] + head_s)
                other_s = whole_s - journeys_s[:, after]
                if split and not first:
                    other_s = other_s * types.forward_share
                busy_s = m * t[:, after]
                end_s = busy_s + np.maximum(0.0, other_s - ahead_s)
                allowed &= end_s <= step_s
                price += stage_price(types, prices, row, n, m, step_s - (end_s if first or split else busy_s))
            best = min(best, price[allowed].min(initial=np.inf))
    return float(best)


def drawn_prices(types: StageTypes, seed: int) -> Multipliers:
    rng, some = np.random.default_rng(seed), BoundColumns(types).first_prices
    shape = some.device.shape
    return some._replace(
        device=rng.uniform(0.1, 1.0, shape),
        slot=rng.uniform(0.0, 1.0, shape) * (seed % 2),
        longest=rng.uniform(0.0, 1.0, shape),
        holder=float(rng.uniform(0.0, 0.5)),
    )


@settings(max_examples=30)
@given(
    types=st.sampled_from(list(TYPES.values())),
    split=st.booleans(),
    m=st.sampled_from((1, 2, 3, 8, 20, 40)),
    room=st.floats(1.05, 8.0),
    share=st.floats(0.1, 1.0),
    seed=st.integers(0, 999),
)
def test_no_chain_of_a_box_is_cheaper(
    types: StageTypes, split: bool, m: int, room: float, share: float, seed: int
) -> None:
    """With Σ known in parts the least price is also about exact, and multipliers give no more."""
    prices = drawn_prices(types, seed)
    whole_s = LAYERS * float(types.layer_s.min())
    step_s, high_s = room * m * whole_s / 2 + whole_s, room * whole_s
    low_s = share * high_s
    box = Boxes(*(np.array([float(x)]) for x in (m, m, low_s, high_s)))
    wanted, chains = np.array([np.inf]), Chains(types, family(types, m, split=split))
    weights = np.array([[0.0], [0.5], [2.0]]) / high_s
    coarse, _ = chains.least_price(prices, step_s, box, wanted, weights)
    fine, cheapest = chains.least_price(prices, step_s, box, wanted, None)
    least = every_price(types, prices, step_s, m, low_s, high_s, split=split)
    better, _ = chains.least_price(prices, step_s, box, wanted, weights, 4)  # no weight proves more than wanted: inf
    assert coarse[0] <= least * (1 + 1e-9)
    assert better[0] >= coarse[0] * (1 - 1e-9)
    assert better[0] <= least * (1 + 1e-9)
    assert fine[0] <= least * (1 + 1e-9)
    if np.isfinite(least):
        assert cheapest
        assert sum(cheapest[0][0].layers) == LAYERS


@settings(max_examples=30)
@given(
    types=st.sampled_from(list(TYPES.values())),
    split=st.booleans(),
    low_m=st.sampled_from((1, 2, 5, 20)),
    more=st.integers(0, 6),
    room=st.floats(1.05, 4.0),
    wanted_share=st.floats(0.5, 3.0),
    seed=st.integers(0, 999),
)
def test_no_chain_of_a_wide_box_processes_more(
    types: StageTypes, split: bool, low_m: int, more: int, room: float, wanted_share: float, seed: int
) -> None:
    """Whatever the number of micro-batches in the box: none has more of them for its price than the box says, or than
    is of interest."""
    prices = drawn_prices(types, seed)
    whole_s = LAYERS * float(types.layer_s.min())
    step_s = room * (low_m + more / 2) * whole_s / 2 + whole_s
    low_s, high_s, high_m = 0.2 * step_s, step_s, low_m + more
    most = max(m / every_price(types, prices, step_s, m, low_s, high_s, split=split) for m in range(low_m, high_m + 1))
    box = Boxes(*(np.array([float(x)]) for x in (low_m, high_m, low_s, high_s)))
    chains = Chains(types, family(types, low_m, split=split))
    target = max(most, 1e-3) / wanted_share
    weights = np.array([[0.0], [0.5], [2.0]]) / high_s
    for multipliers in (weights, None):
        least, _ = chains.least_price(prices, step_s, box, np.array([high_m / target]), multipliers)
        assert most * (1 - 1e-9) <= max(high_m / least[0], target)


@settings(max_examples=40)
@given(
    rate=st.sampled_from((0.05, 1.0, 20.0)),
    split=st.booleans(),
    m=st.sampled_from((1, 2, 3, 8, 20, 40)),
    room=st.floats(1.05, 8.0),
    seed=st.integers(0, 999),
)
def test_no_chain_of_any_depth_is_cheaper_than_its_box(
    rate: float, split: bool, m: int, room: float, seed: int
) -> None:
    """Where depths are free: every stage with its number of micro-batches in flight, memory for these and as many
    forwards ahead as they allow."""
    types, rng = TYPES[rate, "1"], np.random.default_rng(seed)
    prices, shape = drawn_prices(types, seed), replace(family(types, m, split=split), free_depth=True)
    layers = rng.multinomial(LAYERS - (count := int(rng.integers(1, LAYERS + 1))), [1 / count] * count) + 1
    rows, depths = rng.integers(len(types.kind), size=count), rng.integers(1, m + 1, size=count)
    terms = [BoundTerms(int(depth) - 1, int(depth), int(depth), split=split) for depth in depths]
    stages = list(enumerate(zip(rows, layers.tolist(), terms, strict=True)))
    t = [float(types.seconds(False, after, term)[row, n]) for after, (row, n, term) in stages]
    journeys_s, step_s = list(t), room * m * max(t) + sum(t)
    if split:
        journeys_s = [n * (types.layer_s[row] - types.late_s[row]) for _, (row, n, _) in stages]
        journeys_s[0] += types.head_s[rows[0]]
    price = 0.0
    for after, (row, n, term) in stages:
        first = after == count - 1
        head_s = types.head_forward_s[row] if after == 0 else 0.0
        ahead_s = min(term.forwards_ahead, m - 1) * (types.forward_s[1, 1][row, n] + head_s)
        other_s = (sum(journeys_s) - journeys_s[after]) * (types.forward_share if split and not first else 1.0)
        end_s = m * t[after] + max(0.0, other_s - ahead_s)
        assert end_s <= step_s
        slack_s = step_s - (end_s if first or split else m * t[after])
        price += float(stage_price(types, prices, np.array([row]), n, m, np.array([slack_s]))[0])
    box = Boxes(*(np.array([float(x)]) for x in (m, m, 0.9 * sum(journeys_s), 1.1 * sum(journeys_s))))
    weights = np.array([[0.0], [0.5], [2.0]]) / box.high_s
    for multipliers in (weights, None):
        least, _ = Chains(types, shape).least_price(prices, step_s, box, np.array([np.inf]), multipliers)
        assert least[0] <= price * (1 + 1e-9)


def test_gradients_on_a_slow_network_raise_the_price() -> None:
    """A chain is the dearer the longer its machines' interfaces are busy at the end."""
    least = []
    for rate in (20.0, 0.05):
        types = TYPES[rate, "1"]
        some = BoundColumns(types).first_prices
        prices = some._replace(longest=np.ones_like(some.longest))
        step_s = 20 * LAYERS * float(types.layer_s.max())
        box = Boxes(*(np.array([x]) for x in (8.0, 8.0, 0.0, step_s)))
        chains = Chains(types, ScheduleFamily(BOUNDED, 1, 1, 1, LAYERS))
        least.append(chains.least_price(prices, step_s, box, np.array([np.inf]), np.zeros((1, 1)))[0][0])
    assert least[1] > 1.1 * least[0]


@pytest.mark.parametrize("aligned", [None, 16])
@pytest.mark.parametrize("rate", [0.05, 20.0])
def test_a_program_is_worth_what_its_columns_process(rate: float, aligned: int | None) -> None:
    """Strong duality: at the prices that it gives, the cluster is worth the most sequences; no column costs less."""
    types = TYPES[rate, "1" if aligned is None else "2"]
    columns, chains = BoundColumns(types, aligned), Chains(types, ScheduleFamily(BOUNDED, 1, 1, 1, LAYERS, aligned))
    step_s = 40 * LAYERS * float(types.layer_s.min())
    counts = np.array([1.0, 4.0, 16.0, 64.0] if aligned is None else [float(aligned)])
    boxes = Boxes.grid(counts, np.linspace(0.0, step_s, 5))
    prices = columns.first_prices
    for _ in range(4):
        wanted = boxes.high_m
        weights = np.array([[0.0], [1.0]]) * wanted / boxes.high_s
        _, cheapest = chains.least_price(prices, step_s, boxes, wanted, weights)
        columns.add([(chain, float(boxes.low_m[k])) for chain, k in cheapest], prices, step_s, 1.0)
        most, prices = columns.most(step_s)
    assert len(columns) > 2
    assert most > 0.0
    assert columns.worth(prices) == pytest.approx(most, rel=1e-3)
