"""Models with experts and layers of several kinds, in the words of Megatron-LM, Megatron-Bridge and FlagScale."""

import random
import re
from pathlib import Path

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.exports.exporting import write_program
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.shell.scripts import read_script
from hexiopt.exports.trainers.megatron import CORE
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.shipped import read_shipped
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.exports.random_mixtures import chain_of_cells, grid_of_cells, hybrid, mixture
from tests.hexiopt.exports.test_round_trips import canonical


def read_again(name: str, problem: Problem, plan: Plan, model: ModelSpec | None) -> ImportedPlan:
    """What a trainer's files of a plan describe."""
    program = write_program(problem, plan, TRAINERS[name])
    text = next(iter(program.files.values()))
    workload = Workload(problem.workload.global_batch, gradient_bytes=problem.workload.gradient_bytes)
    stated = frozenset({"gradient_bytes", "sequence_parallel"})
    context = ImportContext(name, problem.cluster, program.devices, model, workload, Space(), stated, table=True)
    return TRAINERS[name].read(text, context)


def assert_same(name: str, problem: Problem, plan: Plan, *, by_model: bool, priced: bool) -> None:
    imported_plan = read_again(name, problem, plan, problem.model if by_model else None)
    assert imported_plan.problem.model == problem.model
    assert canonical(imported_plan.plan) == canonical(plan)
    assert imported_plan.problem.workload.routing == problem.workload.routing
    assert not [note for note in imported_plan.notes if note.startswith("not read")]
    if priced:
        prices = [
            PlanPricer(a).price(b).step_time_s
            for a, b in ((problem, plan), (imported_plan.problem, imported_plan.plan))
        ]
        assert prices[0] == pytest.approx(prices[1], rel=1e-12)


def draw_case(kind: str, name: str, seed: int) -> tuple[Problem, Plan]:
    rng = random.Random(f"{kind} {name} {seed}")
    model = mixture(rng, recurrent=name != "flagscale") if kind == "layers" else hybrid(rng, whole=kind == "whole")
    return (chain_of_cells if name == "flagscale" else grid_of_cells)(rng, model)


CASES = [
    ("layers", "megatron"),
    ("layers", "megatron_bridge"),
    ("layers", "flagscale"),
    ("blocks", "megatron"),
    ("blocks", "megatron_bridge"),
    ("whole", "megatron"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_random_mixtures_come_back(kind: str, name: str) -> None:
    for seed in range(25):
        problem, plan = draw_case(kind, name, seed)
        by_model = name == "megatron_bridge" or kind == "whole"
        assert_same(name, problem, plan, by_model=by_model, priced=seed % 8 == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_many_random_mixtures_come_back(kind: str, name: str) -> None:
    for seed in range(100, 500):
        problem, plan = draw_case(kind, name, seed)
        by_model = name == "megatron_bridge" or kind == "whole"
        assert_same(name, problem, plan, by_model=by_model, priced=seed % 40 == 0)


DEGREES = ("tensor", "pipeline", "expert")
NAMES = Path(__file__).with_name("megatron_names.txt")
HYBRID = {"hybrid-layer-pattern"}  # of Megatron-Core 0.17 and later, as a note says


@pytest.mark.parametrize(("kind", "name"), [("layers", "megatron"), ("blocks", "megatron"), ("whole", "megatron")])
def test_every_argument_is_one_of_megatron_lm(kind: str, name: str) -> None:
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    known = {word for line in lines if not line.startswith("#") for word in line.split()}
    written = set[str]()
    for seed in range(60):
        problem, plan = draw_case(kind, name, seed)
        text = next(iter(write_program(problem, plan, TRAINERS[name]).files.values()))
        written |= set(re.findall(r"--([a-z][\w-]*)", text.replace("--data-path", "")))
    assert len(written) > 30
    assert not written - known
    assert {n for n in written if n.startswith("hybrid")} == (set() if kind == "layers" else HYBRID)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_megatron_core_shares_experts_among_the_ranks_of_a_stage() -> None:
    state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is missing")
    for seed in range(40):
        problem, plan = draw_case("layers", "megatron", seed)
        program = write_program(problem, plan, TRAINERS["megatron"])
        script = read_script(program.files["megatron.sh"], "megatron.sh", CORE)
        sizes = {name: int(str(script.arguments[f"{name}-model-parallel-size"][0])) for name in DEGREES}
        tp, pp, ep = (sizes[name] for name in DEGREES)
        order = "tp-cp-ep-pp-dp" if "use-tp-pp-dp-mapping" in script.arguments else "tp-cp-ep-dp-pp"
        world = len(program.devices)

        devices = program.devices
        stages = [stage.parallelism for pipeline in plan.pipelines for stage in pipeline.stages]
        experts = state.RankGenerator(cp=1, order=order, tp=1, ep=ep, dp=world // (ep * pp), pp=pp)
        dense = state.RankGenerator(cp=1, order=order, tp=tp, ep=1, dp=world // (tp * pp), pp=pp)
        cells = {tuple(devices[rank] for rank in group) for group in experts.get_ranks("ep")}
        copies = {tuple(devices[rank] for rank in group) for group in dense.get_ranks("tp")}
        assert cells == {stage.devices for stage in stages}
        assert copies == {copy for stage in stages for copy in stage.parameter_copies}


def deepseek(**keys: object) -> ModelSpec:
    config = {**read_shipped("model", "deepseek_v3"), **keys}
    return model_from_config(Section(config, "config.json"), "deepseek_v3")


def router_of(model: ModelSpec) -> tuple[set[str], str]:
    """The arguments of the router in the script of a plan, and the note on those that are left."""
    where = Cluster.of({"h100_80gb_sxm": 8}, inter_gb_per_s=50)
    stage = Stage(TensorParallel(tuple(range(8)), degree=1), ((0, model.num_layers),))
    problem = Problem(where, model, Workload(64, 4096, "bf16"))
    program = write_program(problem, Plan((Pipeline((stage,), 8, 8),), ONE_F_ONE_B, Sharding(1)), TRAINERS["megatron"])
    [text] = re.findall(r'MODEL="(.*)"', program.files["megatron.sh"])
    [note] = [note for note in program.notes if "router" in note]
    return {argument.strip() for argument in re.findall(r"--moe-router-(?!topk )[^-][^ ]*(?: [^-][^ ]*)?", text)}, note


def test_what_the_file_says_of_the_router_is_written_and_the_rest_is_named() -> None:
    says = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 8, "topk_group": 4}
    model = deepseek(**says, routed_scaling_factor=2.5)
    arguments, note = router_of(model)
    assert arguments == {
        "--moe-router-score-function sigmoid",
        "--moe-router-enable-expert-bias",
        "--moe-router-num-groups 8",
        "--moe-router-group-topk 4",
        "--moe-router-topk-scaling-factor 2.5",
    }
    assert note.endswith("as the model has them, --moe-router-load-balancing-type, --moe-aux-loss-coeff")
    again = model_from_config(Section(model.to_dict(), "plan.json"))
    assert again == model
    assert dict(again.router) == {**says, "routed_scaling_factor": 2.5}
    bare = deepseek(**dict.fromkeys((*says, "routed_scaling_factor")))
    assert bare == model
    assert router_of(bare)[0] == set()
    assert "--moe-router-score-function, --moe-router-pre-softmax" in router_of(bare)[1]
    odd = deepseek(**says | {"scoring_func": 7, "n_group": True}, routed_scaling_factor="2.5")
    assert dict(odd.router) == {"topk_method": "noaux_tc", "norm_topk_prob": True, "topk_group": 4}
