"""The `config.json` of a model by its name on the Hugging Face Hub: shipped, from the local cache, or from the Hub.

The cache is that of huggingface_hub, whose layout is read without the package; the package is asked only for what
neither has, and only the `config.json`, never weights.
"""

import os
import re
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.own_packages import own_package

CONFIG_FILE = "config.json"
_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES = (".yaml", ".yml", ".json")
# In the header of a shipped model, whose lines may break: `as in Qwen/Qwen3-8B config.json`.
_SHIPPED_NAME = re.compile(r"as in (?:text_config of )?(\S+/\S+)[\s#]+config\.json")
_YES = {"1", "on", "yes", "true"}


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form ORG/NAME and names no file or folder here."""
    return _NAME.fullmatch(text) is not None and not text.endswith(_FILES) and not Path(text).exists()


def hub_config(name: str) -> Path:
    """The `config.json` of the model ORG/NAME: as it is shipped, in the local cache, or downloaded.

    Raises InputError with one line that says what was tried.
    """
    return _shipped_files().get(name.lower()) or _cached_file(name) or _download(name)


@cache
def _shipped_files() -> dict[str, Path]:
    """The files of the shipped models by their names on the Hub, in lower case."""
    named = {}
    with as_file(files(own_package("conf")).joinpath("model")) as folder:
        for path in sorted(folder.glob("*.yaml")):
            if name := _SHIPPED_NAME.search(path.read_text(encoding="utf-8")):
                named[name[1].lower()] = path
    return named


def _cached_file(name: str) -> Path | None:
    """The file in the newest snapshot of the cache's main branch, else in any."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    folder = hub / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    first = [folder / "snapshots" / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    snapshots = [*first, *sorted(folder.glob("snapshots/*"))]
    return next((path for snapshot in snapshots if (path := snapshot / CONFIG_FILE).is_file()), None)


def _download(name: str) -> Path:
    where = f"model: {name} is neither a file nor a folder, is not shipped, is not in the local cache of the Hub,"
    offline = "and HF_HUB_OFFLINE forbids to ask the Hub; unset it, or give the path of a config.json"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
        raise InputError(f"{where} {offline}")
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise InputError(
            f"{where} and huggingface_hub is not installed; pip install huggingface_hub, or give a config.json"
        ) from None

    try:
        # Without retries, which take half a minute where there is no network.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG_FILE), timeout=_TIMEOUT_S)
        return Path(hub.hf_hub_download(name, CONFIG_FILE, etag_timeout=_TIMEOUT_S))
    except HFValidationError:
        why = "and is not a name of the Hub; check the path, or the name"
    except GatedRepoError:
        why = f"and is gated: ask for access at huggingface.co/{name}, and log in with 'hf auth login'"
    except RepositoryNotFoundError:
        why = "and the Hub has no such model, or it is private; check the name, or log in with 'hf auth login'"
    except EntryNotFoundError:
        why = f"and has no {CONFIG_FILE} on the Hub; take a model of transformers"
    except OfflineModeIsEnabled:
        why = offline
    except Exception as error:  # of the client below, whose kinds change with its releases
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        why = f"and the Hub cannot be reached ({reason}); check the network, or give the path of a config.json"
    raise InputError(f"{where} {why}")
