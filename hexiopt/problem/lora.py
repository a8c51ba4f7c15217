"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) beside frozen matrices of every layer, stored as they are or
quantised (QLoRA, Dettmers et al., arXiv 2305.14314)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hexiopt.checks import whole_in, word_in
from hexiopt.errors import FieldError, did_you_mean
from hexiopt.value import Value

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The matrices of a layer that may have an adapter, those of attention first."""
TARGET_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"all": TARGETS, "attention": TARGETS[:4], "qkv": TARGETS[:3], "qv": ("q", "v")}
)
OF_COLUMNS = frozenset(TARGETS[4:])
"""Those of MLPs, and of experts: peft takes the names for both (`peft/utils/transformers_weight_conversion.py` of
0.21)."""
MAX_RANK = 4096


# Time of dequantisation over that of a kernel that moves each byte once: from the pairs of LoRA and QLoRA (NF4) runs of
# one model in litgpt's tables; assumed for other storages.
_DEQUANTIZATION_TRAFFIC = 3.1


@dataclass(frozen=True, slots=True)
class Storage:
    """How frozen matrices are stored: bytes of an element; None as the precision has them."""

    element_bytes: float | None

    @property
    def moved_bytes(self) -> float:
        """Bytes an element that its dequantisation moves, each time a product reads it: what is stored and the 16 bits
        that it becomes, with what kernels lose."""
        return 0.0 if self.element_bytes is None else _DEQUANTIZATION_TRAFFIC * (self.element_bytes + 2)


# 4 bits with an FP32 scale for 64 of them; with double quantisation the scales in 8 bits with an FP32 of 256 of those
# (arXiv 2305.14314, section 3); 8 bits with an FP32 scale a row, of 4,096 elements here.
STORAGES: Mapping[str, Storage] = MappingProxyType(
    {
        "16bit": Storage(None),
        "nf4": Storage(0.5 + 4 / 64),
        "nf4_double": Storage(0.5 + 1 / 64 + 4 / 64 / 256),
        "int8": Storage(1.0 + 4 / 4096),
    }
)


@dataclass(frozen=True)
class Lora(Value):
    """Adapters of a `rank` on the `targets` of every layer, two matrices each, beside matrices in a `storage`.

    `targets` is all, attention, qkv, qv, or a list of `TARGETS`; layers that lack one have no adapter of it. `storage`
    is a key of `STORAGES`; embedding, LM head, norms and biases are never quantised. Weights and gradients of adapters
    take `adapter_bytes` each: 4 in FP32, as in peft, or 2.
    Raises InputError where a value breaks its rule.
    """

    rank: int = 16
    targets: str | tuple[str, ...] = "all"
    storage: str = "16bit"
    adapter_bytes: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole_in(self.rank, "workload: lora.rank", at_least=1, at_most=MAX_RANK))
        object.__setattr__(self, "targets", _targets(self.targets))
        word_in(self.storage, "workload: lora.storage", STORAGES)
        if self.adapter_bytes not in (2, 4) or isinstance(self.adapter_bytes, bool):
            raise FieldError("workload: lora.adapter_bytes", self.adapter_bytes, "is not a width; choose 2 or 4")
        object.__setattr__(self, "adapter_bytes", int(self.adapter_bytes))

    @property
    def matrices(self) -> tuple[str, ...]:
        """The targets, in the order of `TARGETS`."""
        return TARGET_GROUPS[self.targets] if isinstance(self.targets, str) else self.targets

    @property
    def frozen_storage(self) -> Storage:
        """How frozen matrices are stored."""
        return STORAGES[self.storage]

    def __str__(self) -> str:
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        return f"LoRA of rank {self.rank} on {targets}, matrices in {self.storage}"


def _targets(value: object) -> str | tuple[str, ...]:
    """A name of a group of targets, or targets in order, each once."""
    where = "workload: lora.targets"
    if isinstance(value, str):
        if value in TARGETS:
            return (value,)
        return word_in(value, where, TARGET_GROUPS)
    names = list(value) if isinstance(value, Iterable) else []
    if not names:
        choices = f"choose {', '.join(TARGET_GROUPS)}, or some of {', '.join(TARGETS)}"
        raise FieldError(where, value, f"names no matrix; {choices}")
    for name in names:
        if name not in TARGETS:
            raise FieldError(where, name, f"is not known; {did_you_mean(str(name), TARGETS)}")
    ordered = tuple(target for target in TARGETS if target in names)
    return next((name for name, group in TARGET_GROUPS.items() if group == ordered), ordered)


DEFAULT_ADAPTERS = Lora()
