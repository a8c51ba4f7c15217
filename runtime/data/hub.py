"""Whether the Hugging Face Hub is within reach: its client tries again for half a minute before it says no."""

import os
import socket
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hexiopt.errors import InputError

_WAIT_S = 1.5
_PORTS = {"http": 80, "https": 443}


def check_hub(name: str) -> None:
    """Raise InputError where neither the Hub can be reached, through a proxy where one is set, nor the cache of Hugging
    Face's packages has a copy of the dataset `name`. Where they have to make do with that, they are told."""
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0", "false", "False"):
        url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        why = _out_of_reach(url)
        if why is None:
            return
        os.environ["HF_HUB_OFFLINE"] = "1"
    else:
        url, why = "the Hub", "HF_HUB_OFFLINE is set"
    if not _is_cached(name):
        raise InputError(
            f"hf://{name}: {url} is out of reach ({why}), and no copy is in the cache; check the network, or give "
            "train.data a file (.jsonl, .parquet, text)"
        )


def _out_of_reach(url: str) -> str | None:
    """Why nobody answers there within a moment; None if somebody does."""
    where = urlsplit(url)
    proxy = None if proxy_bypass(where.hostname or "") else getproxies().get(where.scheme)
    if proxy is not None:
        where = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    reasons: list[str | None] = []

    def connect() -> None:
        try:
            port = where.port or _PORTS.get(where.scheme, 80)
            socket.create_connection((where.hostname or "", port), timeout=_WAIT_S).close()
            reasons.append(None)
        except (OSError, ValueError) as error:
            reasons.append(str(getattr(error, "strerror", None) or error).rstrip("."))

    trying = Thread(target=connect, daemon=True)  # names may be looked up for longer
    trying.start()
    trying.join(_WAIT_S)
    return reasons[0] if reasons else f"no answer within {_WAIT_S:g} s"


def _is_cached(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    last = name.rpartition("/")[2]
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return any(datasets.glob(f"*{last}")) or any(hub.glob(f"datasets--*{last}"))
