"""A candidate and its times, and the scratch arrays of a thread. What the fields mean: see the package."""

from typing import Any, NamedTuple

import numpy as np

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.tables import Tables

MOST_ARRIVALS = 128  # forwards that have come to a stage and are not begun: how much deeper the one before may be
OPTION_SLOTS = 1 << 13  # stages whose least seconds by layers are remembered: 8 bytes each a layer

PLAN = np.dtype(
    [
        ("num_pipelines", "i8"),
        ("zero_stage", "i8"),
        ("by_machine", "i8"),
        ("policy", "i8"),
        ("forwards_first", "i8"),
        ("holders", "i8"),
        ("apart", "i8"),
        ("step_s", "f8"),
        ("pipeline_s", "f8"),
        ("relaxed_s", "f8"),
    ],
    align=True,
)
PIPELINE = np.dtype(
    [
        ("num_stages", "i8"),
        ("size", "i8"),
        ("fits", "i8"),
        ("batches", "i8"),
        ("timed", "i8"),
        ("in_flight", "i8"),
        ("shape", "i8"),
        ("missing", "f8"),
        ("end_s", "f8"),
        ("period_s", "f8"),
        ("layer_sum", "f8"),  # tells layers that balance compute from others
    ],
    align=True,
)
STAGE = np.dtype(
    [
        ("machine", "i8"),
        ("mask", "i8"),
        ("degree", "i8"),
        ("group", "i8"),
        ("layers", "i8"),
        ("room", "i8"),
        ("sums", "i8"),
        ("holders", "i8"),
        ("depth", "i8"),
        ("forward_s", "f8"),
        ("backward_s", "f8"),
        ("late_s", "f8"),
        ("send_s", "f8"),
        ("return_s", "f8"),
        ("early_s", "f8"),
    ],
    align=True,
)
COLUMN = np.dtype(  # of the stages of the pipeline in hand
    [
        ("offset", "i8"),  # in `option_s` of the seconds of 1, 2, ... layers
        ("most", "i8"),  # layers that fit
        ("kept", "i8"),  # layers before
        ("added_s", "f8"),  # seconds beside layers, while these are divided
        ("kept_forward_s", "f8"),
        ("kept_backward_s", "f8"),
        ("was_busy_s", "f8"),  # `busy_s` to `back_s` some rounds ago
        ("was_came_s", "f8"),
        ("was_ahead_s", "f8"),
        ("was_back_s", "f8"),
        ("busy_s", "f8"),  # the stage is free from then on
        ("came_s", "f8"),  # its gradient has come by then
        ("ahead_s", "f8"),  # the link to the next stage is free from then on
        ("back_s", "f8"),  # the link to the stage before
        ("send_s", "f8"),  # messages as the network is now
        ("return_s", "f8"),
        ("late_layers", "i8"),  # of a backward, put off
        ("waiting", "i8"),  # layers that are put off
        ("holding", "i8"),  # micro-batches in flight
        ("layer_s", "f8"),  # weight gradients of a layer
        ("stored_bytes", "f8"),  # a micro-batch in flight
        ("layer_bytes", "f8"),  # a layer put off
        ("begin_bytes", "f8"),  # that a backward works with beside, at its beginning
        ("last_bytes", "f8"),  # and at its end
        ("room_bytes", "f8"),  # for all of these
    ],
    align=True,
)
CURSOR = np.dtype([("stage", "i8"), ("end", "i8")], align=True)  # where a pipeline is among the layers
MEMBER = np.dtype(  # of a ring: a stage, and of it what rings ask
    [
        ("pipeline", "i8"),
        ("stage", "i8"),
        ("machine", "i8"),
        ("mask", "i8"),
        ("degree", "i8"),
        ("key", "i8"),  # orders by machine, then by device
    ],
    align=True,
)
RING = np.dtype(
    [
        ("first", "i8"),  # members `first` to `end`
        ("end", "i8"),
        ("between", "i8"),  # 1: of machines, whose devices have shards each
        ("lanes", "i8"),  # interfaces that it uses in each machine; 0: inside one machine
        ("degree", "i8"),  # the largest of its members: so many slices of a parameter are rings of their own
        ("held", "i8"),  # the most members in a machine
        ("machines", "i8"),
        ("params", "f8"),
        ("last", "f8"),  # those that a backward ends with
        ("s_per_byte", "f8"),  # seconds of a pass, for a byte of each parameter
        ("latency_s", "f8"),
    ],
    align=True,
)
TIMES = np.dtype(  # of a stage in a step
    [
        ("begin_s", "f8"),  # its pipeline runs so long before its first forward
        ("late_s", "f8"),  # of a first stage: its pipeline begins so much later than optimisers
        ("ready_s", "f8"),  # its last backward has ended
        ("summed_s", "f8"),  # its gradients are summed inside sharding groups
        ("ended_s", "f8"),  # and everywhere
        ("optimizer_s", "f8"),
        ("left_s", "f8"),  # compute beside which sums between groups may run
        ("port", "f8"),  # of its devices: seconds for a byte of each parameter that they send inside the machine
        ("wait_s", "f8"),  # latencies of its rings, one after another
        ("between_wait_s", "f8"),
        ("ring", "i8"),  # the last one inside its machine; -1: none yet
        ("converts", "i8"),  # 1: of it gradients are converted to be summed
        ("step_s", "f8"),  # the optimizer's memory traffic, of the states that a device has
        ("tied_s", "f8"),  # and of a tied matrix's, where they are spread over both ends
    ],
    align=True,
)


