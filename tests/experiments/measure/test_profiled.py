"""A plan priced on the machine that trains it: devices keep their names and get the measured speed."""

import pytest

import hexiopt as hx
from experiments.measure.profiled import on_profiled
from hexiopt.plan.plan import Pipeline, Plan, Stage

PROBLEM = hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=4, seq_len=64))
PLAN = Plan((Pipeline((Stage.of((0,), 0, 1), Stage.of((2, 3), 1, 4)), 4),))


def profile(devices: int, tflops: float = 0.05) -> hx.Cluster:
    gpu = {"tflops": tflops, "tflops_fp32": tflops, "memory_gib": 4, "hbm_gb_per_s": 10, "flash_attention": True}
    machine = {"name": "here", "gpu": "mine", "num_gpus": devices, "intra_bandwidth_gb_per_s": 0.3}
    return hx.cluster({"name": "measured", "machines": [machine], "gpus": {"mine": gpu}})


def test_every_device_is_a_measured_one_and_keeps_its_name() -> None:
    here = on_profiled(PROBLEM, PLAN, profile(3))
    assert {machine.gpu.name for machine in here.cluster.machines} == {"mine"}
    names = [[problem.cluster.device_name(d) for d in range(6)] for problem in (here, PROBLEM)]
    assert names[0] == names[1]
    assert {machine.nic_bandwidth_bytes_per_s for machine in here.cluster.machines} == {0.3e9}
    slow, fast = (hx.price(on_profiled(PROBLEM, PLAN, profile(3, tflops)), PLAN) for tflops in (0.05, 0.1))
    assert slow.step_time_s > fast.step_time_s > hx.price(PROBLEM, PLAN).step_time_s


def test_a_profile_that_does_not_suit_is_refused() -> None:
    with pytest.raises(hx.InputError, match=r"mine\.yaml: is of 6 devices, the plan has 3; .* profile\.processes=3"):
        on_profiled(PROBLEM, PLAN, profile(6), "mine.yaml")
    with pytest.raises(hx.InputError, match="has 2 machines"):
        on_profiled(PROBLEM, PLAN, PROBLEM.cluster)
