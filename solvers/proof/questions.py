"""The questions that packings leave to a proof, and what is known of them from longer step times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from solvers.proof.cases import Case
from solvers.proof.partitions import Partition
from solvers.proof.pipelines import PipelineSearch
from solvers.proof.tables import Sharding

Kind = Literal["single", "several"]  # of questions


@dataclass(frozen=True, slots=True)
class Single:
    """Whether a plan of one pipeline on a usage, of micro-batches of `size`, is in time."""

    usage: int
    size: int


@dataclass(frozen=True, slots=True)
class Several:
    """Whether a plan of a partition is in time, given the sharding groups and an upper bound on the sequences of each
    pipeline."""

    parts: Partition
    sharding: Sharding
    most: tuple[int, ...]


Question = Single | Several


def _named(question: Question) -> Single | tuple[Partition, Sharding]:
    """What is asked, whatever is known of it."""
    return question if isinstance(question, Single) else (question.parts, question.sharding)


class Known:
    """What is known of one step time: the single pipelines, and the `refuted` ones of the questions `listed` by kind.
    Partitions are listed case by case, and those of the `cases` listed so far are kept.

    No plan in time T means none in less, and so for single pipelines and partitions. So `before`, of a time that was no
    shorter, is where this one begins.
    """

    def __init__(self, search: PipelineSearch, before: "Known | None") -> None:
        self.search = search
        self.refuted: set[Single | tuple[Partition, Sharding]] = set() if before is None else before.refuted.copy()
        self.listed: dict[Kind, list[Question]] = {} if before is None else before.listed.copy()
        self.cases: dict[Case, list[Several]] = {} if before is None else before.cases.copy()

    def refute(self, question: Question) -> None:
        """Take note that a question is answered with no."""
        self.refuted.add(_named(question))

    def open(self, kind: Kind, questions: "Callable[[Known], Sequence[Question]]") -> list[Question]:
        """The questions of a kind that are not refuted; `questions` lists them where no longer time has."""
        if kind not in self.listed:
            self.listed[kind] = list(questions(self))
        self.listed[kind] = [question for question in self.listed[kind] if _named(question) not in self.refuted]
        return self.listed[kind]
