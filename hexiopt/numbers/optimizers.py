"""What an optimizer keeps and moves for each parameter: another optimizer is another row."""

from dataclasses import dataclass
from types import MappingProxyType

from hexiopt.numbers.coefficients import ADAM_STATE_TRAFFIC_BYTES


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each parameter in training: its weight, gradient, FP32 master weight and the optimizer's moments.

    `traffic_bytes` is what a step reads and writes of master weight and moments; `moments` names these in tables.
    """

    weight: int
    gradient: int
    master: int
    moment: int
    traffic_bytes: int
    moments: str

    @property
    def sharded(self) -> int:
        """Bytes that every ZeRO stage from 1 on spreads: master weight and moments."""
        return self.master + self.moment

    @property
    def total(self) -> int:
        """Bytes of all states, unsharded."""
        return self.weight + self.gradient + self.sharded

    @property
    def step_bytes(self) -> int:
        """Bytes that an optimizer step reads and writes."""
        return self.traffic_bytes + self.gradient + self.weight


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer: bytes of its FP32 moments of a parameter, bytes that a step moves of these and of the master
    weight, and the name of the moments in tables."""

    moment_bytes: int
    traffic_bytes: int
    moments: str

    def states(self, weight: int, gradient: int) -> StateBytes:
        """The states of a parameter, given the bytes of its weight and gradient.

        16-bit weights have an FP32 master weight as well.
        """
        master = 4 if weight == 2 else 0
        return StateBytes(weight, gradient, master, self.moment_bytes, self.traffic_bytes, self.moments)


OPTIMIZERS = MappingProxyType({"adam": OptimizerKind(8, ADAM_STATE_TRAFFIC_BYTES, "Adam's moments")})
