"""The network namespaces of emulated devices: where they stand, and how a process goes into one."""

import ctypes
import os
from pathlib import Path

INTERFACE = "eth0"  # of a device, inside its network namespace
NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


def enter(namespace: str) -> None:
    """Put the calling process (one thread so far) into a network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as handle:
        if libc.setns(handle.fileno(), _NEW_NETWORK):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)
