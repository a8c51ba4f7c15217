"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) as parameters beside frozen ones. Names are those of peft.

Of a matrix that a TP group cuts by its outputs, every rank holds A whole and its part of B; of one cut by its inputs,
its part of A and B whole. What each makes of its own heads, columns or tokens sums to the gradient of a whole matrix,
so that the buckets of whole parameters serve adapters too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hexiopt.problem.lora import TARGETS, Lora
from hexiopt.problem.workload import Workload
from runtime.mapping.parts import ParameterPart

MAX_ALPHA = 10.0**6
DOWN, UP = "lora_A", "lora_B"
MODULES = {target: f"{target}_proj" for target in TARGETS}
"""The names of targets in a model."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of a run: what its workload states of them, and `alpha`, which over the rank scales their products."""

    lora: Lora
    alpha: float

    @classmethod
    def of(cls, workload: Workload, alpha: float | None = None) -> "Adapters | None":
        """Those of a workload, if it has any; `alpha` is twice the rank where it is not stated."""
        lora = workload.adapters
        return None if lora is None else cls(lora, 2.0 * lora.rank if alpha is None else alpha)

    @property
    def scale(self) -> float:
        """By what the products of adapters are multiplied."""
        return self.alpha / self.lora.rank

    def is_target(self, name: str) -> bool:
        """Whether a parameter of the model has an adapter."""
        module, _, last = name.rpartition(".")
        return last == "weight" and module.rpartition(".")[2] in {MODULES[name] for name in self.lora.matrices}


def with_adapters(parts: Iterable[ParameterPart], adapters: Adapters | None) -> Iterator[ParameterPart]:
    """The parts of parameters that a rank holds: those given, frozen where there are adapters, each with its own."""
    for part in parts:
        if adapters is None:
            yield part
            continue
        yield replace(part, trained=False)
        if adapters.is_target(part.name):
            yield from _of(part, adapters.lora.rank)


def _of(part: ParameterPart, rank: int) -> Iterator[ParameterPart]:
    outputs, inputs = part.shape
    down, up = (adapter_name(part.name, matrix) for matrix in (DOWN, UP))
    if part.dim == 0:
        yield ParameterPart(down, (rank, inputs), 0, 0, rank, initial="uniform")
        yield ParameterPart(up, (outputs, rank), 0, part.start, part.end, initial=0.0)
    else:
        yield ParameterPart(down, (rank, inputs), 1, part.start, part.end, initial="uniform")
        yield ParameterPart(up, (outputs, rank), 0, 0, outputs, initial=0.0)


def adapter_name(name: str, matrix: str) -> str:
    """The name of one of the two matrices beside the parameter `name`, which is a weight."""
    return f"{name.removesuffix('.weight')}.{matrix}.weight"
