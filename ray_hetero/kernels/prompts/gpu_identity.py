"""What a GPU is called in keys of kept figures: its name, place, link and driver."""

from __future__ import annotations

from pathlib import Path

import torch


def gpu_of(device: torch.device, root: Path = Path("/")) -> str:
    """A GPU with its link and driver, as far as CUDA and the system tell."""
    if device.type != "cuda":
        return f"GPU {device}"
    found = torch.cuda.get_device_properties(device)
    said = [f"GPU {found.name}"]
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # PyTorch tells it from 2.8 on
        said.append(f"number {device.index}")
    else:
        said += [f"at {address}", *_link(address, root)]
    return " ".join([*said, f"driver {_driver(root)}"])


def _link(address: str, root: Path) -> list[str]:
    """The link's lanes and highest speed; at rest a GPU may lower the current one."""
    folder = root / "sys/bus/pci/devices" / address
    return [
        text for name in ("current_link_width", "max_link_speed") if (text := _text(folder / name))
    ]


def _driver(root: Path) -> str:
    text = _text(root / "proc/driver/nvidia/version")
    return text.splitlines()[0] if text else f"for CUDA {torch.version.cuda}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
