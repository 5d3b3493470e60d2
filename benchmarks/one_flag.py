"""Engines with the one flag on models that do not fit the GPU, beside what the command says.

    python benchmarks/one_flag.py --out FOLDER                    on a host with a GPU
    python benchmarks/one_flag.py --out FOLDER --tiny             a rehearsal on any host

Models are published shapes, cut to some layers, with vLLM's dummy weights; routers, embeddings and
output matrices get weights of their own once an engine is up: with dummy ones, all layers and all
users choose the same experts.  The GPU's memory is limited.  Each engine is a process with a time
limit.  For each, one line has the engine's choice beside that of `ray-hetero plan`, and measured
decode steps beside predicted ones; all of it is in FOLDER/one_flag.json, and logs of the engines
beside it.  With expert ranks, the line has the experts that a layer has read, steps of prompts
included, beside those that planning expects of users who choose at random.  It ends with what the
cores read before the engine and behind it.

    python benchmarks/one_flag.py --out FOLDER --only gpt-oss,llama,qwen      by how names begin
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floor import compute_cpus, socket_bandwidths

from placement.plan.cost import distinct_experts

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "unit" / "data" / "models"
FLAG = "ray_hetero"
LONGEST = 4096
SEQUENCES, TOKENS = 16, 2048
PROMPT, OUTPUT, ROUNDS = 256, 32, 3
USERS = (1, 8)
WITHIN = 0.25
"""Share by which a measured step may be off the predicted one."""
END_SECONDS = 15
REPORTED_S = 2.5
"""Seconds after which a rank's report has what it computed before."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A published model, cut to what a host holds."""

    file: str
    layers: int
    usable_gib: float
    """GiB of the GPU's memory that an engine may use."""
    changed: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def config(self, *, tiny: bool) -> dict[str, Any]:
        """Its config.json; with few small experts and a small vocabulary for a rehearsal."""
        config = json.loads((MODELS / self.file).read_text()) | self.changed
        layers = min(4, self.layers) if tiny else self.layers
        config["num_hidden_layers"] = layers
        config["max_position_embeddings"] = LONGEST
        config.pop("num_nextn_predict_layers", None)
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        if tiny:
            small = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 16,
                     "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512}  # fmt: skip
            config |= {key: value for key, value in small.items() if key in config}
            # Heads of 64, where nothing else says how large they are.
            if not {"head_dim", "kv_lora_rank"} & config.keys():
                config |= {"num_attention_heads": 8, "num_key_value_heads": 2}
        return config


CASES = {
    "gpt-oss": Case("gpt-oss-120b.json", 18, 20),
    "llama-70b-fp8": Case("llama-3.3-70b.json", 16, 12, {"quantization_config": FP8}),
    "deepseek-v3-fp8": Case("deepseek-r1.json", 4, 12),
    "qwen3-next": Case(
        "qwen3-next-80b-a3b.json", 8, 20, engine={"gdn_prefill_backend": "triton"}
    ),
}  # fmt: skip


