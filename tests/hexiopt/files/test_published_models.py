"""Files of published models, as people have them: read to the last parameter, or refused with the feature named."""

import json
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.space import default_schedule
from hexiopt.reading import Section
from hexiopt.report.notes import notes
from tests.hexiopt.files.test_huggingface import LLAMA

CASES = Path(__file__).parents[2] / "cases" / "models"
PUBLISHED = {  # parameters, as model cards and the metadata of checkpoints have them
    "qwen25_0_5b": 494_032_768,
    "qwen25": 7_615_616_512,
    "smollm2": 1_711_376_384,
    "neox20": 20_554_567_680,
    "phi3": 3_821_079_552,
    "olmo2": 13_716_198_400,
    "smollm3": 3_075_098_624,
    "stablelm": 2_795_443_200,
    "nemo": 12_247_782_400,
    "mistral24": 23_572_403_200,
    "falcon3": 7_455_550_464,
    "pythia": 6_857_302_016,
    "yi": 34_388_917_248,
    "llama32": 1_235_814_400,
    "minitron": 4_190_509_056,
    "gemma2": 9_241_705_984,
    "mixtral": 46_702_792_704,
    "qwen3moe": 30_532_122_624,
}


def refusal(**change: Any) -> str:
    with pytest.raises(hx.InputError) as error:
        model_from_config(Section({**LLAMA, **change}, "config.json"))
    return str(error.value).removeprefix("config.json: ")


def test_every_file_is_read() -> None:
    assert {path.stem for path in CASES.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str) -> None:
    assert read_model(CASES / f"{name}.json").num_params == PUBLISHED[name]


def test_the_type_is_named_in_the_notes_of_a_plan() -> None:
    cluster = hx.cluster("small_mixed")
    (type_read, own_code) = read_model(CASES / "phi3.json").notes
    assert type_read.startswith("model_type phi3 is read by its fields: gated MLP, 2 RMSNorms a layer")
    assert own_code.startswith("auto_map: ")
    assert notes(hx.Problem(cluster, read_model(CASES / "olmo2.json")))[0].startswith("model_type olmo2 is read by its")
    assert read_model(CASES / "yi.json").notes == ()
    phi = read_model(CASES / "phi3.json")
    assert phi == phi.replace(notes=())
    assert model_from_config(Section(phi.to_dict(), "plan.json")) == phi


def test_a_window_that_no_sequence_of_the_model_exceeds_is_none() -> None:
    gemma = json.loads((CASES / "gemma2.json").read_text())
    assert model_from_config(Section(gemma | {"max_position_embeddings": 4096}, "m")).attention_window == 4096
    assert model_from_config(Section(gemma | {"sliding_window": None}, "m")).attention_window is None
    windows = [kind.attention.window for kind in model_from_config(Section(gemma, "m")).layers if kind.attention]
    assert windows == [4096, None] * 21


def test_all_faults_of_a_file_come_in_one_line() -> None:
    text = refusal(num_experts=4, zeta=1, quantization_config={"bits": 4}, eta="x", num_hidden_layers=0)
    parts = text.split("; also ")
    assert [part.partition(":")[0] for part in parts] == [
        "num_experts",
        "quantization_config",
        "num_hidden_layers",
        "zeta, eta",
    ]


def test_a_fault_does_not_bring_others_with_it() -> None:
    neo = {
        "model_type": "gpt_neo",
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 100,
        "attention_layers": ["global"],
    }
    with pytest.raises(hx.InputError) as error:
        model_from_config(Section(neo, "m"))
    assert str(error.value) == "m: num_layers: is missing; state it"


def test_a_switch_that_is_off_states_nothing_unless_it_is_misspelt() -> None:
    off = {"use_mrope": False, "some_new_switch": None, "other": 0, "transformers.js_config": {"a": 1}}
    assert model_from_config(Section(LLAMA | off, "m")) == model_from_config(Section(LLAMA, "m"))
    assert "tie_word_embedding: unknown key, did you mean tie_word_embeddings" in refusal(tie_word_embedding=False)
    assert refusal(use_mrope=True).startswith("use_mrope: positions of images")
    assert refusal(some_new_switch=True).startswith("some_new_switch: unknown key; remove it")


