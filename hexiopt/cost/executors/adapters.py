"""Low-rank adapters in a layer: seconds of their products and of dequantisation, and bytes of activations.

A frozen matrix needs no gradient: its backward is one product, and no input is stored for it.
"""

from typing import NamedTuple

from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.problem.kinds import LayerKind
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.operators import Shard
from hexiopt.problem.parameters import adapted_matrices, layer_matrices
from hexiopt.problem.workload import Workload

# Elements of a token that fused kernels of an adapter move, of the matrix's inputs and outputs, and their number. The
# forward reads x, writes A·x, and reads y and B·A·x to write their sum; the backward reads dy for the gradients of B
# and of A·x, x for that of A, and dx and what is added to write the sum. What has the width of the rank is left out.
_FORWARD_MOVES, _FORWARD_KERNELS = (1.0, 3.0), 3
_BACKWARD_MOVES, _BACKWARD_KERNELS = (4.0, 2.0), 5
_BACKWARD_PRODUCTS = 2  # for each of the forward: gradients of the matrix and of its input


def adapter_times(
    model: ModelSpec,
    kind: LayerKind,
    workload: Workload,
    clock: OperatorTimes,
    shard: Shard,
    tokens: float,
    traffic: float,
) -> tuple[float, float]:
    """Forward and backward seconds of the adapters of a layer, if there are any, and of dequantising its matrices, for
    `tokens` tokens on a rank that holds `shard`.

    The framework moves `traffic` times the bytes of fused kernels (`Framework.adapter_traffic`). The products are thin,
    so that they or the memory traffic bind; the larger counts.
    """
    lora, token_bytes = workload.adapters, traffic * workload.element_bytes
    if lora is None:
        return 0.0, 0.0
    forward_s = backward_s = dequantisation_s(model, kind, lora, clock, shard)
    for matrix in adapted_matrices(model, kind, lora):
        inputs, outputs = matrix.inputs.on(shard), matrix.outputs.on(shard)
        products_s = sum(clock.gemm_s(2.0 * tokens * lora.rank * size) for size in (inputs, outputs))
        moved = [tokens * token_bytes * (i * inputs + o * outputs) for i, o in (_FORWARD_MOVES, _BACKWARD_MOVES)]
        forward_s += max(products_s, clock.memory_s(moved[0], _FORWARD_KERNELS))
        backward_s += max(_BACKWARD_PRODUCTS * products_s, clock.memory_s(moved[1], _BACKWARD_KERNELS))
    return forward_s, backward_s


def dequantisation_s(model: ModelSpec, kind: LayerKind, lora: Lora, clock: OperatorTimes, shard: Shard) -> float:
    """Seconds in which a layer's frozen matrices on a rank become 16 bit, once for each pass of their products; the
    backward makes them again (bitsandbytes, `MatMul4Bit`)."""
    moved, sizes = lora.frozen_storage.moved_bytes, _sizes(model, kind, shard)
    return clock.memory_s(moved * sum(sizes), len(sizes)) if moved else 0.0


def dequantised_bytes(model: ModelSpec, kind: LayerKind, lora: Lora, shard: Shard, width: int) -> float:
    """Bytes of the buffer in which a rank dequantises one matrix after another."""
    return float(width * max(_sizes(model, kind, shard))) if lora.frozen_storage.moved_bytes else 0.0


def _sizes(model: ModelSpec, kind: LayerKind, shard: Shard) -> list[int]:
    return [matrix.inputs.on(shard) * matrix.outputs.on(shard) for matrix in layer_matrices(model, kind)]


class StoredElements(NamedTuple):
    """Elements of a token that a layer with adapters stores beyond one whose matrices are trained, negative for less:
    of hidden states, which TP ranks divide, of what has the width of heads or columns, and of a copy that goes to an
    expert."""

    hidden: float
    inner: float
    routed: float


def stored_elements(model: ModelSpec, kind: LayerKind, lora: Lora, shard: Shard) -> StoredElements:
    """Those of a layer: outputs of norms and activations, and rows that come to experts, are stored only for the
    gradient of a matrix that reads them; an adapter stores what its first matrix makes."""
    matrices, adapted = layer_matrices(model, kind), adapted_matrices(model, kind, lora)
    targets = {matrix.target for matrix in adapted}
    attention, recurrent, experts = kind.attention, kind.recurrent, kind.experts
    unread = [not targets & {"q", "k", "v"}] * bool(kind.mixers) + [not targets & {"gate", "up"}] * bool(kind.channels)
    if kind.norms == 1:  # all parts read the same norm
        unread = [all(unread)]
    inner = 0.0
    if "down" not in targets and not model.decoder_form.inner_norms:
        inner -= sum(matrix.inputs.on(shard) for matrix in matrices if matrix.target == "down")
    if attention is not None and attention.kv_rank:
        inner -= attention.q_rank + attention.kv_rank
    if recurrent is not None:
        inner -= shard.state_heads * recurrent.value_dim
    hidden, routed = -float(model.hidden_size) * sum(unread), 0.0
    if experts is not None:
        hidden -= experts.latent
        routed = -float(experts.width(model.hidden_size) + experts.ffn_size)
    return StoredElements(hidden, inner + lora.rank * len(adapted), routed)
