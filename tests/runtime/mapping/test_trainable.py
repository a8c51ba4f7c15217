"""Which models are trained: what is read of them comes back from a plan file, and features that are not are named."""

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from hexiopt.exports.trainable import ACTIVATIONS, OPTIMIZERS, untrainable
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.files.models.execution import execution_of
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.execution import Rotation
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.report.notes import notes
from hexiopt.study.fit import fit
from hexiopt.study.solution import PlacedPlan
from runtime.mapping.moments import RULES
from runtime.model import functions
from tests.runtime.model.test_decoder import CASES, SIZES, tiny
from tests.runtime.model.test_decoder_with_experts import CASES as WITH_EXPERTS
from tests.solvers.problems import cluster

WORKLOAD = Workload(2, 9)
SHIPPED = sorted((Path(__file__).parents[3] / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("case", CASES)
def test_what_training_reads_comes_back_from_a_plan_file(case: str) -> None:
    model = tiny(case)
    assert untrainable(model, WORKLOAD) is None
    again = model_from_config(Section(model.to_dict(), "again"))
    assert (again, execution_of(again)) == (model, execution_of(model))
    assert again.to_dict() == model.to_dict()


@pytest.mark.parametrize("case", [*CASES, *WITH_EXPERTS])
def test_defaults_are_those_of_transformers(case: str) -> None:
    """What a file leaves out is read as from the whole one that transformers writes."""
    auto = pytest.importorskip("transformers").AutoConfig
    model_type, stated = case.partition("-")[0], SIZES | {"num_experts_per_tok": 2} | (CASES | WITH_EXPERTS)[case]
    stated = {key: value for key, value in stated.items() if case in WITH_EXPERTS or key in SIZES | CASES[case]}
    whole = auto.for_model(model_type, **stated).to_dict()
    models = [
        model_from_config(Section(config, case), case) for config in ({"model_type": model_type, **stated}, whole)
    ]
    short, long = (execution_of(model) for model in models)
    assert short is not None
    assert long is not None
    for name, value in vars(long).items():
        short_value = getattr(short, name)
        if isinstance(value, Rotation) and value.rule == "default":
            short_value = replace(short_value, original_positions=value.original_positions)  # which nothing reads
        if name == "score_scale" and short_value is None and value is not None:
            short_value = 1 / sqrt(models[0].head_dim)
        assert short_value == value, name


def test_activations_and_optimizers_are_those_that_are_computed() -> None:
    assert set(ACTIVATIONS) == functions.ACTIVATIONS.keys()
    assert tuple(RULES) == OPTIMIZERS


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.stem != "hf"], ids=lambda path: path.stem)
def test_shipped_models_are_trained_or_refused_in_one_line(path: Path) -> None:
    refusal = untrainable(read_model(path), WORKLOAD)
    assert refusal is None or (refusal.startswith("model ") and "\n" not in refusal and "; " in refusal)


def case(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return name, changes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (case("youtu", hidden_act="tanh"), "activation tanh cannot be trained; take one of silu"),
        (case("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "take one of default, linear"),
        (case("llama", rope_parameters={"rope_type": "yarn"}), "factor: is missing"),
        (case("llama", rope_parameters={"rope_type": "yarn", "factor": 2.0, "odd": 1}), "odd"),
        (case("gemma2", attn_logit_softcapping=-1.0), "attn_logit_softcapping"),
        (case("gemma3_text", sliding_window=64), "layers with and without windows rotate positions differently"),
        (case("granite_swa", layer_rope_theta=[1.0, 2.0]), "differs by layer, which cannot be trained"),
        (case("bamba", time_step_limit=[1.0]), "is not two numbers from 0 on"),
        (case("llama4_text", attn_temperature_tuning="on"), "is not true or false; write one of them"),
        (case("llama4_text", floor_scale=0), "floor_scale"),
        (case("deepseek_v3", num_nextn_predict_layers=1), "layers that predict further tokens cannot be trained"),
    ],
)
def test_features_that_are_not_trained_are_named(model: tuple[str, dict[str, Any]], message: str) -> None:
    name, changes = model
    refusal = untrainable(tiny(name, **changes), WORKLOAD)
    assert refusal is not None
    assert message in refusal


def plan_of(parallelism: Any) -> Plan:
    return Plan((Pipeline((Stage(parallelism, ((0, 2),), ("none",)),), 1),))


SEQUENCE = plan_of(SequenceParallel((SequenceGroup((0, 1), (5, 4), (3, 3)),)))
TWO = plan_of(TensorParallel((0, 1)))


@pytest.mark.parametrize(
    ("name", "plan", "masks", "message"),
    [
        ("olmo2", TWO, False, None),
        ("bamba-limits", TWO, False, None),
        ("bamba", TWO, False, None),
        ("qwen3_next", TWO, False, None),
        ("gemma2", SEQUENCE, False, None),
        ("llama", SEQUENCE, True, "plan with space.sequence=false, or leave out the masking"),
        ("gemma2", TWO, True, "knows no documents"),
        ("bamba", TWO, True, "a recurrence knows no documents"),
        ("gemma3_text", TWO, True, None),
        ("llama4_text", TWO, True, None),
        ("llama4_text", SEQUENCE, False, None),
    ],
)
def test_plans_that_a_model_is_not_trained_by_are_named(
    name: str, plan: Plan, masks: bool, message: str | None
) -> None:
    refusal = untrainable(tiny(name), WORKLOAD, plan, document_masking=masks)
    assert refusal is None if message is None else message in str(refusal)


def test_notes_say_what_is_not_trained() -> None:
    """Of a problem, of a plan, and of what fits, in words; nothing of what is."""
    problem = Problem(cluster(("a", "fast", 2)), tiny("llama"), Workload(2, 9, precision="fp32", optimizer="lion"))
    note = "hexiopt train does not train this: workload.optimizer: lion cannot be trained, only planned, as torch "
    note += "does not have it"
    assert note in notes(problem)
    assert note in PlacedPlan.of(problem, TWO).notes
    assert note in " ".join(str(fit(problem, max_steps=1)).split())
    trained = replace(problem, workload=Workload(2, 9, precision="fp32"))
    assert not any("train" in text for text in (*notes(trained), *PlacedPlan.of(trained, TWO).notes))


def test_a_model_that_was_changed_since_it_was_read_is_refused() -> None:
    refusal = untrainable(replace(tiny("gemma2"), vocab_size=99), WORKLOAD)
    assert "it is not that of its config.json any more" in str(refusal)
