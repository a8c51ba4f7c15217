"""The answer of seven lines: what it says, what cures it, what is on offer, and that it needs no kernel."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from hexiopt.discovery.cards import cluster_of_cards
from hexiopt.numbers.errors import Evidence, evidence
from hexiopt.numbers.products import is_amd
from hexiopt.problem.lora import Lora
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import LORA, Workload
from hexiopt.report.evidence import kind_of
from hexiopt.study.fitting.verdict import memory_risk
from tests.conftest import Run

ADAPTERS = Workload(32, 2048, training=LORA)
ASKED = ("workload.training=lora", "workload.global_batch=32", "workload.seq_len=2048", "hydra.run.dir=out")
PRICES = {"gpu_purchase": {"4090": 1700, "3060 12gb": 250}, "years": 3, "use": 0.5, "energy_price_per_kwh": 0.3}


def make_problem(gpus: Any, model: str = "qwen3_8b", work: Workload = ADAPTERS) -> Problem:
    return Problem(hx.cluster(cluster_of_cards(gpus).data), hx.model(model), work)


def test_two_unlike_cards() -> None:
    problem = make_problem([3090, 4090])
    told = hx.verdict(problem)
    assert (told.fits, told.exact, told.reason, told.cures) == ("yes", True, "", ())
    assert told.plan is not None
    assert not hx.check(problem, told.plan)
    # Its price without kernels is the clock's.
    assert told.plan.cost.step_time_s == pytest.approx(hx.price(problem, told.plan).step_time_s, rel=1e-9)
    best = max(told.owners.values())
    assert told.plan.cost.tokens_per_s > 1.5 * best, "a plan is worth having"
    quantities = told.quantities()
    assert quantities["context"] == 17_152
    assert quantities["layers"] == 101
    assert quantities["micro_batch"] == 8
    assert told.speed is not None
    assert told.speed.grade == "B"
    assert told.speed.low < told.plan.cost.tokens_per_s  # type: ignore[operator]
    text = str(told)
    assert text.startswith("FITS   qwen3_8b, LoRA of rank 16 (16bit), 32 × 2,048 tokens, on rtx_3090 + rtx_4090")
    assert all(len(line) <= 120 for line in text.splitlines())
    assert json.loads(json.dumps(told.to_dict()))["fits"] == "yes"


def test_cards_of_two_makers_and_contexts_beyond_positions_are_noted() -> None:
    told = hx.verdict(make_problem([4090, "7900 XTX"], work=ADAPTERS.replace(seq_len=49_152)))
    makers, positions, _ = told.notes
    assert makers.startswith("rx_7900_xtx and rtx_4090 are priced as if one library joined them")
    assert "beyond the 40,960 positions" in positions
    assert told.to_dict()["notes"] == told.notes
    assert makers in " ".join(str(told).split())


@pytest.mark.parametrize("work", [ADAPTERS, Workload(32, 2048)], ids=["adapters", "full"])
def test_every_cure_of_what_does_not_fit_fits(work: Workload) -> None:
    told = hx.verdict(make_problem([3090], "qwen3_32b", work))
    assert told.fits == "impossible"
    assert told.plan is None
    assert 1 <= len(told.cures) <= 3
    for cure in told.cures:
        assert not hx.check(cure.plan.problem, cure.plan), cure.change
        assert not any(map(is_amd, cure.plan.problem.cluster.types)), "which a PC of NVIDIA's cards has no software for"
    assert "room for" in told.reason
    assert "cures" in str(told)


def test_a_cure_can_be_typed() -> None:
    """The overrides of a cure make the problem whose plan it has."""
    told = hx.verdict(make_problem([3090, 4090], work=Workload(32, 2048)))
    first = told.cures[0]
    assert first.change == "workload.training=lora"
    assert first.plan.problem == told.problem.replace(workload=told.problem.workload.replace(training=LORA))


def test_what_is_required_and_not_there() -> None:
    told = hx.verdict(make_problem([3090, 4090]), require={"context": 32_768, "layers": 10})
    assert told.unmet == ("context 17,152 is less than the 32,768 required",)
    with pytest.raises(hx.InputError, match="unknown key; did you mean context"):
        hx.verdict(make_problem([3090]), require={"contexts": 1})


def test_the_next_card_and_its_price() -> None:
    told = hx.verdict(make_problem([3090, 4090]), offers=PRICES)
    assert [offer.gpu.name for offer in told.offers] == ["rtx_4090", "rtx_3060_12gb"]
    best = told.offers[0]
    assert best.plan is not None
    assert told.plan is not None
    assert best.plan.cost.tokens_per_s > 1.2 * told.plan.cost.tokens_per_s
    for offer in told.offers:
        assert offer.plan is not None
        assert not hx.check(offer.plan.problem, offer.plan)
        assert offer.plan.cost.step_time_s <= told.plan.cost.step_time_s * (1 + 1e-9), "a card more is never worse"
    # A 4090 at its limit of 450 W, over 13,149 hours.
    machines = best.plan.problem.cluster.machines
    assert machines[-1].price_per_hour == pytest.approx(1700 / 13_149 + 0.45 * 0.3)
    with pytest.raises(hx.InputError, match="no card is on sale"):
        hx.verdict(make_problem([3090, 4090]), offers={"energy_price_per_kwh": 0.3})
    with pytest.raises(hx.InputError, match="years: is missing"):
        hx.verdict(make_problem([3090, 4090]), offers={"gpu_purchase": {"4090": 1700}})


def test_storages_without_published_runs_have_no_interval() -> None:
    problem = make_problem([3090], work=ADAPTERS.replace(lora=Lora(storage="nf4")))
    assert kind_of(problem) is None
    told = hx.verdict(problem)
    assert told.speed is not None
    assert (told.speed.grade, told.speed.low) == ("C", None)
    assert "[C: no published run of the kind]" in str(told)


def test_intervals_are_those_of_the_file() -> None:
    rows = {(row.kind, row.many_tokens): row for row in evidence()}
    assert {("adapters", True), ("full", True), ("experts", True)} <= rows.keys()
    for row in rows.values():
        low, high = row.interval
        beyond = sum(ratio < low for ratio in row.speed), sum(ratio > high for ratio in row.speed)
        # Another run lies outside in 2 (beyond + 1) of n + 1 cases: at most in two of ten, and not in far fewer.
        assert len(row.speed) >= 10
        assert max(beyond) <= 0.1 * (len(row.speed) + 1) - 1
        assert min(beyond) + 2 > 0.1 * (len(row.speed) + 1)


def test_memory_is_tight_where_published_runs_needed_more() -> None:
    runs = Evidence("adapters", True, "x.csv", ("a",), (1.0,), (0.9, 1.0, 1.1, 1.2))
    assert memory_risk(runs, 1.05) == "tight: 2 of 4 published runs needed that much more than predicted"
    assert memory_risk(runs, 1.3) == memory_risk(None, 1.0) == ""


def test_it_loads_no_kernel() -> None:
    code = (
        "import sys, hexiopt as hx\n"
        "from hexiopt.problem.workload import LORA, Workload\n"
        "problem = hx.Problem(hx.cluster('pc_3090_4090'), hx.model('qwen3_8b'), Workload(32, 2048, training=LORA))\n"
        "assert hx.verdict(problem).plan is not None\n"
        "assert not {'numba', 'scipy', 'torch'} & sys.modules.keys()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_line(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("fit", "model=Qwen/Qwen3-8B", "gpus=[3090,4090]", *ASKED)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("FITS   qwen3_8b")
    assert "next   hexiopt train plan=out/plan.json" in ran.out
    assert "hexiopt plan model=Qwen/Qwen3-8B gpus=[3090,4090] workload.training=lora" in ran.out
    files = {path.name for path in (tmp_path / "out").glob("*.*") if not path.name.startswith(".")}
    assert {"fit.json", "plan.json", "context.json", "micro_batch.json", "layers.json", "cluster.yaml"} <= files
    again = hexiopt("price", "plan=out/context.json", "hydra.run.dir=priced")
    assert again.code == 0, again.err
    assert hx.cluster(tmp_path / "out" / "cluster.yaml").num_devices == 2


def test_the_line_for_scripts(hexiopt: Run) -> None:
    words = ("fit", "model=Qwen/Qwen3-32B", "gpus=[3090]", *ASKED, "print=json")
    ran = hexiopt(*words)
    assert ran.code == 3
    told = json.loads(ran.out)
    assert (told["fits"], told["tokens_per_s"]) == ("impossible", None)
    assert len(told["cures"]) == 3
    ran = hexiopt("fit", "model=qwen3_8b", "gpus=[3090,4090]", *ASKED, "fit.require={context: 100000}")
    assert ran.code == 3
    assert "fit.require: context 17,152 is less than the 100,000 required" in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gpus=[3060]",), "gpus: '3060' may be rtx_3060_12gb or rtx_3060_8gb"),
        (("gpus=[[3090],[4090]]",), "network: is missing for 2 PCs"),
        (("gpus=[3090]", "cluster=small_mixed"), "gpus: stands beside cluster=...; state one of them"),
        (("network=1gbe", "cluster=small_mixed"), "network: joins the PCs of gpus"),
        (("gpus=[3090]", "print=all"), "print: 'all' is not known"),
        (("gpus=[3090]", "fit.require={contxt: 5}"), "contxt: unknown key; did you mean context"),
    ],
)
def test_wrong_input_is_one_line(hexiopt: Run, words: tuple[str, ...], says: str) -> None:
    ran = hexiopt("fit", "model=qwen3_8b", *words)
    assert ran.code == 2
    assert says in ran.err
    assert ran.err.count("\n") == 1
