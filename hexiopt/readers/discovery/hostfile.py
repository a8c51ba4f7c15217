"""Machines from the hostfile of a launcher: DeepSpeed and Megatron (`host slots=8`), OpenMPI
(`host slots=8 max_slots=8`), MPICH (`host:8`), or plain hosts."""

import re

from hexiopt.errors import InputError
from hexiopt.readers.discovery.lines import read_lines

_MOST_SLOTS = 1024
_PASSED_OVER = ("max_slots", "max-slots", "port", "user", "username")
_SLOTS = ("slots", "count")


def read_hostfile(path: str) -> dict[str, int | None]:
    """The slots of each host, which are taken as GPUs; None where they are not stated. Raises InputError with file and
    line."""
    hosts: dict[str, int | None] = {}
    for line in read_lines(path):
        text = re.sub(r"\s*=\s*", "=", line.text.partition("#")[0]).split()
        if not text:
            continue
        host, colon, count = text[0].rpartition(":")
        if not colon:
            host = text[0]
        said = [count] if colon else []
        for word in text[1:]:
            key, equals, value = word.partition("=")
            if not equals or key not in (*_SLOTS, *_PASSED_OVER):
                line.refuse("is not valid after a host; write host slots=8", word)
            if key in _SLOTS:
                said.append(value)
        if len(said) > 1:
            line.refuse("states slots twice; keep one")
        if said and not (re.fullmatch(r"[0-9]{1,4}", said[0]) and 1 <= int(said[0]) <= _MOST_SLOTS):
            line.refuse(f"is not a number of slots from 1 to {_MOST_SLOTS}; write host slots=8", said[0])
        if host in hosts:
            line.refuse("is a host that appears twice; write it once, as host slots=8", host)
        hosts[line.name(host)] = int(said[0]) if said else None
    if not hosts:
        raise InputError(f"{path}: names no host; write one host per line, such as host slots=8")
    return hosts
