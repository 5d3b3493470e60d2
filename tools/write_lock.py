"""Write requirements.lock: what is installed here, as constraints for pip.

Local parts of versions are left out, so that one lock serves both builds of torch.  Companions of
torch that tools/fix_torchvision.py removed keep their line: pip still has to choose them.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from fix_torchvision import COMPANIONS
from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
LEFT_OUT = {"ray-hetero", "pip", "setuptools", "wheel"}
HEADER = """\
# What CI ran with (Linux x86-64, Python 3.11); `make env` gives it to pip as constraints, and
# `make lock` writes it anew.
"""


def locked(old: str, installed: dict[str, str]) -> str:
    """New text of the lock, from its old text and name → version of what is installed."""
    pins = {
        name: release
        for name, _, release in (line.partition("==") for line in old.splitlines())
        if name in COMPANIONS
    }
    pins |= {name: release.partition("+")[0] for name, release in installed.items()}
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins) if name not in LEFT_OUT]
    return HEADER + "".join(lines)


def main() -> None:
    """Rewrite the lock."""
    installed = {canonicalize_name(dist.name): dist.version for dist in distributions()}
    old = LOCK.read_text() if LOCK.exists() else ""
    LOCK.write_text(locked(old, installed))


if __name__ == "__main__":
    main()
