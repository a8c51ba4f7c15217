"""What a training step must do: how many sequences of what length, in which arithmetic, under which rules."""

from dataclasses import dataclass, fields
from typing import Any

from hexiopt.calibration.gpus import PRECISIONS
from hexiopt.errors import InputError
from hexiopt.reading import Section
from hexiopt.schedules.registry import SCHEDULE_NAMES, schedule_named

RECOMPUTE_POLICIES = ("none", "selective", "full")
SHARDING_STAGES = (0, 1, 2, 3)
AUTO = "auto"


@dataclass(frozen=True)
class Workload:
    """One optimiser step of `global_batch` sequences of `seq_len` tokens.

    `recompute`, `schedule` and `optimizer_sharding` (ZeRO stage) fix a choice for the whole plan, or leave it
    to the search (`auto`). `gradient_bytes` is what a gradient element takes in mixed precision, stored and
    synchronised (2 or 4; 4 always in fp32 and tf32).
    Raises InputError where a value breaks its rule.
    """

    global_batch: int = 256
    seq_len: int = 4096
    precision: str = "bf16"
    recompute: str = AUTO
    schedule: str = AUTO
    optimizer_sharding: str = AUTO
    gradient_bytes: int = 2

    def __post_init__(self) -> None:
        if self.schedule == AUTO or schedule_named(self.schedule, "workload: schedule").lockstep:
            return
        if self.optimizer_sharding in ("2", "3"):
            raise InputError(
                f"workload: optimizer_sharding: {self.optimizer_sharding} does not go with the {self.schedule} "
                f"schedule; choose workload.schedule=1f1b, or {AUTO}, 0 or 1"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation element."""
        return 4 if self.precision in ("tf32", "fp32") else 2

    @property
    def stored_gradient_bytes(self) -> int:
        """Bytes of a gradient element."""
        return self.gradient_bytes if self.element_bytes == 2 else 4

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight: FP32 beside 16-bit weights, none beside FP32 ones."""
        return 4 if self.element_bytes == 2 else 0

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of Adam's two FP32 moments of a parameter."""
        return 8

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len


def workload_from_section(section: Section) -> Workload:
    """The workload of a mapping whose keys are the fields of `Workload`. Raises InputError."""
    default = Workload()
    sharding = section.raw("optimizer_sharding", default.optimizer_sharding)
    if (
        isinstance(sharding, bool)
        or sharding not in (AUTO, "0", "1", "2", "3", 0, 1, 2, 3)
        or isinstance(sharding, float)
    ):
        section.fail("optimizer_sharding", f"is not known; choose {AUTO}, 0, 1, 2 or 3")
    workload = Workload(
        global_batch=section.integer("global_batch", at_least=1, at_most=10**7, default=default.global_batch),
        seq_len=section.integer("seq_len", at_least=1, at_most=2**27, default=default.seq_len),
        precision=section.text("precision", choices=PRECISIONS, default=default.precision),
        recompute=section.text("recompute", choices=(AUTO, *RECOMPUTE_POLICIES), default=default.recompute),
        schedule=section.text("schedule", choices=(AUTO, *SCHEDULE_NAMES), default=default.schedule),
        optimizer_sharding=str(sharding),
        gradient_bytes=section.integer("gradient_bytes", at_least=2, at_most=4, default=default.gradient_bytes),
    )
    if workload.gradient_bytes == 3:
        section.fail("gradient_bytes", "is not a width; choose 2 or 4")
    section.done()
    return workload


def workload_to_dict(workload: Workload) -> dict[str, Any]:
    """All fields, as `workload_from_section` reads them."""
    return {field.name: getattr(workload, field.name) for field in fields(workload)}
