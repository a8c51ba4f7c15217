"""Aligned pipelines: the same layers at every position of each, on TP groups of any GPU and degree.

What planners with one data-parallel degree share: a stage is replicated as often as any other, and the k-th replicas
of all stages make a pipeline. `slots[s][k]` is the TP group of stage s in pipeline k.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

from hexiopt.cost.executors.collectives import tree_depth
from hexiopt.cost.executors.routes import Load
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules, sharding_stages
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule
from solvers.baselines.estimate import Estimates, one_f_one_b_s, shifted
from solvers.baselines.grid import Grid
from solvers.core.partition import Group

Slots = tuple[tuple[Group, ...], ...]

_FEW_STAGES = 4  # stages whose layers are also tried one off


def one_f_one_b(problem: Problem) -> Schedule | None:
    """The schedule of the workload that runs 1F1B: interleaved does, with one layer range a stage. None: no such."""
    allowed = schedules(problem.workload)
    return next((schedule for schedule in (ONE_F_ONE_B, INTERLEAVED) if schedule in allowed), None)


def optimizer_sharding(problem: Problem) -> int | None:
    """The most that the runtimes of these planners shard, ZeRO-1 where the workload allows it; None: nothing allowed.

    It never costs time under our cost model: a reduce-scatter and an all-gather for an all-reduce.
    """
    return max((stage for stage in sharding_stages(problem.workload) if stage <= 1), default=None)


def dealt_batches(total: int, pipelines: int) -> list[int]:
    """`total` micro-batches over pipelines, within one of each other."""
    low, extra = divmod(total, pipelines)
    return [low + (k < extra) for k in range(pipelines)]


def filled(
    problem: Problem,
    machines: Sequence[Sequence[Sequence[int]]],
    wanted: Sequence[Sequence[tuple[int, int]]],
    pipelines: int,
    *,
    along: bool,
    near: bool,
) -> Slots | None:
    """TP groups for all slots, stage by stage or `along` pipeline by pipeline; None where devices do not suffice.

    `machines[k]` are the devices of each machine of kind k. Stage s takes the first (kind, TP degree) of `wanted[s]`
    that a machine has devices for: the kind's first machine, or the one `near` the pipeline's stage before.
    """
    free = [[list(own) for own in kind] for kind in machines]
    stages = len(wanted)
    found: list[list[Group]] = [[] for _ in range(stages)]
    for at in range(stages * pipelines):
        k, s = divmod(at, stages) if along else divmod(at, pipelines)[::-1]
        before = found[s - 1][k][0] if near and s else None
        group = next((g for kind, tp in wanted[s] if (g := _taken(problem, free[kind], tp, before))), None)
        if group is None:
            return None
        found[s].append(group)
    return tuple(tuple(slot) for slot in found)


def _taken(problem: Problem, machines: list[list[int]], tp: int, near: int | None) -> Group | None:
    """`tp` devices of the first machine that has them, or of the one best linked to the device `near`; None without."""
    able = (own for own in machines if len(own) >= tp)
    if near is None:
        own = next(able, None)
    else:
        bandwidth, machine_of = problem.cluster.network.bandwidth, problem.cluster.machine_of
        own = max(able, key=lambda own: float(bandwidth[machine_of[near], machine_of[own[0]]]), default=None)
    if own is None:
        return None
    group = tuple(own[:tp])
    del own[:tp]
    return group


def nearby(layers: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, ...]]:
    """`layers` per stage; of a few stages also with any one layer moved to another stage that has room for it."""
    found = [tuple(layers)]
    if len(layers) <= _FEW_STAGES:
        for a, b in permutations(range(len(layers)), 2):
            if layers[a] > 1 and layers[b] < rooms[b]:
                found.append(tuple(n - (s == a) + (s == b) for s, n in enumerate(layers)))
    return found


def aligned_plan(
    slots: Slots,
    layers: Sequence[int],
    policy: str,
    batches: Sequence[int],
    size: int,
    schedule: Schedule,
    sharding: int,
) -> Plan:
    """The plan of `slots`: `layers` per stage, `batches` of `size` sequences per pipeline."""
    ranges = list(pairwise([0, *accumulate(layers)]))
    return Plan(
        tuple(
            Pipeline(
                tuple(Stage.of(slot[k], first, end, policy) for slot, (first, end) in zip(slots, ranges, strict=True)),
                count,
                size,
            )
            for k, count in enumerate(batches)
        ),
        schedule,
        Sharding(sharding),
    )


def unaligned(plan: Plan) -> str | None:
    """The first rule of aligned pipelines that `plan` breaks: beside layers, one policy, equal batches, 1F1B."""
    lines = plan.pipelines
    stages = [stage for line in lines for stage in line.stages]
    if plan.schedule == GPIPE:
        return f"schedule {plan.schedule}"
    if plan.sharding.stage > 1 or plan.sharding.groups != "all":
        return "sharding other than of the optimizer"
    if any(len(stage.replicas) != 1 for stage in stages):
        return "a replicated stage"
    if any(len(stage.layers) != 1 for stage in stages):
        return "interleaved stages"
    if len({tuple(stage.layers for stage in line.stages) for line in lines}) > 1:
        return "pipelines of different layers"
    if len({policy for stage in stages for policy in stage.recompute}) > 1:
        return "several recompute policies"
    if len({line.micro_batch_size for line in lines}) > 1:
        return "several micro-batch sizes"
    counts = [line.num_micro_batches for line in lines]
    return "unequal batches" if max(counts) - min(counts) > 1 else None


class AlignedEstimates(Estimates):
    """Estimates of a step of aligned pipelines."""

    def step_s(self, slots: Slots, layers: Sequence[int], policy: str, batches: int, size: int) -> float:
        """1F1B of the longest pipeline with `batches` micro-batches, every stage as slow as its slowest replica."""
        grid, last = Grid(slots), len(slots) - 1
        stage_s = [
            self.stage_s(sites, n, s == 0, s == last, size, policy)
            for s, (sites, n) in enumerate(zip(self.sites(grid), layers, strict=True))
        ]
        hop_s = self.messages(grid).seconds(size * self.sequence_bytes)
        return one_f_one_b_s(stage_s, hop_s, batches) + self.gradients_s(slots, layers)

    def refined(
        self, slots: Slots, layers: tuple[int, ...], rooms: Sequence[int], policy: str, batches: int, size: int
    ) -> tuple[int, ...]:
        """`layers` after moving single ones, within `rooms`, while the pipelines get faster."""
        grid, last = Grid(slots), len(slots) - 1
        sites, hop_s = self.sites(grid), self.messages(grid).seconds(size * self.sequence_bytes)

        def seconds(chosen: Sequence[int]) -> float:
            stage_s = [self.stage_s(sites[s], n, s == 0, s == last, size, policy) for s, n in enumerate(chosen)]
            return one_f_one_b_s(stage_s, hop_s, batches)

        return shifted(layers, rooms, seconds)[0]

    def gradients_s(self, slots: Slots, layers: Sequence[int]) -> float:
        """Both passes over the gradients, all stages at once: a ring over the replicas of each stage.

        A slice of a layer goes round between the ranks that hold it, as activations go between unequal TP groups.
        """
        width = len(slots[0])
        if width == 1:
            return 0.0
        model, load, port_s, latency_s = self.problem.model, Load(), 0.0, 0.0
        for s, (slot, count) in enumerate(zip(slots, layers, strict=True)):
            params = count * model.layer_params
            params += (model.embedding_params if s == 0 else 0) + (model.head_params if s == len(slots) - 1 else 0)
            moved = params * self.problem.workload.stored_gradient_bytes * (width - 1) / width
            ring = sorted(slot)
            for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True):
                way = self._hop(sender, receiver)
                port_s = max(port_s, way.port_s_per_byte * moved)
                latency_s = max(latency_s, way.latency_s)
                for resource, s_per_byte in way.shared:
                    load[resource] = load.get(resource, 0.0) + s_per_byte * moved
        return 2.0 * (max(port_s, *load.values(), 0.0) + latency_s * tree_depth(width))