def test_another_head_is_noted() -> None:
    for classes, noted in ((["LlamaForCausalLM"], False), (["LlamaForSequenceClassification"], True), (7, False)):
        model_notes = model_from_config(Section(LLAMA | {"architectures": classes}, "m")).notes
        assert model_notes == (
            ("architectures: LlamaForSequenceClassification is priced with an LM head",) if noted else ()
        )


def test_own_code_is_that_of_transformers_by_its_name_or_refused() -> None:
    auto_map = {
        "AutoConfig": "configuration_llama.LlamaConfig",
        "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
    }
    assert model_from_config(Section(LLAMA | {"auto_map": auto_map}, "m")).notes[0].startswith("auto_map: ")
    assert refusal(auto_map=auto_map | {"AutoModelForCausalLM": "modeling_x.MyLlama"}).startswith(
        "auto_map: the model has"
    )


def test_names_of_one_fact_may_not_disagree() -> None:
    config = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    assert model_from_config(Section(config | {"num_attention_heads": 4}, "m")).num_heads == 4
    with pytest.raises(hx.InputError, match="n_head: differs from num_attention_heads"):
        model_from_config(Section(config | {"num_attention_heads": 8}, "m"))


def test_a_decoder_is_described_by_its_fields() -> None:
    fields = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_size": 96, "vocab_size": 100}
    fields |= {"max_positions": 128, "activation": "silu"}
    decoder = model_from_config(Section({"model_type": "decoder", **fields}, "m"))
    assert decoder.num_params == model_from_config(Section(LLAMA, "m")).num_params
    with pytest.raises(
        hx.InputError, match="m: qk_norm: 'some' is not known; take one of none, plain, head, heads, whole"
    ):
        model_from_config(Section({"model_type": "decoder", **fields, "qk_norm": "some"}, "m"))


def test_infinity_is_read_as_python_writes_it(tmp_path: Path) -> None:
    """Where it changes nothing, or in a file that is refused for what it has."""
    mamba = {"model_type": "mamba2", "state_size": 128, "time_step_limit": [0.0, float("inf")]}
    for config, says in ((LLAMA | {"time_step_limit": float("inf")}, None), (mamba, "state_size: recurrent layers")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if says is None:
            assert read_model(tmp_path).num_params > 0
        else:
            with pytest.raises(hx.InputError, match=says):
                read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rms_norm_eps": float("inf")}))
    with pytest.raises(hx.InputError, match="rms_norm_eps: inf is not finite"):
        read_model(tmp_path)


def test_gpt_neox_20b_on_eight_a100_as_its_maintainers_met_it() -> None:
    """EleutherAI/gpt-neox#892: ZeRO-2 with micro-batches of one runs out of memory without recompute, ZeRO-3 fits."""
    machine = {"name": "n", "gpu": "a100_80gb_sxm", "num_gpus": 8, "intra_bandwidth_gb_per_s": 300}
    workload = hx.Workload(global_batch=256, seq_len=2048, precision="fp16")
    problem = hx.Problem(
        hx.cluster({"name": "a100", "machines": [machine]}), read_model(CASES / "neox20.json"), workload
    )
    pipelines = tuple(Pipeline((Stage.of((k,), 0, 44, "none"),), 32) for k in range(8))
    two, three = (hx.price(problem, Plan(pipelines, default_schedule(workload), Sharding(zero))) for zero in (2, 3))
    assert two.excess_bytes / 2**30 == pytest.approx(13.54, abs=0.01)
    assert three.pipelines[0].stages[0].memory.total / 2**30 == pytest.approx(60.33, abs=0.01)
