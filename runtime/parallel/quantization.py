"""Values in 8 bits, as messages between stages may carry them: e4m3 in blocks with a scale each
(`hexiopt/numbers/messages.py`)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hexiopt.numbers.messages import BLOCK, SCALE_BYTES, quantized_bytes

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_VALUES = 2**20  # converted at a time: in FP32 they stand beside a message for a moment


def quantize(values_tbh: Tensor) -> Tensor:
    """Values [t, B, H] of any floating-point type as bytes [t · B · `quantized_bytes(H)`]: all scales, then all values.

    The largest magnitude of a block becomes that of e4m3. A block with a value that is not finite comes back as NaN.
    """
    tokens, samples, hidden = values_tbh.shape
    sent = values_tbh.new_empty(tokens * samples * quantized_bytes(hidden), dtype=torch.uint8)
    for values, scales, codes in _blocks(values_tbh, sent):
        scales.copy_(values.abs().amax(-1, keepdim=True).float().div_(_LARGEST).clamp_min_(_SMALLEST_SCALE))
        codes.copy_(values / scales)
    return sent


def dequantize(sent: Tensor, values_tbh: Tensor) -> None:
    """Write what `quantize` has made of values of the same shape into `values_tbh`."""
    for values, scales, codes in _blocks(values_tbh, sent):
        values.copy_(codes.float() * scales)


def _blocks(values_tbh: Tensor, sent: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views, a run of tokens at a time: values [t, B, blocks, block], their scales [t, B, blocks, 1], and what they
    become, as the values. The last block of a token, where it is shorter, comes by itself."""
    tokens, samples, hidden = values_tbh.shape
    of_row, even = -(-hidden // BLOCK), hidden // BLOCK
    cut = SCALE_BYTES * tokens * samples * of_row
    scales = sent[:cut].view(torch.float32).view(tokens, samples, of_row, 1)
    codes = sent[cut:].view(_E4M3).view(tokens, samples, hidden)
    step = max(1, _VALUES // (samples * hidden))
    for t in range(0, tokens, step):
        run = slice(t, t + step)
        for first, end, size in ((0, even, BLOCK), (even, of_row, hidden - even * BLOCK)):
            if first < end:
                start, shape = first * BLOCK, (-1, samples, end - first, size)
                stop = start + (end - first) * size
                yield (
                    values_tbh[run, :, start:stop].view(shape),
                    scales[run, :, first:end],
                    codes[run, :, start:stop].view(shape),
                )