class SearchState(NamedTuple):
    """A candidate: `plan` [1], `pipelines` [most pipelines], `stages` [most pipelines, most stages], `free`
    [machines]."""

    plan: Any
    pipelines: Any
    stages: Any
    free: Any


class SearchWork(NamedTuple):
    """Scratch arrays of one thread.

    `option_key` [slots], `option_most` [slots], `option_s` [slots · layers], `option_count` [1]: least seconds of a
    stage by its layers. `touched` [pipelines]: 1 changed, 2 to be timed; `listed` [1 + pipelines]: how many, and which.
    `columns` [stages], `arrivals` [stages, forwards], `load`, `ahead`, `back` [resources], `used` [1 + 2 · resources].
    `active`, `batches` [pipelines]. `cursors` [pipelines], `rings`, `members` and `times` [pipelines, stages] are of
    the step.
    """

    option_key: Any
    option_most: Any
    option_s: Any
    option_count: Any
    touched: Any
    listed: Any
    columns: Any
    arrivals: Any
    load: Any
    ahead: Any
    back: Any
    used: Any
    active: Any
    batches: Any
    cursors: Any
    rings: Any
    members: Any
    times: Any


def new_state(tables: Tables) -> SearchState:
    """A candidate without pipelines, under the first sharding mode that the problem allows."""
    limits = tables.problem[0]
    pipelines, stages = int(limits["most_pipelines"]), int(limits["most_stages"])
    plan = np.zeros(1, PLAN)
    plan["zero_stage"], plan["by_machine"] = tables.modes[0]
    plan["policy"], plan["forwards_first"] = limits["policy"], limits["only_forwards_first"]
    return SearchState(
        plan, np.zeros(pipelines, PIPELINE), np.zeros((pipelines, stages), STAGE), tables.machines["usable"].copy()
    )


def new_work(tables: Tables) -> SearchWork:
    """Scratch arrays for candidates of `tables`."""
    limits = tables.problem[0]
    pipelines, stages, layers = (int(limits[name]) for name in ("most_pipelines", "most_stages", "num_layers"))
    resources = len(tables.s_per_byte)
    segments = min(layers, pipelines * stages) + 2
    whole = np.int64
    return SearchWork(
        np.full(OPTION_SLOTS, -1, whole),
        np.zeros(OPTION_SLOTS, whole),
        np.zeros(OPTION_SLOTS * layers),
        np.zeros(1, whole),
        np.zeros(pipelines, whole),
        np.zeros(1 + pipelines, whole),
        np.zeros(stages + 1, COLUMN),
        np.zeros((stages + 1, MOST_ARRIVALS)),
        np.zeros(resources),
        np.zeros(resources),
        np.zeros(resources),
        np.zeros(1 + 2 * resources, whole),
        np.zeros(pipelines, whole),
        np.zeros(pipelines, whole),
        np.zeros(pipelines, CURSOR),
        np.zeros(segments * (2 + pipelines // 2) + pipelines, RING),
        np.zeros((segments + 3) * pipelines + 1, MEMBER),
        np.zeros((pipelines, stages), TIMES),
    )


@entry
def touch(work: Any, p: int) -> None:
    """Note that pipeline `p` has changed."""
    touched, listed = work.touched, work.listed
    if touched[p] == 0:
        listed[0] += 1
        listed[listed[0]] = p
        touched[p] = 1


@entry
def forget_touched(work: Any) -> None:
    """Begin the next candidate: nothing has changed."""
    touched, listed = work.touched, work.listed
    for k in range(listed[0]):
        touched[listed[1 + k]] = 0
    listed[0] = 0


@entry
def touch_all(work: Any, state: Any) -> None:
    """Note that every pipeline has changed."""
    for p in range(state.plan[0].num_pipelines):
        touch(work, p)


@kernel
def copy_free(source: Any, target: Any) -> None:
    """The free devices of `source` into `target` [machines]."""
    for m in range(len(source)):
        target[m] = source[m]


@kernel
def copy_pipeline(source: Any, target: Any, p: int) -> None:
    """Pipeline `p` of `source` into `target`."""
    target.pipelines[p] = source.pipelines[p]
    for s in range(source.pipelines[p].num_stages):
        target.stages[p, s] = source.stages[p, s]


@entry
def copy_state(source: Any, target: Any) -> None:
    """All of `source` that is in use into `target`."""
    target.plan[0] = source.plan[0]
    copy_free(source.free, target.free)
    for p in range(source.plan[0].num_pipelines):
        copy_pipeline(source, target, p)


@entry
def copy_rows(work: Any, source: Any, target: Any) -> None:
    """The touched pipelines of `source` into `target`, which is equal but for them."""
    target.plan[0] = source.plan[0]
    copy_free(source.free, target.free)
    listed = work.listed
    for k in range(listed[0]):
        p = listed[1 + k]
        if p < source.plan[0].num_pipelines:
            copy_pipeline(source, target, p)
