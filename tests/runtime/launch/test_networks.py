"""A head that dies, and a machine whose network is cut and comes back: machines are network namespaces."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from experiments.lab.emulate.fabric import network_hindrance
from runtime.launch.agent import LOST
from runtime.launch.launch_file import launch_script
from tests.runtime.launch.test_faults import a_run, problem, undisturbed_losses
from tests.runtime.ranks import free_port

__all__ = ["undisturbed_losses"]
_ENDS_S = 300.0
HEAD = """
import json, sys
from pathlib import Path
from runtime.launch.head import AfterFaults, training_events
from runtime.launch.meeting import MeetingPlace
from runtime.training.settings import TrainingRun
folder, address = Path(sys.argv[1]), sys.argv[2]
faults = AfterFaults("restart", lambda lost: folder, 3)
for event in training_events(TrainingRun.read(folder / "the.json"), folder, faults, MeetingPlace(address), force=True):
    print(json.dumps(event), flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def start(words: list[str], **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, which ends with all that it has started."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **more}
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_agents_end_with_their_head(tmp_path: Path) -> None:
    """And say that they can be started again; their processes end, too."""
    a_run(tmp_path, timeout_s=300.0).write(tmp_path / "the.json")
    address = f"127.0.0.1:{free_port()}"
    agent = [sys.executable, "-m", "runtime.launch.agent", address, "--machine"]
    with start([sys.executable, "-c", HEAD, str(tmp_path), address]) as head:
        assert head.stdout is not None
        until_it_listens(address)
        with start([*agent, "a"]) as a, start([*agent, "b"]) as b:
            pids = []
            for line in head.stdout:
                event = json.loads(line)
                if event["event"] == "ready":
                    pids.append(event["pid"])
                if event["event"] == "step":
                    break
            head.kill()
            assert [process.wait(_ENDS_S) for process in (a, b)] == [LOST, LOST]
            for pid in pids:
                assert not Path(f"/proc/{pid}").exists()


def until_it_listens(address: str) -> None:
    """Run until `address` has been connected to."""
    script = "import socket, sys, time\nhost, port = sys.argv[1].split(':')\nwhile True:\n"
    script += "    try: socket.create_connection((host, int(port))); break\n    except OSError: time.sleep(0.1)\n"
    subprocess.run([sys.executable, "-c", script, address], check=True, timeout=_ENDS_S)


@contextmanager
def networks() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """A namespace with a bridge for the head, at 198.18.255.1, and one for each machine: its name, and its cable."""
    prefix = f"hexiopt-{os.getpid()}"
    core, namespaces = f"{prefix}-core", {}
    try:
        ip("netns", "add", core)
        for words in ("link add bridge type bridge", "link set bridge up", "addr add 198.18.255.1/24 dev bridge"):
            ip("-n", core, *words.split())
        ip("-n", core, "link", "set", "lo", "up")
        for number, machine in enumerate("ab", 2):
            namespace, cable = f"{prefix}-{machine}", f"to-{machine}"
            ip("netns", "add", namespace)
            namespaces[machine] = namespace, cable
            ip("-n", core, *f"link add {cable} type veth peer name eth0 netns {namespace}".split())
            ip("-n", core, *f"link set {cable} master bridge up".split())
            ip("-n", namespace, *f"addr add 198.18.255.{number}/24 dev eth0".split())
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield core, namespaces
    finally:
        for namespace in (core, *(name for name, _ in namespaces.values())):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(network_hindrance(problem().cluster) is not None, reason="needs network namespaces")
def test_a_machine_that_is_cut_off_comes_back(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    """The others notice by messages that fail, and wait for it; its agent gives up, and `launch.sh` starts it again."""
    a_run(tmp_path, timeout_s=20.0).write(tmp_path / "the.json")
    address = "198.18.255.1:29500"
    (tmp_path / "launch.sh").write_text(launch_script(["a", "b"], address))
    log = tmp_path / "said"
    script, losses, notes = ["sh", str(tmp_path / "launch.sh")], dict[int, float](), list[str]()
    with networks() as (core, machines):
        inside = {name: ["ip", "netns", "exec", namespace] for name, (namespace, _) in machines.items()}
        head_words = ["ip", "netns", "exec", core, sys.executable, "-c", HEAD, str(tmp_path), address]
        with (
            start(head_words) as head,
            start([*inside["a"], *script, "a"], GLOO_SOCKET_IFNAME="eth0") as a,
            start(
                ["sh", "-c", f"exec 2> {log}; exec {shlex.join([*inside['b'], *script, 'b'])}"],
                GLOO_SOCKET_IFNAME="eth0",
            ) as b,
        ):
            assert head.stdout is not None
            cut, back = False, False
            for line in head.stdout:
                event = json.loads(line)
                if event["event"] == "step":
                    losses[event["step"]] = event["loss"]
                if event["event"] in ("note", "restart"):
                    notes.append(event["reason"])
                if event["event"] == "step" and event["step"] >= 3 and not cut:
                    cut = True
                    ip("-n", core, "link", "set", machines["b"][1], "down")
                if event["event"] == "note" and cut and not back:
                    back = True
                    while "is out of reach" not in log.read_text():
                        assert b.poll() is None
                        time.sleep(0.1)
                    ip("-n", core, "link", "set", machines["b"][1], "up")
            assert [process.wait(_ENDS_S) for process in (head, a, b)] == [0, 0, 0]
    assert losses == pytest.approx(undisturbed_losses, rel=1e-9)
    assert notes[-2:] == ["waiting for b", "b joined"]
