"""`hexiopt replan`, and plan files priced on a changed problem."""

import json
from pathlib import Path

import pytest

from tests.conftest import Run

SMALL = ("cluster=small_mixed", "model=tiny", "workload=small", "report=false", "bound.time_limit_s=0")


PLANS: dict[tuple[str, ...], str] = {}  # by constraints: each is searched once


def plan_override(hexiopt: Run, *constraints: str) -> str:
    path = Path("first/plan.json")
    if constraints not in PLANS:
        settings = ("workload.global_batch=8", "solver.max_steps=60", "hydra.run.dir=first")
        ran = hexiopt("plan", *SMALL, *constraints, *settings)
        assert ran.code == 0, ran.err
        PLANS[constraints] = path.read_text()
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANS[constraints])
    return f"plan={path}"


@pytest.fixture
def plan(hexiopt: Run) -> str:
    return plan_override(hexiopt)


def step_s(tmp_path: Path, folder: str) -> float:
    seconds: float = json.loads((tmp_path / folder / "plan.json").read_text())["prediction"]["step_time_s"]
    return seconds


def test_a_plan_is_priced_on_a_changed_network_batch_and_sequence(hexiopt: Run, tmp_path: Path) -> None:
    plan = plan_override(hexiopt, "constraints.num_pipelines=5")  # on both machines
    before_s = step_s(tmp_path, "first")
    changes = {
        "cluster.inter_machine.bandwidth_gb_per_s=0.001": lambda now_s: now_s > before_s,
        "workload.global_batch=16": lambda now_s: before_s < now_s < 2.01 * before_s,
        "workload.seq_len=64": lambda now_s: now_s < before_s,
    }
    for change, expected in changes.items():
        ran = hexiopt("price", plan, change, "hydra.run.dir=again")
        assert ran.code == 0, ran.err
        assert expected(step_s(tmp_path, "again")), change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.global_batch=9", "micro-batches for 8 sequences are no whole number for 9; choose a batch"),
        ("cluster=hexiscale_setting_1", "is on no machine of the cluster"),
        ("experiment=even", "experiment=even: space: price does not read it; hexiopt plan, compare, fit and others do"),
        ("cluster.inter_machine.bandwith_gb_per_s=1", "did you mean bandwidth_gb_per_s?"),
    ],
)
def test_a_change_that_cannot_be_is_one_line(
    hexiopt: Run, tmp_path: Path, plan: str, change: str, message: str
) -> None:
    ran = hexiopt("price", plan, change, "hydra.run.dir=again")
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "again").exists()


def test_replans_without_a_lost_device(hexiopt: Run, tmp_path: Path, plan: str) -> None:
    cluster = json.loads((tmp_path / "first" / "plan.json").read_text())["problem"]["cluster"]
    lost = f"{cluster['machines'][0]['name']}:0"
    ran = hexiopt("replan", plan, f"lost=['{lost}']", "solver.max_steps=60", "report=true", "hydra.run.dir=second")
    assert ran.code == 0, ran.err
    assert "Pays back" in " ".join(ran.out.split())
    report = json.loads((tmp_path / "second" / "replan.json").read_text())
    new = (tmp_path / "second" / "plan.json").read_text()
    assert json.loads(new)["problem"]["space"]["exclude"] == [lost]
    chosen = next(replacement for replacement in report["replacements"] if replacement["name"] == report["chosen"])
    assert chosen["step_time_s"] == pytest.approx(step_s(tmp_path, "second"))
    moved = sum(size for sizes in report["fetched_bytes"].values() for size in sizes.values())
    assert moved == pytest.approx(chosen["moved_bytes"])
    assert (tmp_path / "second" / "replan.png").stat().st_size > 10_000
    ran = hexiopt("replan", plan, "hydra.run.dir=third")
    assert (ran.code, "nothing has changed" in ran.err) == (2, True)
    ran = hexiopt("replan", plan, "lost=[x:9]", "hydra.run.dir=third")
    assert (ran.code, "exclude: 'x:9'" in ran.err) == (2, True)


def test_what_a_plan_was_asked_for_can_be_lifted_by_what_the_error_says(hexiopt: Run, tmp_path: Path) -> None:
    plan = plan_override(
        hexiopt, "constraints.num_pipelines=2", "constraints.num_stages=2", "cluster.machines.0.count=1"
    )
    problem = json.loads((tmp_path / "first" / "plan.json").read_text())["problem"]
    usable = sum(machine["num_gpus"] * machine.get("count", 1) for machine in problem["cluster"]["machines"])
    names = [f"{machine['name']}:{k}" for machine in problem["cluster"]["machines"] for k in range(machine["num_gpus"])]
    again = (
        "replan",
        plan,
        f"lost={names[: usable - 3]}",
        "solver.max_steps=40",
        "report=false",
        "hydra.run.dir=second",
    )
    ran = hexiopt(*again)
    assert ran.code == 2
    asked, _, lifted = ran.err.partition("or for any number: ")
    assert "2 pipelines of 2 stages need 4 devices, the cluster has 3 to use" in asked
    ran = hexiopt(*again, *lifted.split())
    assert ran.code == 0, ran.err
    space = json.loads((tmp_path / "second" / "plan.json").read_text())["problem"]["space"]
    assert (space["num_pipelines"], space["num_stages"]) == (None, None)
    ran = hexiopt(
        *again, *lifted.split(), "space.replicas=false", "workload.loss_chunk_tokens=64", "space.preset=megatron"
    )
    assert ran.code == 0, ran.err
    now = json.loads((tmp_path / "second" / "plan.json").read_text())["problem"]
    assert now["workload"]["loss_chunk_tokens"] == 64, "the file states none"
    assert not now["space"]["replicas"]
    assert not now["space"]["uneven_tp"]


