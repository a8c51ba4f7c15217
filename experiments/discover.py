"""`hexiopt discover discover.slurm=nodes.txt`: a cluster file from the outputs of a cluster's tools, unknowns null."""

import sys
from collections.abc import Container, Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from experiments.app.cli import main
from experiments.app.common import Job
from hexiopt.errors import InputError
from hexiopt.readers.cluster_yaml import cluster_text, unknowns
from hexiopt.readers.discovery.machines import Discovery, Texts, discover
from hexiopt.report.tabular import plain_table

FILE = "cluster.yaml"
_SHOWN = 40  # machines in the table


def run(job: Job) -> float:
    """Write the cluster file. Raises InputError naming the file and line that cannot be read."""
    config = job.config.discover
    texts = Texts(
        config.paths("nvidia_smi"), config.paths("topology"), config.paths("nccl_tests"), config.slurm, config.hostfile
    )
    if texts == Texts():
        raise InputError(
            "discover: no input is given; state discover.{nvidia_smi,topology,nccl_tests,slurm,hostfile}=FILE"
        )
    found = discover(config.name, texts)
    open_keys = list(unknowns(found.cluster))
    head = ["Written by hexiopt discover."]
    if open_keys:
        head.append("null marks what no input states: hexiopt profile measures it.")
    job.write(FILE, cluster_text(found.cluster, head, found.notes))
    job.show(_machines(found))
    if found.left_out:
        names = ", ".join(found.left_out[:10]) + (", ..." if len(found.left_out) > 10 else "")
        job.show("", f"Left out, without GPUs: {names}")
    if open_keys:
        several = {entry["name"] for entry in found.cluster["machines"] if "count" in entry or "[" in entry["name"]}
        job.show("", Text("Unknown", style="bold"), _unknown(open_keys, several))
    job.show_files(FILE)
    return float("nan")


def _machines(found: Discovery) -> Table:
    rows = []
    machines = found.cluster["machines"]
    for entry in machines[:_SHOWN]:
        count = f" ×{entry['count']}" if "count" in entry else ""
        inside = entry.get("intra_bandwidth_gb_per_s", "")
        cells = map(_cell, (entry["num_gpus"], entry["gpu"], inside))
        rows.append([entry["name"] + count, *cells, "; ".join(found.notes[entry["name"]])])
    if len(machines) > _SHOWN:
        rows.append(["...", "", "", "", f"and {len(machines) - _SHOWN:,} more machines"])
    return plain_table(("Machine", "GPUs", "Type", "Inside, GB/s", "Said"), rows, left=("Machine", "Type", "Said"))


def _cell(value: object) -> str:
    if value is None:
        return "?"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(open_keys: list[tuple[str, str]], several: Container[str]) -> Table:
    """What is null, where, and how to measure it; `several` are the names that stand for more than one machine."""
    rows = list(_rows(open_keys, several))
    more = [("...", f"and {len(rows) - _SHOWN:,} more", "")] if len(rows) > _SHOWN else []
    return plain_table(("Of", "What", "Measured by"), rows[:_SHOWN] + more)


def _rows(open_keys: list[tuple[str, str]], several: Container[str]) -> Iterator[tuple[str, str, str]]:
    across = "torchrun ... -m experiments.profile across the machines"
    for whose, keys in groupby(open_keys, key=lambda one: one[0]):
        what = [key for _, key in keys]
        by_hand = [key for key in what if key == "network_interfaces"]
        measured = [key for key in what if key not in by_hand]
        if measured:
            one = f"hexiopt profile on {'one of them' if whose in several else 'the machine'}"
            yield whose, ", ".join(measured), across if whose == "between machines" else one
        if by_hand:
            yield whose, ", ".join(by_hand), "state it"


if __name__ == "__main__":
    sys.exit(main(["discover", *sys.argv[1:]]))
