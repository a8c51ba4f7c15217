"""Factors, fitted to runs on a cluster, by which its GPUs and links differ from the cost model's values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hexiopt.checks import number_in
from hexiopt.numbers.gpus import Efficiency, Gpu
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.network import Group, Link

LEAST, MOST = 1e-9, 1e3  # of a factor


@dataclass(frozen=True)
class Calibration:
    """Factors of the speed of operators by GPU type, and of the rates of links between machines and inside them.

    `source` says what they were fitted to. Raises InputError for a factor outside 1e-9 to 1e3.
    """

    compute: Mapping[str, float]
    between: float = 1.0
    inside: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            number_in(factor, f"calibration: {name}", at_least=LEAST, at_most=MOST)

    @property
    def factors(self) -> dict[str, float]:
        """All factors by name."""
        return {f"compute.{gpu}": factor for gpu, factor in self.compute.items()} | {
            "between": self.between,
            "inside": self.inside,
        }

    def after(self, before: "Calibration | None") -> "Calibration":
        """The product of this calibration and `before`, which the cluster had when this one was fitted."""
        if before is None:
            return self
        names = {**before.compute, **self.compute}
        compute = {name: before.compute.get(name, 1.0) * self.compute.get(name, 1.0) for name in names}
        return Calibration(compute, before.between * self.between, before.inside * self.inside, self.source)

    def over(self, cluster: Cluster) -> "Calibration":
        """The calibration that turns the calibration of `cluster` into this one."""
        before = calibration_of(cluster)
        if before is None:
            return self
        compute = {name: factor / before.compute.get(name, 1.0) for name, factor in self.compute.items()}
        return Calibration(compute, self.between / before.between, self.inside / before.inside, self.source)

    def apply_to(self, cluster: Cluster) -> Cluster:
        """The cluster with these factors in its GPU types and links, recorded in `calibrated`."""
        machines = tuple(self._machine(machine) for machine in cluster.machines)
        return cluster.replace(
            machines=machines,
            inter_bandwidth_bytes_per_s=cluster.inter_bandwidth_bytes_per_s * self.between,
            groups=tuple(self._group(group) for group in cluster.groups),
            links=tuple(self._link(link) for link in cluster.links),
            calibrated=tuple(self.after(calibration_of(cluster)).factors.items()),
            calibrated_by=self.source,
        )

    def _machine(self, machine: Machine) -> Machine:
        speeds = {i: gpu.speed for i, gpu in enumerate(machine.gpus)}
        inner = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.inside)
            for link in machine.intra_links
        )
        calibrated = replace(
            machine,
            gpu=self._gpu(machine.gpu.at(1.0)),
            slow=(),
            intra_bandwidth_bytes_per_s=machine.intra_bandwidth_bytes_per_s * self.inside,
            intra_links=inner,
            nic_bandwidth_bytes_per_s=machine.nic_bandwidth_bytes_per_s * self.between,
        )
        return calibrated.with_speeds(speeds)

    def _gpu(self, gpu: Gpu) -> Gpu:
        factor = self.compute.get(gpu.name, 1.0)
        if factor == 1.0:
            return gpu
        source = f"{gpu.source}; operators × {factor:g} by {self.source}"
        return replace(gpu, efficiency=_speed_up(gpu.efficiency, factor), source=source)

    def _group(self, group: Group) -> Group:
        uplink, shared = group.uplink_bytes_per_s * self.between, group.shared_bytes_per_s * self.between
        return replace(group, uplink_bytes_per_s=uplink, shared_bytes_per_s=shared)

    def _link(self, link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.between)


def calibration_of(cluster: Cluster) -> Calibration | None:
    """The calibration that a cluster's figures contain; None without one."""
    if not cluster.calibrated:
        return None
    factors = dict(cluster.calibrated)
    compute = {name.partition(".")[2]: factor for name, factor in factors.items() if name.startswith("compute.")}
    return Calibration(compute, factors["between"], factors["inside"], cluster.calibrated_by)


def _speed_up(efficiency: Efficiency, factor: float) -> Efficiency:
    """Make all operators faster by `factor`; no share of a peak exceeds 1."""
    shares = ("gemm_max", "attention_max", "memory_max", "quantized_max", "fp32_max", "nvfp4_max")
    before = {name: share for name in shares if (share := getattr(efficiency, name)) is not None}
    after = {name: min(1.0, share * factor) for name, share in before.items()}
    return replace(efficiency, launch_s=efficiency.launch_s / factor, **after)
