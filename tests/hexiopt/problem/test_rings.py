"""Rings of a TP group over the links of its machine, against brute force."""

import math
from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.machine import IntraLink, Machine


def machine_with(links: list[IntraLink], num_gpus: int = 8) -> Machine:
    gpu = catalogue()["rtx_3090"]
    return Machine("a", "a", gpu, num_gpus, 12e9, 1e-5, tuple(links), 1, 1e9, 2e-5)


def best_by_force(machine: Machine, indices: tuple[int, ...]) -> tuple[float, float]:
    ring_speeds = []
    for order in permutations(indices[1:]):
        ring = (indices[0], *order, indices[0])
        routes = list(pairwise(ring))
        ring_speeds.append(
            (
                min(machine.pair_bandwidth(*route) for route in routes),
                -max(machine.pair_latency(*route) for route in routes),
            )
        )
    bandwidth, latency = max(ring_speeds)
    return bandwidth, -latency


def test_uniform_rings() -> None:
    machine = machine_with([])
    assert machine.ring(()) == machine.ring((3,)) == (math.inf, 0.0)
    assert machine.ring((0, 5)) == machine.ring(tuple(range(8))) == (12e9, 1e-5)


@given(st.data())
def test_rings_against_brute_force(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    pairs = [(a, b) for b in range(7) for a in range(b)]
    rates = st.sampled_from([1e9, 12e9, 25e9, 50e9])
    links = [
        IntraLink(a, b, data.draw(rates), data.draw(st.sampled_from([1e-6, 1e-5, 1e-4])))
        for a, b in sorted(data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    ]
    machine = machine_with(links)
    indices = tuple(data.draw(st.permutations(range(7)))[:size])
    assert machine.ring(indices) == best_by_force(machine, indices)


def test_ring_of_eight_against_brute_force() -> None:
    """The eight V100 of a DGX-1: 1 or 2 NVLinks between some, PCIe between others."""
    double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    rates = {**dict.fromkeys(double, 50e9), **dict.fromkeys(single, 25e9)}
    machine = machine_with([IntraLink(a, b, rates[a, b], 5e-6) for a, b in sorted(rates)])
    whole = tuple(range(8))
    assert machine.ring(whole) == best_by_force(machine, whole) == (50e9, 5e-6)


def test_large_rings_are_rings() -> None:
    links = [IntraLink(min(a, (a + 3) % 16), max(a, (a + 3) % 16), 50e9, 2e-6) for a in range(16)]
    machine = machine_with(sorted(links, key=lambda link: (link.a, link.b)), 16)
    bandwidth, latency = machine.ring(tuple(range(16)))
    assert (bandwidth, latency) in {(12e9, 1e-5), (50e9, 2e-6)}
