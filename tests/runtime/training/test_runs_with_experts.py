"""A run from a plan file trains experts by its settings."""

import json
from pathlib import Path

import numpy as np
import pytest

from hexiopt.files.huggingface import model_from_config
from hexiopt.files.plan_file import FORMAT, VERSION, plan_to_dict
from hexiopt.files.problem_file import problem_to_dict
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch.head import AfterFaults, training_events
from runtime.mapping.model_parts import whole_parts
from runtime.settings import ExpertTraining, Settings
from runtime.state.checkpoint import Checkpoint, finished_checkpoints
from runtime.training.settings import TrainingRun
from tests.runtime.parallel.test_training import SETTINGS
from tests.runtime.ranks import CLUSTER, TIMEOUT_S

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.slow
def test_a_run_trains_experts_by_its_settings(tmp_path: Path) -> None:
    """Two devices that share experts in unequal numbers; each step moves every bias by a rate that says so."""
    model = model_from_config(Section(CONFIG, "config"), "small")
    problem = Problem(CLUSTER, model, Workload(4, 16, precision="fp32"), Space(uneven_experts=True))
    group = ExpertParallel((ExpertReplica((0,), 1, (4,)), ExpertReplica((1,), 1, (2,))))
    plan = Plan((Pipeline((Stage(group, ((0, 2),), ("none",)),), 2, 2),), ONE_F_ONE_B, Sharding(1))
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8))
    content = {"format": FORMAT, "version": VERSION, "problem": problem_to_dict(problem)}
    (tmp_path / "plan.json").write_text(json.dumps(content | plan_to_dict(plan, CLUSTER)))
    experts = ExpertTraining(expert_capacity=3.0, sequence_balance=0.01, expert_bias_rate=0.25)
    settings = Settings(steps=3, adam=SETTINGS, seed=1, checkpoint_every=3, timeout_s=TIMEOUT_S, experts=experts)
    run = TrainingRun("small", tmp_path / "plan.json", tokens, tmp_path / "checkpoints", settings, float64=True)
    events = list(training_events(run, tmp_path, AfterFaults("stop", lambda lost: run.plan, 0)))
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    (left,) = finished_checkpoints(tmp_path / "checkpoints")
    checkpoint = Checkpoint(left)
    checkpoint.check()
    (part,) = (part for part in whole_parts(checkpoint.model) if part.name == BIAS)
    biases = checkpoint.read("weight", part)
    assert biases.any()
    assert (4 * biases).frac().abs().max() == 0
