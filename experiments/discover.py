"""`hexiopt discover discover.slurm=nodes.txt`: a cluster file from the outputs of a cluster's tools, unknowns null."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job
from hexiopt.discovery.machines import Discovery, Texts, discover
from hexiopt.errors import InputError
from hexiopt.files.cluster_yaml import cluster_text, unknowns
from hexiopt.problem.nodelist import compress
from hexiopt.report.tabular import plain_table

FILE = "cluster.yaml"
_SHOWN = 40  # machines in the table


def run(job: Job) -> float:
    """Write the cluster file. Raises InputError naming the file and line that cannot be read."""
    config = job.config.discover
    texts = Texts(
        config.paths("nvidia_smi"),
        config.paths("rocm_smi"),
        config.paths("topology"),
        config.paths("nccl_tests"),
        config.slurm,
        config.kubernetes,
        config.hostfile,
    )
    if texts == Texts():
        options = ",".join(field.name for field in fields(Texts))
        raise InputError(f"discover: no input is given; state discover.{{{options}}}=FILE")
    discovery = discover(config.name, texts)
    open_keys = list(unknowns(discovery.cluster))
    passed_over = _omissions(discovery)
    head = ["Written by hexiopt discover."]
    if open_keys:
        head.append("null marks what no input states: hexiopt profile measures it.")
    job.write(FILE, cluster_text(discovery.cluster, [*head, *passed_over], discovery.notes))
    job.show(_machines(discovery))
    for line in passed_over:
        job.show("", line)
    if open_keys:
        job.show("", Text("Unknown: state it in the file, or measure it", style="bold"))
        for line in _unknown(open_keys, discovery.cluster):
            job.show(line)
    job.show_files(FILE)
    return float("nan")


def _omissions(discovery: Discovery) -> list[str]:
    """What is not in the cluster, a line for each reason."""
    lines = [f"Note: {remark}" for remark in discovery.remarks]
    if discovery.without_gpus:
        lines.append(f"Left out, without GPUs: {_enumerate(discovery.without_gpus)}")
    by_state: dict[str, list[str]] = {}
    for name, state in discovery.out_of_service.items():
        by_state.setdefault(state, []).append(name)
    states = [f"{_enumerate(names)} ({state})" for state, names in by_state.items()]
    if states:
        lines.append(f"Left out, not in service: {'; '.join(states)}")
    return lines


def _enumerate(names: Iterable[str]) -> str:
    lists = compress(names)
    return ", ".join(lists[:10]) + (f" and {len(lists) - 10:,} more" if len(lists) > 10 else "")


def _machines(discovery: Discovery) -> Table:
    rows = []
    machines = discovery.cluster["machines"]
    for entry in machines[:_SHOWN]:
        count = f" ×{entry['count']}" if "count" in entry else ""
        inside = entry.get("intra_bandwidth_gb_per_s", "")
        cells = map(_cell, (entry["num_gpus"], entry["gpu"], inside))
        rows.append([entry["name"] + count, *cells, "; ".join(discovery.notes[entry["name"]])])
    if len(machines) > _SHOWN:
        rows.append(["...", "", "", "", f"and {len(machines) - _SHOWN:,} more machines"])
    return plain_table(("Machine", "GPUs", "Type", "Inside, GB/s", "Notes"), rows, left=("Machine", "Type", "Notes"))


def _cell(value: object) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(open_keys: list[tuple[str, str]], cluster: Mapping[str, Any]) -> Iterator[str]:
    """What is null, where, and how to measure it: a line for all machines of which the same is unknown."""
    several = {entry["name"] for entry in cluster["machines"] if "count" in entry or "[" in entry["name"]}
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, group in groupby(open_keys, key=lambda pair: pair[0]):
        keys = [key for _, key in group]
        by_hand = [key for key in keys if key == "network_interfaces"]
        measured = [key for key in keys if key not in by_hand]
        if owner == "between machines":
            how = f"torchrun ... -m {__package__}.profile across the machines"
        else:
            how = f"hexiopt profile {'on one of them' if owner in several else 'there'}"
        for unknown, remedy in ((measured, how), (by_hand, "no tool measures it")):
            if unknown:
                owners.setdefault((", ".join(unknown), remedy), []).append(owner)
    for (names, remedy), owned in owners.items():
        listed = "; ".join(owned[:_SHOWN]) + (f"; and {len(owned) - _SHOWN:,} more" if len(owned) > _SHOWN else "")
        whose = "" if owned == ["between machines"] else f" of {listed}"
        yield f"- {names}{whose}: {remedy}"


if __name__ == "__main__":
    sys.exit(main(["discover", *sys.argv[1:]]))
