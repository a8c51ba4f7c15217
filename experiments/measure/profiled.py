"""A plan's problem on the machine that it is trained on: its devices replaced by the profiled ones of that machine."""

from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import NOTHING_MEASURED


def on_profiled(problem: Problem, plan: Plan, profiled: Cluster, where: str = "profile") -> Problem:
    """`problem` as if each of its devices were one of `profiled`, a single machine that `hexiopt profile` measured.

    Devices keep their names, so that `plan` can be priced on both. Links inside and between machines get the rate and
    latency that the profile states for most pairs. Raises InputError for a profile of several machines, and for one of
    another number of devices than `plan` has: processes that share cores are as fast as their number lets them be.
    """
    if len(profiled.machines) != 1:
        raise InputError(f"{where}: has {len(profiled.machines)} machines; give the profile of the one that trains")
    (here,) = profiled.machines
    used = len(plan.devices())
    if here.num_gpus != used:
        raise InputError(
            f"{where}: is of {here.num_gpus} devices, the plan has {used}; measure as many: "
            f"hexiopt profile profile.processes={used}"
        )

    def replace_devices(machine: Machine) -> Machine:
        return machine.replace(
            gpu=here.gpu,
            intra_bandwidth_bytes_per_s=here.intra_bandwidth_bytes_per_s,
            intra_latency_s=here.intra_latency_s,
            intra_links=(),
            nic_bandwidth_bytes_per_s=here.intra_bandwidth_bytes_per_s,
            nic_latency_s=here.intra_latency_s,
        )

    cluster = problem.cluster
    changed = cluster.replace(
        machines=tuple(map(replace_devices, cluster.machines)), groups=(), links=(), profile=NOTHING_MEASURED
    )
    return problem.replace(cluster=changed)
