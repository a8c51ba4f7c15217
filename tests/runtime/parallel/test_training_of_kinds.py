"""Models of several kinds of layers train under asymmetric plans as in one process, in float64."""

import random
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from hexiopt.cost.executors.states import RankStates
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.parameters import Parameters
from hexiopt.problem.workload import Workload
from runtime.mapping.model_parts import BALANCE, stage_parts
from runtime.mapping.parts import ExpertCell, shards
from tests.runtime.model.test_decoder import tiny
from tests.runtime.parallel.test_training import SEQ_LEN, RunRanks, equal_one_process
from tests.runtime.ranks import random_plan, random_sequence_plan, run_ranks
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

LAYERS = 4
WINDOWS = ["sliding_attention", "full_attention"] * 2
NORMED = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": WINDOWS, "num_hidden_layers": LAYERS}
RECURRENT = ["linear_attention", "full_attention"] * 2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BLOCKS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 10,
    "moe_latent_size": 7,
    "mlp_bias": True,
}
MODELS: dict[str, ModelSpec] = {
    "windows and norms of heads": tiny("qwen3-mixed", **NORMED),
    "windows, sinks and scales": tiny("granite_swa", layer_types=WINDOWS, num_hidden_layers=LAYERS),
    "capped scores, norms around": tiny("gemma2", layer_types=WINDOWS, num_hidden_layers=LAYERS),
    "chunks and temperatures": tiny("llama4_text", num_hidden_layers=LAYERS),
    "chunks of a token": tiny("llama4_text-plain", num_hidden_layers=LAYERS, attention_chunk_size=1),
    "latent attention": tiny("youtu", num_hidden_layers=LAYERS),
    "latent attention, scaled positions": tiny("youtu-yarn", num_hidden_layers=LAYERS),
    "Mamba-2": tiny("granitemoehybrid", layer_types=RECURRENT, num_hidden_layers=LAYERS, mamba_n_groups=6),
    "Mamba-2, norms of two groups": tiny("granitemoehybrid", layer_types=RECURRENT, num_hidden_layers=LAYERS),
    "Mamba-2, a norm of all heads": tiny("bamba-limits", attn_layer_indices=[1, 3], num_hidden_layers=LAYERS),
    "norms of all heads": tiny("olmo2", num_hidden_layers=LAYERS),
    "norms of all heads, windows": tiny("olmo3", layer_types=WINDOWS, num_hidden_layers=LAYERS),
    "delta rule": tiny("qwen3_next", layer_types=RECURRENT, num_hidden_layers=LAYERS, mlp_only_layers=[0, 1, 2, 3]),
    "blocks of one part": tiny("nemotron_h", n_groups=6),
    "Mamba-2 and experts": tiny("granitemoehybrid", **EXPERTS, layer_types=RECURRENT, num_hidden_layers=LAYERS),
    "blocks of experts behind a projection": tiny("nemotron_h", **BLOCKS),
    "plain MLP": tiny("arcee", num_hidden_layers=LAYERS),
}
SEQUENCES = [name for name in MODELS if name.startswith(("windows", "capped", "chunks", "plain"))]
OTHER_PARTS = (
    "capped scores, norms around",
    "chunks and temperatures",
    "latent attention, scaled positions",
    "Mamba-2",
    "delta rule",
    "norms of all heads",
)
PRECISE = 1e-13


def way(seed: int) -> RunRanks:
    """In threads over one queue as on a GPU first, then over gloo."""
    return run_ranks if seed else run_in_order


def small_plan(rng: random.Random) -> Plan:
    """A plan of few ranks that cuts heads."""
    while True:
        plan, _, _ = random_plan(rng, 5, LAYERS)
        if plan.has_tensor_parallelism and layers_of(plan) == LAYERS:
            return plan


@pytest.mark.parametrize(("name", "seed"), slow_but([(name, 0) for name in OTHER_PARTS], product(MODELS, range(4))))
def test_a_plan_trains_kinds_as_one_process(name: str, seed: int) -> None:
    plan = small_plan(random.Random(seed))
    of_gradients, _ = equal_one_process((plan, MODELS[name], batch(plan)), steps=2, run=way(seed))
    assert of_gradients <= PRECISE


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_rank_holds_what_is_priced(name: str, tp: int) -> None:
    """To the element: norms of what a group cuts are cut with it, and experts are shared by its ranks."""
    model = MODELS[name]
    shard = replace(shards(model, tp)[0], cell=ExpertCell.of(range(tp)))
    held = stage_parts(model, [(0, model.num_layers)], shard, first=True, last=True)
    parameters = Parameters(model, Workload(1, SEQ_LEN))
    states = RankStates.of(parameters, [model.layer_of(kind).shard(tp, model.vocab_size) for kind in model.kinds])
    counts = tuple(model.depth.count(number) for number in range(len(model.kinds)))
    of_rank = sum(prod(part.local_shape) for part in held if not part.name.endswith(BALANCE))
    assert of_rank == states.params.stage(counts, True, True)


@pytest.mark.parametrize(("name", "seed"), slow_but([(SEQUENCES[1], 0)], product(SEQUENCES, range(3))))
def test_sequence_layouts_train_kinds_as_one_process(name: str, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        plan, _, _ = random_sequence_plan(rng, SEQ_LEN, 4, LAYERS)
        if layers_of(plan) == LAYERS:
            break
    of_gradients, _ = equal_one_process((plan, MODELS[name], batch(plan)), steps=2, run=way(seed))
    assert of_gradients <= PRECISE


def layers_of(plan: Plan) -> int:
    return max(end for stage in plan.pipelines[0].stages for _, end in stage.layers)


def batch(plan: Plan) -> int:
    return sum(pipeline.num_sequences for pipeline in plan.pipelines)
