"""The panel's problems by name."""

from collections.abc import Callable
from functools import partial

from experiments.app.configurations import named_cluster, named_model
from experiments.studies.cases.fleets import FLEETS
from experiments.studies.frame.long_contexts import LongSetting
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.huggingface import model_from_config
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.solvers.drawn import drawn_problem

Maker = Callable[[], Problem]

DRAWN = (*range(4), 6, 7, 8, 12, 13, 14, 15, 18, 19, 20, 21, 24)  # 2 to 80 GPUs
LARGE = (4, 5, 10, 11, 16, 28)  # 104 to 240 GPUs
RATES_GB_PER_S = (12.5, 0.625)  # 100 and 5 Gbit/s between machines

# Four GPUs of three types under a desk: two boxes on 1 GbE, the right one with two types. The best plan needs one of
# the 24 orders of these devices.
DESK = {
    "name": "desk",
    "inter_machine": {"bandwidth_gb_per_s": 0.125, "latency_us": 60},
    "machines": [
        {"name": "left", "gpu": "rtx_3090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 12},
        {"name": "right_4090", "gpu": "rtx_4090", "num_gpus": 1, "intra_bandwidth_gb_per_s": 12},
        {"name": "right_a4000", "gpu": "rtx_a4000", "num_gpus": 1, "intra_bandwidth_gb_per_s": 12},
    ],
    "links": [{"between": ["right_4090", "right_a4000"], "bandwidth_gb_per_s": 12, "latency_us": 5}],
}
# Qwen2.5-3B (arXiv 2412.15115), as its config.json has it: first and last layer share a matrix.
QWEN_3B = {
    "name": "qwen2_5_3b",
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def shipped_problem(cluster: str, model: str, workload: Workload | None = None, **changes: float) -> Problem:
    """The problem of a shipped cluster, a shipped model and a workload, by default 256 sequences of 4,096 tokens."""
    return Problem(named_cluster(cluster, **changes), named_model(model), workload or Workload())


def desk() -> Problem:
    """A model of 3B on four GPUs of three types."""
    model = model_from_config(Section(QWEN_3B, "qwen2_5_3b"))
    return Problem(cluster_from_section(Section(DESK, "desk")), model, Workload(32, 2048))


def _settings() -> dict[str, Maker]:
    models = {1: "llama2_7b", 2: "llama2_7b", 3: "llama_30b"}
    return {
        f"setting_{k}_{rate:g}": partial(shipped_problem, f"hexiscale_setting_{k}", model, inter_gb_per_s=rate)
        for k, model in models.items()
        for rate in RATES_GB_PER_S
    }


def _long_contexts() -> dict[str, Maker]:
    settings = (
        LongSetting("hexiseq_testbed", "gpt_7b", 131_072),
        LongSetting("hexiseq_sim_1", "gpt_13b", 262_144),
        LongSetting("four_machines", "gpt_3b", 131_072),
    )
    return {f"long_{s.cluster.removeprefix('hexiseq_')}": s.problem for s in settings}


PROBLEMS: dict[str, Maker] = {
    **{f"drawn_{number}": partial(drawn_problem, number) for number in (*DRAWN, *LARGE)},
    **_settings(),
    "case_study": partial(shipped_problem, "hexiscale_case_study", "llama2_13b", Workload(64, 4096)),
    "four_machines": partial(shipped_problem, "four_machines", "llama2_7b", Workload(64, 2048)),
    "small_mixed_7b": partial(shipped_problem, "small_mixed", "llama2_7b"),
    "small_mixed_3b": partial(shipped_problem, "small_mixed", "gpt_3b", Workload(64, 2048)),
    "synthetic_64": partial(shipped_problem, "synthetic", "llama2_13b", Workload(512), num_machines=8),
    **{fleet.cluster: fleet.problem for fleet in FLEETS},
    **_long_contexts(),
    "desk": desk,
}
