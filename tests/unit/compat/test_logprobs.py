"""The ranks of tokens, which answers with logprobs have, are counted by PyTorch's operators."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.sample import sampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402

from ray_hetero.compat.worker import model_runner  # noqa: E402


def test_logprobs_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(*args: object, **kwargs: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(sampler, "batched_count_greater_than", compile_it)
    model_runner.count_without_compiler()
    logprobs = torch.randn(3, 50).log_softmax(-1)
    order = logprobs.argsort(-1, descending=True)
    places = torch.tensor([0, 7, 49])
    chosen = order.gather(1, places[:, None])[:, 0]
    found = Sampler.gather_logprobs(logprobs, 2, chosen)
    # The likeliest token has the rank 1.
    assert found.selected_token_ranks.tolist() == [1, 8, 50]
    assert found.logprob_token_ids[:, 0].tolist() == chosen.tolist()
    assert found.logprob_token_ids[:, 1:].tolist() == order[:, :2].tolist()


def test_equal_values_count() -> None:
    rows = torch.tensor([[1.0, 2.0, 2.0, 0.5]])
    assert model_runner._as_likely(rows, torch.tensor([[2.0]])).tolist() == [2]
