"""What each published system may choose: its space by the name of its baseline, and the rules that it alone has.

The docstring of a baseline says the same in words, with the paper or the released code; `docs/baselines.md` has the
table.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import Any

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SHARDING_GROUPS, recompute_policies
from hexiopt.problem.workload import SHARDING_STAGES
from solvers.baselines._estimates import GridEstimates
from solvers.baselines._grids import processes_per_machine, rank_devices, rank_groups
from solvers.baselines._plans import RUNS_1F1B, STAGE_SCHEDULES
from solvers.baselines.flashflex.published import SCHEDULES
from solvers.baselines.flashflex.released import memory_shares
from solvers.baselines.fsdp import STRATEGIES
from solvers.baselines.galvatron.galvatron import plan_of
from solvers.baselines.galvatron.stages import ZEROS, GalvatronChoice, Ranks, StagePlanner
from solvers.baselines.megatron import MegatronRecompute, block_lengths
from solvers.baselines.sailor import splits
from solvers.core.partition import DeviceGroup
from tests.solvers.baselines.published_space import (
    ALIKE_RECOMPUTE,
    ALL_DEVICES,
    ANY_BATCHES,
    ANY_PIPELINES,
    ANY_TP,
    BATCHES_WITHIN_ONE,
    EQUAL_LAYERS,
    INTERLEAVED_STAGES,
    NO_TP,
    ONE_TP_OF_MODEL,
    POWERS_OF_TWO,
    REPLICATED_STAGES,
    SINGLE_STAGES,
    TP_PER_STAGE,
    PublishedSpace,
    Rule,
    copies_of,
)

Types = Counter[str]  # GPUs of each type


# Devices along the machines.


def _machines_in_order(problem: Problem, devices: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(int(problem.cluster.machine_of[d]) for d in devices))


def follow_machines(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether `devices` run through machines one after another, equally many of each, or all where it has fewer."""
    machines = _machines_in_order(problem, devices)
    return any(tuple(devices) == rank_devices(problem, machines, most) for most in processes_per_machine(problem))


def follows_ranks(problem: Problem, plan: Plan, processes: Iterable[int], *, both: bool) -> bool:
    """Whether the devices of a symmetric plan form a grid along some order of machines, with one of the numbers of
    `processes` on each."""
    copies = [copies_of(stage) for stage in plan.pipelines[0].stages]
    tp, both = len(copies[0][0]), both and len(copies[0]) == 1
    for along in (False, True)[: 1 + both]:
        groups = _groups_by_rank(plan, along)
        machines = _machines_in_order(problem, (group[0] for group in groups))
        if any(rank_groups(problem, machines, tp, most) == groups for most in processes):
            return True
    return False


def _groups_by_rank(plan: Plan, along: bool) -> list[DeviceGroup]:
    """The TP groups in rank order of a plan whose pipelines have equally many stages; see `lay_out`."""
    stages = [[copies_of(stage) for stage in pipeline.stages] for pipeline in plan.pipelines]
    return [group for turn in (stages if along else zip(*stages, strict=True)) for copies in turn for group in copies]


_GRID_OF_ALL = Rule(
    "all, a grid along the machines",
    "a device left out, or devices that are not placed tensor, data, pipeline parallel in order",
    lambda problem, plan: (
        set(plan.devices()) == set(problem.usable_devices)
        and follows_ranks(problem, plan, [len(problem.usable_devices)], both=False)
    ),
)
_GRID_OF_SOME = Rule(
    "of any machines, a grid along them",
    "devices that are not the ranks of a grid",
    lambda problem, plan: follows_ranks(problem, plan, processes_per_machine(problem), both=True),
)
RANKS_OF_SOME = Rule(
    "of any machines",
    "devices that are not the ranks of some machines",
    lambda problem, plan: follow_machines(
        problem, [d for devices in problem.usable_by_machine.values() for d in devices if d in set(plan.devices())]
    ),
)


# Rules of one system.


def _has_stages_of_one_type(problem: Problem, plan: Plan) -> bool:
    """Espresso."""
    slots = zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)
    return all(
        len({problem.cluster.gpu_of(d).name for stage in stage_groups for d in stage.devices}) == 1
        for stage_groups in slots
    )


