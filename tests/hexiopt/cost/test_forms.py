"""The form of a decoder in its price: that of a named architecture where they are the same, else by its parts."""

from dataclasses import replace

import pytest

import hexiopt as hx
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.form import GPT, LLAMA, Form
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.space import default_schedule
from tests.models import TOY

CLUSTER = hx.cluster(
    {
        "name": "c",
        "machines": [{"name": "n", "gpu": "a100_80gb_sxm", "num_gpus": 2, "intra_bandwidth_gb_per_s": 300}],
    }
)
WORKLOAD = hx.Workload(global_batch=4, seq_len=1000)


def price(model: ModelSpec) -> hx.PlanCost:
    problem = hx.Problem(CLUSTER, model, WORKLOAD)
    stages = (Stage.of((0, 1), 0, 4, "none"),)
    return hx.price(problem, Plan((Pipeline(stages, 4),), default_schedule(WORKLOAD), Sharding(0)))


def decoder(form: Form) -> ModelSpec:
    return replace(TOY, architecture=DECODER, form=form)


def memory(cost: hx.PlanCost) -> float:
    return cost.pipelines[0].stages[0].memory.total


@pytest.mark.parametrize(
    ("named", "form"),
    [
        (TOY, LLAMA),
        (replace(TOY, architecture="qwen3"), replace(LLAMA, qk_norm="head")),
        (replace(TOY, architecture="nemotron"), GPT),
    ],
)
def test_a_decoder_is_priced_as_the_architecture_of_its_form(named: ModelSpec, form: Form) -> None:
    assert price(decoder(form)) == price(named)


def test_norms_take_time_and_memory() -> None:
    forms = [replace(LLAMA, norms=norms) for norms in (1, 2, 4)] + [replace(LLAMA, norms=4, inner_norms=True)]
    wide = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "ffn_size": 11_008}
    costs = [price(decoder(form).replace(**wide)) for form in forms]
    assert [cost.step_time_s for cost in costs] == sorted({cost.step_time_s for cost in costs})
    assert [memory(cost) for cost in costs] == sorted({memory(cost) for cost in costs})


def test_what_is_kept_of_norms_by_hand() -> None:
    """A norm in front of a product keeps its input and its output; a further one, before a sum, its input alone."""
    hidden, width, tokens, layers, tp = TOY.hidden_size, 2, 1000, 4, 2
    statistics = 4
    two, four = (memory(price(decoder(replace(LLAMA, norms=norms)))) for norms in (2, 4))
    states = 16 * 2 * hidden * layers
    kept_bytes = layers * tokens / tp * 2 * (hidden * width + statistics)
    assert four - two == pytest.approx(states + kept_bytes * 1.05, rel=1e-6)  # with the reserve for fragmentation


def test_positions_without_rotation_keep_no_sines() -> None:
    rotary, none = (price(decoder(replace(LLAMA, positions=word))) for word in ("rope", "none"))
    assert memory(none) < memory(rotary)
    learned = price(decoder(replace(LLAMA, positions="learned")))
    assert memory(learned) > memory(none), "its rows are parameters"
