"""What a user asks on the page: cards in PCs, a model and how it is trained."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hexiopt as hx
from hexiopt.discovery.cards import cluster_of_cards
from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.hub import is_hub_name
from hexiopt.files.shipped import shipped_names
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.products import match
from hexiopt.problem.lora import MAX_RANK
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

TASKS = ("plan", "limits", "next")
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"training": "lora"},
    "qlora": {"training": "lora", "storage": "nf4"},
}
NETWORKS = ("1", "2.5", "10", "25", "100")
"""Gbit/s of Ethernet between PCs."""
MAX_CARDS, MAX_PCS, MAX_SECONDS = 64, 16, 120


@dataclass(frozen=True)
class Question:
    """A task about `pcs`, of each of which the number of cards by type, that a `network` of Gbit/s joins."""

    task: str
    pcs: tuple[Mapping[str, int], ...]
    network: str
    model: str
    training: str
    rank: int
    seq_len: int
    global_batch: int
    seconds: float

    @property
    def cluster_data(self) -> dict[str, Any]:
        """The cluster in the file format."""
        pcs = [[f"{count}x{gpu}" for gpu, count in pc.items()] for pc in self.pcs]
        return cluster_of_cards(pcs, f"{self.network}gbe" if len(pcs) > 1 else None).data

    def problem(self) -> Problem:
        """The problem. Raises InputError."""
        workload: dict[str, Any] = {"global_batch": self.global_batch, "seq_len": self.seq_len}
        chosen = dict(TRAININGS[self.training])
        if chosen:
            workload |= {"training": chosen.pop("training"), "lora": hx.Lora(rank=self.rank, **chosen)}
        return hx.Problem(hx.cluster(self.cluster_data), hx.model(self.model), Workload(**workload))

    @property
    def command(self) -> str:
        """The command that does the same, beside the file cluster.yaml."""
        chosen = dict(TRAININGS[self.training])
        words = ["cluster=cluster.yaml", f"model={self.model}"]
        if chosen:
            words += [f"workload.training={chosen.pop('training')}", f"workload.lora.rank={self.rank}"]
            words += [f"workload.lora.{key}={value}" for key, value in chosen.items()]
        words += [f"workload.seq_len={self.seq_len}", f"workload.global_batch={self.global_batch}"]
        return shlex.join(["hexiopt", "plan", *words, f"solver.time_limit_s={self.seconds:g}"])


def question_from(data: object) -> Question:
    """The question that a browser sent. Raises InputError in one line."""
    section = Section(data, "page")
    pcs = tuple(_pc(pc) for pc in section.items("pcs"))
    if not 1 <= len(pcs) <= MAX_PCS:
        raise InputError(f"page: pcs: {len(pcs)} is out of range; state 1 to {MAX_PCS} PCs")
    if (cards := sum(sum(pc.values()) for pc in pcs)) > MAX_CARDS:
        raise InputError(
            f"page: pcs: {cards} cards are too many for the page; take at most {MAX_CARDS}, or the program"
        )
    question = Question(
        task=section.text("task", choices=TASKS, default=TASKS[0]),
        pcs=pcs,
        network=section.text("network", choices=NETWORKS),
        model=_model(section.text("model")),
        training=section.text("training", choices=TRAININGS),
        rank=section.integer("rank", at_least=1, at_most=MAX_RANK),
        seq_len=section.integer("seq_len", at_least=1, at_most=2**20),
        global_batch=section.integer("global_batch", at_least=1, at_most=100_000),
        seconds=section.number("seconds", at_least=1, at_most=MAX_SECONDS),
    )
    section.finish()
    return question


def _pc(data: object) -> dict[str, int]:
    """The number of cards by type of a PC, from pairs of a name and a number."""
    if not isinstance(data, list) or not data:
        raise InputError("page: pcs: a PC has no cards; name one, or remove the PC")
    counts: dict[str, int] = {}
    for pair in data:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InputError(f"page: pcs: {quoted(pair)} is no pair of a card and a number; write ['rtx_3090', 1]")
        name, number = find_card(pair[0]), pair[1]
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_CARDS:
            raise InputError(f"page: pcs: {quoted(number)} is no number of cards; state 1 to {MAX_CARDS}")
        counts[name] = counts.get(name, 0) + number
    return counts


def find_card(text: str) -> str:
    """The type of a card by a name such as `3090` or `RTX 4090`. Raises InputError with those that it may mean."""
    types = {name for name in catalogue() if name != "cpu"}
    if text in types:
        return text
    meant = match(text[:80])
    if meant.gpu in types:
        return meant.gpu
    near = meant.choices or tuple(get_close_matches(text[:80], types))
    choices = f"did you mean {' or '.join(near)}?" if near else "choose one from the list of its field"
    raise InputError(f"page: cards: {quoted(text[:80])} is not known; {choices}")


def _model(text: str) -> str:
    """A shipped model or a name on the Hub: a browser names no files of this machine."""
    if text in shipped_names("model") or (is_hub_name(text) and len(text) <= 200 and not Path(text).exists()):
        return text
    hint = did_you_mean(text[:80], shipped_names("model"))
    raise InputError(f"page: model: {quoted(text[:80])} is neither shipped nor a name ORG/NAME on the Hub; {hint}")
