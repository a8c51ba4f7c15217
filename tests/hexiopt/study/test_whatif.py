"""What other machines and links would give: a machine more never makes the plan worse, one less never better."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

import hexiopt as hx
from hexiopt.bounds import lower_bound
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.price_list import prices_for
from hexiopt.problem.machine import Machine
from hexiopt.reading import Section
from hexiopt.report.compared.tradeoff import Choice, tradeoff_figure, unbeaten
from hexiopt.study.alternatives import ADD, LINK, TAKE, Wishes, alternatives, with_prices
from hexiopt.study.what_if import WhatIf
from tests.conftest import Run
from tests.slow import slow_but

PRICES = {
    "gpu_price_per_hour": {"rtx_4090": 0.4, "rtx_3090": 0.2, "rtx_a6000": 0.5},
    "machines": [
        {
            "name": "rented",
            "gpu": "a100_80gb_sxm",
            "num_gpus": 4,
            "count": 3,
            "intra_bandwidth_gb_per_s": 300,
            "nic_bandwidth_gb_per_s": 12.5,
            "price_per_hour": 8,
        }
    ],
    "interfaces": [{"name": "100G", "bandwidth_gb_per_s": 12.5, "price_per_hour": 0.1}],
}


def make_problem(cluster: str) -> hx.Problem:
    return hx.Problem(hx.cluster(cluster), hx.model("gpt2_345m"), hx.Workload(global_batch=8, seq_len=512))


def solve_what_if(cluster: str, folder: Path) -> WhatIf:
    how = {"max_steps": 12, "time_limit_s": 600, "bound_time_limit_s": 0, "processes": 2, "progress": False}
    return hx.what_if(make_problem(cluster), "local_search", prices=PRICES, folder=folder, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[WhatIf, Path]:
    """The answer for the cluster small_mixed, and its folder."""
    folder = tmp_path_factory.mktemp("small")
    return solve_what_if("small_mixed", folder), folder


@pytest.mark.parametrize("cluster", slow_but(["small_mixed"], ["small_mixed", "four_machines", "two_sites"]))
def test_a_machine_more_never_makes_the_plan_worse_and_one_less_never_better(
    cluster: str, small: tuple[WhatIf, Path], tmp_path: Path
) -> None:
    answer = small[0] if cluster == "small_mixed" else solve_what_if(cluster, tmp_path)
    base, *others = answer.options
    assert base.alternative.change == "as it is"
    assert {option.alternative.change for option in others} == {ADD, TAKE, LINK}
    for option in answer.options:
        assert option.plan is not None
        assert hx.check(option.alternative.problem, option.plan) == []
        assert option.plan.cost.step_time_s == hx.price(option.alternative.problem, option.plan).step_time_s
    for option in others:
        if option.alternative.change == TAKE:
            assert option.step_time_s >= base.step_time_s * (1 - 1e-12)
        else:
            assert option.step_time_s <= base.step_time_s * (1 + 1e-12)
    # The machines' shares in the bound are dual values: they are positive and together no more than everything.
    shares = answer.bound.machine_shares
    assert set(shares) == set(base.alternative.problem.usable_by_machine)
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9
    assert max(map(len, str(answer).splitlines())) <= 80


def test_the_same_call_resumes_and_searches_nothing_twice(small: tuple[WhatIf, Path], tmp_path: Path) -> None:
    first, folder = small
    copytree(folder, tmp_path, dirs_exist_ok=True)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}
    dropped = next(iter(written))
    for path in dropped.parent.iterdir():
        path.unlink()
    second = solve_what_if("small_mixed", tmp_path)
    assert first == second
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}
    assert again.keys() == written.keys()
    changed = {path for path in again if again[path] != written[path]}
    assert {path.parent for path in changed} == {dropped.parent}


def test_a_plan_of_another_alternative_is_taken_where_it_is_better(small: tuple[WhatIf, Path]) -> None:
    answer, _ = small
    taken = [option for option in answer.options if option.found_for != option.alternative.name]
    assert taken, "twelve steps of random search leave something to take over"
    assert f"{len(taken)} plans came from" in str(answer) or "1 plan came from" in str(answer)


def test_names_too_long_for_eighty_columns_lose_their_brackets_not_their_ends(small: tuple[WhatIf, Path]) -> None:
    lines = str(small[0]).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    for option in small[0].options:
        name = option.alternative.name.partition(" (")[0]
        assert any(line.startswith(f"{name} ") for line in lines), name


def test_devices_keep_their_numbers() -> None:
    problem = make_problem("two_sites")
    prices = prices_for(problem, PRICES)
    offers = alternatives(with_prices(problem, prices), prices, 2.0)
    names = [problem.cluster.device_name(device) for device in range(problem.cluster.num_devices)]
    for offer in offers:
        cluster = offer.problem.cluster
        assert [cluster.device_name(device) for device in range(len(names))] == names
    assert len({alternative.name for alternative in offers}) == len(offers)
    assert [alternative.number for alternative in offers if "rented" in alternative.name] == [1, 2, 3]
    grown = next(alternative.problem for alternative in offers if alternative.change == ADD)
    new = grown.cluster.machines[-1]
    # The new machine is in the group of those like it, behind the same uplink.
    assert any(new.name in group.members for group in grown.cluster.groups)
    fewer = next(alternative.problem for alternative in offers if alternative.change == TAKE)
    assert len(fewer.usable_by_machine) == len(problem.usable_by_machine) - 1


def test_machines_like_linked_ones_are_linked_alike() -> None:
    cluster = hx.cluster(
        {
            "name": "linked",
            "inter_machine": {"bandwidth_gb_per_s": 1},
            "machines": [
                {"name": "a", "gpu": "rtx_3090", "num_gpus": 1, "count": 2},
                {"name": "b", "gpu": "rtx_4090", "num_gpus": 1},
            ],
            "links": [
                {"between": ["a", "b"], "bandwidth_gb_per_s": 7},
                {"between": ["a", "a"], "bandwidth_gb_per_s": 9},
            ],
        }
    )
    problem = make_problem("small_mixed").replace(cluster=cluster)
    clusters = {
        alternative.name: alternative.problem.cluster
        for alternative in alternatives(problem, prices_for(problem, None), 3.0)
    }
    grown = clusters["+ 1 × a (1 × rtx_3090)"]
    ends = {(link.source, link.target): link.bandwidth_bytes_per_s / 1e9 for link in grown.links}
    assert ends == {("a", "b"): 7, ("a-more", "b"): 7, ("a", "a"): 9, ("a-more", "a"): 9}
    assert clusters["3 × link a – b"].links[0].bandwidth_bytes_per_s == 21e9
    single = problem.replace(space=hx.Space(exclude=("b", "a-0")))
    assert not [
        alternative for alternative in alternatives(single, prices_for(single, None), 2.0) if alternative.change == TAKE
    ]


def test_prices_are_those_of_the_cluster_then_of_the_list() -> None:
    problem = make_problem("small_mixed")
    first_machine = problem.cluster.machines[0].replace(price_per_hour=3.0)
    cluster = problem.cluster.replace(machines=(first_machine, *problem.cluster.machines[1:]))
    stated = with_prices(problem.replace(cluster=cluster), prices_for(problem, PRICES)).cluster.machines
    per_gpu = PRICES["gpu_price_per_hour"]

    def list_price(machine: Machine) -> float:
        return per_gpu[machine.gpu.name] * machine.num_gpus  # type: ignore[index]

    assert [machine.price_per_hour for machine in stated] == [3.0, *map(list_price, stated[1:])]


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"gpu_price_per_hour": {"rtx_4091": 1}}, "did you mean rtx_4090"),
        ({"gpu_price_per_hour": {"rtx_4090": -1}}, "it must be above 0"),
        ({"machine": []}, "did you mean machines"),
        ({"machines": [{"name": "a", "gpu": "rtx_4090", "num_gpus": 1}]}, "price_per_hour is missing"),
        (
            {"machines": [{"name": "a", "gpu": "rtx_4090", "num_gpus": 1, "price_per_hour": 1}]},
            "nic_bandwidth_gb_per_s is missing",
        ),
        ({"interfaces": [{"name": "x", "bandwidth_gb_per_s": 1}]}, "price_per_hour: is missing"),
    ],
)
def test_a_price_list_that_cannot_be_read_is_one_line(prices: dict[str, object], message: str) -> None:
    with pytest.raises(hx.InputError, match=message):
        hx.what_if(make_problem("small_mixed"), prices=prices)


def test_a_machines_share_in_the_bound_is_what_the_bound_gains_by_it() -> None:
    """Of the compute bound the dual value is exact: with one machine more, throughput grows by its share."""
    problem = make_problem("small_mixed")
    bound = lower_bound(PlanPricer(problem))
    for alternative in alternatives(problem, prices_for(problem, None), 2.0):
        if alternative.change == ADD and alternative.like is not None:
            grown = lower_bound(PlanPricer(alternative.problem))
            assert bound.bound_s / grown.bound_s - 1 == pytest.approx(bound.machine_shares[alternative.like])


@pytest.mark.slow
def test_the_dual_values_of_the_programme_bound_its_gain() -> None:
    """At the prices that prove a bound, a cluster with one machine more is worth that machine's share more, so in the
    same time no plan of the programme processes more than so many sequences more."""
    problem = hx.Problem(hx.cluster("small_mixed"), hx.model("gpt2_345m"), hx.Workload(global_batch=64, seq_len=1024))
    problem = problem.replace(workload=problem.workload.replace(optimizer_sharding="1"))
    bound = lower_bound(PlanPricer(problem), 30.0)
    assert bound.bound_s > lower_bound(PlanPricer(problem)).bound_s, "the programme raises the compute bound here"
    assert 0 < sum(bound.machine_shares.values()) <= 1 + 1e-9
    assert bound.machine_shares != lower_bound(PlanPricer(problem)).machine_shares


def test_unbeaten_choices_are_those_that_no_other_beats_in_both() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.5), (4.0, 1.0), (1.0, 3.5)]
    choices = [Choice(str(point), *point, "all") for point in points]
    assert [(choice.step_time_s, choice.price) for choice in unbeaten(choices)] == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]
    figure = tradeoff_figure(choices, "title", "price")
    written = {text.get_text() for ax in figure.axes for text in ax.texts}
    assert {choice.name for choice in choices} <= written


@pytest.mark.slow
def test_the_verb_writes_table_picture_and_plans(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    asked_for = ("cluster=small_mixed", "model=tiny", "solver=random", "solver.max_steps=2", "bound.time_limit_s=0")
    ran = hexiopt("whatif", *asked_for, "whatif.prices=prices.json", "hydra.run.dir=out", "workload.global_batch=4")
    assert ran.code == 0, ran.err
    assert "worth/h" in ran.out
    assert (tmp_path / "out" / "whatif.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "whatif.csv").read_text().startswith("alternative,change,step_time_s")
    assert len(list((tmp_path / "out" / "alternatives").glob("*/plan.json"))) > 5


CORP = {
    "name": "corp",
    "inter_machine": {"bandwidth_gb_per_s": 12.5, "latency_us": 10},
    "machines": [
        {"name": "gpu-a100-[01-03]", "gpu": "a100_40gb_sxm", "num_gpus": 2, "intra_bandwidth_gb_per_s": 300},
        {"name": "gpu-l40s-[01-02]", "gpu": "l40s", "num_gpus": 1, "price_per_hour": 4},
    ],
}


def names_of(prices: object = None, **wishes: object) -> dict[str, hx.Problem]:
    problem = make_problem("small_mixed").replace(cluster=hx.cluster(CORP))
    offered = prices_for(problem, prices)  # type: ignore[arg-type]
    return {
        alternative.name: alternative.problem for alternative in alternatives(problem, offered, 2.0, Wishes(**wishes))
    }


def test_all_machines_of_a_kind_are_taken_too() -> None:
    problems = names_of()
    assert len(problems["− 1 × gpu-l40s-[01-02] (1 × l40s)"].usable_devices) == 7
    assert problems["− all 2 × gpu-l40s-[01-02] (1 × l40s)"].usable_devices == tuple(range(6))
    assert len(problems["− all 3 × gpu-a100-[01-03] (2 × a100_40gb_sxm)"].usable_devices) == 2


def test_stated_sets_are_taken_and_added() -> None:
    problems = names_of(take=["gpu-l40s-[01-02]", "gpu-a100-03"], add=[{"gpu-l40s-01": 2, "gpu-a100-[01-03]": 1}])
    assert problems["− gpu-l40s-[01-02], gpu-a100-03"].usable_devices == (0, 1, 2, 3)
    assert problems["+ 2 × gpu-l40s-01, 1 × gpu-a100-[01-03]"].cluster.num_devices == 8 + 2 + 2
    several = names_of(take=[["gpu-a100-01:0"], "gpu-a100-02"])
    assert {"− gpu-a100-01:0", "− gpu-a100-02"} <= several.keys()
    as_by_rule = names_of(take=["gpu-l40s-[01-02]"])
    assert "− gpu-l40s-[01-02]" in as_by_rule
    assert "− all 2 × gpu-l40s-[01-02] (1 × l40s)" not in as_by_rule, "the same machines twice"


def test_a_machine_on_offer_that_is_one_of_the_clusters_own_stands_once() -> None:
    offer = {"name": "new", "gpu": "l40s", "num_gpus": 1, "nic_bandwidth_gb_per_s": 12.5, "nic_latency_us": 10}
    problems = names_of({"machines": [offer | {"price_per_hour": 4, "count": 2}]})
    assert "+ 1 × gpu-l40s-[01-02] (1 × l40s)" in problems
    assert "+ 1 × new (1 × l40s)" not in problems
    assert "+ 2 × new (1 × l40s)" in problems
    assert "+ 1 × new (1 × l40s)" in names_of({"machines": [offer | {"price_per_hour": 5}]}), "another price"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"take": 5}, "whatif.take: 5 is no list of machines"),
        ({"take": ["gpu-l40s-03"]}, "whatif.take: 'gpu-l40s-03' is not a machine"),
        ({"add": {"gpu-l40s": 1}}, "whatif.add: 'gpu-l40s' is no machine; did you mean gpu-l40s-02"),
        ({"add": {"gpu-l40s-01": 0}}, "whatif.add: gpu-l40s-01: 0 is out of range"),
        ({"add": ["gpu-l40s-01"]}, "is no number of machines by name"),
        ({"take": ["gpu-l40s-[01-02]", "gpu-a100-[01-03]"]}, "leaves no device"),
    ],
)
def test_a_wish_that_cannot_be_is_one_line(wishes: dict[str, object], message: str) -> None:
    with pytest.raises(hx.InputError, match=re.escape(message)):
        names_of(**wishes)


def test_no_share_of_a_bound_where_there_is_no_plan_to_compare(small: tuple[WhatIf, Path]) -> None:
    base, *others = small[0].options
    none = WhatIf.among([replace(base, plan=None), *others], small[0].bound)
    assert "bound" in str(small[0]).splitlines()[2]
    assert "bound" not in str(none)


def test_nothing_is_added_to_a_box_whose_parts_only_links_join() -> None:
    """How another machine would reach them is not stated."""
    machines = [{"name": name, "gpu": "rtx_3090", "num_gpus": 1} for name in "ab"]
    links = [{"between": ["a", "b"], "bandwidth_gb_per_s": 10}]
    box = cluster_from_section(Section({"name": "box", "machines": machines, "links": links}, "box.yaml"))
    problem = hx.Problem(box, hx.model("gpt2_345m"), hx.Workload(global_batch=8, seq_len=512))
    assert ADD not in {alternative.change for alternative in alternatives(problem, prices_for(problem, PRICES), 2.0)}
    stated = problem.replace(cluster=box.replace(inter_bandwidth_bytes_per_s=1e9))
    assert ADD in {alternative.change for alternative in alternatives(stated, prices_for(problem, PRICES), 2.0)}
