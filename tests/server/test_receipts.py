"""Receipts over HTTP: those of a busy server with drafts replay alone, and none tells more than its own request."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from outrider import LLM
from outrider.async_llm import AsyncLLM
from outrider.kernels import cpu as native
from outrider.receipts import Receipt, check_receipt, find_receipts, replay
from tests.engine.harness import byte_tokenizer, save_folder
from tests.engine.test_exact_mode import FAMILIES, VOCAB
from tests.server.rig import DRAFTS, Served, serving

THREADS = 8
KEY = "the operator's own key, which is secret"
ENGINE: dict[str, Any] = {"exact": True, "device": "cpu", "max_model_len": 112, "max_num_seqs": 6, "num_pages": 64}
KEYS = ("key-of-anna", "key-of-bert")

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("models") / "tiny", FAMILIES["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    key_file = tmp_path_factory.mktemp("keys") / "operator.key"
    key_file.write_text(KEY)

    def start() -> AsyncLLM:
        return AsyncLLM(str(folder), speculative_config=DRAFTS, receipt_key_file=str(key_file), **ENGINE)

    with serving(start, api_key=KEYS) as served:
        yield served
        served.assert_idle()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_prefix_caching=False, **ENGINE) as llm:
        yield llm


def post(served: Served, path: str, key: str = KEYS[0], **body: Any) -> Any:
    return served.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def random_body(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    shared = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))] if number % 3 else [*range(3, 40)]
    body: dict[str, Any] = {"prompt": [*shared, number % VOCAB], "max_tokens": draw.randint(1, 40), "receipt": True,
                            "temperature": draw.choice((0, 0.7, 1.2)), "ignore_eos": draw.random() < 0.7}
    for name, value in (("top_p", 0.9), ("top_k", 30), ("min_p", 0.05), ("presence_penalty", 0.7), ("seed", number),
                        ("allowed_token_ids", [4, 5, 6]), ("logprobs", 2), ("cache_salt", "secret salt")):
        if draw.random() < 0.25:
            body[name] = value
    if body["temperature"] and draw.random() < 0.2:
        body["n"] = 2
    return body


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_receipts_of_a_busy_server_replay_alone(served: Served, llm: LLM, num: int) -> None:
    def ask(number: int) -> list[Receipt]:
        answer = post(served, "/v1/completions", KEYS[number % 2], **random_body(number))
        assert answer.status_code == 200, answer.text
        return list(find_receipts(answer.json()))

    with ThreadPoolExecutor(THREADS) as pool:
        receipts = [receipt for found in pool.map(ask, range(num)) for receipt in found]
    assert len(receipts) >= num and served.llm.engine.stats.num_accepted_tokens
    verdicts = [replay(llm, receipt, key=KEY.encode()) for receipt in receipts]
    assert not [verdict for verdict in verdicts if not verdict.is_equal]


def test_a_receipt_tells_no_secret(served: Served, folder: Path) -> None:
    said = json.dumps([post(served, "/v1/completions", key, **random_body(number)).json()
                       for number, key in enumerate(KEYS * 4)])
    for secret in (*KEYS, KEY, str(folder), "secret salt", "operator.key"):
        assert secret not in said


def test_chats_and_streams_have_receipts(served: Served, llm: LLM) -> None:
    messages = [{"role": "user", "content": "tell"}]
    chat = {"messages": messages, "max_tokens": 6, "receipt": True, "seed": 3, "temperature": 1}
    whole = post(served, "/v1/chat/completions", **chat).json()
    (receipt,) = find_receipts(whole)
    assert replay(llm, receipt, key=KEY.encode()).is_equal
    assert len(whole["choices"][0]["logprobs"]["content"]) == 6
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": [1, 2], "receipt": True,
                                                                             "max_tokens": 6, "n": 2})):
        lines = post(served, path, **body, stream=True).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        found = list(find_receipts(events))
        assert len(found) == body.get("n", 1) and all(check_receipt(own, KEY.encode()) is None for own in found)
        assert all(replay(llm, own, beside=2).is_equal for own in found)
        assert all(("receipt" in choice) == bool(choice["finish_reason"])
                   for event in events for choice in event["choices"])
    assert receipt in list(find_receipts(whole)) and found


def test_answers_without_the_field_have_none(served: Served) -> None:
    answer = post(served, "/v1/completions", prompt=[1, 2], max_tokens=2).json()
    assert "receipt" not in answer["choices"][0] and answer["choices"][0]["logprobs"] is None


def test_what_has_no_receipt_is_refused_by_name(served: Served) -> None:
    embeds = b64encode(save({"embeds": torch.zeros(2, 40)})).decode()
    answer = post(served, "/v1/completions", prompt_embeds=embeds, max_tokens=2, receipt=True)
    assert answer.status_code == 400, answer.text
    assert "leave prompt_embeds or receipt out" in answer.json()["error"]["message"]
    for body in ({"use_beam_search": True}, {"receipt": "yes"}):
        answer = post(served, "/v1/completions", **{"prompt": [1, 2], "max_tokens": 2, "receipt": True} | body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "receipt", answer.text
