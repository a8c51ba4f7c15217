"""The kind of a text, by its header or shape: which option of `hexiopt discover` reads it, or what to run instead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hexiopt.discovery import gres_conf, hostfile, kubernetes, sinfo, slurm, slurm_json, smi, topology
from hexiopt.discovery.lines import Text, open_text
from hexiopt.errors import InputError

COMMANDS = {
    "slurm": f"{slurm.COMMAND}, or {sinfo.COMMAND}",
    "kubernetes": kubernetes.COMMAND,
    "hostfile": "one host per line, such as host slots=8",
    "nvidia_smi": smi.QUERY,
    "rocm_smi": smi.ROCM_COMMAND,
    "topology": "nvidia-smi topo -m, or rocm-smi --showtopo",
}
"""The commands that write the texts of each option."""


@dataclass(frozen=True)
class _Kind:
    """A kind of text: its name, how it is recognised, and the option whose `reader` reads it.

    Without a reader, `lacks` says why it cannot be read; the remedy is the command of `option`.
    """

    name: str
    recognises: Callable[[Text], bool]
    option: str
    reader: Callable[[Text], Any] | None = None
    lacks: str = ""


def _has(pattern: str) -> Callable[[Text], bool]:
    return lambda text: text.has(pattern)


# The first kind that recognises a text counts: kinds with a header come before kinds that are known by shape only.
_KINDS = (
    _Kind("JSON of Slurm", slurm_json.is_slurm_json, "slurm", slurm_json.read_slurm_json),
    _Kind("a list of Kubernetes nodes", kubernetes.is_kubernetes, "kubernetes", kubernetes.read_kubernetes),
    _Kind("the output of kubectl describe", kubernetes.is_description, "kubernetes", kubernetes.read_description),
    _Kind(
        "the table of kubectl get nodes", _has(r"\ANAME\s+STATUS\s+ROLES\s+AGE"), "kubernetes", lacks="states no GPUs"
    ),
    _Kind("rocm-smi --showtopo", _has(r"^=+ Link Type between two GPUs =+"), "topology", topology.read_rocm_topology),
    _Kind("rocm-smi --showproductname", _has(r"^GPU\[\d+\]\s*:\s*Card [Ss]eries:"), "rocm_smi", smi.read_rocm_smi),
    _Kind("a text of rocm-smi", _has(smi.ROCM_BANNER), "rocm_smi", lacks="names no products"),
    _Kind("a text of amd-smi", _has(r"(?i)amd-smi|^GPU: \d+$|MARKET_NAME"), "rocm_smi", lacks="is not read"),
    _Kind("the table of nvidia-smi", _has(r"\| NVIDIA-SMI \d"), "nvidia_smi", lacks="cuts the names of GPUs"),
    _Kind("the log of nvidia-smi -q", _has(r"=+NVSMI LOG=+|<nvidia_smi_log>"), "nvidia_smi", lacks="is not read"),
    _Kind("the output of nvidia-smi -L", smi.is_list, "nvidia_smi", smi.read_list),
    _Kind("nvidia-smi topo -m", _has(r"^([ \t]+GPU0|GPU0\s+X)(\s|$)"), "topology", topology.read_topology),
    _Kind("CSV of nvidia-smi", smi.is_table, "nvidia_smi", smi.read_table),
    _Kind("CSV of nvidia-smi without header", smi.is_headerless, "nvidia_smi", smi.read_headerless),
    _Kind("scontrol show node", slurm.is_scontrol, "slurm", slurm.read_scontrol),
    _Kind("gres.conf", _has(r"(?i)^\s*(AutoDetect=|([^#]*\s)?Name=\w+(\s|$))"), "slurm", gres_conf.read_gres_conf),
    _Kind(
        "slurm.conf",
        _has(r"(?i)^\s*(NodeName|SlurmctldHost|ClusterName|PartitionName|ControlMachine)="),
        "slurm",
        slurm.read_slurm_conf,
    ),
    _Kind(
        "a table of sinfo with commas between its columns",
        sinfo.has_commas,
        "slurm",
        lacks="cannot be told from those inside them",
    ),
    _Kind("a table of sinfo", sinfo.is_sinfo, "slurm", sinfo.read_sinfo),
    _Kind("a table of sinfo without header", sinfo.is_headerless, "slurm", sinfo.read_headerless),
    _Kind("a hostfile", hostfile.is_hostfile, "hostfile", hostfile.read_hostfile),
)


def read(option: str, path: str) -> Any:
    """The content of the text in a file, read by its kind.

    Raises InputError with file and lines; for a kind that `option` does not read, with its name and the remedy.
    """
    text = open_text(path)
    if not text.lines:
        raise InputError(f"{path}: is empty; write it with {COMMANDS[option]}")
    kind = next((kind for kind in _KINDS if kind.recognises(text)), None)
    if kind is None:
        raise InputError(f"{path}: is no text that discover.{option} reads; give it {COMMANDS[option]}")
    if kind.reader is None:
        raise InputError(f"{path}: is {kind.name}, which {kind.lacks}; run {COMMANDS[kind.option]}")
    if kind.option != option:
        raise InputError(f"{path}: is {kind.name}; give it as discover.{kind.option}, not as discover.{option}")
    return kind.reader(text)


def read_all(option: str, paths: Mapping[str, str]) -> dict[str, Any]:
    """The contents of the texts of one option, by machine. Raises InputError."""
    return {machine: read(option, path) for machine, path in paths.items()}
