"""What an optimizer keeps and moves for each parameter: another optimizer is another row."""

from dataclasses import dataclass
from types import MappingProxyType

from hexiopt.numbers.coefficients import ADAM_STATE_TRAFFIC_BYTES

_BLOCK = 256  # parameters that share an FP32 scale in 8-bit states
_INT8_BYTES = 1 + 4 / _BLOCK
_ADAM_BYTES = 8  # of two FP32 moments
# An FP32 master weight, or the FP32 weight itself, read and written.
_MASTER_TRAFFIC_BYTES = ADAM_STATE_TRAFFIC_BYTES - 2 * _ADAM_BYTES


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each parameter in training: its weight, gradient, FP32 master weight and the optimizer's moments.

    `traffic_bytes` is what a step reads and writes beside a pass over the gradient and the writing of the weight;
    `moments` names the moments in tables.
    """

    weight: float
    gradient: float
    master: float
    moment: float
    traffic_bytes: float
    moments: str

    @property
    def sharded(self) -> float:
        """Bytes that every ZeRO stage from 1 on spreads: master weight and moments."""
        return self.master + self.moment

    @property
    def total(self) -> float:
        """Bytes of all states, unsharded."""
        return self.weight + self.gradient + self.sharded

    @property
    def step_bytes(self) -> float:
        """Bytes that an optimizer step reads and writes."""
        return self.traffic_bytes + self.gradient + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer: the moments that it keeps for each parameter, what a step moves, and what it needs whole.

    Of moments there are `moment_bytes`, and `moment_widths` more in the width of the weight; each is read and written
    once. With `master`, 16-bit weights have an FP32 master weight, else the step rounds to 16 bits. `gradient_reads`
    and `weight_reads` count the passes over gradient and master weight or weight. `whole_matrices`: a step needs rows
    and columns of whole matrices, so that ZeRO, whose shards are ranges of all parameters in a row, cannot spread its
    states. `products` counts iterations of a matrix product with whole matrices (`orthogonal_flops`); where there are
    any, embedding and LM head are left to `ends`, another row.
    """

    name: str
    moments: str
    source: str
    moment_bytes: float = 0
    moment_widths: int = 0
    master: bool = True
    gradient_reads: int = 1
    weight_reads: int = 1
    whole_matrices: bool = False
    products: int = 0
    ends: str | None = None

    def states(self, weight: int, gradient: int) -> StateBytes:
        """The states of a parameter, given the bytes of its weight and gradient."""
        moment = self.moment_bytes + self.moment_widths * weight
        stored = _MASTER_TRAFFIC_BYTES if self.master else self.weight_reads * weight
        traffic = 2 * moment + stored + (self.gradient_reads - 1) * gradient
        return StateBytes(weight, gradient, 4 if self.master and weight == 2 else 0, moment, traffic, self.moments)


_ROWS = (
    OptimizerKind(
        name="adamw",
        moments="Adam's moments",
        moment_bytes=_ADAM_BYTES,
        source="Micikevicius et al., arXiv 1710.03740: FP32 master weights; Kingma and Ba, arXiv 1412.6980",
    ),
    OptimizerKind(
        name="adamw_bf16",
        moments="Adam's moments in the weight's precision",
        moment_widths=2,
        master=False,
        source="torchtune: states in the dtype of the parameter",
    ),
    OptimizerKind(
        name="adamw_8bit",
        moments="Adam's moments in 8 bits",
        moment_bytes=2 * _INT8_BYTES,
        master=False,
        source="Dettmers et al., arXiv 2110.02861: blocks with an FP32 scale, of 256 in bitsandbytes",
    ),
    OptimizerKind(
        name="lion", moments="Lion's momentum", moment_bytes=4, source="Chen et al., arXiv 2302.06675, algorithm 2"
    ),
    OptimizerKind(
        name="lion_8bit",
        moments="Lion's momentum in 8 bits",
        moment_bytes=_INT8_BYTES,
        master=False,
        source="as adamw_8bit, with one moment",
    ),
    # Of the gradient: mean squares of rows and columns, the update's own mean square, the update; of the weight: its
    # mean square, then the step. The means are a thousandth of what they are of.
    OptimizerKind(
        name="adafactor",
        moments="means of rows and columns",
        master=False,
        gradient_reads=3,
        weight_reads=2,
        whole_matrices=True,
        source="Shazeer and Stern, arXiv 1804.04235, algorithm 4, without momentum",
    ),
    OptimizerKind(
        name="muon",
        moments="Muon's momentum",
        moment_bytes=4,
        whole_matrices=True,
        products=5,
        ends="adamw",
        source="Liu et al., arXiv 2502.16982: FP32 master weights and momentum; AdamW for what is no matrix of a layer",
    ),
    OptimizerKind(
        name="momentum",
        moments="momentum in the weight's precision",
        moment_widths=1,
        master=False,
        source="torch.optim.SGD: the buffer is a copy of the gradient",
    ),
    OptimizerKind(name="sgd", moments="no moments", master=False, source="torch.optim.SGD"),
)
OPTIMIZERS = MappingProxyType({row.name: row for row in _ROWS})
ADAMW = _ROWS[0].name


def orthogonal_flops(rows: float, columns: float) -> tuple[float, float, float]:
    """FLOPs of the three products of an iteration that makes a matrix orthogonal (Newton-Schulz): X Xᵀ, its square, and
    what multiplies X. 4·m²·n + 2·m³ in all for m ≤ n."""
    m, n = min(rows, columns), max(rows, columns)
    return 2.0 * m * m * n, 2.0 * m**3, 2.0 * m * m * n