def test_an_override_of_a_section_changes_what_it_states(hexiopt: Run, tmp_path: Path) -> None:
    plan = plan_override(hexiopt, "constraints.num_stages=1", "workload.seq_len=64")
    again = ("replan", plan, "solver.max_steps=40", "report=false", "hydra.run.dir=second")
    for change, expected in (
        ("constraints={max_tp: 1}", (1, 1, 64, 8)),
        ("workload=default", (1, None, 4096, 256)),
    ):
        ran = hexiopt(*again, change)
        assert ran.code == 0, ran.err
        now = json.loads((tmp_path / "second" / "plan.json").read_text())["problem"]
        space, workload = now["space"], now["workload"]
        values = space["num_stages"], space["max_tp"], workload["seq_len"], workload["global_batch"]
        assert values == expected, change


def test_the_table_names_what_a_change_is_taken_to_cost(hexiopt: Run, tmp_path: Path, plan: str) -> None:
    before = json.loads((tmp_path / "first" / "plan.json").read_text())
    machines = [machine["name"] for machine in before["problem"]["cluster"]["machines"]]
    used = next(f"{name}:{k}" for name in machines for k in range(9) if f"{name}:{k}" in str(before["pipelines"]))
    words = ("replan", plan, f"lost=['{used}']", "solver.max_steps=40", "report=false")
    times_s = {}
    for stated, foot in (
        (
            (),
            "takes 120 s more, and a machine reads a checkpoint at 2 GB/s, or as fast as its network where that",
        ),
        (
            ("replan.restart_s=7", "replan.checkpoint_gb_per_s=null"),
            "takes 7 s more, and a machine reads a checkpoint as",
        ),
    ):
        ran = hexiopt(*words, *stated, "hydra.run.dir=second")
        assert ran.code == 0, ran.err
        assert foot in " ".join(ran.out.split())
        times_s[stated] = json.loads((tmp_path / "second" / "replan.json").read_text())["replacements"][-1]["moving_s"]
    assert times_s[()] > 120.0
    assert 7.0 < times_s["replan.restart_s=7", "replan.checkpoint_gb_per_s=null"] < 100.0


def test_replans_with_slow_devices_and_more_machines(hexiopt: Run, tmp_path: Path, plan: str) -> None:
    cluster = json.loads((tmp_path / "first" / "plan.json").read_text())["problem"]["cluster"]
    name = cluster["machines"][1]["name"]
    changes = {f"slow={{{name}:0: 0.5, {name}:2: 0.7}}": "slow", "added=more.yaml": "machines"}
    (tmp_path / "more.yaml").write_text("machines: [{name: more, gpu: rtx_4090, num_gpus: 1}]")
    for change, key in changes.items():
        ran = hexiopt("replan", plan, change, "solver.max_steps=40", "hydra.run.dir=changed")
        assert ran.code == 0, ran.err
        now = json.loads((tmp_path / "changed" / "plan.json").read_text())["problem"]["cluster"]
        assert now.get(key) != cluster.get(key), change
        if key == "slow":
            assert now["slow"] == {f"{name}:0": 0.5, f"{name}:2": 0.7}
        replacements = json.loads((tmp_path / "changed" / "replan.json").read_text())["replacements"]
        assert replacements[0]["moving_s"] == 0.0
    listed = "added=[{name: more, gpu: rtx_4090, num_gpus: 1}]"
    assert hexiopt("replan", plan, listed, "solver.max_steps=40", "report=false", "hydra.run.dir=listed").code == 0
    for change, message in (
        ("slow=0.5", "slow: 0.5 is no speeds"),
        ("slow={x: 0.5}", "slow: 'x' is not a machine"),
        ("slow=nowhere", "nowhere: the file does not exist"),
        ("added=nothing.yaml", "nothing.yaml: the file does not exist"),
        ("added=[{name: more}]", "num_gpus: is missing"),
    ):
        ran = hexiopt("replan", plan, change, "hydra.run.dir=third")
        assert (ran.code, message in ran.err, len(ran.err.splitlines())) == (2, True, 1), ran.err
        assert not (tmp_path / "third").exists()
