"""The last layer of a GPU rank computes the rows that are read, and all of them when in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import DTYPE, HEAD, HEADS, HIDDEN, bare, layers_of, mlp, model  # noqa: E402
from paged_steps import Steps  # noqa: E402
from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata  # noqa: E402
from worlds import world  # noqa: E402

from ray_hetero.kernels.layers import layer_tokens  # noqa: E402
from ray_hetero.offload.prefill import offload_gpu  # noqa: E402
from ray_hetero.worker import last_layer  # noqa: E402
from ray_hetero.worker.last_layer import LEAST, find, install  # noqa: E402

NAME = "layers.1"
"""Of the last layer's attention."""
ENDS = [700, 1100, 1101]
"""Tokens up to the end of each request: two prompts, and a request that decodes."""
ROWS = [end - 1 for end in ENDS]


def config(**changed: Any) -> Any:
    """What is asked of an engine's configuration, with dotted names for what is changed."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {"runner_type": "generate", "is_diffusion": False},
        "parallel_config": {
            "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
            "use_ubatching": False,
        },
        "compilation_config": {"max_cudagraph_capture_size": 512},
        "cache_config": {"kv_sharing_fast_prefill": False},
    }  # fmt: skip
    whole = dict.fromkeys(("speculative_config", "lora_config", "kv_transfer_config"))
    made = SimpleNamespace(
        **{part: SimpleNamespace(**values) for part, values in parts.items()},
        **whole, additional_config={},
    )  # fmt: skip
    for name, value in changed.items():
        *path, last = name.split("__")
        owner: Any = made
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made


def metadata(cls: Any = CPUAttentionMetadata, ends: Any = tuple(ENDS)) -> Any:
    """What vLLM's attention is told of requests that end at these tokens."""
    made = cls.__new__(cls)
    made.query_start_loc = torch.tensor([0, *ends], dtype=torch.int32)
    return made


def installed(made: Any, vllm_config: Any = None, stages: tuple[str, ...] = ("c", "g")) -> Any:
    """The configuration of a rank of the last stage, after it has loaded a model."""
    config_of = vllm_config or config()
    there = world(*stages)
    install(SimpleNamespace(get_model=lambda: made), config_of, there, there.seats[-1])
    return config_of


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    layer_tokens.take()
    with torch.inference_mode():
        yield
    last_layer._installed.clear()


