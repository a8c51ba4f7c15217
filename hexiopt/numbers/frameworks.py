"""What training frameworks do differently on the same hardware (`frameworks.yaml`).

Plans are found for our own runtime, `hexiopt`; the others are there to predict runs that were made with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hexiopt.numbers.coefficients import COEFFICIENTS
from hexiopt.numbers.constants import constant, constant_values
from hexiopt.numbers.gpus import QUANTIZED_BYTES
from hexiopt.reading import Section, read_mapping, sha256_of
from hexiopt.units import MICROSECOND

GRADIENT_SUMS = ("after", "beside", "by_part")
"""When gradients are synchronised; the file says what each value means."""
WEIGHT_GATHERS = ("after", "beside", "by_part")
"""When sharded weights are gathered; the file says what each value means."""
_TABLE = Path(__file__).with_name("frameworks.yaml")


@dataclass(frozen=True)
class Framework:
    """How a framework executes; the file says what each value means. Seconds, factors, shares."""

    name: str
    sequence_parallel: bool
    recompute_stops_early: bool
    gradient_sums: str
    weight_gathers: str
    memory_traffic: float
    attention_speed: float
    tp_exposed: float
    tp_copies: float
    contention: float
    layer_host_s: float
    holder_s: float
    cast_bytes: Mapping[str, float]
    block_attention_speed: float
    adapter_traffic: float = 1.0
    exchange_exposed: float = 1.0
    expert_passes: float = 1.0
    copies_to_machines: bool = False
    expert_columns: bool = False
    spreads_over_ends: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether this project's lower bounds and proofs hold for the framework.

        They do where each of its sums begins no earlier than the last backward of every device in it, gathers follow
        all sums and delay the next step or nothing (`late_bytes`), and no recomputing shortens a step.
        """
        return self.gradient_sums != "beside" and self.weight_gathers != "beside"

    def late_bytes(self, weight_bytes: float) -> float:
        """Of the bytes of a sharded weight, those that are certainly gathered before the next step begins."""
        return weight_bytes if self.weight_gathers == "after" else 0.0

    def share_after_backward(self, sharding_stages: Sequence[int], gradient_bytes: float, weight_bytes: float) -> float:
        """The least share, of what is summed once a step and gathered after it, that follows the last backward.

        It holds for plans of any of `sharding_stages` (ZeRO). Gathers follow the optimiser.
        """
        early = [stage for stage in sharding_stages if stage < 2]
        if self.gradient_sums == "after" or not early:
            return 1.0
        gathered = min(gradient_bytes, self.late_bytes(weight_bytes))
        return gathered / (gradient_bytes + gathered) if 0 not in early else 0.0


@cache
def frameworks() -> Mapping[str, Framework]:
    """All frameworks by name, read once."""
    return calibrated_frameworks(constant_values())


def calibrated_frameworks(values: Mapping[str, float]) -> Mapping[str, Framework]:
    """The frameworks with `values` of the fitted constants."""
    file = Section(read_mapping(_TABLE), _TABLE.name)
    table, casts = file.section("frameworks"), file.section("casts")
    return MappingProxyType({name: _read(table.section(name), name, values, casts) for name in table.keys()})  # noqa: SIM118


def fitted_constants(name: str) -> set[str]:
    """The names of the fitted constants that stand in a framework's row."""
    file = Section(read_mapping(_TABLE), _TABLE.name)
    section = file.section("frameworks").section(name)
    casts = file.section("casts").section(section.text("casts"))
    content = [part.raw(key) for part in (section, casts) for key in part.keys()]  # noqa: SIM118
    return {value for value in content if isinstance(value, str) and value in constant_values()}


def _read(section: Section, name: str, values: Mapping[str, float], casts: Section) -> Framework:
    cast_bytes = casts.section(section.text("casts", choices=casts.keys()))
    framework = Framework(
        name,
        section.flag("sequence_parallel"),
        section.flag("recompute_stops_early"),
        section.text("gradient_sums", choices=GRADIENT_SUMS),
        section.text("weight_gathers", choices=WEIGHT_GATHERS),
        constant(section, "memory_traffic", values),
        constant(section, "attention_speed", values),
        constant(section, "tp_exposed", values),
        constant(section, "tp_copies", values),
        constant(section, "contention", values),
        constant(section, "layer_host_us", values) * MICROSECOND,
        constant(section, "holder_us", values) * MICROSECOND,
        {
            precision: constant(cast_bytes, precision, values)
            for precision in QUANTIZED_BYTES
            if precision in cast_bytes
        },
        constant(section, "block_attention_speed" if "block_attention_speed" in section else "attention_speed", values),
        section.number("adapter_traffic", above=0, at_most=100, default=1.0),
        section.number("exchange_exposed", at_least=0, at_most=1, default=1.0),
        section.number("expert_passes", at_least=0, at_most=1, default=1.0),
        section.flag("copies_to_machines", default=False),
        section.flag("expert_columns", default=False),
        section.flag("spreads_over_ends", default=False),
    )
    section.finish()
    return framework


def default_framework() -> Framework:
    """Our own runtime."""
    return frameworks()["hexiopt"]


def calibration_sha256() -> str:
    """SHA-256 of the constants of the cost model, so that a plan file says which constants priced the plan."""
    # Files written before adapters, experts and tied matrices were priced have no such fields.
    switches = {"copies_to_machines": False, "expert_columns": False, "spreads_over_ends": True}
    later = {"adapter_traffic": 1.0, "exchange_exposed": 1.0, "expert_passes": 1.0, **switches}
    framework = {name: value for name, value in asdict(default_framework()).items() if later.get(name) != value}
    return sha256_of({"coefficients": COEFFICIENTS, "fitted": constant_values(), "framework": framework})