def _recomputes_first_layers(problem: Problem, plan: Plan) -> bool:
    """Megatron-LM."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    blocks = (MegatronRecompute("full", n) for n in block_lengths(problem, plan.pipelines[0].num_chunks))
    tried = (*map(MegatronRecompute, recompute_policies(problem.workload)), *blocks)
    return any(all(stage.recompute == choice.of(stage.layers) for stage in stages) for choice in tried)


def _has_equal_units(problem: Problem, plan: Plan) -> bool:
    """Sailor."""
    layers = tuple(stage.num_layers for stage in plan.pipelines[0].stages)
    return layers in splits(problem.model.num_layers, len(layers))


def ranks_of(plan: Plan) -> Ranks:
    """Galvatron's ranks: the devices of a plan stage by stage."""
    slots = zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)
    return tuple(d for stage_groups in slots for stage in stage_groups for d in stage.devices)


def choices_of(planner: StagePlanner, plan: Plan) -> list[GalvatronChoice]:
    """The choices of which a plan of alike pipelines may be, one for each pair of policies."""
    first, tps = plan.pipelines[0], tuple(stage.tp for stage in plan.pipelines[0].stages)
    each = len(plan.pipelines), plan.sharding.stage, first.micro_batch_size, first.num_micro_batches
    return [GalvatronChoice(tps, *each, policies) for policies in planner.policies()]


def _has_equal_blocks(problem: Problem, plan: Plan) -> bool:
    """Galvatron."""
    slots = zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True)
    blocks = {sum(len(stage.devices) for stage in stage_groups) for stage_groups in slots}
    return len(blocks) == 1 and follow_machines(problem, ranks_of(plan))


def _is_planned_for_equal_gpus(problem: Problem, plan: Plan) -> bool:
    """Galvatron."""
    planner, ranks = _planner(problem), ranks_of(plan)
    return any(
        plan == plan_of(problem, ranks, choice, split)
        for choice in choices_of(planner, plan)
        for split in planner.splits(ranks, choice)
    )


@lru_cache(maxsize=2)
def _planner(problem: Problem) -> StagePlanner:
    return StagePlanner(PlanPricer(problem))


def _keeps_to_machines(problem: Problem, plan: Plan) -> bool:
    """FlashFlex."""
    machine_of = problem.cluster.machine_of
    for pipeline in plan.pipelines:
        runs = [m for m, _ in groupby(int(machine_of[stage.devices[0]]) for stage in pipeline.stages)]
        if len(set(runs)) < len(runs):
            return False
    return True


def _has_equal_batches(problem: Problem, plan: Plan) -> bool:
    """FlashFlex as released."""
    sequences = [pipeline.num_sequences for pipeline in plan.pipelines]
    return max(sequences) - min(sequences) <= max(pipeline.micro_batch_size for pipeline in plan.pipelines)


