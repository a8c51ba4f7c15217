"""A backend of torch.distributed that keeps the order of NCCL on a CPU, where gloo keeps none: what would hang on GPUs
hangs here, is known to hang at once, and is reported with who waits for whom.

Ranks are threads of one process. What they enqueue stands in queues, and runs when it has reached the head of the
queues of all who take part, as late as possible: not before every host waits. Each communicator of a rank has a queue
of its own, as NCCL's kernels have a stream; or, stricter, a rank has `one_queue` for all, as where kernels find no room
beside each other or NCCL_LAUNCH_ORDER_IMPLICIT keeps them in order. `lazy` communicators are made when they are first
used, and hold up the host until all their ranks use them.

Tags are ignored. What comes in can be seen after `wait` only, and is NaN until then; what is sent is read when it runs.
`wait` blocks the host: on a GPU it blocks the current stream, and all that is enqueued later waits for that. A step
hangs when every host is blocked and nothing can run, whatever the time.
"""

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # optimisers import it at first use
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    HashStore,
    _set_thread_isolation_mode,
)
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from runtime.parallel.gradient_sync import GradientSync
from runtime.parallel.messages import StageMessages
from runtime.parallel.weight_store import WeightStore

NAME = "stream_order"


class HungError(Exception):
    """The step hangs; the message says who waits for whom."""


@dataclass(eq=False)
class _Exchange:
    """Something that `ranks` do together: `run` gets what each gave, by rank, once all are there. Those of another
    `kind` that meet hang on a GPU, or mix up what they move."""

    ranks: tuple[int, ...]
    kind: str
    run: Callable[[dict[int, Any]], None]
    given: dict[int, Any] = field(default_factory=dict)
    entries: dict[int, "_Entry"] = field(default_factory=dict)
    done: bool = False


class _Entry(dist.Work):
    """What a rank has enqueued: exchanges that run beside each other, and where their results go once waited for."""

    def __init__(self, world: "World", rank: int, label: str, queue: deque["_Entry"]) -> None:
        super().__init__()
        self.world, self.rank, self.label, self.queue = world, rank, label, queue
        self.exchanges: list[_Exchange] = []
        self.late: list[tuple[Tensor, Tensor]] = []

    def is_completed(self) -> bool:
        return all(exchange.done for exchange in self.exchanges)

    def wait(self, timeout: Any = None) -> bool:
        self.world.block(self.rank, f"waits for {self.label}", self.is_completed, self)
        for real, copy in self.late:
            real.copy_(copy)
        self.late = []
        return True


@dataclass(eq=False)
class _Blocked:
    label: str
    is_over: Callable[[], bool]
    entry: _Entry | None
    missing: Callable[[], list[int]] = list


class World:
    """All that the ranks of a run have enqueued."""

    def __init__(self, size: int, one_queue: bool, lazy: bool) -> None:
        self.size, self.one_queue, self.lazy = size, one_queue, lazy
        self.changed = threading.Condition()
        self.queues: dict[tuple[Any, ...], deque[_Entry]] = {}
        self.exchanges: dict[tuple[Any, ...], _Exchange] = {}
        self.blocked: dict[int, _Blocked] = {}
        self.ended: set[int] = set()
        self.doing: dict[int, str] = {}
        self.made: dict[Any, set[int]] = {}
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.failure: BaseException | None = None

    def block(self, rank: int, label: str, is_over: Callable[[], bool], entry: _Entry | None = None,
              missing: Callable[[], list[int]] = list) -> None:  # fmt: skip
        """Hold up a rank's host until it is over."""
        with self.changed:
            self.blocked[rank] = _Blocked(label, is_over, entry, missing)
            self._run_if_all_wait()
            while not is_over():
                if self.failure is not None:
                    raise self.failure
                self.changed.wait()
            del self.blocked[rank]

    def end(self, rank: int, failure: BaseException | None = None) -> None:
        with self.changed:
            self.ended.add(rank)
            self.failure = self.failure or failure
            self._run_if_all_wait()
            self.changed.notify_all()

    def post(self, entry: _Entry, given: Sequence[tuple[tuple[Any, ...], _Exchange, Any]]) -> None:
        """Enqueue exchanges (by keys that are equal on all their ranks), each with what the rank gives."""
        with self.changed:
            for key, new_exchange, mine in given:
                number = self.counts[entry.rank, key]
                self.counts[entry.rank, key] += 1
                exchange = self.exchanges.setdefault((*key, number), new_exchange)
                if exchange.kind != new_exchange.kind:
                    other, theirs = next(iter(exchange.entries.items()))
                    raise HungError(f"rank {entry.rank}'s {entry.label} meets rank {other}'s {theirs.label}")
                exchange.given[entry.rank], exchange.entries[entry.rank] = mine, entry
                entry.exchanges.append(exchange)
            entry.queue.append(entry)

    def _run_if_all_wait(self) -> None:
        if len(self.ended) + len(self.blocked) < self.size or self.failure is not None:
            return
        self._run()
        if self.blocked and not any(waiter.is_over() for waiter in self.blocked.values()):
            self.failure = HungError("\n".join(self._description(rank) for rank in range(self.size)))
        self.changed.notify_all()

    def _run(self) -> None:
        """Run whatever can run."""
        moved = True
        while moved:
            moved = False
            for queue in self.queues.values():
                for exchange in queue[0].exchanges if queue else ():
                    if not exchange.done and all(self._is_at_head(exchange, rank) for rank in exchange.ranks):
                        exchange.run(exchange.given)
                        exchange.done = moved = True
                while queue and queue[0].is_completed():
                    queue.popleft()
                    moved = True

    def _is_at_head(self, exchange: _Exchange, rank: int) -> bool:
        entry = exchange.entries.get(rank)
        return entry is not None and entry.queue[0] is entry

    def _description(self, rank: int) -> str:
        if rank not in self.blocked:
            return f"rank {rank} has ended"
        waiter = self.blocked[rank]
        line = f"rank {rank} {waiter.label}"
        if waiter.entry is None:
            return f"{line}: not there are ranks {waiter.missing()}"
        head = waiter.entry.queue[0]
        if head is not waiter.entry:
            line += f", behind {head.label}"
        for exchange in head.exchanges:
            for other in exchange.ranks:
                if not self._is_at_head(exchange, other):
                    theirs = exchange.entries.get(other)
                    why = "has not come to it" if theirs is None else f"has it behind {theirs.queue[0].label}"
                    return f"{line}: rank {other} {why}"
        return line

    def leftover(self) -> list[str]:
        """What was enqueued and never ran."""
        with self.changed:
            return [f"rank {entry.rank}: {entry.label}" for queue in self.queues.values() for entry in queue]


