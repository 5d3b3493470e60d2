"""Demo models: the same bytes each time, a tokenizer that works, greedy output worth comparing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_hetero.cli.demo.model import ARCHITECTURES, DemoShape, write_demo_model
from ray_hetero.cli.demo.tokenizer import BEGIN, TEXT, text_tokens, train_tokenizer
from ray_hetero.cli.main import commands
from ray_hetero.errors import ConfigError, UnsupportedError
from ray_hetero.preflight import host_checks

SMALL = DemoShape(layers=2, hidden=64, heads=2)
CLASS = {
    "llama": "LlamaForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "Gemma3ForCausalLM",
}


def digest(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def test_same_arguments_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    # All of them in one process: most of its time is importing torch.
    script = (
        "from ray_hetero.cli.demo.model import DemoShape, write_demo_model\n"
        f"for name in {list(ARCHITECTURES)}:\n"
        f"    write_demo_model({str(tmp_path)!r} + '/there/' + name, name, "
        "shape=DemoShape(layers=2, hidden=64, heads=2), seed=7)"
    )
    environment = {"PYTHONHASHSEED": "12345", "PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    for name in ARCHITECTURES:
        here = write_demo_model(tmp_path / "here" / name, name, shape=SMALL, seed=7)
        assert digest(here) == digest(tmp_path / "there" / name)
        assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json",
                "tokenizer_config.json", "chat_template.jinja"} <= set(digest(here))  # fmt: skip


def test_another_seed_changes_the_weights_only(tmp_path: Path) -> None:
    first = digest(write_demo_model(tmp_path / "0", shape=SMALL, seed=0))
    second = digest(write_demo_model(tmp_path / "1", shape=SMALL, seed=1))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_is_decisive_and_does_not_collapse(tmp_path: Path, architecture: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = write_demo_model(tmp_path / "model", architecture)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    in_bf16 = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    in_f32 = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(in_f32).__name__ == CLASS[architecture]
    different = 0
    words = set(text_tokens(tokenizer))
    outputs = []
    for start in range(0, 240, 60):
        prompt = tokenizer(TEXT[start : start + 100], return_tensors="pt").input_ids
        with torch.no_grad():
            output = in_f32.generate(prompt, max_new_tokens=32, do_sample=False)
            logits = in_bf16(output).logits[0, prompt.shape[1] - 1 : -1]
        tokens = output[0, prompt.shape[1] :]
        different += int((logits.argmax(-1) != tokens).sum())
        outputs.append(tuple(tokens.tolist()))
        assert len(set(tokens.tolist())) >= 8
    everything = [token for tokens in outputs for token in tokens]
    assert len(everything) == 4 * 32  # none ended early
    assert len(set(outputs)) == 4
    assert sum(token in words for token in everything) > 0.9 * len(everything)
    assert different <= 0.05 * len(everything)


def test_the_last_token_alone_does_not_decide(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_demo_model(tmp_path / "model"))
    tokenizer = train_tokenizer(64)
    prompts = [f"{text} the" for text in TEXT.splitlines()[:12]]
    nexts = set()
    for prompt in prompts:
        with torch.no_grad():
            logits = model(tokenizer(prompt, return_tensors="pt").input_ids).logits
        nexts.add(int(logits[0, -1].argmax()))
    assert len(nexts) > 1


def test_gemma_has_tied_embeddings_and_sliding_windows(tmp_path: Path) -> None:
    from safetensors import safe_open

    directory = write_demo_model(tmp_path / "model", "gemma", shape=SMALL)
    config = json.loads((directory / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    with safe_open(directory / "model.safetensors", framework="pt") as weights:
        assert not [name for name in weights.keys() if "lm_head" in name]  # noqa: SIM118


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("f32", "F32")])
def test_weights_are_stored_in_the_type_asked_for(tmp_path: Path, dtype: str, stored: str) -> None:
    from safetensors import safe_open

    directory = write_demo_model(tmp_path / "model", shape=SMALL, dtype=dtype)  # type: ignore[arg-type]
    with safe_open(directory / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {stored}  # noqa: SIM118


@pytest.mark.parametrize(
    "text", ["The harbour wakes", "é 日本 🚢\n\ttab", '{"a": [1, 2.5, null]}', ""]
)
def test_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = train_tokenizer(64)
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == BEGIN + text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_chat_template_marks_roles_and_asks_for_an_answer() -> None:
    tokenizer = train_tokenizer(64)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    assert tokenizer.model_max_length == 64


def test_a_directory_with_something_in_it_is_only_written_when_forced(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / "model-00002-of-00002.safetensors").write_text("of another model")
    with pytest.raises(ConfigError, match=r"not empty; add --force"):
        write_demo_model(tmp_path, shape=SMALL)
    write_demo_model(tmp_path, shape=SMALL, force=True)
    assert (tmp_path / "note.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="expected a directory, this is a file"):
        write_demo_model(tmp_path / "file", shape=SMALL, force=True)


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{', '.join(ARCHITECTURES)}; got 'bert'"):
        write_demo_model(tmp_path / "model", "bert")
    with pytest.raises(ConfigError, match=r"bf16 or f32; got 'fp8'"):
        write_demo_model(tmp_path / "model", dtype="fp8")  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "--layers: expected 1 to 200, got 0"),
        ({"hidden": 100}, r"got 12\.5; type: --hidden 256"),
        ({"hidden": 64, "heads": 4}, "got 16; type: --hidden 128"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoShape(**sizes)


def test_a_torchvision_that_breaks_transformers_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(host_checks, "installed_version", versions.get)
    done = CliRunner().invoke(commands, ["demo-model", str(tmp_path / "model")])
    assert isinstance(done.exception, UnsupportedError)
    assert "torchvision: CUDA builds beside torch 2.13.0+cpu" in str(done.exception)
    assert str(done.exception).endswith("type: pip uninstall --yes torchvision")
    assert not (tmp_path / "model").exists()


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    folder = write_demo_model(tmp_path / "model", shape=SMALL)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
