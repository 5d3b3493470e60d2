"""The config.json of a model that is named on the command line: on disk, or on the hub."""

from __future__ import annotations

import threading
from pathlib import Path

from placement.model.config import UnknownModelError

ANSWER_S = 3.0
"""Longest wait for the hub's first answer, in seconds; the hub's own library tries for half a
minute."""


def hub_config(model: str) -> Path:
    """Path of a model's folder or config.json; that of a name on the hub is fetched.

    Raises:
        UnknownModelError: it is neither here nor to be had from the hub.

    """
    path = Path(model).expanduser()
    is_name = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    # A name that is too long for a file is refused where the file is read.
    if not is_name or _is_there(path):
        return path
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.constants import ENDPOINT, is_offline_mode
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UnknownModelError(
            f"{model}: there is no such folder, and huggingface_hub, which asks the hub, is missing"
        ) from None
    try:
        # What is in the cache is taken after one request, whether that is answered or not.
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            if is_offline_mode():
                raise _missing(model, "it is not in the hub's cache, and HF_HUB_OFFLINE is set")
            if why := _why_unreached(model):
                raise _missing(model, f"it is not in the hub's cache, and {ENDPOINT} {why}")
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UnknownModelError(
            f"{model}: there is no such folder, and its config.json cannot be had from the hub: "
            f"{reason}. Give a folder with a config.json."
        ) from None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _missing(model: str, why: str) -> UnknownModelError:
    return UnknownModelError(
        f"{model}: there is no such folder, {why}. Give a folder with a config.json, or type on a "
        f"host that reaches the hub: hf download {model} config.json"
    )


def _why_unreached(model: str) -> str:
    """Why the hub does not answer a request for a model's config.json; empty where it answers."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    found = [f"does not answer within {ANSWER_S:g} s"]
    address = hf_hub_url(model, "config.json")

    def ask() -> None:
        try:
            get_hf_file_metadata(address, timeout=ANSWER_S)
        except HfHubHTTPError:
            pass  # an answer too, whose reason the download tells
        except (HTTPError, OSError) as error:
            found[0] = f"cannot be reached: {error}".rstrip(".")
            return
        found[0] = ""

    # The time limit of a request does not hold while a name is looked up.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return found[0]