_WORLD: list[World] = []  # the one that runs


def synchronize() -> None:
    """As of torch.cuda: this rank's host waits for all that it has enqueued."""
    world, rank = _WORLD[0], dist.get_rank()
    entries = [entry for key, queue in world.queues.items() if key[0] == rank for entry in queue]
    for entry in entries:
        world.block(rank, f"synchronises, and so waits for {entry.label}", entry.is_completed, entry)


class StreamOrder(dist.ProcessGroup):
    """A group of ranks. Collectives have the names of torch 2.13."""

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.global_rank, self.world, self.key = self.ranks[options.group_rank], _WORLD[0], options.group_id

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _entry(self, label: str) -> _Entry:
        world = self.world
        if world.lazy:
            with world.changed:
                made = world.made.setdefault(self.key, set())
                made.add(self.global_rank)
            world.block(self.global_rank, f"makes the communicator of ranks {self.ranks}",
                        lambda: len(made) == len(self.ranks), None, lambda: sorted(set(self.ranks) - made))  # fmt: skip
        key = (self.global_rank,) if world.one_queue else (self.global_rank, self.key)
        with world.changed:
            queue = world.queues.setdefault(key, deque())
        doing = world.doing.get(self.global_rank)
        return _Entry(world, self.global_rank, f"{doing}: {label}" if doing else label, queue)

    def _together(
        self, kind: str, run: Callable[[list[Any]], None], given: Any, comes: Sequence[Tensor] = ()
    ) -> _Entry:
        entry = self._entry(f"{kind} of ranks {self.ranks}")
        copies = _hide(comes, entry)
        what = entry.label
        if kind != "all_to_all":  # of which each rank has sizes of its own
            what += f", {sum(tensor.numel() for tensor in comes)} elements"
        exchange = _Exchange(self.ranks, what, lambda by_rank: run([by_rank[rank] for rank in self.ranks]))
        self.world.post(entry, [((self.key,), exchange, (copies, given))])
        return entry

    def _transfer(self, entry: _Entry, peer: int, tensor: Tensor, sends: bool) -> Any:
        other = self.ranks[peer]
        sender, receiver = (self.global_rank, other) if sends else (other, self.global_rank)

        def run(by_rank: dict[int, Any]) -> None:
            assert by_rank[sender].shape == by_rank[receiver].shape, (
                f"{by_rank[sender].shape} to {by_rank[receiver].shape}"
            )
            by_rank[receiver].copy_(by_rank[sender])

        given = tensor if sends else _hide([tensor], entry)[0]
        exchange = _Exchange(tuple(sorted((sender, receiver))), f"message from {sender} to {receiver}", run)
        return (self.key, sender, receiver), exchange, given

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Entry:
        entry = self._entry(f"send to {self.ranks[peer]}")
        self.world.post(entry, [self._transfer(entry, peer, tensors[0], True)])
        return entry

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Entry:
        entry = self._entry(f"receive from {self.ranks[peer]}")
        self.world.post(entry, [self._transfer(entry, peer, tensors[0], False)])
        return entry

    def batch(self, operations: Sequence[dist.P2POp]) -> list[_Entry]:
        """As one kernel of NCCL: all beside each other."""
        entry = self._entry(f"messages with {sorted({self.ranks[operation.group_peer] for operation in operations})}")
        sends = [operation.op is dist.isend for operation in operations]
        given = [
            self._transfer(entry, operation.group_peer, operation.tensor, send)
            for operation, send in zip(operations, sends, strict=True)
        ]
        self.world.post(entry, given)
        return [entry]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Entry:  # type: ignore[override]
        most = opts is not None and opts.reduceOp == dist.ReduceOp.MAX

        def run(each: list[Any]) -> None:
            stacked = torch.stack([copies[0] for copies, _ in each])
            result = stacked.amax(dim=0) if most else stacked.sum(dim=0)
            for copies, _ in each:
                copies[0].copy_(result)

        return self._together("all_reduce", run, None, tensors)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Entry:
        def run(each: list[Any]) -> None:
            whole = torch.cat([mine.reshape(-1) for _, mine in each])
            for copies, _ in each:
                copies[0].view(-1).copy_(whole)

        if tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():  # in place, which NCCL allows
            tensor = tensor.clone()
        return self._together("all_gather", run, tensor, [out])

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> _Entry:
        def run(each: list[Any]) -> None:
            shares = torch.stack([mine.reshape(-1) for _, mine in each]).sum(dim=0).chunk(len(each))
            for (copies, _), share in zip(each, shares, strict=True):
                copies[0].view(-1).copy_(share)

        return self._together("reduce_scatter", run, tensor, [out])

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, out_sizes: list[int], own_sizes: list[int], opts: Any = None
    ) -> _Entry:
        def run(each: list[Any]) -> None:
            parts = [mine.split(sizes) for _, (mine, sizes) in each]
            for place, (copies, _) in enumerate(each):
                copies[0].copy_(torch.cat([row[place] for row in parts]))

        return self._together("all_to_all", run, (tensor, own_sizes), [out])

    def barrier(self, opts: Any = None) -> _Entry:
        return self._together("barrier", lambda each: None, None)


