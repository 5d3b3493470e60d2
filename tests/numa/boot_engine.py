"""Boot a guest with two NUMA nodes under QEMU's software emulation and serve a model inside.

    python tests/numa/boot_engine.py [--experts] [--kernel VMLINUZ]

Debian packages: qemu-system-x86, busybox-static, libnuma1, e2fsprogs; the environment of
`make env`.  Without --kernel the package linux-image-cloud-amd64 is downloaded and unpacked, not
installed.  The machine: two sockets of two cores, a NUMA node each.  An engine with a CPU rank on
each serves a tiny model (engine_checks.py); with --experts, a pretended GPU and an expert rank on
each serve a tiny mixture.  Which tokens are right is what stock vLLM answers here.
Exit code 0 if every check passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import disk
import guest_files
import qemu

from ray_hetero.cli.demo.model import write_demo_model

MACHINE = [
    *("-machine", "q35"),
    *("-m", "5120M", "-smp", "4,sockets=2,cores=2,threads=1"),
    *("-object", "memory-backend-ram,id=m0,size=2560M"),
    *("-object", "memory-backend-ram,id=m1,size=2560M"),
    *("-numa", "node,nodeid=0,memdev=m0,cpus=0-1"),
    *("-numa", "node,nodeid=1,memdev=m1,cpus=2-3"),
    *("-numa", "dist,src=0,dst=1,val=21"),
]
ACCEL = "tcg,thread=multi,tb-size=768"
KERNEL_OPTIONS = "root=/dev/nvme0n1 ro init=/init mitigations=off"
INIT = """
/bin/busybox mkdir /dev/shm
for folder in /tmp /run /dev/shm; do /bin/busybox mount -t tmpfs tmpfs $folder; done
/bin/busybox mkdir /run/lock
/bin/busybox ip link set lo up
HOME=/tmp TERM=dumb NO_COLOR=1 COLUMNS=120 /python/bin/python3 /engine_checks.py
/bin/busybox poweroff -f
"""
TIMEOUT_S = 3600.0
REFERENCE_S = 600.0
"""Longest wait for the tokens of stock vLLM."""
LENGTHS = (1, 5, 34, 100)
"""Tokens of the prompts."""
SAMPLING = {"temperature": 0.0, "max_tokens": 16, "detokenize": False, "ignore_eos": True}
STOCK: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
}
SLOW_S = 3600
"""Seconds instead of this project's time limits, which are made for real processors."""
OURS: dict[str, Any] = {
    "distributed_executor_backend": "ray_hetero",
    "additional_config": {
        "ray_hetero": {
            "cpu": {"kv_cache_gib": 0.0625},
            "exchange": {"timeout_s": SLOW_S},
            "placement": {"timeout_s": SLOW_S},
            "serving": {"step_timeout_s": SLOW_S},
            "startup": {"actor_timeout_s": SLOW_S},
            "warmup": {"step_timeout_s": SLOW_S},
        }
    },
}
EXPERT_KEYS: dict[str, Any] = {"layout": [["gpu"]], "experts": {"ranks": 2}}
"""Of this project beside those of `OURS`: a pretended GPU with attention, and an expert rank on
each socket."""
LONG = 1000
"""Tokens of the prompt during which expert ranks are watched."""


def main() -> int:
    """Boot, copy the guest's console to ours, tell whether it passed."""
    given = qemu.options(
        __doc__.splitlines()[0], TIMEOUT_S, {"--experts": "expert ranks beside a pretended GPU"}
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        kernel = given.kernel or qemu.fetch_kernel(scratch)
        began = time.monotonic()
        image = scratch / "disk.img"
        disk.write(
            image,
            INIT,
            {
                "engine_checks.py": guest_files.HERE / "engine_checks.py",
                "given": write_given(scratch, has_experts=given.experts),
                "packages/placement": guest_files.ROOT / "placement",
                "packages/ray_hetero": guest_files.ROOT / "ray_hetero",
            },
        )
        size, seconds = image.stat().st_size / (1 << 30), time.monotonic() - began
        made = "for the tokens of stock vLLM and a disk of"
        print(f"{seconds:.0f} s {made} {size:.1f} GiB", flush=True)
        machine = [
            *MACHINE,
            *("-drive", f"file={image},if=none,id=disk,format=raw,readonly=on"),
            *("-device", "nvme,drive=disk,serial=disk"),
        ]
        accel = ACCEL if given.accel == "tcg" else given.accel
        console = qemu.boot(machine, kernel, accel, given.timeout, KERNEL_OPTIONS)
    return 0 if qemu.PASSED.search(console) else 1


def write_given(scratch: Path, *, has_experts: bool) -> Path:
    """The model, what is asked, and what stock vLLM answers; the folder that the guest gets."""
    given = scratch / "given"
    architecture = "mixtral" if has_experts else "llama"
    model = write_demo_model(given / "model", architecture, dtype="f32")
    lengths = (*LENGTHS, LONG) if has_experts else LENGTHS
    prompts = [
        [(7919 * (place + 1) * (at + 1) + 31 * at) % 600 + 8 for at in range(length)]
        for place, length in enumerate(lengths)
    ]
    stock = STOCK | ({"max_model_len": 2 * LONG} if has_experts else {})
    ours = dict(OURS)
    if has_experts:
        keys = ours["additional_config"]["ray_hetero"] | EXPERT_KEYS
        ours["additional_config"] = {"ray_hetero": keys}
    (given / "request.json").write_text(
        json.dumps(
            {
                "engine": {"model": "/given/model", **stock, **ours},
                "has_experts": has_experts,
                "prompts": prompts,
                "sampling": SAMPLING,
                "tokens": stock_tokens(scratch, {"model": str(model), **stock}, prompts),
            }
        )
    )
    return given


def stock_tokens(
    scratch: Path, engine: dict[str, Any], prompts: list[list[int]]
) -> list[list[int]]:
    """Greedy tokens of stock vLLM in one process of this machine."""
    run = {
        "engine": engine,
        "batches": [{"prompts": prompts, "sampling": SAMPLING}],
    }
    request, answer = scratch / "request.json", scratch / "answer.json"
    request.write_text(json.dumps({"ray": None, "runs": [run]}))
    program = guest_files.ROOT / "tests/cluster/engine_process.py"
    settings = {
        "TMPDIR": str(scratch),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, str(program), str(request), str(answer)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **settings},
            capture_output=True,
            text=True,
            timeout=REFERENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"stock vLLM has not answered in {REFERENCE_S:.0f} s")
    if done.returncode:
        sys.exit(f"stock vLLM failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    answers = json.loads(answer.read_text())[0][0]
    return [one["tokens"][0] for one in answers]


if __name__ == "__main__":
    sys.exit(main())
