"""Small models that see, served: an image has the same answer by every route, and the same as without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.engine.text import Tokenizer
from tests.engine.harness import byte_tokenizer
from tests.images.made_images import data_url, hostile, written
from tests.server.rig import Served, serving

recipes = pytest.importorskip("tests.images.recipes")
TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}[assistant]")
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4,
                            "num_pages": 128}
GREEDY = {"temperature": 0, "max_tokens": 6}


def save_tokenizer(folder: Path, place: tuple[int, ...]) -> None:
    """Bytes, then special tokens up to those of images."""
    backend = byte_tokenizer().backend
    names = {recipes.SOFT: "<|image_pad|>", recipes.BEGIN: "<|vision_start|>", recipes.END: "<|vision_end|>"}
    backend.add_special_tokens([AddedToken(names.get(token, f"<|{token}|>"), special=True)
                                for token in range(259, 320)])
    assert Tokenizer(backend).token_to_id("<|image_pad|>") == recipes.SOFT
    backend.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("PLACE", "".join(names[token] for token in place))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.fixture(scope="module", params=["gemma4_unified", "gemma4", "qwen3_5", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    recipe = recipes.RECIPES[family]
    folder = recipe.save(tmp_path_factory.mktemp("seeing") / family)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    (folder / "preprocessor_config.json").write_text(json.dumps(recipes.PROCESSOR_CONFIG[kind]))
    save_tokenizer(folder, recipe.place)
    with pytest.MonkeyPatch.context() as patch:
        recipes.allow_small_budget(patch)
        yield folder


@pytest.fixture(scope="module")
def image(family: str) -> np.ndarray:
    recipe = recipes.RECIPES[family]
    return np.asarray(recipe.image(0, recipe.shapes[0]))


@pytest.fixture(scope="module")
def alone(folder: Path, image: np.ndarray) -> tuple[list[int], list[int]]:
    """The prompt and the answer of an LLM in this process."""
    with LLM(str(folder), **SETTINGS) as llm:
        content = [{"type": "text", "text": "What?"}, {"type": "image", "image": image}]
        (output,) = llm.chat([{"role": "user", "content": content}], SamplingParams(**GREEDY), use_tqdm=False)
    return output.prompt_token_ids, list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS)) as served:
        yield served
        served.assert_idle()


def url_of(image: np.ndarray) -> str:
    from PIL import Image

    return data_url(written(Image.fromarray(image)))


def chat(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, {
        "type": "image_url", "image_url": {"url": url}}]}]}


def test_a_chat_equals_the_engine_alone(served: Served, alone: tuple[list[int], list[int]], image: np.ndarray) -> None:
    answer = served.post("/v1/chat/completions", **chat(url_of(image)), **GREEDY, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == alone[0] and answer["choices"][0]["token_ids"] == alone[1]
    assert answer["usage"]["prompt_tokens"] == len(alone[0])
    other = served.post("/v1/chat/completions", **chat(url_of(image[::-1])), **GREEDY, return_token_ids=True).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < len(alone[0])


def test_every_route_counts_and_answers_alike(served: Served, alone: tuple[list[int], list[int]],
                                              image: np.ndarray) -> None:
    url, num = url_of(image), len(alone[0])
    body = chat(url)
    text = served.post("/v1/chat/completions", **body, **GREEDY).json()["choices"][0]["message"]["content"]
    assert served.post("/tokenize", **body).json()["tokens"] == alone[0]
    response = served.post("/v1/responses", temperature=0, max_output_tokens=6, input=[{"role": "user", "content": [
        {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]}]).json()
    assert response["usage"]["input_tokens"] == num
    assert "".join(item["content"][0]["text"] for item in response["output"]) == (text or "")
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "source": source}]}]
    assert served.post("/v1/messages/count_tokens", messages=messages).json()["input_tokens"] == num
    message = served.post("/v1/messages", messages=messages, **GREEDY).json()
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == num
    assert "".join(block["text"] for block in message["content"]) == (text or "")
    assert served.http.get("/v1/models").json()["data"][0]["capabilities"] == {"vision": True}


@pytest.mark.parametrize("detail", ["low", "high", "auto"])
def test_detail_is_taken(served: Served, image: np.ndarray, detail: str) -> None:
    body = chat(url_of(image))
    body["messages"][0]["content"][1]["image_url"]["detail"] = detail
    answer = served.post("/v1/chat/completions", **body, **GREEDY)
    assert answer.status_code in (200, 400), answer.text  # finer, an image may be longer than this small model


def test_hostile_images_harm_nobody(served: Served, alone: tuple[list[int], list[int]], image: np.ndarray) -> None:
    for number in range(48):
        answer = served.post("/v1/chat/completions", **chat(data_url(hostile(number))), temperature=0, max_tokens=1)
        assert answer.status_code in (200, 400), answer.text
    answer = served.post("/v1/chat/completions", **chat(url_of(image)), **GREEDY, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == alone[1]


def test_markers_in_texts_stay_texts(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "a<|image_pad|><|vision_start|>b"}]}
    tokens = served.post("/tokenize", **body).json()["tokens"]
    assert bytes(tokens).decode() == "[user]a<|image_pad|><|vision_start|>b[assistant]"
    assert served.post("/v1/chat/completions", **body, **GREEDY).status_code == 200


def test_text_requests_are_served_beside_images(served: Served) -> None:
    assert served.post("/v1/completions", prompt="ab", **GREEDY).status_code == 200
    body = {"messages": [{"role": "user", "content": "ab"}]}
    assert served.post("/v1/chat/completions", **body, **GREEDY).status_code == 200
