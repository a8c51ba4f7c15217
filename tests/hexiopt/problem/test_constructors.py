"""What is built in Python obeys the same rules, in the same words, as what is read from files."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.problem_file import space_from_sections, workload_from_section
from hexiopt.numbers.gpus import PRECISIONS
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import IntraLink, Machine
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.network import Group, Link
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import BOUNDS, Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.strategies import JSON, LAB

MACHINE, NUMBERED = LAB.machines[0], LAB.machines[1]
WINDOW = ModelSpec(
    name="windowed",
    architecture="mistral",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=100,
    max_positions=8192,
    attention_window=1024,
)


def refusal(build: Callable[[], object]) -> str | None:
    """The one line that refuses what `build` builds; None where nothing does."""
    try:
        build()
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: replace(MACHINE, num_gpus=0), "machine a: num_gpus: 0 is out of range; it must be at least 1"),
        (lambda: replace(MACHINE, name="a b"), "machine: name: 'a b' is not a name; use up to 100 letters"),
        (lambda: replace(MACHINE, nic_bandwidth_bytes_per_s=0), "machine a: nic_bandwidth_bytes_per_s: 0 is out of"),
        (lambda: replace(MACHINE, nic_latency_s=float("nan")), "machine a: nic_latency_s: nan is not finite; state"),
        (lambda: IntraLink(0, 1, -1.0, 0.0), "link of devices 0 and 1: bandwidth_bytes_per_s: -1.0 is out of range"),
        (
            lambda: replace(MACHINE, intra_links=(IntraLink(0, 4, 1e9, 0.0),)),
            "machine a: intra_links[0]: [0, 4] is not a pair of the machine's devices; write two of 0 to 3",
        ),
        (lambda: replace(LAB, machines=()), "cluster lab: machines: [] is empty; state at least one machine"),
        (
            lambda: replace(LAB, machines=(MACHINE, NUMBERED, replace(NUMBERED, name="x"))),
            "cluster lab: machine x: spec_name: 'v' is shared by 2 machines; make them equal but for the names v-0,",
        ),
        (
            lambda: replace(LAB, machines=(NUMBERED, MACHINE, LAB.machines[2])),
            "machine v-1: spec_name: 'v' is that of earlier machines; put machines of one spec together",
        ),
        (
            lambda: replace(LAB, machines=(MACHINE, replace(NUMBERED, nic_bandwidth_bytes_per_s=float("inf")))),
            "cluster lab: inter_bandwidth_bytes_per_s: is missing; state it, in bytes/s per network interface and "
            "direction",
        ),
        (
            lambda: replace(LAB, groups=(Group("g", ("a", "w"), 1e9, 0.0),)),
            "cluster lab: groups[0].members: ('a', 'w') has 'w', which is not a machine or group; known: a, g, v, v-0,",
        ),
        (
            lambda: replace(LAB, groups=(Group("g", ("h",), 1e9, 0.0), Group("h", ("g",), 1e9, 0.0))),
            "cluster lab: groups[0].members: ('h',) makes the group 'g' contain itself; remove the cycle",
        ),
        (
            lambda: replace(LAB, groups=(Group("a", ("v",), 1e9, 0.0),)),
            "cluster lab: groups[0].name: 'a' appears twice; give machines and groups different names",
        ),
        (
            lambda: replace(LAB, links=(Link("a", "b", 1e9, None, True),)),
            "cluster lab: links[0].target: 'b' names 'b', which is not a machine; known: a, v, v-0, v-1",
        ),
        (
            lambda: replace(LAB, links=(Link("a", "v", 1e9, None, True), Link("v-1", "a", 1e9, None, False))),
            "cluster lab: links[1].source: 'v-1' covers a pair of machines that already has a link; keep one link",
        ),
        (
            lambda: replace(LAB, links=(Link("a", "a", 1e9, None, True),)),
            "cluster lab: links[0].target: 'a' links a machine with itself; name two machines",
        ),
        (lambda: Link("a", "v", 1e9, -1.0, True), "link of 'a' and 'v': latency_s: -1.0 is out of range; it must be"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(build: Callable[[], object], line: str) -> None:
    assert (refusal(build) or "").startswith(line)


@given(st.sampled_from([field.name for field in fields(Workload)]), JSON)
def test_workloads_of_python_and_of_files_obey_the_same_rules(name: str, value: Any) -> None:
    """But for null, which is refused in files by another rule."""
    assume(value is not None)
    stated = refusal(lambda: Workload(**{name: value}))
    assert stated == refusal(lambda: workload_from_section(Section({name: value}, "workload")))
    if stated is None:
        assert Workload(**{name: value}) == workload_from_section(Section({name: value}, "workload"))


@given(st.sampled_from([field.name for field in fields(Space) if field.name != "exclude"]), JSON)
def test_spaces_of_python_and_of_files_obey_the_same_rules(name: str, value: Any) -> None:
    assume(value is not None)
    bounds = {name: value} if name in BOUNDS else {}
    freedoms = {} if bounds else {name: value}

    def read() -> Space:
        return space_from_sections(Section(freedoms, "space"), Section(bounds, "constraints"))

    stated = refusal(lambda: Space(**{name: value}))
    assert stated == refusal(read)
    if stated is None:
        assert Space(**{name: value}) == read()


def test_values_are_brought_to_one_form() -> None:
    """So that equal workloads are equal, and hash alike."""
    assert Workload(seq_len=4096.0, optimizer_sharding=1) == Workload(optimizer_sharding="1")  # type: ignore[arg-type]
    assert Space(exclude=["a"]).exclude == ("a",)  # type: ignore[arg-type]


@given(st.integers(0, 2**20), st.floats(), st.floats(), st.floats())
def test_any_machine_is_refused_or_makes_a_cluster(gpus: int, inside: float, nic: float, latency: float) -> None:
    def build() -> Cluster:
        machine = Machine("m", "m", MACHINE.gpu, gpus, inside, latency, (), 1, nic, latency)
        return Cluster("one", (machine,), nic, latency)

    assert refusal(build) or build().num_devices == gpus


def test_the_command_line_offers_every_precision() -> None:
    text = Path("conf/workload/default.yaml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("precision:"))
    assert line.partition("#")[2].strip() == ", ".join(PRECISIONS)


def test_fp8_needs_bf16_for_what_is_no_product() -> None:
    gpu = replace(MACHINE.gpu, flops_fp8=1e14, flops_bf16=None)
    cluster = Cluster("one", (replace(MACHINE, gpu=gpu),), float("inf"), 0.0)
    with pytest.raises(InputError, match="workload: precision: bf16 is not supported by rtx_3090 "):
        Problem(cluster, replace(WINDOW, attention_window=None), Workload(precision="fp8"))


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    """It would take less than the full attention priced; a window that the sequence fits into changes nothing."""
    cluster = replace(LAB, machines=LAB.machines[:1])

    def make_pricer(model: ModelSpec, seq_len: int) -> PlanPricer:
        return PlanPricer(Problem(cluster, model, Workload(4, seq_len, precision="fp16")))

    line = "model: sliding_window: windowed attends to 1024 tokens at a time, fewer than seq_len 2048, and only full"
    assert (refusal(lambda: make_pricer(WINDOW, 2048)) or "").startswith(line)
    assert refusal(lambda: make_pricer(WINDOW, 1024)) is None
    assert refusal(lambda: make_pricer(replace(WINDOW, attention_window=None), 2048)) is None
    qwen = replace(WINDOW, architecture="qwen2", attention_bias=True)
    assert (refusal(lambda: make_pricer(qwen, 2048)) or "").endswith("full attention: model.use_sliding_window=false")
    neo = replace(WINDOW, architecture="gpt_neo", num_kv_heads=4, mlp_bias=True)
    assert refusal(lambda: make_pricer(neo, 2048)) is None  # computes all scores and masks them


def test_a_link_of_two_devices_has_one_form_and_a_lone_device_no_rate_inside() -> None:
    links = (IntraLink(3, 2, 1e9, 0.0), IntraLink(1, 0, 1e9, 0.0))
    machine = replace(MACHINE, num_gpus=4, intra_links=links)
    assert [(link.a, link.b) for link in machine.intra_links] == [(0, 1), (2, 3)]
    assert machine == replace(MACHINE, num_gpus=4, intra_links=links[::-1])
    lone = replace(MACHINE, num_gpus=1, intra_links=(), intra_bandwidth_bytes_per_s=1e9)
    assert lone.intra_bandwidth_bytes_per_s == float("inf")


def test_links_alone_make_a_network_in_python_too() -> None:
    """Interfaces then have the rate of all links of the machine together."""
    inf = float("inf")
    machines = tuple(
        replace(MACHINE, name=name, spec_name=name, nic_bandwidth_bytes_per_s=inf) for name in ("x", "y", "z")
    )
    links = tuple(Link(a, b, 1e9, None, True) for a, b in (("x", "y"), ("y", "z"), ("x", "z")))
    cluster = Cluster("box", machines, inf, 0.0, links=links)
    assert {machine.nic_bandwidth_bytes_per_s for machine in cluster.machines} == {2e9}
    line = refusal(lambda: Cluster("box", machines, inf, 0.0, links=links[:2])) or ""
    assert line.endswith("state it, in bytes/s per network interface and direction, or the link from x to z")
