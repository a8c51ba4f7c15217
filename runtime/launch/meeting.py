"""The meeting place of a run: a store in the process that its user started, so that it outlives every machine.

Through it go the rendezvous of the agents, all events, and what each round of processes is to train.
"""

import json
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from hexiopt.errors import InputError
from runtime.events import Event

DEFAULT_PORT = 29500
_EVENTS, _END, _STOP = "events", "end", "stop"
_READ = timedelta(seconds=30)  # that the store may take to answer, until the network is taken to be cut
_CONNECT_S = 10.0
_POLL_S = 0.05


class TrainingFailedError(Exception):
    """Training ended before its last step; the message says why."""


class EndedError(Exception):
    """The run has ended."""


def address_of(text: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`. Raises InputError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"train.master: {text!r} is not an address; write host:port, such as node1:{DEFAULT_PORT}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class MeetingPlace:
    """The store, held by this process: at `master`, `HOST:PORT`, for machines that come there, or at a free port that
    only this machine reaches.

    Raises InputError where it cannot listen there.
    """

    def __init__(self, master: str | None = None) -> None:
        self.is_local = master is None
        host, port = ("127.0.0.1", 0) if master is None else address_of(master)
        try:
            family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # Listens at this address only, not at all of the machine's: the state of a rendezvous is a pickle, so that
            # whoever reaches the port runs code here.
            listener = socket.create_server((sockaddr[0], port), family=family)
        except OSError as error:
            raise InputError(
                f"train.master: cannot listen at {host}:{port} ({error.strerror or error}); "
                "state an address of this machine and a free port"
            ) from None
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=_READ, master_listen_fd=listener.detach()
        )

    def hear(self) -> Event | None:
        """The next event; None where there is none for a moment."""
        if self._store.queue_len(_EVENTS) == 0:
            time.sleep(_POLL_S)
            return None
        event: Event = json.loads(self._store.queue_pop(_EVENTS))
        return event

    def answer(self, event: Event, what: Event) -> None:
        """Answer an event that asks."""
        self._store.set(event["token"], json.dumps(what))

    def ask_to_stop(self) -> None:
        """Ask all ranks to write a checkpoint and stop."""
        self._store.set(_STOP, "")

    def end(self) -> None:
        """Tell all agents that the run has ended."""
        self._store.set(_END, "")


class MeetingClient:
    """The store, as agents and processes reach it. Raises OSError where nobody listens, later on
    `torch.distributed.DistError` where it is gone."""

    def __init__(self, address: str) -> None:
        self.host, self.port = address_of(address)
        # Torch's own connecting fills the screen for a minute where nobody listens.
        self.probe(_CONNECT_S)
        self.store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_READ)

    def probe(self, timeout_s: float) -> None:
        """Raise OSError where the meeting place cannot be reached."""
        socket.create_connection((self.host, self.port), timeout=timeout_s).close()

    def tell(self, event: Event) -> None:
        """Tell an event."""
        self.store.queue_push(_EVENTS, json.dumps(event))

    def ask(self, event: Event) -> Event:
        """Tell an event and wait for the answer, for as long as it takes. Raises EndedError."""
        token = f"answer/{uuid.uuid4().hex}"
        self.tell(event | {"token": token})
        while not self.store.check([token]):
            self.check_end()
            time.sleep(_POLL_S)
        answer: Event = json.loads(self.store.get(token))
        return answer

    def check_end(self) -> None:
        """Raise EndedError where the run has ended."""
        if self.store.check([_END]):
            raise EndedError

    def must_stop(self) -> bool:
        """Whether the ranks are to write a checkpoint and stop."""
        is_set: bool = self.store.check([_STOP])
        return is_set

    def claim(self, name: str) -> Callable[[], bool]:
        """Take a name over from whoever has it; says whether it is still ours."""
        key, token = f"claim/{name}", uuid.uuid4().hex
        self.store.set(key, token)
        return lambda: self.store.get(key).decode() == token

    def own_address(self) -> str:
        """This machine's address, as the network of the meeting place knows it."""
        family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            host: str = probe.getsockname()[0]
            return host
