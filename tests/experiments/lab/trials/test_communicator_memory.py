"""What communicators take of a device is what is missing once they are made, and the model's figure is beside it."""

from dataclasses import replace

import pytest

from experiments.lab.trials.communicators import _model_bytes, _of_each, group_memory, taken_bytes
from hexiopt.problem.cluster import Cluster
from tests.experiments.lab.trials.gpu import first_gpu, needs_gpu

__all__ = ["first_gpu"]
MIB = 2**20


class Device:
    """A device of 100 bytes, which notes what happens to it."""

    def __init__(self) -> None:
        self.free, self.events = 100, list[str]()

    def look(self) -> int:
        self.events.append("look")
        return self.free

    def make(self) -> None:
        self.events.append("make")
        self.free -= 30

    def meet(self) -> None:
        self.events.append("meet")


def test_none_makes_anything_while_another_looks() -> None:
    device = Device()
    assert taken_bytes(device.make, device.look, device.meet) == 30
    assert device.events == ["meet", "look", "meet", "make", "meet", "look", "meet"]


def test_a_cpu_has_no_such_memory() -> None:
    device = Device()
    assert taken_bytes(device.make, lambda: None, device.meet) is None
    assert device.free == 70  # all the same


def test_ranks_of_a_gpu_see_what_all_of_them_take() -> None:
    seen = [[20 * MIB, 8 * MIB, None], [22 * MIB, 8 * MIB, None]]
    assert _of_each(seen, shares_gpu=True) == [11 * MIB, 4 * MIB, None]
    assert _of_each(seen, shares_gpu=False) == [22 * MIB, 8 * MIB, None]


@pytest.mark.parametrize(
    ("gpu", "shares_gpu", "mib"),  # of all ranks, TP, sums, a message either way
    [
        ("a100_80gb_sxm", False, [4 + 6 + 12, 4 + 32 * 6 + 24 * 12, 4 + 16 * 6 + 16 * 12, *2 * [4 + 4 * 6 + 4 * 6]]),
        ("a100_80gb_sxm", True, [4 + 6, 4 + 32 * 6, 4 + 16 * 6, *2 * [4 + 4 * 6]]),
        ("rtx_4090", False, [4 + 6, 4 + 4 * 6, 4 + 16 * 6, *2 * [4 + 4 * 6]]),
    ],
)
def test_the_figures_of_the_model(gpu: str, shares_gpu: bool, mib: list[int]) -> None:
    cluster = Cluster.of({gpu: 2}, intra_gb_per_s=100)
    assert _model_bytes(cluster, shares_gpu) == [MIB * size_mib for size_mib in mib]
    (machine,) = cluster.machines
    processor = replace(cluster, machines=(replace(machine, gpu=replace(machine.gpu, link="memory")),))
    assert _model_bytes(processor, shares_gpu) == [0.0] * 5


@needs_gpu
def test_communicators_take_memory_of_a_gpu(first_gpu: None) -> None:
    for memory in group_memory(Cluster.of({"h100_80gb_sxm": 1}), 120.0):
        assert memory.measured_bytes is not None, memory.kind
        assert memory.measured_bytes > 0, memory.kind
