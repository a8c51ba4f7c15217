"""A cluster's network on one machine, slower by one factor: namespaces joined by bridges, links shaped by `tc`.

Every device is a network namespace with an address of its own. Its machine is a bridge, as are the groups around it, up
to one that joins all. What a device sends into its machine, what an interface sends and receives, and what an uplink
carries pass a token bucket (`htb`) of the rate in the cluster file, divided. Latencies are not made here (`netem` is
often missing): `pace.py` delays messages. Needs root, and Linux's `ip` and `tc`.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from experiments.lab.emulate.namespaces import INTERFACE, NAMESPACES
from hexiopt.errors import InputError
from hexiopt.problem.cluster import Cluster

_MTU = 576  # bytes of a packet: small ones, since a bucket lets one through that it has not been filled for
_PAYLOAD = _MTU - 52  # those of them that are a message's (TCP over IPv4, with timestamps)
_FRAME = _MTU + 14
# Packets of less than 128 bytes, by the length in their header, pass at once: what TCP acknowledges, and what gloo
# announces, would wait behind a slow message here and does not on a cluster, whose packets are larger.
_SMALL, _UNSHAPED = "0xff80", "1:ffff"
_MACHINES = 512  # of a /24 each
_MOST = 2e9  # bytes/s; faster links are left as they are


def network_hindrance(cluster: Cluster) -> str | None:
    """Why a cluster's network cannot be emulated on this machine, and what to do; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not found"
    if cluster.links:
        return f"cluster {cluster.name}: single links between machines are not emulated"
    if len(cluster.machines) > _MACHINES:
        return f"cluster {cluster.name}: {len(cluster.machines)} machines are more than the {_MACHINES} with addresses"
    return None


