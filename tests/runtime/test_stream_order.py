"""What `stream_order` is: where NCCL's order lets go on, it does, and where that would hang, it says who waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.stream_order import HungError, run_in_order, synchronize

Work = Callable[[int], Any]


def pair(count: int = 2) -> list[Any]:
    """Groups of ranks 0 and 1."""
    return [dist.new_group([0, 1]) for _ in range(count)]


def opposite(rank: int) -> list[float]:
    """Both groups are used, by the second rank in the other order."""
    ways, x = pair(), [torch.full((2,), 1.0 + rank) for _ in range(2)]
    works = [dist.all_reduce(x[k], group=ways[k], async_op=True) for k in ((0, 1) if rank == 0 else (1, 0))]
    for work in works:
        assert work is not None
        work.wait()
    return [float(tensor[0]) for tensor in x]


def test_groups_used_in_opposite_orders() -> None:
    """End where each has a queue, and hang in one queue, or where they are made at their first use."""
    assert run_in_order(2, opposite, one_queue=False) == [[3.0, 3.0]] * 2
    with pytest.raises(HungError) as hung:
        run_in_order(2, opposite)
    assert str(hung.value).splitlines() == [
        "rank 0 waits for all_reduce of ranks (0, 1): rank 1 has it behind all_reduce of ranks (0, 1)",
        "rank 1 waits for all_reduce of ranks (0, 1): rank 0 has it behind all_reduce of ranks (0, 1)",
    ]
    with pytest.raises(HungError, match=r"rank 0 makes the communicator of ranks \(0, 1\): not there are ranks \[1\]"):
        run_in_order(2, opposite, one_queue=False, lazy=True)


def meeting(waits: bool) -> Work:
    """A receive is posted; then the host waits for the device, perhaps; then what the peer waits for is sent."""

    def work(rank: int) -> None:
        there, back = pair()
        x = torch.ones(4)
        for _ in range(2):
            y = torch.zeros(4)
            if rank == 0:
                coming = dist.irecv(y, 1, group=back)
                if waits:
                    synchronize()
                dist.isend(x, 1, group=there)
                assert coming is not None
                coming.wait()
            else:
                dist.recv(y, 0, group=there)
                dist.isend(y, 0, group=back)
            assert y.tolist() == [1.0] * 4

    return work


def test_a_host_that_synchronises_with_a_receive_posted() -> None:
    run_in_order(2, meeting(False), one_queue=False)
    with pytest.raises(HungError) as hung:
        run_in_order(2, meeting(True), one_queue=False)
    assert str(hung.value).splitlines() == [
        "rank 0 synchronises, and so waits for receive from 1: rank 1 has not come to it",
        "rank 1 waits for receive from 0: rank 0 has not come to it",
    ]
    with pytest.raises(HungError, match="rank 1 waits for receive from 0: rank 0 has it behind receive from 1"):
        run_in_order(2, meeting(False))


def test_both_send_and_then_receive_in_one_communicator() -> None:
    def work(rank: int, batch: bool) -> float:
        (way,), y, x = pair(1), torch.zeros(4), torch.full((4,), 1.0 + rank)
        if batch:
            operations = [dist.P2POp(dist.isend, x, 1 - rank, way), dist.P2POp(dist.irecv, y, 1 - rank, way)]
            works = dist.batch_isend_irecv(operations)
        else:
            works = [dist.isend(x, 1 - rank, group=way), dist.irecv(y, 1 - rank, group=way)]  # type: ignore[list-item]
        for handle in works:
            handle.wait()
        return float(y[0])

    with pytest.raises(HungError, match="rank 0 waits for send to 1: rank 1 has it behind send to 0"):
        run_in_order(2, lambda rank: work(rank, False))
    assert run_in_order(2, lambda rank: work(rank, True)) == [2.0, 1.0]  # one kernel


def test_what_nobody_has_waited_for_is_no_number() -> None:
    def work(rank: int) -> list[bool]:
        y = torch.zeros(2)
        if rank == 1:
            dist.send(torch.ones(2), 0)
            return []
        coming = dist.irecv(y, 1)
        assert coming is not None
        before = bool(y.isnan().all())
        coming.wait()
        return [before, y.tolist() == [1.0, 1.0]]

    assert run_in_order(2, work) == [[True, True], []]


def test_a_buffer_used_again_too_early_is_sent_as_it_is_then() -> None:
    def work(rank: int) -> list[float]:
        x = torch.zeros(2)
        if rank == 0:
            dist.isend(x, 1)
            x += 1
        else:
            dist.recv(x, 0)
        dist.barrier()
        return x.tolist()

    assert run_in_order(2, work) == [[1.0, 1.0], [1.0, 1.0]]


def test_collectives_give_what_they_should() -> None:
    def work(rank: int) -> list[list[float]]:
        values = torch.arange(3.0) + 10 * rank
        most = values.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        whole, share, came = torch.zeros(9), torch.zeros(1), torch.zeros(3)
        dist.all_gather_single(whole, values)
        dist.reduce_scatter_single(share, values)
        sizes = [[1, 2, 0], [1, 1, 1], [1, 0, 2]]
        dist.all_to_all_single(came, values, [row[rank] for row in sizes], sizes[rank])
        return [tensor.tolist() for tensor in (most, whole, share, came)]

    results = run_in_order(3, work)
    whole = [float(10 * rank + k) for rank in range(3) for k in range(3)]
    for rank, (most, gathered, share, _) in enumerate(results):
        assert (most, gathered, share) == ([20.0, 21.0, 22.0], whole, [30.0 + 3 * rank])
    assert [came for *_, came in results] == [[0.0, 10.0, 20.0], [1.0, 2.0, 11.0], [12.0, 21.0, 22.0]]


def test_a_rank_that_ends_early_and_one_that_fails() -> None:
    def early(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1), 1)

    with pytest.raises(HungError, match="rank 0 waits for receive from 1: rank 1 has not come to it\nrank 1 has ended"):
        run_in_order(2, early)

    def fails(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_in_order(2, fails)
