"""Speeds in proportion to peaks: every type of GPU as efficient as an A100.

HexiSeq (arXiv 2605.07569) sets clusters of like FLOPS against each other, which counts an H100 as three A100. By
published runs it is worth less (`hexiopt/calibration/constants.yaml`). What a table says with either tells what depends
on it.
"""

from dataclasses import replace

from hexiopt.calibration.gpus import catalogue
from hexiopt.problem.cluster import Cluster

_TYPE = "a100_80gb_sxm"
IF_BY_PEAK = "Were all types of GPU as efficient as an A100, so that an H100 had three times its speed"


def equally_efficient(cluster: Cluster, precision: str) -> Cluster:
    """The cluster with the efficiency of an A100 for all types, and its fill time of a GEMM."""
    example = catalogue()[_TYPE]
    peak = example.peak_flops(precision)
    assert peak is not None
    machines = []
    for machine in cluster.machines:
        half_flops = example.efficiency.gemm_half_flops * (machine.gpu.peak_flops(precision) or peak) / peak
        efficiency = replace(example.efficiency, gemm_half_flops=half_flops)
        machines.append(replace(machine, gpu=replace(machine.gpu, efficiency=efficiency)))
    return replace(cluster, machines=tuple(machines))
