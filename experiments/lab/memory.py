"""What a rank of a training run holds, by the parts of `Memory`: of its own tensors, of what autograd saves, at most.

States are counted from the tensors themselves. Activations and logits are the storages that autograd has saved for
backwards still to come, each once, however many operations saved it, and without parameters and tables, which last:
at the moment when most are alive.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from experiments.lab.devices import forget_peak
from hexiopt.cost.executors.memory import Memory
from hexiopt.own_packages import own_package
from runtime.device import gpu_peak_bytes
from runtime.parallel.pipeline import Sequences
from runtime.saved import counting
from runtime.training.trainee import Trainee


@dataclass(frozen=True)
class States:
    """Tensors that last: the states of a rank, and the tables that all its layers read."""

    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    masters: tuple[Tensor, ...]
    moments: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]

    @staticmethod
    def of(trainee: Trainee) -> "States":
        """Those of a rank."""
        flat = (bucket.weight for bucket in trainee.buckets if bucket.weight is not None)
        return States(
            weights=(*trainee.weights.values(), *flat),
            gradients=tuple(bucket.gradient for bucket in trainee.buckets),
            masters=tuple(master for master in trainee.optimizer.masters if master is not None),
            moments=tuple(moment for moments in trainee.optimizer.moments for moment in moments.values()),
            tables=tuple(_tables(trainee.calls)),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.moments + self.tables

    def bytes_of(self) -> dict[str, int]:
        """Bytes by part of `Memory`."""
        return {
            "weights": _bytes(self.weights),
            "gradients": _bytes(self.gradients),
            "master": _bytes(self.masters),
            "optimizer": _bytes(self.moments),
            "buffers": _bytes(self.tables),
        }


@dataclass(frozen=True)
class Used:
    """What a rank held in some computing: the most of each part, and the most of all at once.

    Of `communicators` and `reserve` there is none. `peak_bytes` counts also tensors of a moment: on a GPU those of
    torch's allocator, elsewhere what operations made.
    """

    parts: Memory
    peak_bytes: int


def memory_use(
    states: States, device: torch.device, compute: Callable[[], Any], most_message_bytes: Callable[[], int]
) -> Used:
    """What `compute` uses; `most_message_bytes` says afterwards what its messages held at most."""
    lasting, by_part = states.tensors(), states.bytes_of()
    saved, alive = _Saved(lasting, states.weights), _Alive(lasting)
    forget_peak(device)
    with saved.hooks(), alive, counting(saved):
        compute()
    peak_bytes = gpu_peak_bytes(device) or sum(by_part.values()) + alive.most
    by_part["buffers"] += most_message_bytes()
    most = saved.most
    parts = Memory(**by_part, activations=most["activations"], logits=most["logits"], communicators=0, reserve=0)
    return Used(parts, peak_bytes)


def trainee_memory_use(trainee: Trainee, sequences: Sequences) -> Used:
    """The memory that the gradients of a global batch take: they are computed, but slowly. What follows takes no more:
    the optimizer steps bucket by bucket, when nothing is saved any longer."""
    compute, messages = partial(trainee.gradients, sequences), trainee.messages
    use = memory_use(States.of(trainee), messages.like.device, compute, lambda: messages.most_bytes)
    parts = replace(
        use.parts,
        weights=use.parts.weights + trainee.store.most_bytes,
        gradients=use.parts.gradients + trainee.sync.most_bytes,
    )
    return replace(use, parts=parts)


def _tables(calls: Iterable[object]) -> Iterator[Tensor]:
    """The tensors that parts of layers hold: those in the fields of the runtime's own objects, each once."""
    todo, seen = list(calls), set[int]()
    while todo:
        held = todo.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            yield held
        elif isinstance(held, list | tuple):
            todo += held
        elif isinstance(held, dict):
            todo += held.values()
        elif type(held).__module__.startswith(f"{own_package('runtime')}."):
            fields = vars(held) if hasattr(held, "__dict__") else getattr(held, "__slots__", ())
            todo += [getattr(held, name) for name in fields]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({_at(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _at(tensor: Tensor) -> int:
    """The address of what a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


@dataclass(eq=False)
class _Packed:
    """A saved tensor, as long as its operation's backward is still to come."""

    tensor: Tensor


class _Saved:
    """Counts what is saved: bytes `now` and at `most`, by part.

    Of parameters nothing is: under ZeRO-3 what they hold comes and goes, and a backward finds what they hold then.
    """

    def __init__(self, lasting: Iterable[Tensor], weights: Sequence[Tensor]) -> None:
        self._lasting, self._weights = set(map(_at, lasting)), weights
        self._holders: Counter[int] = Counter()  # of a storage, by its address
        self._part: dict[int, str] = {}  # likewise
        self._saved_as = [("activations", 0)]  # the part of what is saved now, and transient bytes with it
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def hooks(self) -> saved_tensors_hooks:
        """To count by, as a context."""
        return saved_tensors_hooks(self.pack, lambda packed: packed.tensor.detach())

    @contextmanager
    def part(self, name: str, transient_bytes: int) -> Iterator[None]:
        """What is saved in here belongs to that part of `Memory`, with further bytes for the moment."""
        self._saved_as.append((name, transient_bytes))
        try:
            yield
        finally:
            self._saved_as.pop()

    def pack(self, tensor: Tensor) -> _Packed:
        """Count a tensor as long as what is returned lives."""
        at, size = _at(tensor), tensor.untyped_storage().nbytes()
        for weight in self._weights:
            if weight.data_ptr() == tensor.data_ptr() and weight.shape == tensor.shape:
                return _Packed(weight)
        packed = _Packed(tensor.detach())  # of what an operation makes, the tensor holds the operation
        if at not in self._lasting:
            self._holders[at] += 1
            if self._holders[at] == 1:
                part, transient_bytes = self._saved_as[-1]
                self._part[at] = part
                self.now[part] += size
                self.most[part] = max(self.most[part], self.now[part] + transient_bytes)
            weakref.finalize(packed, self._release, at, size)
        return packed

    def _release(self, at: int, size: int) -> None:
        self._holders[at] -= 1
        if not self._holders[at]:
            del self._holders[at]
            self.now[self._part.pop(at)] -= size


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operations make, as long as they live: bytes `now` and at `most`."""

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(map(_at, lasting))
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_at(tensor) for tensor in args if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda tensor: self._see(tensor, before), result)
        return result

    def _see(self, tensor: Tensor, before: set[int]) -> None:
        storage, at = tensor.untyped_storage(), _at(tensor)
        size = storage.nbytes()
        if size and at not in self._known and at not in before:
            self._known.add(at)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, at, size)

    def _forget(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size
