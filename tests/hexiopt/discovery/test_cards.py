"""Clusters from the names of cards."""

import os
from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.discovery.cards import cluster_of_cards


def test_one_pc_shares_its_memory() -> None:
    cluster = hx.cluster(cluster_of_cards([3090, "4090", "2x RTX 3090"]).data)
    assert [(machine.gpu.name, machine.num_gpus) for machine in cluster.machines] == [("rtx_3090", 3), ("rtx_4090", 1)]
    network = cluster.network
    assert network.pair_bandwidth(0, 3) == 12e9
    assert [network.resource_name(r) for r in network.route(0, 3)][1] == "pc inside"


def test_several_pcs_share_their_network() -> None:
    told = cluster_of_cards([[3090, 4090], ["2x4060ti-16gb"]], "10gbe")
    cluster = hx.cluster(told.data)
    assert cluster.network.pair_bandwidth(0, 2) == pytest.approx(1.25e9 * 1448 / 1538)
    assert cluster.network.pair_latency(0, 2) == pytest.approx(100e-6)
    assert cluster.network.pair_bandwidth(0, 1) == 12e9
    assert "GB/s between PCs" in told.assumed
    assert hx.cluster(cluster_of_cards([[3090], [4090]], 0.5).data).network.pair_bandwidth(0, 1) == 0.5e9


def test_an_x_in_a_name_is_no_count() -> None:
    cluster = hx.cluster(cluster_of_cards(["7900 XT", "2x 7900xtx", "4060 ti 16gb x2", "4090*3"]).data)
    assert [(machine.gpu.name, machine.num_gpus) for machine in cluster.machines] == [
        ("rx_7900_xt", 1),
        ("rx_7900_xtx", 2),
        ("rtx_4060_ti_16gb", 2),
        ("rtx_4090", 3),
    ]


def test_one_card_assumes_nothing() -> None:
    told = cluster_of_cards("3090")
    assert told.assumed == ""
    assert hx.cluster(told.data).num_devices == 1


def test_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    rows = "0, NVIDIA GeForce RTX 3090, 24576 MiB\n1, NVIDIA GeForce RTX 4090, 24564 MiB\n"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\nindex, name, memory.total [MiB]\n{rows}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cluster = hx.cluster(cluster_of_cards("auto").data)
    assert [machine.gpu.name for machine in cluster.machines] == ["rtx_3090", "rtx_4090"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(hx.InputError, match="nvidia-smi failed"):
        cluster_of_cards("auto")


@pytest.mark.parametrize(
    ("gpus", "network", "says"),
    [
        ([], None, "is no list of cards"),
        ({"a": 1}, None, "is no list of cards"),
        ([3.5], None, "is not the name of a card"),
        (["0x3090"], None, "a PC has 0 cards"),
        ([[3090], 4090], None, "has cards beside PCs"),
        ([[]], None, "a PC has 0 cards"),
        ([3090], "1gbe", "joins several PCs"),
        ([[3090], [4090]], "fast", "write 1gbe, 10gbe, or GB/s"),
        ([[3090], [4090]], -1, "network: -1 is out of range"),
        (["9090"], None, "is not a known GPU"),
    ],
)
def test_other_lists_are_refused(gpus: object, network: object, says: str) -> None:
    with pytest.raises(hx.InputError) as refused:
        cluster_of_cards(gpus, network)
    assert says in str(refused.value)
