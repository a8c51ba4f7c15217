"""Gradients summed in 8 bits, as ZeRO++ does (Wang et al., arXiv 2306.10209).

Each rank of a group gets its share of all ranks' values by an all-to-all in e4m3, sums it in FP32 or better, and gives
the sum to all in e4m3 where they need it. Its own values it adds as they are. So each value is rounded once on its way
to the sum, and each sum once on its way back.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.numbers.messages import BLOCK, quantized_bytes
from runtime.parallel.quantization import dequantize, quantize


class QuantizedSum:
    """A sum of flat `values` [ranks · share] over a `group`, whose shares are whole blocks, on its way: first to the
    ranks that own shares, then back."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup | None) -> None:
        self._group, self._place, count = group, dist.get_rank(group), dist.get_world_size(group)
        self._shares = values.view(count, -1, 1, BLOCK)
        num_bytes = self._shares.shape[1] * quantized_bytes(BLOCK)
        sizes = [0 if k == self._place else num_bytes for k in range(count)]
        self._sent = torch.cat([quantize(share) for k, share in enumerate(self._shares) if k != self._place])
        self._came = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._came, self._sent, sizes, sizes, group=group, async_op=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds beside the values."""
        return self._sent.nbytes + self._came.nbytes

    def reduce(self) -> None:
        """Wait for what others have sent, and sum this rank's share in its place."""
        self._work.wait()
        share = self._shares[self._place]
        total = share.to(torch.promote_types(share.dtype, torch.float32), copy=True)
        part = torch.empty_like(total)
        for sent in self._came.chunk(len(self._shares) - 1):
            dequantize(sent, part)
            total += part
        share.copy_(total)
        self._sent = self._came = self._sent[:0]

    def spread(self) -> None:
        """After `reduce`: begin to give all ranks the sums."""
        self._sent = quantize(self._shares[self._place])
        self._came = self._sent.new_empty(len(self._shares) * len(self._sent))
        self._work = dist.all_gather_single(self._came, self._sent, group=self._group, async_op=True)

    def finish(self) -> None:
        """After `spread`: wait for the sums, the same ones on all ranks."""
        self._work.wait()
        for sent, share in zip(self._came.chunk(len(self._shares)), self._shares, strict=True):
            dequantize(sent, share)
