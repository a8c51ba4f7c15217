"""Where machines meet, and the script by which each takes its part in a run."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile
from runtime.launch.launch_file import launch_script, machines_of, meeting_address
from tests.runtime.launch.test_faults import narrow, problem, wide

AGENT = """#!/bin/sh
echo "$@" >> {log}
[ $(wc -l < {log}) -ge 3 ] && exit {last}
exit 75
"""


def test_machines_of_a_plan_and_those_that_replan_may_use() -> None:
    used = machines_of(PlanFile(problem(), narrow(), {}))
    assert (
        len(used) < len(machines_of(PlanFile(problem(), narrow(), {}), spare=True)) == len(problem().cluster.machines)
    )
    assert used == machines_of(PlanFile(problem(), wide(), {}))[-len(used) :]


@pytest.mark.parametrize("last", [0, 2])
def test_an_agent_is_started_again_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """75 says that it has lost the others; whatever else it ends with is the script's."""
    log, agent = tmp_path / "said", tmp_path / "it's python"
    agent.write_text(AGENT.format(log=log, last=last))
    agent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(agent))
    script = tmp_path / "launch.sh"
    names = machines_of(PlanFile(problem(), wide(), {}))
    assert len(names) > 1
    script.write_text(launch_script(names, "10.0.0.1:5000").replace("sleep 5", "sleep 0"))
    done = subprocess.run(["sh", script, names[1]], capture_output=True, text=True)
    assert done.returncode == last
    assert log.read_text() == f"-m runtime.launch.agent 10.0.0.1:5000 --machine {names[1]}\n" * 3
    done = subprocess.run(["sh", script, "elsewhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"launch.sh: no machine 'elsewhere'; name one of {', '.join(names)}\n"


def test_where_machines_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting_address("10.0.0.1:5000") == "10.0.0.1:5000"
    for wrong in ("a", "a:", ":1", "a:0", "a:65536", "a:x"):
        with pytest.raises(InputError, match="is not an address; write host:port"):
            meeting_address(wrong)

    def answer(address: str) -> Any:
        return lambda host, port, **more: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", answer("10.0.0.1"))
    assert meeting_address(None) == "node1:29500"
    monkeypatch.setattr(socket, "getaddrinfo", answer("127.0.1.1"))
    with pytest.raises(InputError, match=r"this host's name, node1, is no address that other machines reach; state"):
        meeting_address(None)
