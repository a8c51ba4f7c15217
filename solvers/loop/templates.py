"""Chains of one or two kinds of machines and how well they use their devices, of which the master (`starts.py`) makes
candidates."""

from typing import Any

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.layers import split
from solvers.loop.edits import count_devices, dissolve, lowest
from solvers.loop.rebuild import build

_HOLDERS, _ROOM = 8, 24  # of states, and for groups that sum gradients, as chains are judged alone
_SHARES = (0.25, 0.5, 0.75)  # of what a kind alone takes, in chains of two


@kernel
def fill_probe(tables: Any, state: Any, place: Any, chain: Any) -> None:
    """Let pipeline 0 of a scratch candidate be `chain`; `place` [kinds]: a machine of each kind."""
    state.pipelines[0].num_stages, state.pipelines[0].size = chain[0], chain[1]
    for s in range(chain[0]):
        stage, m = state.stages[0, s], place[chain[2 + 2 * s]]
        stage.machine, stage.mask, stage.room = m, lowest(tables.machines[m].usable, chain[3 + 2 * s]), _ROOM


@kernel
def sync_s(tables: Any, state: Any, place: Any, chain: Any) -> Any:
    """Seconds in which the interfaces of a machine pass the gradients and weights of the layers that it holds: at most
    those of as many stages as have room in it."""
    problem, longest = tables.problem[0], 0.0
    for s in range(chain[0]):
        kind = chain[2 + 2 * s]
        machine, layers = tables.machines[place[kind]], 0
        room = max(1, count_devices(machine.usable) // chain[3 + 2 * s])
        for t in range(s, min(chain[0], s + room)):
            if chain[2 + 2 * t] == kind:
                layers += state.stages[0, t].layers
        passed = layers * problem.layer_params * (problem.sum_bytes + problem.weight_bytes)
        longest = max(longest, passed * tables.s_per_byte[machine.first_interface] / machine.num_interfaces)
    return longest


@kernel
def worth(tables: Any, work: Any, state: Any, place: Any, value: Any, chain: Any) -> Any:
    """Sequences a second of a chain, gradients included, for the value of its devices, when its share of the batch is
    by value; 0 where it does not fit. `value` [kinds + 1] of a device by kind, and of all devices together."""
    fill_probe(tables, state, place, chain)
    plan, pipeline = state.plan[0], state.pipelines[0]
    plan.num_pipelines, plan.holders = 1, _HOLDERS
    total = 0.0
    for s in range(chain[0]):
        total += chain[3 + 2 * s] * value[chain[2 + 2 * s]]
        state.stages[0, s].holders = _HOLDERS
    size = tables.sizes[chain[1]]
    batches = max(1.0, tables.problem[0].global_batch * total / value[len(value) - 1] / size)
    pipeline.in_flight = max(1, int(batches))
    split(tables, work, state, 0)
    if not pipeline.fits:
        return 0.0
    period, once = 0.0, 0.0
    for s in range(chain[0]):
        seconds = state.stages[0, s].forward_s + state.stages[0, s].backward_s
        once += seconds
        period = max(period, seconds)
    step = once - period + batches * period + sync_s(tables, state, place, chain)
    return batches * size / (step * total)


@kernel
def set_run(chain: Any, first: int, count: int, kind: int, degree: int) -> None:
    """Let `count` stages of a chain from number `first` on be on a kind of machines, and the chain end with them."""
    for s in range(first, first + count):
        chain[2 + 2 * s], chain[3 + 2 * s] = kind, degree
    chain[0] = first + count


@kernel
def fewest(tables: Any, work: Any, state: Any, place: Any, value: Any, chain: Any, run: Any) -> Any:
    """The fewest further stages with which a chain fits, of at most `run[3]`; 0 where none do. `run`: stages before,
    kind, degree, most."""
    low, high = 0, 1
    while True:
        high = min(high, run[3])
        set_run(chain, run[0], high, run[1], run[2])
        if worth(tables, work, state, place, value, chain) > 0.0:
            break
        low = high
        if high >= run[3]:
            return 0
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        set_run(chain, run[0], middle, run[1], run[2])
        if worth(tables, work, state, place, value, chain) > 0.0:
            high = middle
        else:
            low = middle
    return high


@kernel
def note(chain: Any, found: float, book: Any) -> None:
    """Write a chain and its worth into `book`, if there is room."""
    chains, worths, count = book
    if count[0] < len(worths):
        for k in range(2 + 2 * chain[0]):
            chains[count[0], k] = chain[k]
        worths[count[0]] = found
        count[0] += 1


@kernel
def offer_lengths(tables: Any, work: Any, state: Any, place: Any, value: Any, chain: Any, run: Any, book: Any) -> Any:
    """Chains with the fewest further stages and some more, into `book`: chains, their worths, and how many they are."""
    least = fewest(tables, work, state, place, value, chain, run)
    if least == 0:
        return 0
    for extra in (0, 1, 2, 4, least):
        if least + extra > run[3]:
            continue
        set_run(chain, run[0], least + extra, run[1], run[2])
        found = worth(tables, work, state, place, value, chain)
        if found > 0.0:
            note(chain, found, book)
    return least


@entry
def list_chains(tables: Any, work: Any, state: Any, values: Any, limits: Any, scratch: Any, book: Any) -> None:
    """All chains of one kind, and of two where each has a quarter to three quarters of what it would take alone, into
    `book` until that is full. `values`: place, value (`worth`). `limits` [kinds + 1]: most groups
    of a kind at degree 1; sizes that are tried. `scratch`: a chain, and stages alone [kinds, degrees]."""
    place, value = values
    kinds, most_stages = len(place), min(state.stages.shape[1], tables.problem[0].num_layers)
    chain, alone = scratch
    for size in range(limits[kinds]):
        chain[1] = size
        for a in range(kinds):
            for d in range(len(tables.degrees)):
                degree = tables.degrees[d]
                alone[a, d] = 0
                if place[a] < 0 or count_devices(tables.machines[place[a]].usable) < degree:
                    continue
                if tables.kind_group[a, degree] >= 0:
                    run = (0, a, degree, min(most_stages, limits[a] // degree))
                    alone[a, d] = offer_lengths(tables, work, state, place, value, chain, run, book)
                    if alone[a, d] == 0:
                        alone[a, d] = -run[3]  # more than there are
        for a in range(kinds):
            for d in range(len(tables.degrees)):
                for b in range(kinds):
                    for e in range(len(tables.degrees)):
                        if a == b or alone[a, d] == 0 or alone[b, e] == 0:
                            continue
                        before = 0
                        for share in _SHARES:
                            first = max(1, int(share * abs(alone[a, d])))
                            rest = min(most_stages - first, limits[b] // tables.degrees[e])
                            if first == before or rest < 1:
                                continue
                            before = first
                            set_run(chain, 0, first, a, tables.degrees[d])
                            run = (first, b, tables.degrees[e], rest)
                            least = fewest(tables, work, state, place, value, chain, run)
                            if least > 0:
                                set_run(chain, first, least, b, tables.degrees[e])
                                note(chain, worth(tables, work, state, place, value, chain), book)


@entry
def build_copies(tables: Any, work: Any, state: Any, kit: Any, chain: Any, most: int) -> int:
    """Build a chain up to `most` times, on machines of the copy before where they have room; how many were built."""
    count = 0
    while count < most and build(tables, work, state, kit, chain, state.plan[0].num_pipelines - 1 if count else -1):
        count += 1
    return count


@entry
def dissolve_last(work: Any, state: Any, count: int) -> None:
    """The last `count` pipelines go, and their devices are free."""
    for _ in range(count):
        dissolve(work, state, state.plan[0].num_pipelines - 1)
