"""`random`: random partitions, the baseline of HexiScale's own evaluation (arXiv 2409.01143, section 5).

GPUs are assigned to pipelines at random, the GPUs of a machine in a pipeline are cut into random TP groups, and stages
are in random order. Layers, recomputation and micro-batches are computed as for every other solver, so the comparison
shows the value of the partition alone.
"""

import random

from hexiopt.problem.problem import Problem
from solvers.completion.completer import PlanCompleter
from solvers.core.interleaving import draw_schedule
from solvers.core.partition import DeviceGroup, Partition, PipelineGroup, devices_by_machine
from solvers.core.search import Search
from solvers.core.zero import draw_sharding_groups, draw_zero_stage, requires_lockstep
from solvers.frame.solver import SearchSolver, offer_partition


def random_groups(problem: Problem, devices: list[int], rng: random.Random) -> list[DeviceGroup]:
    """TP groups from the devices of each machine, with random degrees, in random order."""
    groups: list[DeviceGroup] = []
    for machine, own in devices_by_machine(problem.cluster, devices).items():
        allowed = problem.space.allowed_tp(problem.cluster.machines[machine].num_gpus)
        rng.shuffle(own)
        while own:
            tp = rng.choice([t for t in allowed if t <= len(own)])
            groups.append(tuple(sorted(own[:tp])))
            del own[:tp]
    rng.shuffle(groups)
    return groups


def _some_devices(problem: Problem, rng: random.Random) -> list[int]:
    """All usable devices or, in a third of the draws, those of a random set of machines."""
    machines = list(problem.usable_by_machine.values())
    if len(machines) > 1 and rng.random() < 1 / 3:
        machines = rng.sample(machines, rng.randint(1, len(machines)))
    return sorted(device for own in machines for device in own)


def draw_partition(problem: Problem, rng: random.Random) -> Partition | None:
    """A random partition; None where a pipeline came out empty or too long."""
    devices = _some_devices(problem, rng)
    space, layers = problem.space, problem.model.num_layers
    most = min(len(devices), problem.workload.global_batch, 64)
    count = space.num_pipelines or rng.randint(1, most)
    if not space.uneven_structure or not space.uneven_tp or requires_lockstep(problem):
        return _regular(problem, rng)
    parts: list[list[int]] = [[] for _ in range(count)]
    for device in devices:
        rng.choice(parts).append(device)
    size = rng.choice(problem.space.micro_batch_sizes(max(1, problem.workload.global_batch // count)))
    pipeline_groups = []
    for part in parts:
        groups = random_groups(problem, part, rng)
        if space.num_stages is not None:
            groups = groups[: space.num_stages]
        if not groups or len(groups) > layers:
            return None
        pipeline_groups.append(PipelineGroup(tuple((group,) for group in groups), size))
    schedule, chunks = draw_schedule(problem, rng)
    sharding = draw_zero_stage(problem, rng, aligned=len(pipeline_groups) == 1)
    return Partition(tuple(pipeline_groups), schedule, sharding, chunks, draw_sharding_groups(problem, rng, sharding))


def _regular(problem: Problem, rng: random.Random) -> Partition | None:
    """A random partition of one pipeline group with a single TP degree."""
    space = problem.space
    by_machine = devices_by_machine(problem.cluster, _some_devices(problem, rng))
    tp = rng.choice(space.allowed_tp(max(map(len, by_machine.values()))))
    groups: list[DeviceGroup] = []
    for machine, own in by_machine.items():
        if tp in space.allowed_tp(problem.cluster.machines[machine].num_gpus):
            rng.shuffle(own)
            groups += [tuple(sorted(own[k : k + tp])) for k in range(0, len(own) - tp + 1, tp)]
    rng.shuffle(groups)
    most = min(len(groups), problem.workload.global_batch)
    if not most:
        return None
    count = space.num_pipelines or rng.randint(1, most)
    stages = space.num_stages or rng.randint(1, max(1, min(len(groups) // count, problem.model.num_layers)))
    if count * stages > len(groups):
        return None
    size = rng.choice(problem.space.micro_batch_sizes(max(1, problem.workload.global_batch // count)))
    pipeline_group = PipelineGroup(tuple(tuple(groups[s * count : (s + 1) * count]) for s in range(stages)), size)
    schedule, chunks = draw_schedule(problem, rng)
    sharding = draw_zero_stage(problem, rng, aligned=True)
    return Partition((pipeline_group,), schedule, sharding, chunks, draw_sharding_groups(problem, rng, sharding))


class RandomPartition(SearchSolver):
    """Random partitions of the devices, the best of them kept: what any search should beat.

    A step is one draw.
    """

    name = "random"

    def search(self, run: Search, rng: random.Random) -> None:
        """Draw and price."""
        completer = PlanCompleter(run.pricer)
        while run.step():
            partition = draw_partition(run.problem, rng)
            if partition is not None:
                offer_partition(run, completer, partition)
