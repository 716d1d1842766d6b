"""Images in requests, by every route: what the engine gets, what is refused, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from outrider.features.images import fetch as fetching
from outrider.server.app import build_app
from outrider.server.batch_file import answer_lines
from outrider.server.chat import _Chat
from outrider.server.errors import ApiError
from outrider.server.images import RequestImages, TenantBudget
from outrider.server.protocol import ChatRequest
from outrider.server.response_store import ResponseStore, StoredItem, StoredResponse
from outrider.server.settings import ServerConfig
from outrider.server.stored_images import StoredImages
from tests.images.made_images import data_url, hostile, picture, png, png_of_zeros, written
from tests.images.test_fetch import Network, answer
from tests.server.image_rig import IMAGE_TOKENS, ImageEngine, serving_images
from tests.server.rig import Served
from tests.server.test_other_clients import environment

URL = data_url(png(5, 7))
OTHER = data_url(png(4, 3, seed=1))
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Served, ImageEngine]]:
    with serving_images() as both:
        yield both


@pytest.fixture
def served(both: tuple[Served, ImageEngine]) -> Served:
    return both[0]


@pytest.fixture
def engine(both: tuple[Served, ImageEngine]) -> ImageEngine:
    both[1].prompts.clear()
    return both[1]


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def asking(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 2}


def shapes(engine: ImageEngine) -> list[tuple[int, ...]]:
    return [each.shape for each in engine.images]


def test_a_chat_with_images(served: Served, engine: ImageEngine) -> None:
    answer = served.client().chat.completions.create(
        model="tiny", max_tokens=2, messages=[{"role": "user", "content": [  # type: ignore[list-item]
            text("before"), image(), text("between"), image(OTHER, detail="high"), text("behind"), text("more")]}])
    assert engine.text == "[user]before(image)between(image)behind\nmore[assistant]"
    assert np.array_equal(engine.images[0], picture(5, 7)) and np.array_equal(engine.images[1], picture(4, 3, 1))
    assert engine.prompts[-1]["mm_processor_kwargs"] == {"detail": ["auto", "high"]}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.prompts[-1]["prompt_token_ids"]) + 2 * (IMAGE_TOKENS - 1)


def test_a_stream_with_an_image(served: Served, engine: ImageEngine) -> None:
    stream = served.client().chat.completions.create(
        model="tiny", max_tokens=3, stream=True, stream_options={"include_usage": True},
        messages=[{"role": "user", "content": [image()]}])  # type: ignore[list-item]
    *_, last = list(stream)
    assert last.usage is not None and last.usage.prompt_tokens == len(b"[user][assistant]") + IMAGE_TOKENS
    assert engine.prompts[-1]["mm_processor_kwargs"] is None


def test_an_image_url_may_be_a_text(served: Served, engine: ImageEngine) -> None:
    assert served.post("/v1/chat/completions", **asking({"type": "image_url", "image_url": URL})).status_code == 200
    assert shapes(engine) == [(5, 7, 3)]


def test_a_response_with_images(served: Served, engine: ImageEngine) -> None:
    client = served.client()
    given: list[Any] = [{"role": "user", "content": [
        {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL, "detail": "low"}]}]
    first = client.responses.create(model="tiny", max_output_tokens=2, input=given)
    assert engine.text == "[user]What?(image)[assistant]"
    assert engine.prompts[-1]["mm_processor_kwargs"] == {"detail": ["low"]}
    assert first.usage is not None and first.usage.input_tokens == len("[user]What?[assistant]") + IMAGE_TOKENS
    assert client.responses.input_tokens.count(model="tiny", input=given).input_tokens == first.usage.input_tokens
    client.responses.create(model="tiny", max_output_tokens=2, input="And now?", previous_response_id=first.id)
    assert engine.text.startswith("[user]What?(image)[assistant]") and np.array_equal(engine.images[0], picture(5, 7))
    (item,) = client.responses.input_items.list(first.id).data
    assert item.to_dict()["content"][1]["image_url"] == URL  # type: ignore[index]


def test_an_image_in_the_output_of_a_function(served: Served, engine: ImageEngine) -> None:
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    outputs = [{"type": "function_call_output", "call_id": call_id, "output": [
        {"type": "input_text", "text": call_id}, {"type": "input_image", "image_url": url}]}
        for call_id, url in (("a", URL), ("b", OTHER))]
    given = [{"role": "user", "content": "Look"}, call | {"call_id": "a"}, call | {"call_id": "b"}, *outputs]
    assert served.post("/v1/responses", input=given, max_output_tokens=2).status_code == 200
    assert engine.text == "[user]Look[assistant][tool]a[tool]b[user](image)(image)[assistant]"
    assert shapes(engine) == [(5, 7, 3), (4, 3, 3)]
    assert served.post("/v1/responses", input=[*given, {"role": "user", "content": "So?"}]).status_code == 200
    assert engine.text.endswith("[tool]b[user](image)(image)So?[assistant]")


def block(url: str = URL) -> dict[str, Any]:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def test_a_message_with_images(served: Served, engine: ImageEngine) -> None:
    body = {"messages": [{"role": "user", "content": [text("a"), block(), text("b")]}]}
    answer = served.post("/v1/messages", max_tokens=2, **body)
    assert answer.status_code == 200, answer.text
    assert engine.text == "[user]a(image)b[assistant]" and np.array_equal(engine.images[0], picture(5, 7))
    counted = served.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert counted == len("[user]ab[assistant]") + IMAGE_TOKENS
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_images_in_the_results_of_tools(served: Served, engine: ImageEngine) -> None:
    use = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": "a", "content": [text("one"), block()]},
               {"type": "tool_result", "tool_use_id": "b", "content": [block(OTHER)]}]
    talk = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": use}]
    for own, end in (([], ""), ([text("What?")], "What?"), ([text("What?"), block()], "What?(image)")):
        messages = [*talk, {"role": "user", "content": [*results, *own]}]
        answer = served.post("/v1/messages", max_tokens=2, messages=messages)
        assert answer.status_code == 200, answer.text
        assert engine.text == f"[user]Look[assistant][tool]one[tool][user](image)(image){end}[assistant]"
        assert shapes(engine)[:2] == [(5, 7, 3), (4, 3, 3)]


def test_images_of_tools_come_before_a_later_answer(served: Served, engine: ImageEngine) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Look"}, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": [image()]}, {"role": "assistant", "content": "Yes"},
                {"role": "user", "content": [image(OTHER)]}]
    assert served.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
    assert engine.text == "[user]Look[assistant][tool][user](image)[assistant]Yes[user](image)[assistant]"
    assert shapes(engine) == [(5, 7, 3), (4, 3, 3)]


def test_tokenize_has_the_tokens_of_images(served: Served, engine: ImageEngine) -> None:
    answer = served.post("/tokenize", messages=asking(text("a"), image())["messages"]).json()
    assert answer["count"] == len(answer["tokens"]) == len("[user]a[assistant]") + IMAGE_TOKENS
    plain = served.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()
    assert plain["count"] == len("[user]a[assistant]")


def test_the_list_of_models_says_that_the_model_sees(served: Served) -> None:
    card = served.http.get("/v1/models").json()["data"][0]
    assert card["modalities"] == ["text", "image"] and card["capabilities"] == {"vision": True}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_texts_of_users_make_no_places_for_images(served: Served, engine: ImageEngine, path: str) -> None:
    """A tool's output that holds the marker has crashed servers."""
    own = {"input": f"a{PAD}b"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": f"a{PAD}b"}]}
    assert served.post(path, **own, **({"max_tokens": 2} if path != "/v1/responses" else {})).status_code == 200
    assert engine.text == f"[user]a{PAD}b[assistant]"


def test_markers_beside_images(served: Served, engine: ImageEngine) -> None:
    body = asking(text(PAD), image(), text(PAD)) | {"tools": [{"type": "function", "function": {
        "name": "f", "description": PAD}}], "tool_choice": "none"}
    assert served.post("/v1/chat/completions", **body).status_code == 200
    assert engine.text == f"[user]{PAD}(image){PAD}[assistant]"


PATHS = {"/v1/chat/completions": lambda url: asking({"type": "image_url", "image_url": url}),
         "/v1/responses": lambda url: {"input": [{"role": "user", "content": [
             {"type": "input_image", "image_url": url}]}]},
         "/v1/messages": lambda url: {"max_tokens": 1, "messages": [{"role": "user", "content": [
             {"type": "image", "source": {"type": "url", "url": url}}]}]}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("url", ["http://127.0.0.1/", "https://example.org/a.png", "file:///etc/passwd", "/etc/passwd",
                                 "", "ftp://example.org/"])
def test_nothing_is_read_unless_it_is_allowed(served: Served, path: str, url: str) -> None:
    error = served.error(path, **PATHS[path](url))
    assert error["param"] in ("messages", "input") and error["message"].startswith("the URL of an image was not read")


@pytest.mark.parametrize("url", ["data:image/png;base64,====", "data:image/png;base64,AAAA", "data:text/plain,a",
                                 data_url(png_of_zeros(10_000, 10_000)), data_url(png()[:-30])])
@pytest.mark.parametrize("path", PATHS)
def test_images_that_are_none(served: Served, path: str, url: str) -> None:
    error = served.error(path, **PATHS[path](url))
    assert error["param"] in ("messages", "input") and "image" in error["message"] and "AAAA" not in error["message"]


@pytest.mark.parametrize(("path", "body", "words"), [
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "file_id is not"),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}, "base64 or url"),
    ("/v1/chat/completions", asking(image(detail="huge")), "detail"),
    ("/v1/chat/completions", asking({"type": "image_url"}), "image_url"),
    ("/v1/chat/completions", asking(image()) | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens could cut"),
    ("/v1/embeddings", asking(image()) | {"max_tokens": None}, "this route takes no images"),
    ("/v1/chat/completions", asking({"type": "video_url", "video_url": {"url": "x"}}), "'video_url' is not supported"),
    ("/v1/chat/completions", asking({"type": "input_audio"}), "'input_audio' is not supported"),
])
def test_what_is_refused_by_name(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    assert words in served.error(path, **body)["message"]


def test_a_model_of_texts_refuses_images_and_names_itself() -> None:
    with serving_images(sees=False) as (served, engine):
        for path, make in PATHS.items():
            message = served.error(path, **make(URL))["message"]
            assert message.startswith(f"{engine.rig.engine.model.name} sees no images here")
        card = served.http.get("/v1/models").json()["data"][0]
        assert card["modalities"] == ["text"] and card["capabilities"] == {"vision": False}
        large = "data:image/png;base64," + "a" * (17 << 20)
        assert served.post("/v1/chat/completions", **asking(image(large))).status_code == 413


def test_limits_are_settings(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    folder = str(tmp_path)
    with serving_images(image_max_pixels=40, image_max_bytes=3000, max_body_bytes=2000,
                        allowed_local_media_path=folder) as (served, engine):
        def post(*urls: str) -> Any:
            return served.post("/v1/chat/completions", **asking(*map(image, urls)))

        assert post(URL, OTHER).status_code == 200
        assert post(f"file://{folder}/a.png").status_code == 200 and shapes(engine) == [(5, 7, 3)]
        assert "42 pixels" not in post(URL).text and "more than 40 pixels" in post(data_url(png(6, 7))).text
        assert "more than 80" in post(URL, URL, URL).text
        noise = data_url(written(Image.fromarray(picture(4, 10)), "BMP") + bytes(2900))
        assert "more than 3000" in post(noise).text
        assert post(*[data_url(png() + bytes(2400))] * 2).status_code == 200
        assert post(*[data_url(png() + bytes(2800))] * 4).status_code == 413  # more than two files in base64
        assert served.post("/v1/completions", prompt="x" * 2100).status_code == 413
        error = served.error("/v1/chat/completions", **asking(image(f"file://{folder}/../x")))
        assert folder not in error["message"]


def test_no_image_is_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    secret = base64.b64encode(b"secret of a client").decode()
    with caplog.at_level(logging.DEBUG):
        answer = served.post("/v1/chat/completions", **asking(image(f"data:image/png;base64,{secret}")))
        assert secret not in answer.text
        served.post("/v1/chat/completions", **asking(image(f"https://example.org/{secret}")))
    assert secret not in caplog.text


def test_lines_of_a_batch(served: Served, engine: ImageEngine) -> None:
    body = asking(text("a"), image()) | {"model": "tiny"}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()

    async def answered() -> list[bytes]:
        app = build_app(served.service)
        return [answer.json async for answer in answer_lines(app, [line], 1)]

    (answer,) = asyncio.run(answered())
    assert json.loads(answer)["response"]["status_code"] == 200
    assert engine.text == "[user]a(image)[assistant]"


def check_hostile(served: Served, numbers: range) -> None:
    for number in numbers:
        path = list(PATHS)[number % 3]
        answer = served.post(path, **PATHS[path](data_url(hostile(number))))
        assert answer.status_code in (200, 400), (number, answer.text)


def test_hostile_images(served: Served) -> None:
    check_hostile(served, range(100))


@pytest.mark.long
def test_two_thousand_hostile_images_leave_no_memory(served: Served) -> None:
    check_hostile(served, range(200))
    before = held_bytes()
    check_hostile(served, range(200, 2200))
    served.assert_idle()
    assert held_bytes() - before < 128 << 20


def held_bytes() -> int:
    """Resident memory, without what the C library keeps of freed images of all sizes."""
    from tests.images.test_decode import resident_bytes

    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)(0)
    return resident_bytes()


def test_a_budget_has_lines_of_their_own_for_tenants() -> None:
    async def run() -> None:
        budget, done = TenantBudget(10), list[str]()

        async def hold(name: str, tenant: str, amount: int, until: asyncio.Event) -> None:
            async with budget.holding(tenant, amount):
                done.append(name)
                await until.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(hold(name, tenant, amount, event)) for name, tenant, amount, event in (
            ("a", "one", 6, first), ("b", "one", 6, rest), ("c", "one", 2, rest), ("d", "two", 10, rest))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert done == ["a", "d"]  # c fits, and b was first
        gone = asyncio.create_task(hold("e", "one", 9, rest))
        await asyncio.sleep(0)
        gone.cancel()
        first.set()
        await asyncio.sleep(0.01)
        assert done == ["a", "d", "b", "c"] and budget.total_held == 18
        rest.set()
        await asyncio.gather(*tasks)
        assert budget.total_held == 0
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(run())


def test_a_request_that_waits_for_room_and_leaves_gives_its_place_to_the_next() -> None:
    async def run() -> None:
        budget = TenantBudget(10)
        async with budget.holding("one", 6):
            waiting = [asyncio.create_task(budget._take("one", amount)) for amount in (9, 4)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert budget.total_held == 10
        budget._give_back("one", 4)
        assert budget.total_held == 0

    asyncio.run(run())


def test_warnings_about_damaged_files_are_not_kept() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert RequestImages(ServerConfig())._threads is not None
        warnings.warn_explicit("Corrupt", UserWarning, "x.py", 1, module="PIL.TiffImagePlugin")
        warnings.warn_explicit("other", UserWarning, "x.py", 1, module="other")
    assert [str(warning.message) for warning in seen] == ["other"]


@pytest.mark.parametrize("domain", ["https://example.org", "example.org:80", "*", "localhost", "a b.c", "*.*.org"])
def test_domains_are_names(domain: str) -> None:
    with pytest.raises(ValueError, match="allowed_media_domains"):
        ServerConfig(allowed_media_domains=(domain,))


def test_stored_responses_keep_an_image_once(served: Served, engine: ImageEngine) -> None:
    url = data_url(written(Image.fromarray(picture(60, 60, 9))))
    part = {"type": "input_image", "image_url": url}
    given = [{"role": "user", "content": [part, part]}]
    store, answers = served.service.responses, list[Any]()
    for _ in range(3):
        answers.append(served.post("/v1/responses", input=given, max_output_tokens=1).json())
    kept = [store.find(None, answer["id"]) for answer in answers]
    assert len({id(image) for one in kept for image in one.images}) == 1
    assert all(one.num_bytes < 3000 < len(url) for one in kept)
    listed = served.http.get(f"/v1/responses/{answers[0]['id']}/input_items").json()["data"]
    assert [each["image_url"] for each in listed[0]["content"]] == [url, url]
    assert served.post("/v1/responses", input="So?", previous_response_id=answers[1]["id"]).status_code == 200
    assert len(engine.images) == 2 and np.array_equal(engine.images[1], picture(60, 60, 9))
    gone = served.post("/v1/responses", input=given, max_output_tokens=1, store=False).json()["id"]
    assert served.http.get(f"/v1/responses/{gone}").status_code == 404


def test_images_count_once_against_the_space_of_a_key() -> None:
    store, image = ResponseStore(100), {"type": "input_image", "image_url": "data:image/png;base64," + "a" * (30 << 20)}
    for name in "abcdef":
        item, images = store.images.take_from({"id": name, "content": [image]}, None)
        store.add(None, StoredResponse(name, b"{}", (StoredItem.from_json(item, images),), ()))
    assert store.find(None, "a") and store.find(None, "f")
    for name in "ghi":
        other = image | {"image_url": image["image_url"] + name}
        item, images = store.images.take_from({"id": name, "content": [other]}, None)
        store.add(None, StoredResponse(name, b"{}", (StoredItem.from_json(item, images),), ()))
    with pytest.raises(ApiError):
        store.find(None, "a")
    assert store.find(None, "i").input[0].whole_json == json.dumps(
        {"id": "i", "content": [other]}, separators=(",", ":")).encode()


def test_images_of_running_responses_have_a_bound() -> None:
    images = StoredImages()
    url = "data:image/png;base64," + "a" * (50 << 20)
    held = [images.take_from({"content": [{"image_url": f"{url}{i}"}]}, "one")[1] for i in range(2)]
    images.check_room("one")
    held.append(images.take_from({"content": [{"image_url": f"{url}2"}]}, "one")[1])
    with pytest.raises(ApiError, match="try again later"):
        images.check_room("one")
    images.check_room("two")
    held.clear()
    images.check_room("one")


def test_a_mark_that_a_client_writes_stays_a_text() -> None:
    store = StoredImages()
    url = data_url(png(40, 40))
    item, images = store.take_from({"id": "a", "content": [{"image_url": url}]}, None)
    mark = json.loads(StoredItem.from_json(item, images).json)["content"][0]["image_url"]
    given = {"id": "b", "content": [{"image_url": url}, {"text": f'"image_url":"{mark}"'}]}
    changed, images = store.take_from(given, None)
    assert json.loads(StoredItem.from_json(changed, images).whole_json) == given


def test_a_request_forgets_its_images_when_the_engine_has_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[ChatRequest] = []
    run = _Chat.__init__

    def remember(self: _Chat, service: Any, body: ChatRequest, *more: Any) -> None:
        bodies.append(body)
        run(self, service, body, *more)

    monkeypatch.setattr(_Chat, "__init__", remember)
    assert served.post("/v1/chat/completions", **asking(image())).status_code == 200
    (part,) = bodies[0].messages[0].content  # type: ignore[misc, union-attr]
    assert part.image_url.url == ""


@pytest.mark.long
def test_real_clients_send_images(served: Served, tmp_path: Path) -> None:
    packages = ("openai", "anthropic", "langchain-openai", "langchain-anthropic")
    python = environment(tmp_path, *packages) / "python"
    script = Path(__file__).parent / "clients" / "image_parts.py"
    data = base64.b64encode(png()).decode()
    done = subprocess.run([python, script, served.url, data], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]



def test_an_allowed_host_is_fetched_from(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network([["127.0.0.1"], ["93.184.215.14"]], [answer(png())])
    monkeypatch.setattr(fetching, "resolve_name", network.resolve)
    monkeypatch.setattr(fetching, "connect_to", network.connect)
    with serving_images(allowed_media_domains=("pics.example",)) as (served, engine):
        body = asking(image("https://pics.example/a.png"))
        assert served.error("/v1/chat/completions", **body)["message"] == fetching.NOT_FETCHED and not network.dialled
        assert served.post("/v1/chat/completions", **body).status_code == 200
        assert np.array_equal(engine.images[0], picture(5, 7))
        assert network.dialled == [("93.184.215.14", 443, "pics.example")]
        block = {"type": "image", "source": {"type": "url", "url": "http://pics.example/"}}
        messages = [{"role": "user", "content": [block]}]
        assert served.post("/v1/messages", max_tokens=1, messages=messages).status_code == 200
        assert served.error("/v1/chat/completions", **asking(image("http://other.example/")))


def test_a_part_may_have_a_name_of_its_own(served: Served, engine: ImageEngine) -> None:
    """It changes nothing: what an image is, its pixels say."""
    answered = served.post("/v1/chat/completions", **asking(image() | {"uuid": "a"}))
    assert answered.status_code == 200 and "uuid" in answered.headers["x-outrider-ignored"]
    assert engine.prompts[-1].get("multi_modal_uuids") is None


def test_a_url_of_other_characters_than_ascii_is_refused(served: Served) -> None:
    """Half a surrogate pair, which JSON may have, has no bytes."""
    url = "data:image/png;base64," + "A" * 2000 + "\\ud800"
    for path in PATHS:
        body = json.dumps({"model": "tiny"} | PATHS[path]("URL")).replace("URL", url)
        answer = served.http.post(path, content=body.encode(), headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "not valid base64" in answer.text, answer.text


@pytest.mark.parametrize(("path", "body"), [
    ("/rerank", {"query": "a", "documents": [{"content": [image("http://secret.example/")]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "image_data": "http://secret.example/"}),
])
def test_no_url_is_in_an_error(served: Served, path: str, body: dict[str, Any]) -> None:
    assert "secret" not in served.error(path, **body)["message"]