def installed_in_last(part: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A part of a model's last layer, and its own forward function."""
    made = model(2)
    last = part(layers_of(made)[-1])
    own = last.forward
    installed(made)
    return last, own


@pytest.fixture
def whole() -> Any:
    """A model's last MLP, and what its own forward function makes of rows."""
    return installed_in_last(lambda layer: layer.mlp)


@pytest.fixture
def whole_output() -> Any:
    """The output layer of its last attention, and the same."""
    return installed_in_last(lambda layer: layer.self_attn.o_proj)


def step(new: dict[str, SamplingParams | None], finished: tuple[str, ...] = ()) -> Any:
    """A scheduler's output with new requests."""
    requests = [SimpleNamespace(req_id=name, sampling_params=one) for name, one in new.items()]
    return SimpleNamespace(scheduled_new_reqs=requests, finished_req_ids=set(finished))


def run(module: Any, x: Any, attn_metadata: Any) -> tuple[Any, int]:
    """What a module makes of rows in such a step, and how many were left out."""
    context = ForwardContext(no_compile_layers={}, attn_metadata=attn_metadata, slot_mapping={})
    with override_forward_context(context):
        return module(x), layer_tokens.take().left_out


def rows(count: int = ENDS[-1], inputs: int = HIDDEN) -> Any:
    torch.manual_seed(count)
    return torch.randn(count, inputs, dtype=DTYPE)


@pytest.mark.parametrize(
    "cls", [CPUAttentionMetadata, FlashAttentionMetadata, TritonAttentionMetadata]
)
def test_rows_that_are_read_are_those_of_the_whole(whole: Any, cls: Any) -> None:
    module, own = whole
    x = rows()
    found, left_out = run(module, x, {"layers.0": None, NAME: metadata(cls)})
    assert torch.equal(found[ROWS], own(x[ROWS]))
    torch.testing.assert_close(found[ROWS], own(x)[ROWS], rtol=2e-2, atol=1e-2)
    unread = torch.ones(len(x), dtype=torch.bool)
    unread[ROWS] = False
    assert not found[unread].any()
    assert left_out == len(x) - len(ROWS)


def test_the_output_layer_is_computed_for_the_same_rows(whole_output: Any) -> None:
    output, own = whole_output
    x = rows(inputs=HEADS * HEAD)
    (found, bias), left_out = run(output, x, {NAME: metadata()})
    assert bias is None
    assert torch.equal(found[ROWS], own(x[ROWS])[0])
    assert int(found.any(dim=1).sum()) == len(ROWS)
    # They are counted once for a layer.
    assert left_out == 0


def test_padding_adds_no_rows_that_are_not_there(whole: Any) -> None:
    """Tokens are padded behind the last request, and requests with the number of tokens."""
    module, own = whole
    x = rows(ENDS[-1] + 3)
    found, _ = run(module, x, {NAME: metadata(ends=(*ENDS, ENDS[-1], ENDS[-1]))})
    assert torch.equal(found[ROWS], own(x[[*ROWS, ROWS[-1], ROWS[-1]]])[: len(ROWS)])
    assert not found[ENDS[-1] :].any()


@pytest.mark.parametrize(
    ("count", "attn_metadata"),
    [
        (ENDS[-1], None),
        (ENDS[-1], [{NAME: metadata()}, {NAME: metadata()}]),
        (ENDS[-1], {"layers.0": metadata()}),
        (ENDS[-1], {NAME: metadata(FlexAttentionMetadata)}),
        (ENDS[-1], {NAME: SimpleNamespace()}),
        (LEAST - 1, {NAME: metadata(ends=(LEAST - 1,))}),
        (LEAST, {NAME: metadata(ends=range(1, LEAST + 1))}),
    ],
    ids=["dummy", "micro-batches", "another layer", "another backend", "none", "few", "decoding"],
)
def test_all_rows_are_computed_otherwise(whole: Any, count: int, attn_metadata: Any) -> None:
    module, own = whole
    x = rows(count)
    found, left_out = run(module, x, attn_metadata)
    assert torch.equal(found, own(x))
    assert left_out == 0


def test_all_rows_are_computed_while_a_request_asks_for_its_prompt(whole: Any) -> None:
    module, _ = whole
    asks, plain = SamplingParams(prompt_logprobs=0), SamplingParams()

    def left_out(scheduler_output: Any) -> bool:
        for last in last_layer._installed.values():
            last.begin_step(scheduler_output)
        return run(module, rows(), {NAME: metadata()})[1] > 0

    assert left_out(step({"a": plain, "pooled": None}))
    assert not left_out(step({"b": asks}))
    # Chunks of its prompt, and steps without it while it is preempted.
    assert not left_out(step({"c": plain}, finished=("a",)))
    # A model runner may be sent a resumed request as a new one.
    assert not left_out(step({"b": asks}))
    assert left_out(step({}, finished=("b",)))
    assert not left_out(step({"b": asks}, finished=("b",)))


def test_the_ids_whose_logprobs_are_wanted_need_all_rows_too() -> None:
    sampling = SamplingParams(prompt_logprob_token_ids=[[1, 2]])
    assert last_layer.read_rows.asks_for_prompt(sampling)


class Attention:
    """The last attention of a model in a step of three requests, whose caches are written.

    Args:
        monkeypatch: replaces vLLM's forward context.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 0)
        steps = Steps(monkeypatch)
        begun, whole_prompt, decoding = map(steps.request, (900, 400, 21))
        # vLLM's own attention multiplies what is behind a request's end by 0.
        steps.caches[-1].zero_()
        attention = steps.layers[-1].self_attn.attn
        attention.kv_cache_dtype, attention.dtype = "auto", DTYPE
        # Of the first prompt, 200 tokens are in the cache.
        parts = [(begun, 200, 900), (whole_prompt, 0, 400), (decoding, 20, 21)]
        for some in ([(begun, 0, 200), (decoding, 0, 20)], parts):
            steps.begin(some)
            self.metadata, self.layer, self.cache, slots = steps.contexts[NAME]
            qkv = torch.randn(len(slots), HEADS + 2 * steps.kv_heads, HEAD, dtype=DTYPE)
            self.queries, self.keys, self.values = qkv.split(
                [HEADS, steps.kv_heads, steps.kv_heads], dim=1
            )
            self.layer.impl.do_kv_cache_update(
                self.layer, self.keys.contiguous(), self.values.contiguous(), self.cache, slots
            )
        self.own = self.layer.impl.forward
        installed(steps.decoder)

    def pad(self, requests: int) -> None:
        """Pad metadata with requests without tokens."""
        made = self.metadata
        last = made.query_start_loc[-1:].expand(requests)
        nothing = made.seq_lens.new_zeros(requests)
        made.query_start_loc = torch.cat([made.query_start_loc, last])
        made.seq_lens = torch.cat([made.seq_lens, nothing])
        made.block_table = torch.nn.functional.pad(made.block_table, (0, 0, 0, requests))

    def attended(self, forward: Any) -> Any:
        """What a function makes of the step."""
        found = torch.full_like(self.queries, torch.nan)

        def call(queries: Any) -> Any:
            return forward(
                self.layer, queries, self.keys, self.values, self.cache, self.metadata, found
            )

        result, _ = run(call, self.queries, {NAME: self.metadata})
        assert result is found
        return found

    @property
    def read(self) -> Any:
        return (self.metadata.query_start_loc[1:4] - 1).tolist()


@pytest.mark.parametrize("padding", [0, 3])
def test_attention_is_computed_from_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    made = Attention(monkeypatch)
    expected = made.attended(made.own)
    if padding:
        made.pad(padding)
    found = made.attended(made.layer.impl.forward)
    assert expected.isfinite().all()
    torch.testing.assert_close(found[made.read], expected[made.read], rtol=2e-2, atol=1e-2)
    unread = torch.ones(len(found), dtype=torch.bool)
    unread[made.read] = False
    assert not found[unread].any()


@pytest.mark.parametrize(
    "changed",
    [{"causal": False}, {"causal": torch.tensor(True)}, {"encoder_cache": torch.zeros(1)}],
    ids=lambda changed: next(iter(changed)),
)
def test_attention_that_depends_on_more_is_computed_from_all_rows(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    made = Attention(monkeypatch)
    for name, value in changed.items():
        setattr(made.metadata, name, value)
    seen: list[int] = []
    last = last_layer._installed[NAME]

    def forward(layer: Any, queries: Any, *others: Any) -> Any:
        seen.append(len(queries))
        return others[-1]

    made.attended(lambda *given: last.attend(forward, *given))
    assert seen == [len(made.queries)]


def test_results_that_may_not_depend_on_the_batch_are_computed_from_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Attention(monkeypatch)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found = made.attended(made.layer.impl.forward)
    assert torch.equal(found, made.attended(made.own))


def test_flash_attention_is_told_of_the_same_rows() -> None:
    """Its kernels need a GPU, on which test_last_layer_rows.py compares them."""
    lengths, ends = torch.tensor([900, 400, 21]), torch.tensor([700, 1100, 1101])
    made = FlashAttentionMetadata(
        num_actual_tokens=1101, max_query_len=700, query_start_loc=metadata().query_start_loc,
        max_seq_len=900, seq_lens=lengths, block_table=torch.zeros(3, 29), slot_mapping=ends,
        scheduler_metadata=torch.zeros(9), max_num_splits=0,
    )  # fmt: skip
    found = last_layer.read_rows.attention_of_rows(None, made, ends - 1)
    assert (found.num_actual_tokens, found.max_query_len, found.max_seq_len) == (3, 1, 900)
    assert found.query_start_loc.tolist() == [0, 1, 2, 3]
    assert found.seq_lens is lengths
    assert found.scheduler_metadata is None
    made.rswa_window = 64
    assert last_layer.read_rows.attention_of_rows(None, made, ends - 1) is None


def test_compiled_code_sees_one_operator(whole: Any) -> None:
    module, own = whole
    compiled = torch.compile(lambda x: module(x) + 1, fullgraph=True, backend="eager", dynamic=True)
    for count, ends in ((8, (8,)), (ENDS[-1], ENDS)):
        x = rows(count)
        found, left_out = run(compiled, x, {NAME: metadata(ends=ends)})
        assert torch.equal(found[-1:], own(x[-1:]) + 1)
        assert left_out == (count - len(ends) if count >= LEAST else 0)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "glm4",
               "granite", "stablelm"],
)  # fmt: skip
def test_the_last_layer_of_dense_models_is_found(family: str) -> None:
    made = model(2, family=family)
    last = layers_of(made)[-1]
    mlp_found, modules = find(made)
    assert mlp_found is last.mlp
    assert modules.attend.layer_name == NAME
    assert modules.output is last.self_attn.o_proj


@pytest.mark.parametrize("family", ["opt", "falcon-7b", "mixtral"])
def test_other_models_are_left_alone(family: str) -> None:
    assert find(model(2, family=family)) is None


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_experts_in_place_of_the_mlp_are_left_alone(family: str) -> None:
    made = model(2, family=family)
    layers_of(made)[-1].mlp = torch.nn.Linear(HIDDEN, HIDDEN)
    assert find(made) is None


def test_a_stage_without_layers_and_two_decoders_are_left_alone() -> None:
    assert find(model(0)) is None
    assert find(bare(torch.nn.Module, one=model(1), other=model(1))) is None
    assert find(bare(torch.nn.Module, tower=mlp("LlamaMLP"), decoder=model(2))) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__runner_type": "pooling"},
        {"model_config__is_diffusion": True},
        {"speculative_config": SimpleNamespace()},
        {"lora_config": SimpleNamespace()},
        {"kv_transfer_config": SimpleNamespace()},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"parallel_config__use_ubatching": True},
        {"cache_config__kv_sharing_fast_prefill": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_nothing_is_replaced_where_more_rows_are_read(changed: dict[str, Any]) -> None:
    made = model(2)
    assert not installed(made, config(**changed)).additional_config
    assert "forward" not in vars(layers_of(made)[-1].mlp)


@pytest.mark.parametrize("stages", [("g", "c"), ("c", "gc"), ("gg", "cg")])
def test_nothing_is_replaced_on_cpu_ranks_and_beside_them(stages: tuple[str, ...]) -> None:
    assert not installed(model(2), stages=stages).additional_config


def test_an_earlier_stage_computes_all_rows() -> None:
    there, made = world("g", "g"), config()
    install(SimpleNamespace(get_model=lambda: model(2)), made, there, there.seats[0])
    assert not made.additional_config


def test_steps_of_captured_graphs_are_computed_whole() -> None:
    made = model(2)
    captured = config(compilation_config__max_cudagraph_capture_size=2048)
    assert installed(made, captured).additional_config == {"ray_hetero_last_layer": True}
    layer_tokens.take()
    module = layers_of(made)[-1].mlp
    with torch.inference_mode():
        _, whole_rows = run(module, rows(2048), {NAME: metadata(ends=(2048,))})
        _, left_out = run(module, rows(2049), {NAME: metadata(ends=(2049,))})
    assert (whole_rows, left_out) == (0, 2048)
