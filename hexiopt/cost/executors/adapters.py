"""Low-rank adapters in a layer: seconds of their products and of dequantisation, and bytes of activations.

A frozen matrix needs no gradient: its backward is one product, and no input is stored for it.
"""

from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.operators import Shard
from hexiopt.problem.parameters import adapted_matrices, layer_matrices

# Elements of a token that fused kernels of an adapter move, of the matrix's inputs and outputs, and their number. The
# forward reads x, writes A·x, and reads y and B·A·x to write their sum; the backward reads dy for the gradients of B
# and of A·x, x for that of A, and dx and what is added to write the sum. What has the width of the rank is left out.
_FORWARD_MOVES, _FORWARD_KERNELS = (1.0, 3.0), 3
_BACKWARD_MOVES, _BACKWARD_KERNELS = (4.0, 2.0), 5
_BACKWARD_PRODUCTS = 2  # for each of the forward: gradients of the matrix and of its input


def adapter_times(
    model: ModelSpec, lora: Lora, clock: OperatorTimes, shard: Shard, tokens: float, token_bytes: float
) -> tuple[float, float]:
    """Forward and backward seconds of a layer's adapters, and of dequantising its matrices, for `tokens` tokens on a
    rank that holds `shard`.

    `token_bytes` is the width of activations times what the framework moves over fused kernels
    (`Framework.adapter_traffic`). The products are thin, so that they or the memory traffic bind; the larger counts.
    """
    forward_s = backward_s = dequantisation_s(model, lora, clock, shard)
    for matrix in adapted_matrices(model, lora).values():
        inputs, outputs = matrix.inputs.on(shard), matrix.outputs.on(shard)
        products_s = sum(clock.gemm_s(2.0 * tokens * lora.rank * size) for size in (inputs, outputs))
        moved = [tokens * token_bytes * (i * inputs + o * outputs) for i, o in (_FORWARD_MOVES, _BACKWARD_MOVES)]
        forward_s += max(products_s, clock.memory_s(moved[0], _FORWARD_KERNELS))
        backward_s += max(_BACKWARD_PRODUCTS * products_s, clock.memory_s(moved[1], _BACKWARD_KERNELS))
    return forward_s, backward_s


def dequantisation_s(model: ModelSpec, lora: Lora, clock: OperatorTimes, shard: Shard) -> float:
    """Seconds in which a layer's frozen matrices on a rank become 16 bit, once for each pass of their products; the
    backward makes them again (bitsandbytes, `MatMul4Bit`)."""
    moved = lora.frozen_storage.moved_bytes
    return clock.memory_s(moved * sum(_sizes(model, shard)), len(layer_matrices(model))) if moved else 0.0


def dequantised_bytes(model: ModelSpec, lora: Lora, shard: Shard, width: int) -> float:
    """Bytes of the buffer in which a rank dequantises one matrix after another."""
    return float(width * max(_sizes(model, shard))) if lora.frozen_storage.moved_bytes else 0.0


def _sizes(model: ModelSpec, shard: Shard) -> list[int]:
    return [matrix.inputs.on(shard) * matrix.outputs.on(shard) for matrix in layer_matrices(model).values()]


def stored_elements(model: ModelSpec, lora: Lora, shard: Shard) -> tuple[float, float]:
    """Elements of a token that a layer with adapters stores beyond one whose matrices are trained, negative for less:
    of hidden states, which TP ranks divide, and of what has the width of heads or of the MLP.

    Outputs of norms and of the activation are stored only for the gradient of a matrix that reads them; an adapter
    stores what its first matrix makes.
    """
    form, targets = model.decoder_form, set(lora.matrices)
    readers = [{"q", "k", "v"}, {"gate", "up"}]
    if form.norms == 1:  # attention and MLP read the same norm
        readers = [readers[0] | readers[1]]
    hidden = -float(model.hidden_size) * sum(not targets & reads for reads in readers)
    inner = 0.0 if "down" in targets or form.inner_norms else -float(shard.ffn)
    return hidden, inner + lora.rank * len(adapted_matrices(model, lora))
