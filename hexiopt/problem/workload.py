"""The workload of a training step: its sequences, precision, and choices that are fixed for the whole plan."""

from dataclasses import dataclass
from functools import cached_property

from hexiopt.checks import flag_in, whole_in, word_in
from hexiopt.errors import FieldError
from hexiopt.numbers.gpus import PRECISIONS
from hexiopt.numbers.messages import MESSAGE_PRECISIONS, QUANTIZED_VALUE_BYTES, TRAINING, quantized_bytes
from hexiopt.numbers.optimizers import OPTIMIZERS, StateBytes
from hexiopt.schedules.registry import schedule_by_name, schedule_names
from hexiopt.value import Value

RECOMPUTE_POLICIES = ("none", "selective", "full")
JOINED = "joined"
LAYER_POLICIES = (*RECOMPUTE_POLICIES, JOINED)
"""The policies of a layer of a plan. `joined` is full recompute together with the layer before it: such a group keeps
only the input of its first layer."""
SHARDING_STAGES = (0, 1, 2, 3)
AUTO = "auto"
MAX_SEQ_LEN = 2**27
_SHARDINGS = (AUTO, *SHARDING_STAGES, *map(str, SHARDING_STAGES))
_WHOLE = {
    "global_batch": (1, 10**7),
    "seq_len": (1, MAX_SEQ_LEN),
    "gradient_bytes": (2, 4),
    "loss_chunk_tokens": (1, MAX_SEQ_LEN),
}
"""The least and the greatest value of fields that are whole numbers."""


@dataclass(frozen=True)
class Workload(Value):
    """One optimiser step of `global_batch` sequences of `seq_len` tokens.

    `recompute`, `schedule` and `optimizer_sharding` (ZeRO stage) fix a choice for the whole plan, or leave it
    to the search (`auto`). `gradient_bytes` is the size of a gradient element in mixed precision, both
    stored and synchronised (2 or 4; in fp32 and tf32 always 4). `loss_chunk_tokens` is the number of tokens whose
    logits the loss holds at once, computing their gradients in the forward; None: a whole micro-batch, whose
    probabilities are kept. With `sequence_parallel`, TP groups divide norms and residuals along the sequence
    (Korthikanti et al., arXiv 2205.05198); without, every rank of a group holds and computes all of them.
    `message_precision` is that of hidden states and their gradients between stages: `training` sends them as they are
    computed, `fp8` in 8 bits, which changes the numerics (`hexiopt/numbers/messages.py`). `gradient_precision` is that
    of gradients that ranks sum, under ZeRO-0 and 1: with `fp8` they are sent in 8 bits and summed in FP32.
    Raises InputError where a value breaks its rule.
    """

    global_batch: int = 256
    seq_len: int = 4096
    precision: str = "bf16"
    recompute: str = AUTO
    schedule: str = AUTO
    optimizer_sharding: str = AUTO
    gradient_bytes: int = 2
    loss_chunk_tokens: int | None = None
    sequence_parallel: bool = True
    message_precision: str = TRAINING
    gradient_precision: str = TRAINING

    def __post_init__(self) -> None:
        for name, (least, most) in _WHOLE.items():
            if getattr(self, name) is not None or name != "loss_chunk_tokens":
                value = whole_in(getattr(self, name), f"workload: {name}", at_least=least, at_most=most)
                object.__setattr__(self, name, value)
        if self.gradient_bytes == 3:
            raise FieldError("workload: gradient_bytes", 3, "is not a width; choose 2 or 4")
        flag_in(self.sequence_parallel, "workload: sequence_parallel")
        word_in(self.precision, "workload: precision", PRECISIONS)
        word_in(self.message_precision, "workload: message_precision", MESSAGE_PRECISIONS)
        word_in(self.gradient_precision, "workload: gradient_precision", MESSAGE_PRECISIONS)
        word_in(self.recompute, "workload: recompute", (AUTO, *RECOMPUTE_POLICIES))
        schedule = word_in(self.schedule, "workload: schedule", (AUTO, *schedule_names()))
        sharding: object = self.optimizer_sharding
        if isinstance(sharding, bool | float) or sharding not in _SHARDINGS:
            rule = f"is not known; choose {AUTO}, 0, 1, 2 or 3"
            raise FieldError("workload: optimizer_sharding", sharding, rule)
        object.__setattr__(self, "optimizer_sharding", str(sharding))
        if schedule != AUTO and str(sharding) in ("2", "3") and not schedule_by_name(schedule).lockstep:
            rule = f"does not work with the {schedule} schedule; choose workload.schedule=1f1b, or {AUTO}, 0 or 1"
            raise FieldError("workload: optimizer_sharding", int(self.optimizer_sharding), rule)
        if self.sums_quantized and str(sharding) in ("2", "3"):
            rule = f"does not go with gradient_precision={self.gradient_precision}; choose {AUTO}, 0 or 1"
            raise FieldError("workload: optimizer_sharding", int(self.optimizer_sharding), rule)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation element."""
        return 4 if self.precision in ("tf32", "fp32") else 2

    def message_bytes(self, hidden_size: int) -> int:
        """Bytes of a token's hidden state, or of its gradient, in a message between stages."""
        if self.message_precision == TRAINING:
            return hidden_size * self.element_bytes
        return quantized_bytes(hidden_size)

    @property
    def sums_quantized(self) -> bool:
        """Whether gradients are summed in 8 bits."""
        return self.gradient_precision != TRAINING

    @property
    def sum_bytes(self) -> float:
        """Bytes of a parameter's gradient on its way to a sum."""
        return QUANTIZED_VALUE_BYTES if self.sums_quantized else self.states.gradient

    @property
    def sum_buffer_bytes(self) -> float:
        """Bytes that a parameter's gradient takes beside itself until it is summed: what is sent, and what comes."""
        return 2 * self.sum_bytes if self.sums_quantized else 0.0

    def quantization_bytes(self, zero_stage: int) -> float:
        """Bytes that conversions and sums of a parameter's gradient read and write, under ZeRO-0 or 1.

        A gradient is read and its 8 bits written; what comes is read, and added to an FP32 sum that is read and written
        for each sender. Under ZeRO-0 the sums come back in 8 bits, and are converted.
        """
        if not self.sums_quantized:
            return 0.0
        gradient, sent = self.states.gradient, self.sum_bytes
        reduced = gradient + sent + sent + 2 * 4
        return reduced if zero_stage else reduced + sent + gradient

    @cached_property
    def states(self) -> StateBytes:
        """Bytes of a parameter's weight, gradient, master weight and optimizer moments."""
        width = self.element_bytes
        return OPTIMIZERS["adam"].states(width, self.gradient_bytes if width == 2 else 4)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len
