"""Measuring for real, on this CPU: every operator, and messages between two processes."""

import json
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from experiments.lab.profile.fit import fit_channel, fit_efficiency, fit_ring, measured_rates
from experiments.lab.profile.links import Links
from experiments.lab.profile.operators import OperatorBench, Timer, from_both_ends, sample_evenly
from experiments.lab.profile.points import MeasuredPoint, Measurement, of_kind
from experiments.lab.profile.rank import Request, measure, own_device
from hexiopt.errors import InputError
from runtime.launch.torchrun import ProcessPlace
from tests.runtime.ranks import run_ranks

CPU = torch.device("cpu")


def test_every_operator_is_measured() -> None:
    heard: list[str] = []
    points = OperatorBench(CPU, "fp32", 0.05, 2**24).points(heard.append)
    assert heard == ["launch", "gemm", "attention", "stream", "adam"]
    assert {point.what for point in points} == set(heard)
    assert all(0 < point.seconds < 10 for point in points)
    gemms = of_kind(points, "gemm")
    assert {point.of for point in gemms} == {("forward",), ("input",), ("weight",)}
    for point in gemms:
        size = point.size
        assert size["flops"] == 2 * size["tokens"] * size["in"] * size["out"]
    rates = measured_rates(points)
    efficiency = fit_efficiency(points, rates)
    for share in (efficiency.gemm_max, efficiency.attention_max, efficiency.memory_max):
        assert 0 < share <= 1
    assert efficiency.gemm_half_flops >= 0
    assert 0 < efficiency.launch_s < 1e-2


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_peak_in_every_precision(precision: str) -> None:
    peak = OperatorBench(CPU, precision, 0.02, 2**28).peak(precision)
    assert peak is not None
    assert peak.what == f"peak_{precision}"
    assert peak.size["flops"] / peak.seconds > 1e6


def test_a_time_is_that_of_one_run() -> None:
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        torch.ones(1)

    seconds = Timer(CPU).seconds(work, 0.01)
    assert len(runs) > 100  # short work is queued
    assert seconds < 1e-3


def test_spread_takes_both_ends() -> None:
    assert sample_evenly(range(100), 5) == [0, 25, 50, 74, 99]
    assert sample_evenly([1, 2], 5) == [1, 2]


def test_what_is_left_out_for_want_of_time_is_of_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(from_both_ends([1, 2, 3, 4, 5])) == [5, 1, 4, 2, 3]
    monkeypatch.setattr("experiments.lab.profile.operators._OVERTIME", 0.0)
    streams = of_kind(OperatorBench(CPU, "fp32", 0.02, 2**24).points(lambda kind: None), "stream")
    assert [round(math.log2(point.size["bytes"])) for point in streams] == [22, 16, 21, 17, 20, 18]


def links_of(rank: int) -> list[MeasuredPoint]:
    links = Links(CPU, ["a:0", "a:1"], 0.1, 2**24)
    points = links.exchange(0, 1)
    group = dist.new_group([0, 1])
    return points + links.collectives((0, 1), group) + links.exchange(1, 0)


def test_two_processes_exchange() -> None:
    first, second = run_ranks(2, links_of)
    assert {point.what for point in first} == {"message", "all_gather", "reduce_scatter"}
    assert {point.of for point in second} == {("a:1", "a:0")}  # the sender has the points
    there = of_kind(first, "message")
    assert [point.size["bytes"] for point in there] == sorted(point.size["bytes"] for point in there)
    for channel in (fit_channel(there), fit_channel(second), fit_ring(of_kind(first, "all_gather", "reduce_scatter"))):
        assert 1e5 < channel.bytes_per_s < 1e12
        assert 0 <= channel.latency_s < 1


def refusal(rank: int) -> str:
    """`measure` without anything measured: a process of a machine whose name is none refuses for all."""
    from experiments.lab.profile import rank as module

    place = ProcessPlace(rank, 2, rank, 2, "")
    try:
        module._measure(
            Request(0.01, machine="a" if rank else "not a name"),
            place,
            lambda line: None,
            lambda m: None,
            lambda d: None,
        )
    except InputError as error:
        return str(error)
    return ""


def test_what_one_process_refuses_all_refuse() -> None:
    for message in run_ranks(2, refusal):
        assert "profile.machine: 'not a name' is not a name" in message


@pytest.mark.slow
def test_one_process_measures_and_checks_first() -> None:
    concluded: list[Measurement] = []
    request, place = Request(0.02, machine="a"), ProcessPlace(0, 1, 0, 1, "")
    threads = torch.get_num_threads()

    def refuse(devices: object) -> None:
        raise InputError("no")

    try:
        measure(request, place, lambda line: None, concluded.append)
        with pytest.raises(InputError, match="no"):
            measure(request, place, lambda line: None, concluded.append, refuse)
    finally:
        torch.set_num_threads(threads)
    (measured,) = concluded
    assert json.loads(json.dumps(measured.to_dict()))["points"] == [point.to_dict() for point in measured.points]
    (device,) = measured.devices
    assert (device.name, device.is_gpu, device.precision) == ("a:0", False, "fp32")
    assert 0 < device.free_bytes <= device.total_bytes
    assert all(point.of[0] == "a:0" and math.isfinite(point.seconds) for point in measured.points)


def test_processes_share_a_machine() -> None:
    threads = torch.get_num_threads()
    try:
        devices = [own_device("a", local, 2, "bf16")[0] for local in range(2)]
    finally:
        torch.set_num_threads(threads)
    assert [device.name for device in devices] == ["a:0", "a:1"]
    whole = partial(own_device, None, 0, 1, None)()[0]
    assert devices[0].total_bytes == whole.total_bytes // 2