def main() -> None:
    """Measure the cases that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="beginnings of cases' names, with commas"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=230, help="of each engine")
    parser.add_argument("--all-s", type=float, default=840, help="of all of them")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        measure(json.loads(options.engine))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    ends, found = time.monotonic() + options.all_s, {}
    for name in cases_of(options.only):
        left = min(options.limit_s, ends - time.monotonic())
        if left < END_SECONDS:
            found[name] = {"error": "no time was left"}
        else:
            found[name] = run_case(name, options, left)
        print(said(name, found[name]), flush=True)
        (options.out / "one_flag.json").write_text(json.dumps(found, indent=1))


def cases_of(only: str) -> list[str]:
    """Names of the cases whose names begin so; all of them for no beginning."""
    found = []
    for begins in only.split(","):
        names = [name for name in CASES if name.startswith(begins) and name not in found]
        if not names:
            raise SystemExit(f"--only {only}: expected beginnings of {', '.join(CASES)}")
        found += names
    return found


def run_case(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """The command's plan, the engine's choice, and steps of both."""
    case = CASES[name]
    folder = options.out / name
    folder.mkdir(exist_ok=True)
    config = case.config(tiny=options.tiny)
    (folder / "config.json").write_text(json.dumps(config))
    share = share_of_gpu(case.usable_gib)
    began = time.monotonic()
    planned = plan(folder, share)
    found: dict[str, Any] = {"plan_s": round(time.monotonic() - began, 1)}
    if "error" in planned:
        return found | planned
    found["planned"] = layout_of_notes(planned["notes"])
    log = folder / "log"
    engine = case.engine | {"model": str(folder), "gpu_memory_utilization": share}
    read = [cores_read()]
    found |= run_engine(engine, options, log, limit_s)
    found["cores_read_gb_per_s"] = [*read, cores_read()]
    text = log.read_text(errors="replace")
    chosen = re.findall(r"stages: (.*?) – ", text)
    found["chosen"] = chosen[0] if chosen else None
    for users, step in found.pop("steps", {}).items():
        answer = plan(folder, share, fixed(planned, int(users)))
        predicted = answer.get("decode_step_s")
        found[f"step_{users}"] = {
            "measured_ms": round(step, 2),
            "predicted_ms": None if predicted is None else round(1e3 * predicted, 2),
        }
        if f"experts_read_{users}" in found:
            experts = next(config[key] for key in EXPERTS if key in config)
            expected = distinct_experts(experts, config["num_experts_per_tok"], int(users))
            found[f"step_{users}"] |= {
                "experts_read": found.pop(f"experts_read_{users}"),
                "experts_expected": round(expected, 1),
            }
    return found


def cores_read() -> float:
    """GB/s that the cores of the first socket read now.

    Predictions use what was measured at one time; other users of a machine change it.
    """
    cpus = compute_cpus(0, 1)
    return round(socket_bandwidths(cpus)["socket"] / 1e9, 1)


def share_of_gpu(usable_gib: float) -> float:
    """--gpu-memory-utilization for so many GiB of the first GPU; vLLM's own without one."""
    from placement.host.gpus import read_gpus

    gpus = read_gpus()
    memory = gpus[0].memory_bytes if gpus else None
    return 0.92 if memory is None else round(usable_gib * 2**30 / memory, 4)


def plan(folder: Path, share: float, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of `ray-hetero plan --json`, or its message where it fails."""
    environment = dict(os.environ)
    if settings is not None:
        file = folder / "fixed.json"
        file.write_text(json.dumps(settings))
        environment["RAY_HETERO_CONFIG"] = str(file)
    words = [
        str(Path(sys.executable).with_name("ray-hetero")), "plan", str(folder), "--json",
        "--max-model-len", str(LONGEST), "--max-num-seqs", str(SEQUENCES),
        "--max-num-batched-tokens", str(TOKENS), "--gpu-memory-utilization", str(share),
    ]  # fmt: skip
    ran = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if ran.returncode:
        return {"error": ran.stderr.strip()[-800:]}
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def fixed(planned: dict[str, Any], users: int) -> dict[str, Any]:
    """The configuration that places a model as it was planned, to price another step of it."""
    settings: dict[str, Any] = {
        "layout": [[rank["kind"] for rank in stage["ranks"]] for stage in planned["stages"]],
        "layers": planned["layer_partition"],
        "workload": {"users": users, "context": PROMPT + OUTPUT // 2, "sequences": 1},
    }
    if experts := planned["experts"]:
        settings["experts"] = {"ranks": len(experts), "layers": experts[0]["layers"]}
    return settings


def layout_of_notes(notes: list[str]) -> str | None:
    """The layout that the command has chosen, in its words."""
    found = [re.match(r"Layout \(automatic\): (.*?) – ", note) for note in notes]
    return next((one[1] for one in found if one), None)


def run_engine(
    engine: dict[str, Any],
    options: argparse.Namespace,
    log: Path,
    limit_s: float,
    *,
    script: str = __file__,
    checkout: Path | None = None,
) -> dict[str, Any]:
    """Steps of an engine in a process of its own, which is ended after its time.

    Args:
        engine: arguments, which the script gets behind `--engine`.
        options: with the folder for results.
        log: for the output.
        limit_s: seconds after which it is ended.
        script: a benchmark whose process says results in lines that begin with RESULT.
        checkout: whose code is run; this one's by default.

    """
    words = [sys.executable, script, "--out", str(options.out), "--engine", json.dumps(engine)]
    environment = dict(os.environ)
    if checkout is not None:
        # Ray's workers import from the driver's folder before anything else.
        path = str(checkout.resolve()), environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    began = time.monotonic()
    is_late = False
    with log.open("w") as file:
        child = subprocess.Popen(
            words, stdout=file, stderr=file, start_new_session=True, env=environment,
            cwd=checkout,
        )  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            os.killpg(child.pid, signal.SIGTERM)
        finally:
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    found: dict[str, Any] = {"engine_s": round(time.monotonic() - began, 1)}
    results = re.findall(r"^RESULT (.*)$", log.read_text(errors="replace"), re.MULTILINE)
    for line in results:
        found |= json.loads(line)
    if is_late:
        found["error"] = f"ended by its limit of {limit_s:g} s; what is missing was not reached"
    elif "steps" not in found:
        text = log.read_text(errors="replace")
        reasons = re.findall(r"cannot start: (.*)", text) or text.strip().splitlines()[-3:]
        found["error"] = f"status {child.returncode}: {' | '.join(reasons)[-800:]}"
    return found


def measure(given: dict[str, Any]) -> None:
    """In the engine's process: start it with the one flag, and time decode steps."""
    # The engine takes functions for its ranks.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from engine_run import Point
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(
        distributed_executor_backend=FLAG, load_format="dummy", skip_tokenizer_init=True,
        max_model_len=LONGEST, max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(USERS)}, **given,
    )  # fmt: skip
    started_s = round(time.monotonic() - began, 1)
    say(start_s=started_s)
    say(spread=llm.collective_rpc(spread_weights))
    steps: dict[int, float] = {}
    read = experts_read()
    for users in USERS:
        steps[users], first_token_s = timed(llm, Point(users, PROMPT, OUTPUT))
        say(**{"steps": steps, f"first_token_{users}_s": round(first_token_s, 3)})
        before, read = read, experts_read() if read else None
        if before and read and read[1] > before[1]:
            a_layer = (read[0] - before[0]) / (read[1] - before[1])
            say(**{f"experts_read_{users}": round(a_layer, 1)})


