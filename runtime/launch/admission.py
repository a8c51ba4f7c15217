"""Before a run starts: whether its plan can be trained, on what, and whether this machine can carry it."""

from collections.abc import Sequence
from pathlib import Path

from hexiopt.cores import usable_cores
from hexiopt.cost.cost import copy_costs
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.trainable import NO_TENSOR_PARALLELISM, untrainable
from hexiopt.files.plan_file import PlanFile
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.products import match
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.units import GIB
from runtime.device import gpu_memory_bytes, gpu_product, host_memory_bytes, num_gpus
from runtime.mapping.layout import layout_of

# Measured on two cores with a tiny model (8 layers, hidden size 8): a step takes 0.25 s with 4 processes, 0.41 s with
# 16 and 0.76 s with 32. A plan of 54 devices drove the load to 73, and nothing else could be done on the machine.
MOST_PROCESSES_PER_CORE = 8
# Measured, too: forked processes share torch's 280 MB, and each adds 16 to 25 MB of its own before its tensors. Twice
# that, since connections and the allocator grow with what is trained.
_TORCH_BYTES, _PROCESS_BYTES = 280e6, 50e6


def check_problem(problem: Problem, *, document_masking: bool = False) -> None:
    """Raise InputError where a search would choose plans that cannot be trained."""
    cannot = untrainable(problem.model, problem.workload, document_masking=document_masking)
    if cannot is None and not problem.workload.sequence_parallel and problem.space.max_tp != 1:
        cannot = NO_TENSOR_PARALLELISM  # which a search would choose
    if cannot is None and document_masking and problem.space.sequence:
        cannot = "train.document_masking: sequence layouts know no documents; take space.sequence=false"
    if cannot is not None:
        raise InputError(cannot)


def check_trainable(path: str | Path, plan_file: PlanFile, *, document_masking: bool = False) -> None:
    """Raise InputError where the plan of the file `path` is not valid or cannot be trained."""
    problem, plan = plan_file.problem, plan_file.plan
    cannot = untrainable(problem.model, problem.workload, plan, document_masking=document_masking)
    if cannot is not None:
        raise InputError(cannot)
    wrong = check(problem, plan)
    if wrong:
        raise InputError(f"{path}: {wrong[0].text}; plan again")


def choose_device(wanted: str, num_processes: int) -> tuple[str, str | None]:
    """The device kind for `num_processes` on this machine, and one line that explains a fallback, if any.

    `auto` is a GPU for each process, or the CPU where there are fewer. Raises InputError where `cuda` has too few.
    """
    assert wanted in ("auto", "cpu", "cuda")
    gpus = 0 if wanted == "cpu" else num_gpus()
    if wanted == "cuda" and gpus < num_processes:
        raise InputError(
            f"train.device: cuda takes a GPU for each of {num_processes} processes, and this machine has {gpus}; "
            "plan for as many devices, or take train.device=cpu"
        )
    if wanted == "cpu":
        return "cpu", None
    if gpus < num_processes:
        available = f"GPUs for only {gpus} of {num_processes} processes" if gpus else "no GPU"
        return "cpu", f"Training on CPU processes: this machine has {available} (train.device=auto)."
    return "cuda", None


def ranks_on(plan_file: PlanFile, machine: str | None) -> list[int]:
    """The ranks of a plan whose devices are in a machine of its cluster; all of them where it is None."""
    name_of = plan_file.problem.cluster.device_name
    devices = layout_of(plan_file.plan, plan_file.problem.model).devices
    return [rank for rank, d in enumerate(devices) if machine in (None, name_of(d).partition(":")[0])]


