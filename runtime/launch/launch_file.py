"""Where the machines of a run meet, and the shell script by which each of them takes its part."""

import ipaddress
import shlex
import socket
import sys
from collections.abc import Sequence

from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile
from runtime.launch.meeting import DEFAULT_PORT, address_of


def machines_of(plan_file: PlanFile, spare: bool = False) -> list[str]:
    """The names of the machines that a plan uses, the one with rank 0 first; if `spare`, of all that it may use."""
    cluster = plan_file.problem.cluster
    devices = plan_file.problem.usable_devices if spare else plan_file.plan.devices()
    machines = sorted({int(cluster.machine_of[device]) for device in devices})
    return [cluster.machines[machine].name for machine in machines]


def meeting_address(master: str | None) -> str:
    """Where machines meet: `master`, by default at this host's name. Raises InputError where others cannot reach it."""
    if master is not None:
        address_of(master)
        return master
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, DEFAULT_PORT, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        address = None
    if address is None or ipaddress.ip_address(address).is_loopback:
        raise InputError(
            f"train.master: is missing, and this host's name, {host}, is no address that other machines reach; "
            f"state host:port, such as train.master=10.0.0.1:{DEFAULT_PORT}"
        )
    return f"{host}:{DEFAULT_PORT}"


def launch_script(machines: Sequence[str], master: str) -> str:
    """`launch.sh MACHINE`, by which a machine takes part in the run at `master` until that has ended.

    An agent that has lost the others, as when its network was cut, ends with 75: it is started again.
    """
    names = " | ".join(map(shlex.quote, machines))
    run = f'{shlex.quote(sys.executable)} -m runtime.launch.agent {shlex.quote(master)} --machine "$1"'
    lines = [
        "#!/bin/sh",
        "# launch.sh MACHINE: what each machine of the plan runs; checkpoints and data are in shared folders.",
        'case "$1" in',
        f"{names}) ;;",
        f"*) echo \"launch.sh: no machine '$1'; name one of {', '.join(machines)}\" >&2; exit 2 ;;",
        "esac",
        "while :; do",
        f"  {run}",
        "  code=$?",
        "  [ $code -eq 75 ] || exit $code",
        "  sleep 5",
        "done",
    ]
    return "\n".join(lines) + "\n"
