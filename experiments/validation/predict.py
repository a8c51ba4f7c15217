"""The cost model's prediction of a measured run, with the fitted constants or with others, and in the row's own metric
(`metric_names.py`).

`tflops_per_gpu` and `mfu` (in percent of the dense BF16 peak) count FLOPs as the source does: per token, 6 for each
parameter outside the input embedding, and all of attention rather than its causal half (12 · layers · width · length;
PaLM, arXiv 2204.02311, appendix B). Megatron of 2021 counts 96 B s l h² (1 + s/6h + V/16lh) with full recompute and
three quarters of that without (Narayanan et al., arXiv 2104.04473, section 5.1). Of models with experts Megatron counts
the FLOPs of the experts that a token goes to, and the causal half of attention: within 1 % of `model_tflops` in its
tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise

from experiments.validation.metric_names import ITER_TIME, ITERATIONS, SAMPLES, TFLOPS, TOKENS, TOKENS_OF_GPU
from experiments.validation.rows import Row
from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.sequence.context_parallel import ContextParallel
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.constants import constant_values
from hexiopt.numbers.frameworks import Framework, calibrated_frameworks
from hexiopt.numbers.gpus import Gpu, calibrated_catalogue
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.units import TFLOP

Values = Mapping[str, float]
_PERCENT = 100.0


@dataclass(frozen=True)
class Case:
    """A run that the cost model can express. Link rates in `problem` are nominal unless `links_measured`.

    With context parallelism over `parts` devices, each sequence of the run is `parts` sequences of the workload, and
    its devices have pipelines of their own (`hexiopt.cost.executors.sequence.context_parallel`).
    """

    row: Row
    problem: Problem
    plan: Plan
    framework: str
    links_measured: bool
    parts: int = 1


def predict(case: Case, values: Values | None = None) -> Cost:
    """The cost of the run with the given `values` of the fitted constants (None: those of the calibration)."""
    return cost_model(case, values).price(case.plan)


def cost_model(case: Case, values: Values | None = None) -> PlanPricer:
    """The pricer of the run, with `values` as in `predict`."""
    values = constant_values() if values is None else values
    gpus, frameworks = tables(tuple(values.items()))
    cluster = case.problem.cluster
    known: dict[Machine, Machine] = {}

    def of(machine: Machine) -> Machine:
        kind = replace(machine, name="kind", spec_name="kind")
        if kind not in known:
            known[kind] = _machine(machine, gpus[machine.gpu.name], {} if case.links_measured else values)
        return replace(known[kind], name=machine.name, spec_name=machine.spec_name)

    calibrated: Cluster = replace(cluster, machines=tuple(of(machine) for machine in cluster.machines))
    return PlanPricer(
        replace(case.problem, cluster=calibrated), frameworks[case.framework], context=_context(case, calibrated)
    )


def _context(case: Case, cluster: Cluster) -> ContextParallel | None:
    """How sequences are cut: over the first `parts` replicas of the first stage, whose slowest link counts."""
    if case.parts == 1:
        return None
    replicas = (devices for line in case.plan.pipelines for devices in line.stages[0].parallelism.parameter_copies)
    first = [devices[0] for devices in islice(replicas, case.parts)]
    paths = [cluster.network.path(a, b) for a, b in pairwise(first)]
    bytes_per_s = min(min([way[1], *(rate for _, rate in way[2])]) for way in paths)
    return ContextParallel(case.parts, bytes_per_s, max(way[0] for way in paths), case.row.says("cp_comm=a2a"))


@lru_cache(maxsize=256)
def tables(values: tuple[tuple[str, float], ...]) -> tuple[Mapping[str, Gpu], Mapping[str, Framework]]:
    """The catalogue and the frameworks with (name, value) of the fitted constants."""
    return calibrated_catalogue(dict(values)), calibrated_frameworks(dict(values))


def link_constants(machine: Machine) -> tuple[str, str]:
    """The names of the constants of the links inside a machine and of its network."""
    return (
        "nvlink_efficiency" if machine.gpu.link.startswith("nvlink") else "pcie_efficiency",
        "ethernet_efficiency" if machine.num_interfaces == 1 else "infiniband_efficiency",
    )


def _machine(machine: Machine, gpu: Gpu, values: Values) -> Machine:
    """The machine with calibrated efficiencies; links reach a share of their nominal rates.

    One interface for a whole machine is taken as Ethernet with TCP, one per GPU as RDMA.
    """
    link, network = link_constants(machine)
    return replace(
        machine,
        gpu=replace(gpu, flash_attention=machine.gpu.flash_attention),
        intra_bandwidth_bytes_per_s=machine.intra_bandwidth_bytes_per_s * values.get(link, 1.0),
        nic_bandwidth_bytes_per_s=machine.nic_bandwidth_bytes_per_s * values.get(network, 1.0),
    )


def in_metric(case: Case, step_time_s: float) -> float:
    """The value of the row's metric for a step time in seconds."""
    row, workload, gpus = case.row, case.problem.workload, case.problem.cluster.num_devices
    if row.metric == ITER_TIME:
        return step_time_s
    rates = {
        ITERATIONS: 1.0,
        TOKENS: float(workload.tokens),
        TOKENS_OF_GPU: workload.tokens / gpus,
        SAMPLES: workload.global_batch / case.parts,  # with context parallelism a sequence is several of the workload
    }
    if row.metric in rates:
        return rates[row.metric] / step_time_s
    per_gpu = _counted_flops(case) / (step_time_s * gpus)
    if row.metric == TFLOPS:
        return per_gpu / TFLOP
    peaks = [machine.num_gpus * (machine.gpu.peak_flops("bf16") or 0.0) for machine in case.problem.cluster.machines]
    return _PERCENT * per_gpu * gpus / sum(peaks)


def step_time_s(case: Case) -> float:
    """The step time that the row measured, in seconds."""
    value = case.row.value
    if case.row.metric == ITER_TIME:
        return value
    return in_metric(case, 1.0) / value  # all other metrics are rates


def _counted_flops(case: Case) -> float:
    model, workload = case.problem.model, case.problem.workload
    length, width = workload.seq_len * case.parts, model.hidden_size
    if model.layers:
        return float(workload.tokens * model.model_flops_per_token(length))
    if case.framework.startswith("megatron_20"):
        layers, vocabulary = model.num_layers, model.vocab_size
        recomputed = case.plan.pipelines[0].stages[0].policy == "full"
        whole = 96.0 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
        return workload.tokens * whole * (1.0 if recomputed else 0.75)
    params = model.num_layers * model.layer_params + model.vocabulary_params
    return workload.tokens * (6.0 * params + 12.0 * model.num_layers * model.q_size * length)
