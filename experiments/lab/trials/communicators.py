"""Device memory of communicators, which torch's allocator does not see, beside what the cost model charges for them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from experiments.lab.devices import free_device_bytes
from experiments.lab.processes import run_processes
from experiments.lab.trials.trial import join_ranks
from hexiopt.cost.executors.communicators import Channels, Communicators
from hexiopt.numbers.coefficients import WORLD_CHANNELS
from hexiopt.problem.cluster import Cluster
from runtime.device import num_gpus
from runtime.network import ProcessGroups, host_group

_BOTH, _THERE, _BACK = (0, 1), (0, 1), (1, 0)  # ranks of a group; sender and receiver
_SUMS = Channels.of((), [_BOTH], ())
_MESSAGES = Channels.of((), (), [_THERE, _BACK])


@dataclass(frozen=True)
class GroupMemory:
    """Bytes of a kind of communicator on each of its two ranks, as the cost model has them and as measured: None where
    they have no device memory, since they are on CPUs."""

    kind: str
    model_bytes: float
    measured_bytes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Kind:
    """A kind of communicator: groups of these ranks, or pairs, with so many channels at most."""

    name: str
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    channels: Channels = field(default_factory=Channels)


# In the order in which they are made: the first that sums and the first that sends load NCCL's kernels for that.
_KINDS = (
    _Kind("all ranks, and NCCL's kernels of sums"),
    _Kind("TP 2", groups=(_BOTH,)),
    _Kind("sums of gradients", groups=(_BOTH,), channels=_SUMS),
    _Kind("messages to the next stage, and NCCL's kernels of messages", pairs=(_THERE,), channels=_MESSAGES),
    _Kind("messages back", pairs=(_BACK,), channels=_MESSAGES),
)


def group_memory(cluster: Cluster, limit_s: float) -> list[GroupMemory]:
    """Of each kind of communicator between two processes, on GPUs like the first one of `cluster` or, where there is
    none, on the CPU. Raises ProcessFailedError.

    Two that share a GPU talk over sockets, whose buffers are the host's; the model's figures are without them, too.
    """
    kind, shares_gpu = ("cuda" if num_gpus() else "cpu"), num_gpus() == 1
    by_rank = run_processes(2, kind, _measure, kind, shares_gpu, limit_s)
    return [
        GroupMemory(communicator.name, model_bytes, measured)
        for communicator, model_bytes, measured in zip(
            _KINDS, _model_bytes(cluster, shares_gpu), _of_each(by_rank, shares_gpu), strict=True
        )
    ]


def _model_bytes(cluster: Cluster, shares_gpu: bool) -> list[float]:
    gpu, model = cluster.gpu_of(0), Communicators(cluster)
    if shares_gpu:
        gpu = replace(gpu, peer_to_peer=False)
    pair_bytes = [model.pair_bytes(gpu, _MESSAGES.pairs[pair]) for pair in (_THERE, _BACK)]
    sums = [model.sum_bytes(gpu, channels) for channels in (WORLD_CHANNELS, _SUMS.groups[_BOTH])]
    return [sums[0], model.tp_group_bytes(gpu, 2), sums[1], *pair_bytes]


def _of_each(by_rank: Sequence[Sequence[int | None]], shares_gpu: bool) -> list[float | None]:
    """By kind, bytes of a rank from what each has seen: the most of any; where all have seen the same GPU, a part."""
    parts = len(by_rank) if shares_gpu else 1
    return [
        None if any(size is None for size in seen) else max(size for size in seen if size is not None) / parts
        for seen in zip(*by_rank, strict=True)
    ]


def _measure(tell: Callable[[str], None], kind: str, shares_gpu: bool, limit_s: float) -> list[int | None]:
    """Of each kind, what a rank sees of its device's memory go."""
    _, device = join_ranks(kind, range(2), 2, limit_s, shares_gpu=shares_gpu)
    free_bytes, meet = partial(free_device_bytes, device), partial(dist.barrier, group=host_group(limit_s))
    groups = list[ProcessGroups]()  # as long as they live, their memory is taken

    def make(communicator: _Kind) -> None:
        groups.append(ProcessGroups(communicator.groups, limit_s, communicator.pairs, device, communicator.channels))

    return [taken_bytes(partial(make, communicator), free_bytes, meet) for communicator in _KINDS]


def taken_bytes(
    make: Callable[[], object], free_bytes: Callable[[], int | None], meet: Callable[[], object]
) -> int | None:
    """How much less is free once `make` has made something, between moments at which all ranks `meet`: none makes
    anything while another one looks. None where `free_bytes` knows of no memory."""
    meet()
    before = free_bytes()
    meet()
    make()
    meet()
    after = free_bytes()
    meet()
    return None if before is None or after is None else before - after
