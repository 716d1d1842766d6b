"""Logits processors behind HTTP: the operator names their code, and clients send plain values to it."""

from __future__ import annotations

import pytest

from outrider.async_llm import AsyncLLM
from tests.engine.test_logits_processors import Fragile
from tests.server.rig import serving, tiny_engine


def test_clients_pass_values_to_the_operators_code(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda: AsyncLLM.around(tiny_engine(logits_processors=[Fragile]).engine)) as served:
        body = {"prompt": "ab", "max_tokens": 4, "return_token_ids": True}
        answer = served.post("/v1/completions", **body, vllm_xargs={"only": 99}).json()
        assert answer["choices"][0]["text"] == "cccc"
        messages = [{"role": "user", "content": "x"}]
        chat = served.post("/v1/chat/completions", messages=messages, max_tokens=3, vllm_xargs={"only": 100}).json()
        assert chat["choices"][0]["message"]["content"] == "ddd"
        refused = served.error("/v1/completions", **body, vllm_xargs={"only": "x"})
        assert "Fragile refuses them: ValueError: only must be an integer" in refused["message"]
        assert "vllm_xargs" in served.error("/v1/completions", **body, vllm_xargs={"only": {"a": 1}})["message"]
        failed = served.error("/v1/completions", 500, **body, vllm_xargs={"only": 99, "raises": 1})
        assert "the server's log says why" in failed["message"] and "Fragile failed: KeyError" in caplog.text
        for field in ("logits_processors", "logits_processor_cls", "extra_args"):
            assert field in served.error("/v1/completions", **body, **{field: ["os:system"]})["message"]
        refused = served.error("/v1/score_tokens", prompt="ab", logprobs_mode="processed")
        assert refused["param"] == "logprobs_mode" and "use logprobs_mode='raw'" in refused["message"]
        assert served.post("/v1/score_tokens", prompt="ab").status_code == 200
        served.assert_idle()


def test_values_for_no_processor_are_refused() -> None:
    with serving() as served:
        assert "this engine has none" in served.error("/v1/completions", prompt="a", vllm_xargs={"only": 1})["message"]
