"""How far predictions were from measured runs (`errors.yaml`), by what was trained.

The file is written by `hexiopt validate data=FILE validate.errors=hexiopt/numbers/errors.yaml`, a row each of its kinds
of runs; nothing in it is typed in.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hexiopt.reading import Section, read_mapping

ERRORS = Path(__file__).with_name("errors.yaml")
OUTSIDE = 0.1  # share of cases on either side of an interval
LEAST = 10  # runs of a row, with which an interval ends at one of them
MANY_TOKENS = 1024  # of a micro-batch, from which on the host does not bind an eager trainer


@dataclass(frozen=True)
class Evidence:
    """Measured over predicted values of the runs of a kind, ascending: speeds, and memory of processes.

    `many_tokens`: whether their micro-batches have at least `MANY_TOKENS` tokens; `data` is the file of the runs, and
    `gpus` are their types.
    """

    kind: str
    many_tokens: bool
    data: str
    gpus: tuple[str, ...]
    speed: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """The factors of a predicted speed between which another run of the kind lies in eight of ten cases at least:
        of n runs, it lies beyond the j-th at either end in j of n + 1 (Wilks, Annals of Mathematical Statistics 12(1),
        1941)."""
        j = int((len(self.speed) + 1) * OUTSIDE)
        assert j >= 1, "a row has `LEAST` runs"
        return self.speed[j - 1], self.speed[-j]


@cache
def evidence() -> tuple[Evidence, ...]:
    """All rows of the file, read once."""
    return read_evidence(ERRORS)


def read_evidence(path: Path) -> tuple[Evidence, ...]:
    """The rows of a file. Raises InputError."""
    table = Section(read_mapping(path), path.name)
    rows = tuple(_read(section) for section in table.sections("kinds"))
    table.finish()
    return rows


def _read(section: Section) -> Evidence:
    speed, memory = section.items("speed"), section.items("memory")
    row = Evidence(
        section.text("kind"),
        section.flag("many_tokens"),
        section.text("data"),
        tuple(section.items("gpus")),
        tuple(sorted(map(float, speed))),
        tuple(sorted(map(float, memory))),
    )
    section.finish()
    return row
