"""What a run computes on, and what is not started because this machine could not carry it."""

from dataclasses import replace
from pathlib import Path

import pytest

from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch import admission
from runtime.launch.admission import MOST_PROCESSES_PER_CORE, check_machine, choose_device, ranks_on
from tests.runtime.launch.test_faults import narrow, problem, wide


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 1 MiB."""
    monkeypatch.setattr(admission, "num_gpus", lambda: 2)
    monkeypatch.setattr(admission, "gpu_memory_bytes", lambda index: 2**20)


def test_a_gpu_for_each_process_or_the_cpu(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto", 2) == ("cuda", None)
    assert choose_device("cuda", 2) == ("cuda", None)
    assert choose_device("cpu", 2) == ("cpu", None)
    device, told = choose_device("auto", 3)
    assert device == "cpu"
    assert told == "Training on CPU processes: this machine has GPUs for only 2 of 3 processes (train.device=auto)."
    with pytest.raises(InputError, match="cuda takes a GPU for each of 3 processes, and this machine has 2; plan for"):
        choose_device("cuda", 3)
    monkeypatch.setattr(admission, "num_gpus", lambda: 0)
    assert choose_device("auto", 1)[1] == "Training on CPU processes: this machine has no GPU (train.device=auto)."


def test_ranks_of_a_machine() -> None:
    plan_file = PlanFile(problem(), wide(), {})
    names = [plan_file.problem.cluster.device_name(d).partition(":")[0] for d in sorted(wide().devices())]
    assert ranks_on(plan_file, None) == [0, 1, 2, 3]
    for machine in set(names):
        assert ranks_on(plan_file, machine) == [rank for rank, name in enumerate(names) if name == machine]


def test_processes_are_bound_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pipelines = [Pipeline((Stage.of((d,), 0, 4),), 1) for d in range(MOST_PROCESSES_PER_CORE)]
    plan = Plan(tuple(pipelines), ONE_F_ONE_B, Sharding(1))
    task = problem()
    plan_file = PlanFile(task, plan, {})
    assert len(plan.devices()) == len(task.cluster.machine_of)
    ranks = ranks_on(plan_file, None)
    monkeypatch.setattr(admission, "usable_cores", lambda: 1)
    check_machine(plan_file, ranks, "cpu")
    monkeypatch.setattr(admission, "MOST_PROCESSES_PER_CORE", 7)
    with pytest.raises(InputError, match=r"8 processes, .* at most 7 devices, .* train\.force=true$"):
        check_machine(plan_file, ranks, "cpu")
    check_machine(plan_file, ranks[1:], "cpu")


def test_memory_is_bound_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all processes together; a model a thousand times wider does not fit into a GiB."""
    plan_file = PlanFile(problem(), wide(), {})
    monkeypatch.setattr(admission, "usable_cores", lambda: 4)
    monkeypatch.setattr(admission, "host_memory_bytes", lambda: (2**30, 2**30))
    check_machine(plan_file, ranks_on(plan_file, None), "cpu")
    model = replace(plan_file.problem.model, hidden_size=16 * 64, head_dim=4 * 64, ffn_size=24 * 64)
    wider = PlanFile(replace(plan_file.problem, model=model), wide(), {})
    with pytest.raises(InputError, match=r"4 processes need about \d+\.\d GiB, and 1\.0 GiB .* train\.force=true$"):
        check_machine(wider, ranks_on(wider, None), "cpu")


def test_a_gpu_must_hold_its_rank(gpus: None, tmp_path: Path) -> None:
    plan_file = PlanFile(problem(), narrow(), {})
    check_machine(plan_file, [0, 1], "cuda")
    model = replace(plan_file.problem.model, hidden_size=16 * 64, head_dim=4 * 64, ffn_size=24 * 64)
    wider = PlanFile(replace(plan_file.problem, model=model), narrow(), {})
    with pytest.raises(InputError, match=r"of the plan needs about .* GPU 0 of this machine has 0\.0 GiB; plan for"):
        check_machine(wider, [0, 1], "cuda")


def test_no_search_for_what_cannot_be_trained() -> None:
    """Without sequence parallelism a search may choose tensor parallelism, unless it is told not to."""
    base = problem()
    without = replace(base, workload=replace(base.workload, sequence_parallel=False))
    with pytest.raises(InputError, match="sequence_parallel: false cannot be trained with tensor parallelism"):
        admission.check_problem(without)
    admission.check_problem(replace(without, space=replace(without.space, max_tp=1)))
    sequences = replace(base, space=replace(base.space, sequence=True))
    with pytest.raises(
        InputError, match=r"document_masking: sequence layouts know no documents; take space\.sequence="
    ):
        admission.check_problem(sequences, document_masking=True)
    admission.check_problem(sequences)