class Fabric:
    """The network of a cluster's `devices`, as long as the context is entered; `slowdown` divides all rates.

    Raises InputError where it cannot be made.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int], slowdown: float) -> None:
        self._cluster, self._slowdown = cluster, slowdown
        self._numbers = count()
        self._core = f"hexiopt-{os.getpid()}-core"
        self.namespaces = {device: f"hexiopt-{os.getpid()}-{device}" for device in devices}
        machine_of, index_of = cluster.machine_of, cluster.index_in_machine
        # 198.18.0.0/15 is for tests of networks (RFC 2544). A machine is a /24.
        self.addresses = {d: f"{_subnet(int(machine_of[d]))}.{int(index_of[d]) + 1}" for d in devices}

    def __enter__(self) -> Self:
        _remove(name for name in _ours() if not Path("/proc", name.split("-")[1]).exists())
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        namespaces = {self._core, *self.namespaces.values()}
        _remove(name for name in _ours() if name in namespaces)

    def _build(self) -> None:
        for name in (self._core, *self.namespaces.values()):
            _run("ip", "netns", "add", name)
        cluster = self._cluster
        root = self._bridge()
        bridges = {name: self._bridge() for name in (group.name for group in cluster.groups)}
        inside = {member: group.name for group in cluster.groups for member in group.members}
        for group in cluster.groups:
            above = bridges[inside[group.name]] if group.name in inside else root
            rate = group.uplink_bytes_per_s
            self._join(bridges[group.name], above, [(rate, "", [])], [(rate, "", [])])
        by_machine: dict[int, list[int]] = {}
        for device in self.namespaces:
            by_machine.setdefault(int(cluster.machine_of[device]), []).append(device)
        for m, devices in by_machine.items():
            machine = cluster.machines[m]
            bridge = self._bridge()
            place = next((inside[n] for n in (machine.name, machine.spec_name) if n in inside), None)
            interfaces: dict[int, list[str]] = {}
            for device in devices:
                interface = machine.interface(int(cluster.index_in_machine[device]))
                interfaces.setdefault(interface, []).append(self.addresses[device])
            rate = machine.nic_bandwidth_bytes_per_s
            self._join(
                bridge,
                root if place is None else bridges[place],
                [(rate, "src", addresses) for addresses in interfaces.values()],
                [(rate, "dst", addresses) for addresses in interfaces.values()],
            )
            for device in devices:
                self._attach(device, m, bridge, devices)

    def _bridge(self) -> str:
        name = f"b{next(self._numbers)}"
        _batch(self._core, [f"link add {name} type bridge", f"link set {name} up"])
        return name

    def _join(
        self, below: str, above: str, up: list[tuple[float, str, list[str]]], down: list[tuple[float, str, list[str]]]
    ) -> None:
        """Join two bridges by a cable that is shaped in both directions: (bytes/s, side, addresses) each."""
        number = next(self._numbers)
        first, second = f"u{number}", f"d{number}"
        _batch(
            self._core,
            [
                f"link add {first} type veth peer name {second}",
                f"link set {first} master {below} up",
                f"link set {second} master {above} up",
            ],
        )
        self._shape(self._core, first, up)
        self._shape(self._core, second, down)

    def _attach(self, device: int, m: int, bridge: str, devices: Sequence[int]) -> None:
        """Join a device to its machine."""
        namespace, port = self.namespaces[device], f"p{next(self._numbers)}"
        _batch(
            self._core,
            [
                f"link add {port} type veth peer name {INTERFACE} netns {namespace}",
                f"link set {port} master {bridge} up",
            ],
        )
        _batch(
            namespace,
            [
                "link set lo up",
                f"link set {INTERFACE} mtu {_MTU} gso_max_segs 1",  # no packets of packets: they would pass as one
                f"addr add {self.addresses[device]}/15 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ],
        )
        machine, index_of = self._cluster.machines[m], self._cluster.index_in_machine
        rates: dict[float, list[str]] = {}
        for other in devices:
            if other != device:
                rate = machine.pair_bandwidth(int(index_of[device]), int(index_of[other]))
                rates.setdefault(rate, []).append(self.addresses[other])
        self._shape(namespace, INTERFACE, [(rate, "dst", addresses) for rate, addresses in rates.items()])

    def _shape(self, namespace: str, link: str, classes: Iterable[tuple[float, str, list[str]]]) -> None:
        """Limit what a link sends: (bytes/s, src or dst, addresses) each; no addresses are all."""
        match = f"filter add dev {link} parent 1: protocol ip"
        lines = [
            f"qdisc add dev {link} root handle 1: htb",
            f"class add dev {link} parent 1: classid {_UNSHAPED} htb rate {round(8 * _MOST)}bit",
            f"{match} prio 1 u32 match u16 0 {_SMALL} at 2 flowid {_UNSHAPED}",
        ]
        before = len(lines)
        for number, (full_rate, side, addresses) in enumerate(classes, 1):
            rate = full_rate / self._slowdown * _FRAME / _PAYLOAD  # headers travel on top of what is asked for
            if not math.isfinite(rate) or rate > _MOST:
                continue
            lines.append(
                f"class add dev {link} parent 1: classid 1:{number} htb "
                f"rate {max(1, round(8 * rate))}bit burst 1 cburst 1 quantum {_FRAME}"
            )
            for where in [f"{side} {address}/32" for address in addresses] or ["src 198.18.0.0/15"]:
                lines.append(f"{match} prio 2 u32 match ip {where} flowid 1:{number}")
        if len(lines) > before:
            _run("tc", "-n", namespace, "-batch", "-", stdin="\n".join(lines))


def _subnet(machine: int) -> str:
    return f"198.{18 + machine // 256}.{machine % 256}"


def _ours() -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob("hexiopt-*")) if NAMESPACES.exists() else []


def _remove(names: Iterable[str]) -> None:
    for name in names:
        _run("ip", "netns", "del", name)


def _batch(namespace: str, lines: Sequence[str]) -> None:
    _run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines))


def _run(*words: str, stdin: str = "") -> None:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise InputError(f"emulate.network: {' '.join(words[:4])} failed ({why}); take emulate.network=false")
