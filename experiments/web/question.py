"""What a user asks on the page: cards in PCs, a model and how it is trained."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import hexiopt as hx
from hexiopt.discovery.cards import CardCluster, cluster_of_cards
from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.hub import is_hub_name
from hexiopt.files.shipped import shipped_names
from hexiopt.numbers.products import find_gpu
from hexiopt.problem.lora import MAX_RANK
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

TASKS = ("plan", "next")
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full_8bit": {"optimizer": "adamw_8bit"},
    "lora": {"training": "lora"},
    "qlora": {"training": "lora", "lora.storage": "nf4"},
}
"""Of a workload, what a choice of the form states; a workload is the last that it agrees with."""
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
    def _gpus(self) -> list[list[str]]:
        return [[f"{count}x{gpu}" if count > 1 else gpu for gpu, count in pc.items()] for pc in self.pcs]

    @property
    def _network(self) -> str | None:
        return f"{self.network}gbe" if len(self.pcs) > 1 else None

    @property
    def _workload(self) -> dict[str, Any]:
        options = dict(TRAININGS[self.training])
        rank = {"lora.rank": self.rank} if "training" in options else {}
        return options | rank | {"seq_len": self.seq_len, "global_batch": self.global_batch}

    @property
    def cards(self) -> CardCluster:
        """The cluster in the file format, and what is assumed of it. Raises InputError."""
        return cluster_of_cards(self._gpus, self._network)

    def problem(self) -> Problem:
        """The problem. Raises InputError."""
        workload = self._workload
        lora = {key.removeprefix("lora."): workload.pop(key) for key in [*workload] if key.startswith("lora.")}
        return hx.Problem(hx.cluster(self.cards.data), hx.model(self.model), Workload(lora=hx.Lora(**lora), **workload))

    @property
    def commands(self) -> list[str]:
        """The commands that do the same: the answer at once, and the search."""
        pcs = [",".join(pc) for pc in self._gpus]
        gpus = pcs[0] if len(pcs) == 1 else ",".join(f"[{pc}]" for pc in pcs)
        words = [f"model={self.model}", f"gpus=[{gpus}]", *[f"network={self._network}"] * (len(pcs) > 1)]
        words += [f"workload.{key}={value}" for key, value in self._workload.items()]
        search = f"solver.time_limit_s={self.seconds:g}"
        return [shlex.join(["hexiopt", "fit", *words]), shlex.join(["hexiopt", "plan", *words, search])]

    def form_of(self, changed: Problem) -> dict[str, Any]:
        """What the form shows of the problem with another training or context, or with cards more, in the first PC."""
        workload = changed.workload
        agrees = [
            name
            for name, options in TRAININGS.items()
            if all(attrgetter(key)(workload) == value for key, value in options.items())
        ]
        first, *others = ({**pc} for pc in self.pcs)
        for machine in changed.cluster.machines[len(self.cards.data["machines"]) :]:
            first[machine.gpu.name] = first.get(machine.gpu.name, 0) + machine.num_gpus
        pcs = [[[gpu, count] for gpu, count in pc.items()] for pc in (first, *others)]
        return {"training": agrees[-1], "rank": workload.lora.rank, "seq_len": workload.seq_len, "pcs": pcs}


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
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or len(pair[0]) > 80:
            raise InputError(f"page: pcs: {quoted(pair)} is no pair of a card and a number; write ['rtx_3090', 1]")
        name, number = find_gpu(pair[0], {}, "page: cards").name, pair[1]
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_CARDS:
            raise InputError(f"page: pcs: {quoted(number)} is no number of cards; state 1 to {MAX_CARDS}")
        counts[name] = counts.get(name, 0) + number
    return counts


def _model(text: str) -> str:
    """A shipped model or a name on the Hub: a browser names no files of this machine."""
    if text in shipped_names("model") or (is_hub_name(text) and len(text) <= 200 and not Path(text).exists()):
        return text
    hint = did_you_mean(text[:80], shipped_names("model"))
    raise InputError(f"page: model: {quoted(text[:80])} is neither shipped nor a name ORG/NAME on the Hub; {hint}")