def say(**result: Any) -> None:
    """Tell a result to the process that has started this one (`run_engine`)."""
    print("RESULT " + json.dumps(result), flush=True)


def timed(llm: Any, point: Any) -> tuple[float, float]:
    """Milliseconds of a decode step, and seconds until all requests have their first tokens.

    Args:
        llm: the engine.
        point: requests of `engine_run`, asked `ROUNDS` times behind one that does not count.

    """
    from engine_run import run_requests

    run_requests(llm, point, 1)
    rounds = [run_requests(llm, point, salt) for salt in range(2, 2 + ROUNDS)]
    between = [step for one in rounds for step in one.between_steps]
    started_s = statistics.median(one.all_started for one in rounds)
    return 1000 * statistics.median(between), started_s


def spread_weights(worker: Any) -> int:
    """In a rank: layers choose different experts, and so do users; answers how many were changed.

    Dummy embeddings are smaller than the dummy biases that layers add for every token, so that the
    states of all users would be nearly the same.
    """
    import torch

    changed = 0
    for name, parameter in worker.model_runner.model.named_parameters():
        is_ours = re.search(
            r"(\.(router|gate)|(^|\.)(embed_tokens|embedding|lm_head))\.weight$", name
        )
        if is_ours and parameter.dim() == 2 and parameter.is_floating_point():
            torch.manual_seed(changed)
            parameter.data.normal_()
            changed += 1
    return changed


def experts_read() -> tuple[int, int] | None:
    """Experts that an expert rank has read, and layers that it has computed; None without one."""
    # Ranks report every two seconds.
    time.sleep(REPORTED_S)
    words = [str(Path(sys.executable).with_name("ray-hetero")), "status", "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    try:
        engines = json.loads(ran.stdout)
    except ValueError:
        return None
    for engine in engines:
        for rank in engine["ranks"]:
            if "experts_read" in rank:
                return rank["experts_read"], rank["expert_layers"]
    return (0, 0) if any(one["kind"] == "experts" for e in engines for one in e["ranks"]) else None


def said(name: str, found: dict[str, Any]) -> str:
    """One line of a case."""
    if "chosen" not in found:
        return f"{name}: {found.get('error')}"
    is_same = "as planned" if found["chosen"] == found["planned"] else "NOT AS PLANNED"
    line = f"{name}: {found['chosen']} ({is_same}: {found['planned']})"
    for key, step in found.items():
        if key.startswith("step_") and step["predicted_ms"]:
            off = step["measured_ms"] / step["predicted_ms"] - 1
            verdict = "" if abs(off) <= WITHIN else ", TOO FAR"
            line += (
                f"; {key[5:]} users: {step['measured_ms']} ms, predicted {step['predicted_ms']} "
                f"({off:+.0%}{verdict})"
            )
            if "experts_read" in step:
                line += (
                    f", {step['experts_read']} experts read a layer, "
                    f"{step['experts_expected']} expected"
                )
    before, after = found["cores_read_gb_per_s"]
    line += f"; cores read {before} GB/s before it and {after} behind it"
    return line + (f"; {found['error']}" if "error" in found else "")


if __name__ == "__main__":
    main()
