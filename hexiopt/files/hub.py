"""The `config.json` of a model on the Hugging Face Hub: from the local cache or, online, from the Hub."""

import re
from pathlib import Path

from hexiopt.errors import InputError

CONFIG_FILE = "config.json"
_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILES = (".yaml", ".yml", ".json")


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form ORG/NAME and names no file or folder here."""
    return _NAME.fullmatch(text) is not None and not text.endswith(_FILES) and not Path(text).exists()


def hub_config(name: str) -> Path:
    """The `config.json` of the model ORG/NAME in the local cache, downloaded if it was not there.

    Raises InputError with one line that says what was tried.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        cached = hub.try_to_load_from_cache(name, CONFIG_FILE)
        if isinstance(cached, str):
            return Path(cached)
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
        why = "and HF_HUB_OFFLINE forbids to ask the Hub; unset it, or give the path of a config.json"
    except Exception as error:  # of the client below, whose kinds change with its releases
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        why = f"and the Hub cannot be reached ({reason}); check the network, or give the path of a config.json"
    raise InputError(f"model: {name} is neither a file nor a folder, is not in the local cache of the Hub, {why}")
