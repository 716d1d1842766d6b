"""prompt_embeds of /v1/completions: the answer is that of the token ids, and nothing but numbers is ever read."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save

from outrider.async_llm import AsyncLLM
from outrider.models.base import Model
from tests.engine.harness import Rig, tiny_model
from tests.server.rig import Served, chat_tokenizer, serving

ROUTE = "/v1/completions"
ASK: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
MODEL = tiny_model("llama", torch.float32)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    def start() -> AsyncLLM:
        rig = Rig(MODEL, tokenizer=chat_tokenizer(), max_model_len=64, num_pages=64)
        return AsyncLLM.around(rig.engine)

    with serving(start, max_prompts=4) as served:
        yield served
        served.assert_idle()


def embeds_of(model: Model, text: str) -> torch.Tensor:
    return model.embed_tokens.look_up(torch.tensor([*text.encode()]))  # type: ignore[attr-defined, no-any-return]


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(tensor: torch.Tensor, **others: torch.Tensor) -> str:
    return packed(save({"embeds": tensor.contiguous()} | others, metadata={"format": "pt"}))


EMBEDS = embeds_of(MODEL, "abc")
WIDTH = EMBEDS.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_answer_is_that_of_the_token_ids(served: Served, dtype: torch.dtype) -> None:
    (expected,) = served.post(ROUTE, prompt="abc", **ASK).json()["choices"]
    answer = served.post(ROUTE, prompt_embeds=file_of(EMBEDS.to(dtype)), return_token_ids=True, **ASK).json()
    assert answer["choices"][0]["text"] == expected["text"] and answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["prompt_token_ids"] is None
    several = served.post(ROUTE, prompt_embeds=[file_of(EMBEDS), file_of(embeds_of(MODEL, "x"))], **ASK).json()
    other = served.post(ROUTE, prompt="x", **ASK).json()["choices"][0]
    assert [choice["text"] for choice in several["choices"]] == [expected["text"], other["text"]]
    streamed = served.post(ROUTE, prompt_embeds=file_of(EMBEDS), stream=True, return_token_ids=True, **ASK).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected["text"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_numbers_are_read_as_they_are(served: Served, dtype: torch.dtype) -> None:
    short = EMBEDS.to(dtype)
    texts = [served.post(ROUTE, prompt_embeds=file_of(own), **ASK).json()["choices"][0]["text"]
             for own in (short, short.float())]
    assert texts[0] == texts[1]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a client's code ran",)


def saved_by_torch(value: Any, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return packed(file.getvalue())


def written(header: Any, numbers: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return packed(len(text).to_bytes(8, "little") + text + numbers)


def named(**fields: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [1, WIDTH], "data_offsets": [0, 4 * WIDTH]} | fields}


ROW = bytes(4 * WIDTH)


@pytest.mark.parametrize(("given", "words"), [
    (saved_by_torch(EMBEDS), "a file of torch.save"), (packed(pickle.dumps(Bomb())), "a file of torch.save"),
    (saved_by_torch(EMBEDS, _use_new_zipfile_serialization=False), "a file of torch.save"),
    ("%%%", "is not valid base64"), ("", "is not a safetensors file"), (packed(b"short"), "is not a safetensors file"),
    (packed(b"\xff" * 100), "is not a safetensors file"), ("A" * 400_000, "more than 64 tokens"),
    (file_of(EMBEDS, more=EMBEDS.clone()), "with one tensor"), (file_of(EMBEDS[None]), "with one tensor"),
    (file_of(EMBEDS[:, :-1]), f"the shape [tokens, {WIDTH}]"), (file_of(EMBEDS[:0]), "at most 64 tokens"),
    (file_of(EMBEDS[:1].expand(65, -1)), "at most 64 tokens"), (file_of(EMBEDS.int()), "one of the types F64, F32"),
    (file_of(EMBEDS * float("nan")), "NaN, infinity"), (file_of(EMBEDS[:1].expand(64, -1)), "leaves no room"),
    (written(b"{" * 60_000), "with one tensor"), (written([]), "with one tensor"), (written({}), "with one tensor"),
    (written({"x": None}), "with one tensor"), (written(named(dtype=[]), ROW), "with one tensor"),
    (written(named(data_offsets=[4, 4 + 4 * WIDTH]), ROW), "with one tensor"),
    (written(named(), ROW[:-1]), "bytes of numbers"), (written(named(), ROW + b"x"), "bytes of numbers"),
    (written(named(shape=[10**30, WIDTH]), ROW), "at most 64 tokens"),
    (written(named(shape=[-1, WIDTH]), ROW), "at most 64 tokens"),
    ([], "has 0 prompts"), ([file_of(EMBEDS)] * 5, "has 5 prompts"),
])
def test_what_is_no_such_file_is_refused(capfd: pytest.CaptureFixture[str], served: Served, given: Any,
                                         words: str) -> None:
    error = served.error(ROUTE, prompt_embeds=given, **ASK)
    assert words in error["message"], error
    assert "a client's code ran" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": "a"}, "prompt"), ({"echo": True}, "echo"), ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"repetition_penalty": 1.5}, "repetition_penalty"),
])
def test_fields_that_need_tokens_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    assert served.error(ROUTE, prompt_embeds=file_of(EMBEDS), **fields)["param"] == param
    assert served.error(ROUTE)["param"] == "prompt"


def test_keys_share_no_pages_of_equal_embeddings() -> None:
    def start() -> AsyncLLM:
        return AsyncLLM.around(Rig(MODEL, tokenizer=chat_tokenizer(), max_model_len=64, num_pages=64).engine)

    with serving(start, api_key=("one", "two")) as served:
        file = file_of(embeds_of(MODEL, "a" * 40))
        answers = [served.http.post(ROUTE, json={"prompt_embeds": file, **ASK}, headers={"x-api-key": key}).json()
                   for key in ("one", "two", "one")]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[:2] == [0, 0] and cached[2] > 0
