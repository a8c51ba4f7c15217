"""What links take: messages between two processes, and the collectives of tensor parallelism.

Both ends must do the same number of runs: the first rank of a group decides it and tells the others before each size.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.lab.profile.points import MeasuredPoint
from runtime.device import wait_for

_SIZES = tuple(4**k for k in range(5, 15))  # bytes, from 1 KiB to 256 MiB
_RUNS = (3, 50)


class Links:
    """Measures links from one process. `names` are the devices of all ranks; each size takes its share of `seconds`.

    Every rank must call the same methods in the same order; those that do not belong to a link return at once.
    """

    def __init__(self, device: torch.device, names: Sequence[str], seconds: float, most_bytes: float) -> None:
        self._device, self._names, self._seconds = device, names, seconds
        self._sizes = [size for size in _SIZES if 4.0 * size < most_bytes] or list(_SIZES[:1])
        self._rank = dist.get_rank()

    def exchange(self, sender: int, receiver: int, group: dist.ProcessGroup | None = None) -> list[MeasuredPoint]:
        """A message of each size from one rank to another, and a byte back. The points, on the sender.

        `group` is of these two ranks, where they have one.
        """
        if self._rank not in (sender, receiver):
            return []
        reply = torch.zeros(1, dtype=torch.uint8, device=self._device)

        def run(whole: Tensor) -> None:
            if self._rank == sender:
                dist.send(whole, receiver, group=group)
                dist.recv(reply, receiver, group=group)
            else:
                dist.recv(whole, sender, group=group)
                dist.send(reply, sender, group=group)

        def agree(runs: Tensor) -> None:
            (dist.send if self._rank == sender else dist.recv)(
                runs, receiver if self._rank == sender else sender, group=group
            )

        of = (self._names[sender], self._names[receiver])
        return self._measure_sizes("message", of, run, agree, first=self._rank == sender)

    def collectives(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> list[MeasuredPoint]:
        """All-gather and reduce-scatter of each size (gathered) over a TP group. The points, on its first rank."""
        if self._rank not in ranks:
            return []
        count, of = len(ranks), tuple(self._names[rank] for rank in ranks)

        def gather(whole: Tensor) -> None:
            shard_size = len(whole) // count
            dist.all_gather_single(whole[: shard_size * count], whole[:shard_size].clone(), group=group)

        def scatter(whole: Tensor) -> None:
            shard_size = len(whole) // count
            dist.reduce_scatter_single(whole.new_empty(shard_size), whole[: shard_size * count], group=group)

        def agree(runs: Tensor) -> None:
            dist.broadcast(runs, ranks[0], group=group)

        first = self._rank == ranks[0]
        points: list[MeasuredPoint] = []
        for what, run in (("all_gather", gather), ("reduce_scatter", scatter)):
            points += self._measure_sizes(what, of, run, agree, first=first)
        return points

    def _measure_sizes(
        self,
        what: str,
        of: tuple[str, ...],
        run: Callable[[Tensor], None],
        agree: Callable[[Tensor], None],
        *,
        first: bool,
    ) -> list[MeasuredPoint]:
        """Each size until the time is spent; the first rank says how often, 0 for no more."""
        points: list[MeasuredPoint] = []
        began, share_s = time.perf_counter(), self._seconds / len(self._sizes)
        for k, size in enumerate(self._sizes):
            whole = torch.zeros(max(1, size // 2), dtype=torch.bfloat16, device=self._device)
            runs = torch.ones(1, dtype=torch.int64, device=self._device)
            spent_s = time.perf_counter() - began
            if first and k > 2 and spent_s > self._seconds:
                runs.zero_()
            agree(runs)
            if not int(runs):
                break
            once_s = min(self._time_run(run, whole) for _ in range(2))  # the first run may open connections
            least, most = _RUNS
            runs.fill_(max(least, min(most, int(share_s / max(once_s, 1e-7)))))
            agree(runs)
            seconds = median(self._time_run(run, whole) for _ in range(int(runs)))
            ranks = {"ranks": len(of)} if what != "message" else {}
            points.append(MeasuredPoint(what, {"bytes": float(2 * len(whole)), **ranks}, seconds, of))
        return points if first else []

    def _time_run(self, run: Callable[[Tensor], None], whole: Tensor) -> float:
        wait_for(self._device)
        began = time.perf_counter()
        run(whole)
        wait_for(self._device)
        return time.perf_counter() - began
