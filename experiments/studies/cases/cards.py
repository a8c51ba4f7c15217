"""Cards as their owners have them, and how what owners do is told beside a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import hexiopt as hx
from experiments.app.configurations import named_cluster, named_model
from hexiopt.discovery.cards import cluster_of_cards
from hexiopt.plan.plan import Plan
from hexiopt.problem.lora import Lora
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import LORA, Workload
from hexiopt.study.fitting.owners import BEST, EQUAL, MAP, owners_tokens_per_s

BATCH, SEQ_LEN, RANK = 32, 2048, 16
STORAGES = {"16bit": "16-bit", "nf4": "NF4"}
MODELS = ("qwen3_8b", "qwen3_14b", "qwen3_32b")
COLUMNS = {MAP: "device_map_tokens_per_s", EQUAL: "equal_tokens_per_s", BEST: "card_tokens_per_s"}


@dataclass(frozen=True)
class CardFleet:
    """A shipped cluster of a few cards, in words, and the precision that all have."""

    cluster: str
    words: str
    precision: str = "bf16"

    def problem(self, model: str, storage: str) -> Problem:
        """Adapters of a shipped model beside matrices in a storage."""
        adapters = Lora(rank=RANK, storage=storage)
        work = Workload(BATCH, SEQ_LEN, precision=self.precision, training=LORA, lora=adapters)
        return Problem(named_cluster(self.cluster), named_model(model), work)


FLEETS = (
    CardFleet("pc_3090_4090", "3090 + 4090"),
    CardFleet("pc_of_four", "3060 + 2 × 3090 + 5090"),
    CardFleet("lab_v100_a100", "4 × V100 + 2 × A100, 10 GbE", "fp16"),
    CardFleet("home_5090_4060ti", "5090; 2 × 4060 Ti, 1 GbE"),
)


def owners(problem: Problem, plan: Plan) -> dict[str, float]:
    """Tokens per second of what owners do beside a plan; NaN where it fits no card."""
    return {COLUMNS[name]: rate for name, rate in owners_tokens_per_s(problem).items()}


# Two cards of one PC, as people write them.
PAIRS = (
    ("a2000 12gb", "3060 12gb"),
    ("3060 12gb", "3090"),
    ("3080 10gb", "3090"),
    ("2080 ti", "3090"),
    ("3090", "4090"),
    ("4060 ti 16gb", "4090"),
    ("5060 ti 16gb", "5090"),
    ("3090", "5090"),
    ("4090", "5090"),
    ("pro 4500", "3090"),
    ("a6000", "4090"),
    ("7900 xt", "7900 xtx"),
)


@dataclass(frozen=True)
class Needs:
    """GB that the tables of trainers say a model needs on one card, with 16-bit matrices and with those of 4 bits.

    unsloth: its requirements page (unsloth.ai/docs, "Fine-tuning VRAM requirements"). LLaMA-Factory: README at 00409ff,
    "Hardware Requirement": its column for the size, else its rule of 2 and 1/2 GB a billion parameters.
    """

    unsloth: tuple[float, float]
    llama_factory: tuple[float, float]

    def by_table(self, memories_gib: Sequence[float], quantised: bool) -> str:
        """Where the model fits by each table: on one card (1), on as much memory as all have (2), or nowhere (0)."""
        words = []
        for letter, table in (("U", self.unsloth), ("L", self.llama_factory)):
            need = table[quantised]
            words.append(f"{letter}{1 if need <= max(memories_gib) else 2 if need <= sum(memories_gib) else 0}")
        return " ".join(words)


NEEDS_GB = {
    "mistral_7b": Needs((19, 5), (16, 6)),
    "qwen3_8b": Needs((22, 6), (16, 4)),
    "qwen3_14b": Needs((33, 8.5), (32, 12)),
    "gemma3_27b": Needs((64, 22), (54, 13.5)),
    "qwen3_32b": Needs((76, 26), (64, 16)),
    "llama3_70b": Needs((164, 41), (160, 48)),
}


def pair_problem(pair: tuple[str, str], model: str, storage: str) -> Problem:
    """What `hexiopt fit gpus=[...]` asks: adapters beside matrices in a storage; FP16 where a card has no BF16."""
    cluster = hx.cluster(cluster_of_cards(list(pair)).data)
    precision = "bf16" if all(gpu.flops_bf16 for gpu in cluster.types) else "fp16"
    adapters = Lora(rank=RANK, storage=storage)
    return Problem(cluster, named_model(model), Workload(BATCH, SEQ_LEN, precision, training=LORA, lora=adapters))
