"""The cost model's prediction of a measured run, with the fitted constants or with others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise

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

Values = Mapping[str, float]


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
