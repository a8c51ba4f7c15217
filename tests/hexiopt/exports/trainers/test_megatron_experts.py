"""Models with experts and layers of several kinds, in the words of Megatron-LM, Megatron-Bridge and FlagScale."""

import random
import re
from pathlib import Path

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.exporting import write_program
from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.shell.scripts import read_script
from hexiopt.exports.trainers.megatron import CORE
from hexiopt.exports.trainers.registry import TRAINERS
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from tests.hexiopt.exports.random_mixtures import chain_of_cells, grid_of_cells, hybrid, mixture
from tests.hexiopt.exports.test_round_trips import canonical
from tests.hexiopt.exports.test_written_keys import is_default, shell


def read_again(name: str, problem: Problem, plan: Plan, model: ModelSpec | None) -> ImportedPlan:
    """What a trainer's files of a plan describe."""
    program = write_program(problem, plan, TRAINERS[name])
    text = next(iter(program.files.values()))
    workload = Workload(problem.workload.global_batch, gradient_bytes=problem.workload.gradient_bytes)
    stated = frozenset({"gradient_bytes", "sequence_parallel"})
    context = ImportContext(name, problem.cluster, program.devices, model, workload, Space(), stated, table=True)
    return TRAINERS[name].read(text, context)


def assert_same(name: str, problem: Problem, plan: Plan, *, by_model: bool, priced: bool) -> None:
    found = read_again(name, problem, plan, problem.model if by_model else None)
    assert found.problem.model == problem.model
    assert canonical(found.plan) == canonical(plan)
    assert found.problem.workload.routing == problem.workload.routing
    assert not [note for note in found.notes if note.startswith("not read")]
    if priced:
        prices = [PlanPricer(a).price(b).step_time_s for a, b in ((problem, plan), (found.problem, found.plan))]
        assert prices[0] == pytest.approx(prices[1], rel=1e-12)


def drawn(kind: str, name: str, seed: int) -> tuple[Problem, Plan]:
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
        problem, plan = drawn(kind, name, seed)
        by_model = name == "megatron_bridge" or kind == "whole"
        assert_same(name, problem, plan, by_model=by_model, priced=seed % 8 == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_many_random_mixtures_come_back(kind: str, name: str) -> None:
    for seed in range(100, 500):
        problem, plan = drawn(kind, name, seed)
        by_model = name == "megatron_bridge" or kind == "whole"
        assert_same(name, problem, plan, by_model=by_model, priced=seed % 40 == 0)


SILENT = {  # how experts are computed and scored, which is nowhere priced, and a program that a pattern implies
    *("moe-grouped-gemm", "moe-token-dispatcher-type", "moe-router-pre-softmax", "spec", "rotary-base"),
    *("make-vocab-size-divisible-by", "position-embedding-type"),  # padding of a multiple; the default of a model
}
DEGREES = ("tensor", "pipeline", "expert")
NAMES = Path(__file__).with_name("megatron_names.txt")
HYBRID = {"hybrid-layer-pattern"}  # of Megatron-Core 0.17 and later, as a note says


@pytest.mark.parametrize(("kind", "name"), [("layers", "megatron"), ("blocks", "megatron"), ("whole", "megatron")])
def test_every_argument_is_one_of_megatron_lm(kind: str, name: str) -> None:
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    known = {word for line in lines if not line.startswith("#") for word in line.split()}
    written = set[str]()
    for seed in range(60):
        problem, plan = drawn(kind, name, seed)
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
        problem, plan = drawn("layers", "megatron", seed)
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


@pytest.mark.parametrize("kind", ["layers", "blocks"])
def test_no_written_argument_of_layers_goes_in_silence(kind: str) -> None:
    """Without it the answer is another, or a note appears, or the file is refused."""
    for seed in range(5):
        problem, plan = drawn(kind, "megatron", seed)
        program = write_program(problem, plan, TRAINERS["megatron"])
        workload = Workload(global_batch=97 * problem.workload.global_batch, seq_len=2048)
        context = ImportContext("script", problem.cluster, program.devices, None, workload, Space(), table=True)

        def answer(text: str, context: ImportContext = context) -> object:
            try:
                found = TRAINERS["megatron"].read(text, context)
            except InputError:
                return "refused"
            return found.plan, found.problem.workload, found.problem.model, found.notes

        text = next(iter(program.files.values()))
        whole = answer(text)
        assert whole != "refused"
        for name, value, rest in shell(text.partition("set -f")[2]):
            if name not in SILENT and not is_default(name, value):
                assert answer("set -f" + rest) != whole, (seed, name)
