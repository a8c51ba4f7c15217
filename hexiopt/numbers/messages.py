"""What ranks send each other: in which precision values may travel, and what those of a token or parameter come to.

`fp8` is e4m3 (Micikevicius et al., arXiv 2209.05433) in blocks of 128 values with an FP32 scale each, as DeepSeek-V3
scales activations (arXiv 2412.19437, section 3.3.2). Blocks never cross tokens, so that any cut along tokens or samples
has the same blocks, and the same bytes in all. So are gradients in sums, whose blocks never cross shares.
"""

TRAINING, FP8 = "training", "fp8"
MESSAGE_PRECISIONS = (TRAINING, FP8)
BLOCK = 128
"""Values with one scale; the last block of a token may be shorter."""
SCALE_BYTES = 4
QUANTIZED_VALUE_BYTES = 1 + SCALE_BYTES / BLOCK
"""Of a value in a whole block."""


def quantized_bytes(hidden_size: int) -> int:
    """Bytes of the `hidden_size` values of a token, one each, and of their scales."""
    return hidden_size + SCALE_BYTES * -(-hidden_size // BLOCK)
