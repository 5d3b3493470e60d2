"""Variables of the environment that hold a secret, and which of them a rank needs.

Ray writes the environment that an actor is given into its logs.  A secret is therefore handed to a
rank as an argument of its actor's constructor, if at all, and Ray's own processes start without
any, since every worker inherits their environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

HARMLESS = re.compile(
    r"TOKENIZERS?|FASTOKENS|TOKENS?_(PER|THRESHOLD)|TOTAL_TOKENS|IMPLICIT_TOKEN"
    r"|\w+_(PATH|FILE|DIR|FOLDER)$"
)
"""Parts of names that speak of a model's tokens, of a place or of a switch."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
PROXY = "_PROXY"
"""Suffix of variables that name a proxy."""
RAYS_OWN = "RAY_"
"""Prefix of variables that Ray's processes read themselves, such as RAY_AUTH_TOKEN."""
HUB = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
STORES = ("AWS_", "S3_", "GOOGLE_", "AZURE_", "MINIO_")
"""Prefixes of variables that give access to object stores, from which vLLM's loaders read."""
MODELSCOPE = "MODELSCOPE_"


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable holds a secret, as its name or a password in its value tells.

    What the user has named otherwise cannot be told.
    """
    said = SECRET.search(HARMLESS.sub("", name.upper()))
    return said is not None or PASSWORD_IN_URL.search(value) is not None


def needed_by_ranks(models: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Secrets without which a rank cannot read these models, from a driver's environment.

    Args:
        models: names on the hub, addresses in object stores, or folders, as the user gave them.
        environment: of the driver.

    """
    from_hub = any("://" not in name and not os.path.isdir(name) for name in models)
    if environment.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        from_hub = False
    prefixes: tuple[str, ...] = ()
    if any("://" in name for name in models):
        prefixes += STORES
    if from_hub and environment.get("VLLM_USE_MODELSCOPE", "0") not in ("", "0"):
        prefixes += (MODELSCOPE,)
    return {
        name: value
        for name, value in environment.items()
        if (from_hub and name in HUB) or (name.startswith(prefixes) and is_secret(name, value))
    }


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that Ray's processes on this host start with.

    A proxy with a password stays: whatever downloads needs it, and these processes' environments
    can be read by their user only.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(RAYS_OWN)
        or not is_secret(name, "" if name.upper().endswith(PROXY) else value)
    }


@contextmanager
def withheld() -> Iterator[None]:
    """Keep secrets from the processes that are started inside, which inherit this environment."""
    kept = without_secrets(os.environ)
    taken = {name: value for name, value in os.environ.items() if name not in kept}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)