def _layers_follow_memory(problem: Problem, plan: Plan) -> bool:
    """FlashFlex as released."""
    return all(
        [stage.num_layers for stage in pipeline.stages]
        == memory_shares(problem, tuple(stage.devices for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )


# Metis.


def _follows_ranks_by_type(problem: Problem, plan: Plan) -> bool:
    """Whether stages are device groups of ranks in order, and idle devices those whose share rounds to no sample."""
    pipelines, count = plan.pipelines, len(plan.pipelines[0].stages)
    used = [[d for pipeline in pipelines for d in pipeline.stages[s].devices] for s in range(count)]
    name_of = {d: problem.cluster.gpu_of(d).name for d in problem.usable_devices}
    machine_of = problem.cluster.machine_of.tolist()
    for name in set(name_of.values()):
        machines = [ordered for devices in used if (ordered := [machine_of[d] for d in devices if name_of[d] == name])]
        if any(max(before) > min(after) for before, after in pairwise(machines)):
            return False
    types = [Counter(name_of[d] for d in devices) for devices in used]
    idle = Counter(name_of.values()) - sum(types, Types())
    samples = sum(pipeline.micro_batch_size for pipeline in pipelines)
    most = [samples * pipelines[0].stages[s].tp for s in range(count)]
    slower = [_slower(_estimates(problem), pipelines, s, set(idle)) for s in range(count)]
    return _are_groups(types, idle, slower, most)


@lru_cache(maxsize=1)
def _estimates(problem: Problem) -> GridEstimates:
    return GridEstimates(PlanPricer(problem))


def _slower(estimates: GridEstimates, pipelines: Sequence[Pipeline], stage: int, names: set[str]) -> set[str]:
    """The types of `names` that get no sample beside a stage's replicas: one takes them at least as long as any."""
    problem, pricer = estimates.problem, estimates.pricer
    first = pipelines[0].stages[stage]

    def layer_s(devices: tuple[int, ...], samples: int) -> float:
        tp_group = frozenset([pricer.tp_group(devices)])
        return estimates.stage_s(tp_group, 1, False, False, samples, first.policy)

    slowest_s = min(
        max(
            layer_s(replica.devices, samples)
            for replica, samples in zip(
                pipeline.stages[stage].parallelism.replicas,
                pipeline.stages[stage].parallelism.samples(pipeline.micro_batch_size),
                strict=True,
            )
        )
        for pipeline in pipelines
    )
    slower = set()
    for machine, devices in problem.usable_by_machine.items():
        name = problem.cluster.machines[machine].gpu.name
        if name in names and len(devices) >= first.tp and layer_s(devices[: first.tp], 1) >= slowest_s:
            slower.add(name)
    return slower


def _are_groups(types: Sequence[Types], idle: Types, slower: Sequence[set[str]], most: Sequence[int]) -> bool:
    """Whether the stages, with idle GPUs added where faster ones leave them idle, are groups of ranks in order.

    A stage has at most `most` GPUs: on average a sample for each replica.
    """
    if not idle:
        powers = all(stage.total() & (stage.total() - 1) == 0 for stage in types)
        return powers and not _alternate([set(stage) for stage in types])
    for s, stage in enumerate(types):
        for name in slower[s] & set(idle):
            # Either all of them, or as many as make the stage a power of two.
            sizes = {1 << k for k in range((stage.total() + idle[name]).bit_length())}
            for more in sorted({size - stage.total() for size in sizes} | {idle[name]}):
                if 0 < more <= min(idle[name], most[s] - stage.total()):
                    here = Counter({name: more})
                    if _are_groups([*types[:s], stage + here, *types[s + 1 :]], idle - here, slower, most):
                        return True
    return False


def _alternate(names: Sequence[set[Any]]) -> bool:
    """Whether a name returns after another, or two names share more than one stage, so that neither comes first."""
    spans = {name: [s for s, stage in enumerate(names) if name in stage] for stage in names for name in stage}
    if any(span[-1] - span[0] + 1 != len(span) for span in spans.values()):
        return True
    return any(
        min(a[-1], b[-1]) > max(a[0], b[0]) for k, a in enumerate(spans.values()) for b in list(spans.values())[:k]
    )


# Symmetric sequence layouts.


def _layouts(plan: Plan) -> list[SequenceParallel | None]:
    ways = [stage.parallelism for pipeline in plan.pipelines for stage in pipeline.stages]
    return [way if isinstance(way, SequenceParallel) else None for way in ways]


def _are_symmetric(_: Problem, plan: Plan) -> bool:
    layouts = [layout for layout in _layouts(plan) if layout is not None]
    groups = [group for layout in layouts for group in layout.groups]
    tokens = [count for group in groups for count in group.tokens]
    return (
        None not in _layouts(plan)
        and len({(len(layout.groups), layout.order) for layout in layouts}) == 1
        and len({(len(group.devices), heads) for group in groups for heads in group.heads}) == 1
        and max(tokens) - min(tokens) <= 1
    )


# All of them.

_SEQUENCES = PublishedSpace(
    schedules=STAGE_SCHEDULES,
    sharding=tuple(Sharding(stage, groups) for stage, groups in product(SHARDING_STAGES, SHARDING_GROUPS)),
    stages=Rule(
        "a symmetric sequence layout",
        "a stage without a sequence layout, or unequal groups, orders, heads or shards",
        _are_symmetric,
    ),
    tp=Rule("none; any groups", "", lambda *_: True),
    layers=EQUAL_LAYERS,
)
_RING = Rule(
    "none; groups of one",
    "an all-to-all",
    lambda _, plan: all(layout and len(layout.groups[0].devices) == 1 for layout in _layouts(plan)),
)
_ALL_TO_ALL = Rule(
    "none; one group",
    "a ring",
    lambda _, plan: all(layout and len(layout.groups) == 1 for layout in _layouts(plan)),
)

SPACES: Mapping[str, PublishedSpace] = {
    "amp": PublishedSpace(schedules=RUNS_1F1B[:1], tp=ONE_TP_OF_MODEL, devices=_GRID_OF_ALL),
    "espresso": PublishedSpace(
        devices=Rule("any, of one GPU type a stage", "several GPU types in a stage", _has_stages_of_one_type)
    ),
    "flashflex": PublishedSpace(
        schedules=SCHEDULES,
        pipelines=ANY_PIPELINES,
        tp=ANY_TP,
        devices=Rule(
            "all, no pipeline returns to a machine",
            "a device left out, or a pipeline that comes back to a machine",
            lambda problem, plan: ALL_DEVICES.holds(problem, plan) and _keeps_to_machines(problem, plan),
        ),
        batches=ANY_BATCHES,
    ),
    "fsdp": PublishedSpace(
        schedules=STAGE_SCHEDULES,
        sharding=STRATEGIES,
        pipelines=SINGLE_STAGES,
        tp=NO_TP,
        recompute=ALIKE_RECOMPUTE,
        devices=RANKS_OF_SOME,
    ),
    "galvatron": PublishedSpace(
        sharding=tuple(map(Sharding, ZEROS)),
        stages=REPLICATED_STAGES,
        pipelines=POWERS_OF_TWO,
        layers=Rule(
            "planned for the slowest GPU",
            "layers or recompute that are not planned for GPUs that are all alike",
            _is_planned_for_equal_gpus,
        ),
        tp=TP_PER_STAGE,
        recompute=Rule("full where memory asks", "", lambda *_: True),  # which the rule of layers checks too
        devices=Rule(
            "of any machines, equally many a stage",
            "unequally many GPUs in stages, or devices that are not the ranks of machines in some order",
            _has_equal_blocks,
        ),
    ),
    "megatron": PublishedSpace(
        stages=INTERLEAVED_STAGES,
        tp=ONE_TP_OF_MODEL,
        layers=Rule(
            "equal but in first and last stage",
            "unequal layers of middle stages",
            lambda _, plan: len({stage.num_layers for stage in plan.pipelines[0].stages[1:-1]}) <= 1,
        ),
        recompute=Rule(
            "one policy, or full of first layers",
            "several recompute policies, but not full of the first layers",
            _recomputes_first_layers,
        ),
        devices=_GRID_OF_SOME,
    ),
    "metis_atc24": PublishedSpace(
        stages=REPLICATED_STAGES,
        tp=TP_PER_STAGE,
        devices=Rule(
            "all by type, powers of two a stage, slow ones may idle",
            "stages that are no powers of two of ranks in order, GPU types one after another, slow replicas idle or "
            "none",
            _follows_ranks_by_type,
        ),
    ),
    "sailor": PublishedSpace(
        tp=ANY_TP,
        batches=BATCHES_WITHIN_ONE,
        layers=Rule("equal, ends counted or not", "unequal layers", _has_equal_units),
    ),
    "ring": replace(_SEQUENCES, tp=_RING),
    "ulysses": replace(_SEQUENCES, tp=_ALL_TO_ALL),
    "usp": _SEQUENCES,
}
FLASHFLEX_AS_RELEASED = replace(
    SPACES["flashflex"],
    devices=ALL_DEVICES,
    batches=Rule("equal, within one micro-batch", "unequal batches", _has_equal_batches),
    layers=Rule("by the memory of stages", "layers that do not follow the memory of stages", _layers_follow_memory),
)