def check_machine(plan_file: PlanFile, ranks: Sequence[int], kind: str, gpus: Sequence[int] | None = None) -> None:
    """Raise InputError where these ranks of a plan are more than this machine can carry, on its CPU or on `gpus`, by
    default its first ones.

    Memory is the cost model's, without what it reserves for a GPU's libraries; on a CPU with the copy of exact weights
    and two moments that a checkpoint is written from.
    """
    problem, plan = plan_file.problem, plan_file.plan
    cost = PlanPricer(problem).price(plan)
    copied = 0.0 if kind == "cuda" else 1.5  # times the moments
    needed = {
        device: copy.memory.tensors + copied * copy.memory.optimizer
        for _, _, devices, copy in copy_costs(plan, cost)
        for device in devices
    }
    devices = layout_of(plan, problem.model).devices
    if kind == "cuda":
        for gpu, rank in zip(range(len(ranks)) if gpus is None else gpus, ranks, strict=True):
            _check_gpu(gpu, problem.cluster.device_name(devices[rank]), needed[devices[rank]])
    else:
        _check_cpu([needed[devices[rank]] for rank in ranks])


def admit_ranks(plan_file: PlanFile, ranks: Sequence[int], wanted: str, force: bool) -> tuple[str, str | None]:
    """The device kind for `ranks` of a plan on this machine, and one line that explains a fallback, if any.

    Raises InputError where the machine has too few GPUs or, unless `force`, cannot carry the ranks.
    """
    device, fallback = choose_device(wanted, len(ranks))
    if not force:
        check_machine(plan_file, ranks, device)
    return device, fallback


def admit_machine(
    plan_file: PlanFile, machine: str | None, gpus: Sequence[int], wanted: str, force: bool
) -> tuple[str, str | None]:
    """The device kind for a machine whose processes have these numbers of GPUs, and a line on a fallback, if any.

    Raises InputError where it has too few GPUs or, unless `force`, others than the plan says, or cannot carry
    its ranks.
    """
    kind, fallback = choose_device(wanted, max(gpus) + 1)
    if force:
        return kind, fallback
    ranks, problem = ranks_on(plan_file, machine), plan_file.problem
    devices = [layout_of(plan_file.plan, problem.model).devices[rank] for rank in ranks]
    local_gpus = [int(problem.cluster.index_in_machine[device]) for device in devices]
    if kind == "cuda":
        for gpu, device in zip(local_gpus, devices, strict=True):
            _check_type(gpu, problem.cluster.device_name(device), problem.cluster.gpu_of(device).type_name)
    if ranks:
        check_machine(plan_file, ranks, kind, local_gpus)
    return kind, fallback


def _check_type(index: int, name: str, planned: str) -> None:
    """Types that the catalogue does not have, or products that may be several, are not compared."""
    product = gpu_product(index)
    gpu_type = match(product, gpu_memory_bytes(index)).gpu
    if gpu_type is not None and planned in catalogue() and gpu_type != planned:
        raise InputError(
            f"train: {name} of the plan is a {planned}, and GPU {index} of this machine is a {gpu_type} ({product}); "
            "plan for these GPUs, start this machine under its own name, or go on with train.force=true"
        )


def _check_cpu(needed: Sequence[float]) -> None:
    count, cores = len(needed), usable_cores()
    most = MOST_PROCESSES_PER_CORE * cores
    if count > most:
        raise InputError(
            f"train: {count} processes, one for each device of the plan, are more than {MOST_PROCESSES_PER_CORE} on "
            f"each of this machine's {cores} cores; plan for at most {most} devices, use more machines "
            "(train.launch=machine), or go on with train.force=true"
        )
    total = sum(needed) + _TORCH_BYTES + _PROCESS_BYTES * count
    _, free = host_memory_bytes()
    if total > free:
        raise InputError(
            f"train: the plan's {count} processes need about {total / GIB:.1f} GiB, and {free / GIB:.1f} GiB of this "
            "machine are free; take a smaller model or batch, use more machines (train.launch=machine), or go on with "
            "train.force=true"
        )


def _check_gpu(local: int, name: str, needed: float) -> None:
    has = gpu_memory_bytes(local)
    if needed > has:
        raise InputError(
            f"train: {name} of the plan needs about {needed / GIB:.1f} GiB, and GPU {local} of this machine has "
            f"{has / GIB:.1f} GiB; plan for these GPUs, or go on with train.force=true"
        )
