"""The workload of a training step: its sequences, precision, and choices that are fixed for the whole plan."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from hexiopt.checks import flag_in, whole_in, word_in
from hexiopt.errors import FieldError, did_you_mean
from hexiopt.numbers.gpus import PRECISIONS, QUANTIZED_BYTES
from hexiopt.numbers.messages import MESSAGE_PRECISIONS, QUANTIZED_VALUE_BYTES, TRAINING, quantized_bytes
from hexiopt.numbers.optimizers import ADAMW, OPTIMIZERS, StateBytes
from hexiopt.problem.lora import DEFAULT_ADAPTERS, Lora
from hexiopt.schedules.registry import schedule_by_name, schedule_names
from hexiopt.value import Value

RECOMPUTE_POLICIES = ("none", "selective", "full")
JOINED = "joined"
LAYER_POLICIES = (*RECOMPUTE_POLICIES, JOINED)
"""The policies of a layer of a plan. `joined` is full recompute together with the layer before it: such a group keeps
only the input of its first layer."""
ROUTINGS = ("natural", "forced")
SHARDING_STAGES = (0, 1, 2, 3)
AUTO = "auto"
FULL, LORA = KINDS_OF_TRAINING = ("full", "lora")
MAX_SEQ_LEN = 2**27
_SHARDINGS = (AUTO, *SHARDING_STAGES, *map(str, SHARDING_STAGES))
_WHOLE = {
    "global_batch": (1, 10**7),
    "seq_len": (1, MAX_SEQ_LEN),
    "gradient_bytes": (2, 4),
    "loss_chunk_tokens": (1, MAX_SEQ_LEN),
}
"""The least and the greatest value of fields that are whole numbers."""
_TRAINED = ("training", "lora", "optimizer")


@dataclass(frozen=True, repr=False)
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
    of gradients that ranks sum, under ZeRO-0 and 1: with `fp8` they are sent in 8 bits and summed in FP32. `routing` of
    tokens to experts is `natural`, so that some experts get more than others, or `forced` to be even. `training` is
    `full`, or `lora`: low-rank adapters as `lora` has them, a `Lora` or a mapping of its fields. `optimizer` names one
    of `OPTIMIZERS` (`hexiopt/numbers/optimizers.py`).
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
    routing: str = "natural"
    training: str = FULL
    lora: Lora = DEFAULT_ADAPTERS
    optimizer: str = ADAMW

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
        word_in(self.routing, "workload: routing", ROUTINGS)
        word_in(self.training, "workload: training", KINDS_OF_TRAINING)
        word_in(self.optimizer, "workload: optimizer", OPTIMIZERS)
        object.__setattr__(self, "lora", _lora(self.lora))
        self._check_training()

    def _check_training(self) -> None:
        """Refuse what adapters and the optimizer cannot have."""
        sharding = self.optimizer_sharding
        if self.adapters is None and self.lora != DEFAULT_ADAPTERS:
            raise FieldError("workload: training", FULL, "has no adapters; choose workload.training=lora, or no lora")
        if self.adapters is not None and self.precision in QUANTIZED_BYTES:
            rule = "is not modelled beside adapters; choose workload.precision=bf16"
            raise FieldError("workload: precision", self.precision, rule)
        if sharding != AUTO and int(sharding) > self.most_sharding:
            what = f"the optimizer {self.optimizer}, which needs whole matrices" if self.whole_matrices else "adapters"
            rule = f"is not modelled with {what}; choose {AUTO}, or at most {self.most_sharding}"
            raise FieldError("workload: optimizer_sharding", int(sharding), rule)

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return f"Workload({', '.join(f'{field.name}={value!r}' for field, value in values if value != field.default)})"

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained; None where the whole model is."""
        return self.lora if self.training == LORA else None

    @property
    def whole_matrices(self) -> bool:
        """Whether the optimizer's step needs whole matrices."""
        return OPTIMIZERS[self.optimizer].whole_matrices

    @property
    def most_sharding(self) -> int:
        """The highest ZeRO stage that a plan may have. From ZeRO-2 on states are gathered or scattered in every
        micro-batch, which is not modelled for adapters, a thousandth of the model."""
        return 0 if self.whole_matrices else 3 if self.adapters is None else 1

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
        """Bytes of a trained parameter's weight, gradient, master weight and optimizer moments; with Muon, one of a
        layer. Adapters are stepped as they are stored: they have no master weight."""
        width, kind = self.element_bytes, OPTIMIZERS[self.optimizer]
        if self.adapters is None:
            return kind.states(width, self.gradient_bytes if width == 2 else 4)
        width = self.adapters.adapter_bytes
        return replace(kind.states(width, width), master=0)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len


def _lora(value: Any) -> Lora:
    """The adapters that `value`, a `Lora` or a mapping of its fields, states."""
    if isinstance(value, Lora):
        return value
    if not isinstance(value, Mapping):
        raise FieldError("workload: lora", value, "is no mapping; write {rank: 16}")
    names = [field.name for field in fields(Lora)]
    for key in value:
        if key not in names:
            raise FieldError(f"workload: lora.{key}", value[key], f"is unknown; {did_you_mean(str(key), names)}")
    return Lora(**value)