def _hide(comes: Sequence[Tensor], entry: _Entry) -> list[Tensor]:
    """Copies to fill instead of tensors that nobody may read yet."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in comes]
    for hidden, copy in zip(comes, copies, strict=True):
        if hidden.is_floating_point():
            hidden.fill_(torch.nan)
        entry.late.append((hidden, copy))
    return copies


dist.Backend.register_backend(NAME, StreamOrder, extended_api=True, devices="cpu")


def _batch(operations: list[dist.P2POp]) -> list[_Entry]:
    group = operations[0].group
    assert isinstance(group, StreamOrder)
    return group.batch(operations)


def _with_label(method: Callable[..., Any]) -> Callable[..., Any]:
    """What the step is doing stands beside the name of what it enqueues."""

    def call(self: Any, action: Any, *arguments: Any) -> Any:
        doing, rank = _WORLD[0].doing, dist.get_rank()
        doing[rank] = str(action)
        try:
            return method(self, action, *arguments)
        finally:
            del doing[rank]

    return call


def run_in_order(size: int, work: Callable[[int], Any], *, one_queue: bool = True, lazy: bool = False) -> list[Any]:
    """What `work(rank)` returns on each rank of a world over `stream_order`. Raises HungError, and what ranks raise."""
    world, results, store = World(size, one_queue, lazy), [None] * size, HashStore()

    def rank(number: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group(NAME, store=store, rank=number, world_size=size)
            results[number] = work(number)
            world.end(number)
        except BaseException as error:
            if not isinstance(error, HungError):
                error.add_note(f"on rank {number}: {traceback.format_exc()}")
            world.end(number, error)

    _WORLD.append(world)
    _install_threaded_pg()  # each thread has groups of its own; so has what C++ knows by name
    _set_thread_isolation_mode(True)
    try:
        with (
            patch.object(dist, "batch_isend_irecv", _batch),
            patch.multiple(
                StageMessages, send=_with_label(StageMessages.send), expect=_with_label(StageMessages.expect)
            ),
            patch.object(GradientSync, "start", _with_label(GradientSync.start)),
            patch.object(WeightStore, "gather", _with_label(WeightStore.gather)),
        ):
            threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        _set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        _WORLD.clear()
    if world.failure is not None:
        raise world.failure
    assert not world.leftover()
    return results
