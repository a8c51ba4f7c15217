"""Cards as their owners have them, and how what owners do is told beside a plan."""

from dataclasses import dataclass

from experiments.app.configurations import named_cluster, named_model
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
