"""What a server refuses, and how: errors in OpenAI's form, keys, sizes, a full queue, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import openai
import pytest

from outrider.async_llm import AsyncLLM
from outrider.engine.text import Tokenizer
from outrider.server.errors import ApiError
from outrider.server.guard import PIECE_BYTES, Guard
from outrider.server.held_bodies import HeldBodies, HeldBody
from tests.server.rig import MODEL, PATIENCE, Served, served_fixture, tiny_engine

CHAT = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "x", "max_tokens": 190, "ignore_eos": True, "speculative": False}


def slow_llm(seconds: float = 0.02) -> AsyncLLM:
    """Every step takes a while, so that requests meet."""
    rig = tiny_engine(max_num_seqs=2)
    inner = rig.engine.step
    rig.engine.step = lambda: (time.sleep(seconds), inner())[1]  # type: ignore[method-assign]
    return AsyncLLM.around(rig.engine)

served = served_fixture(slow_llm, max_num_queued_reqs=2, max_body_bytes=20_000, max_prompts=3)
guarded = served_fixture(api_key=("first", "second"))


@pytest.mark.parametrize(("field", "value", "words"), [
    ("temperature", "hot", "temperature"), ("temperature", -1, "temperature must be a number from 0"),
    ("n", True, "n: "), ("n", 1000, "n must be"), ("top_p", 2, "top_p must be"), ("max_tokens", 0, "max_tokens"),
    ("logprobs", 99, "max_logprobs"), ("stop", 5, "stop: "), ("logit_bias", {"x": 1}, "'x' is not a token id"),
    ("logit_bias", {" 5_0 ": 1}, "' 5_0 ' is not a token id"), ("logit_bias", {"５": 1}, "'５' is not a token id"),
    ("logit_bias", {"-5": 1}, "'-5' is not a token id"), ("logit_bias", {"9" * 5000: 1}, "is not a token id"),
    ("logit_bias", {"5": 1, "05": 2}, "'05' names the same token as another key"),
    ("logit_bias", {"5": 1e99}, "logit_bias"), ("prompt", [], "prompt"), ("prompt", [[]], "empty"),
    ("prompt", [999999], "vocabulary"), ("prompt", ["a"] * 4, "at most 3"), ("prompt", None, "prompt"),
    ("prompt", "x" * 300, "max_model_len"), ("prompt", "", "the prompt is empty"),
    ("temprature", 1, "did you mean temperature"),
    ("stream_options", {"include_usage": True}, "stream=true"), ("best_of", 3, "best_of is not supported"),
    ("response_format", {"type": "yaml"}, "response_format"), ("guided_json", {}, "use structured_outputs"),
    ("structured_outputs", {"regx": "a"}, "did you mean regex"), ("structured_outputs", {}, "exactly one of"),
    ("structured_outputs", {"regex": "a"}, "no end token"),
    ("echo", "yes", "echo"), ("priority", 2**40, "priority must be"), ("seed", 2**70, "seed must be"),
    ("suffix", "end", "suffix is not supported"), ("speculative", -2, "speculative"), ("cache_salt", 5, "cache_salt"),
])
def test_a_bad_field_is_refused_by_name(served: Served, field: str, value: Any, words: str) -> None:
    error = served.error("/v1/completions", **({"prompt": "hello"} | {field: value}))
    assert words in error["message"], error
    assert error["param"] == field
    assert "/" not in error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize(("fields", "words"), [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "asistant", "content": "x"}]}, "messages.0.role: the role asistant is not supported: did"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"), ({"messages": "x"}, "messages"),
    ({"top_logprobs": 2}, "logprobs=true"), ({"top_logprobs": 99, "logprobs": True}, "top_logprobs=99 exceeds"),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be"),
    ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
    ({"chat_template_kwargs": {"messages": []}}, "must not set messages"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "same thing"), ({"functions": []}, "use tools"),
    ({"response_format": {"type": "json_schema"}}, "json_schema and the type"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "give one of them"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "refused the messages: No."),
    ({"documents": [{"title": "a", "text": "b"}]}, "documents is not supported"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
])
def test_a_bad_chat_is_refused_by_name(served: Served, fields: dict[str, Any], words: str) -> None:
    error = served.error("/v1/chat/completions", **({"messages": CHAT} | fields))
    assert words in error["message"] and error["param"] in fields, error


def test_values_that_change_nothing_are_taken(served: Served) -> None:
    answer = served.post("/v1/chat/completions", messages=CHAT, max_tokens=1, response_format={"type": "text"},
                         store=False, service_tier="auto", best_of=None, user="me", stop=None)
    assert answer.status_code == 200, answer.text


def test_special_tokens_around_texts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates write theirs, so by default only texts of completions get some."""
    seen: list[bool] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda own, text, add: [seen.append(add), encode(own, text, add)][1])
    for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        assert served.post("/v1/completions", prompt="a", max_tokens=1, **more).status_code == 200
        assert served.post("/v1/chat/completions", messages=CHAT, max_tokens=1, **more).status_code == 200
    assert seen == [True, False, False, False, True, True]


def test_other_mistakes_have_their_own_status(served: Served) -> None:
    assert served.error("/v1/completions", 404, prompt="x", model="other")["param"] == "model"
    assert served.error("/v1/nothing", 404)["type"] == "NotFoundError"
    assert served.http.get("/v1/completions").json()["error"]["code"] == 405
    for body in (b"{", b"\xff\xfe", b"[1]", b"", b"null", b'{"prompt": 1e999}', b"[" * 5000):
        answer = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == 400, (body, answer.text)
    assert served.error("/detokenize", tokens=[-1])["param"] == "tokens"
    assert served.error("/tokenize", prompt="a", messages=CHAT)["param"] == "prompt"


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    assert served.error("/v1/completions", 413, prompt="x" * 30_000)["type"] == "RequestTooLargeError"
    chunks = (b'{"prompt": "' if i == 0 else b"x" * 1000 for i in range(40))  # without a declared length
    assert served.http.post("/v1/completions", content=chunks).status_code == 413


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("key", ["first", "wrong"])
def test_a_client_that_is_still_sending_its_body_gets_the_answer(guarded: Served, is_chunked: bool, key: str) -> None:
    """A connection that is closed while data comes in is reset, and the client never sees what it was told."""
    host, port = guarded.url.removeprefix("http://").split(":")
    size = (16 << 20) + 4_000_000
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {size}"
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\n{length}\r\n\r\n")
    piece = b"x" * 50_000
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        raw.sendall(head.encode())
        for _ in range(size // len(piece)):
            raw.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
        raw.sendall(b"0\r\n\r\n" if is_chunked else piece[: size % len(piece)])
        answer = b""
        while got := raw.recv(1 << 16):
            answer += got
    assert answer.startswith(b"HTTP/1.1 413" if key == "first" else b"HTTP/1.1 401"), answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_full_queue_answers_429_and_the_rest_is_served(served: Served) -> None:
    with served.http.stream("POST", "/v1/completions", json=LONG | {"n": 4, "stream": True}) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # kept: without it the client would close the stream
        next(lines)
        refused = served.post("/v1/completions", prompt="x")
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert served.http.get("/ready").status_code == 429 and served.http.get("/health").status_code == 200
        assert served.http.get("/load").json() == {"server_load": 4}
        with pytest.raises(openai.RateLimitError, match="try again later"):
            served.client().completions.create(model=MODEL, prompt="x")
    served.assert_idle()
    assert served.post("/v1/completions", prompt="x").status_code == 200


def test_every_refused_request_is_counted_by_its_status(served: Served) -> None:
    """Whatever refuses it: its body, its fields, its model, the queue. What pages and probes ask for is no request."""
    def counts() -> dict[str, int]:
        text = served.http.get("/metrics").text
        return {found[1]: int(found[2])
                for found in re.finditer(r'vllm:requests_refused_total\{.*status="(\d+)"\} (\d+)', text)}

    before = counts()
    assert set(before) >= {"400", "429"}, "they are there before the first, for rates"
    for body in ({"prompt": "x", "temperature": -1}, {"prompt": "x" * 500}, {}, {"prompt": "x", "nonsense": 1}):
        served.error("/v1/completions", **body)
    served.error("/v1/completions", 404, prompt="x", model="another")
    served.error("/v1/completions", 413, prompt="x" * 30_000)
    for path in ("/favicon.ico", "/v1/models/another"):
        assert served.http.get(path).status_code == 404
    assert served.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    after = counts()
    assert {status: after[status] - before.get(status, 0) for status in after} == {
        "400": 4, "404": 1, "413": 1} | {status: 0 for status in after if status not in ("400", "404", "413")}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(served: Served, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nContent-Type: application/json\r\nContent-Length: "
                    + str(len(body)).encode() + b"\r\n\r\n" + body)
        served.wait_for(lambda: served.llm.engine.scheduler.num_running == 1)
    before = served.llm.engine.stats.num_steps
    served.assert_idle()
    assert served.llm.engine.stats.num_steps - before < 100, "it was not ended but ran out"


def test_a_reader_that_does_not_read_blocks_nobody(served: Served) -> None:
    with served.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "logprobs": 5}):
        began = time.monotonic()
        assert served.post("/v1/completions", prompt="y", max_tokens=4).status_code == 200
        assert time.monotonic() - began < 120
    served.assert_idle()


def test_many_at_once_are_all_answered(served: Served) -> None:
    statuses: list[int] = []
    ask = {"prompt": "many", "max_tokens": 3}
    threads = [threading.Thread(target=lambda: statuses.append(served.post("/v1/completions", **ask).status_code))
               for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 12 and set(statuses) <= {200, 429} and 200 in statuses
    served.assert_idle()


def test_every_route_but_health_wants_a_key(guarded: Served) -> None:
    open_routes = {"/health", "/ready", "/ping"}  # and the pages at / and /docs
    for route in guarded.http.get("/openapi.json", headers={"Authorization": "Bearer first"}).json()["paths"]:
        for method in ("GET", "POST"):
            status = guarded.http.request(method, route.replace("{name}", "x")).status_code
            assert (status == 401) == (route not in open_routes), (method, route, status)
    assert guarded.http.get("/nothing").status_code == 401
    for header in ("Bearer third", "first", "Basic first", "Bearer firs", "Bearer firstt"):
        assert guarded.http.get("/v1/models", headers={"Authorization": header}).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        guarded.client("third").models.list()
    assert list(guarded.client("first").models.list()) and list(guarded.client("second").models.list())


def test_bodies_are_kept_for_no_client_without_a_key(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not on routes that are open: a thousand clients could fill the memory."""
    monkeypatch.setattr(Guard, "_read", lambda *_: pytest.fail("a body is read"))
    for path, status in (("/ping", 200), ("/health", 405), ("/ready", 405), ("/", 405), ("/docs", 405)):
        answer = guarded.http.post(path, content=b"x" * 1_000_000)
        assert answer.status_code == status, path
        assert guarded.http.get("/health").status_code == 200
    assert guarded.http.post("/v1/completions", content=b"x" * 1_000_000).status_code == 401


def test_bodies_count_for_their_keys_until_they_are_answered() -> None:
    """An answer, a refusal, a client that leaves: nothing stays counted, and another key is served meanwhile."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(guard._bodies.held))
        if scope["path"] == "/fails":
            raise OSError
        await send({"type": "http.response.start", "status": 200})
        left.append(dict(guard._bodies.held))

    def ask(key: str, path: str, *parts: bytes) -> int | None:
        coming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        coming.append({"type": "http.request", "body": b""} if path != "/left" else {"type": "http.disconnect"})
        statuses: list[int] = []

        async def receive() -> Any:
            return coming.pop(0)

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        asyncio.run(guard({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send))
        return statuses[0] if statuses else None

    seen: list[Any] = []
    left: list[Any] = []  # counted once the answer begins
    guard = Guard(app, keys=["one", "two"], max_body_bytes=100)
    assert ask("one", "/x", b"x" * 60, b"x" * 30) == 200 and list(seen[-1].values()) == [90] and left == [{}]
    with pytest.raises(OSError):
        ask("one", "/fails", b"x")
    assert ask("one", "/left", b"x" * 50) is None
    assert ask("one", "/x", b"x" * 50, b"x" * 60) == 413
    assert not guard._bodies.held
    full = HeldBody(guard._bodies)
    full.add(guard._digest(b"one").hex()[:16], 64 * 100)
    assert ask("one", "/x", b"x") == 429 and ask("two", "/x", b"x") == 200


def test_a_large_answer_is_sent_in_pieces() -> None:
    """Each piece waits until the connection has room for it, which would copy the whole answer otherwise."""
    body, sent = os.urandom(3 * PIECE_BYTES + 5), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more_body in (True, False):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(app, keys=[], max_body_bytes=100)
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/x", "headers": []}, receive, send))
    pieces = sent[1:]
    assert max(len(piece["body"]) for piece in pieces) <= PIECE_BYTES
    assert b"".join(piece["body"] for piece in pieces) == body + body
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_a_key_whose_requests_hold_too_many_bytes_is_told_to_wait(guarded: Served) -> None:
    bodies = HeldBodies(100)
    one, more, other = HeldBody(bodies), HeldBody(bodies), HeldBody(bodies)
    one.add("a", 64 * 100)
    with pytest.raises(ApiError) as refused:
        more.add("a", 1)
    assert refused.value.status == 429
    other.add("b", 1)
    for body in (one, one, more, other):
        body.release()
    assert not bodies.held


def test_prefix_hits_do_not_cross_keys_or_salts(guarded: Served) -> None:
    def hits(key: str, **extra: Any) -> int:
        answer = guarded.client(key).completions.create(model=MODEL, prompt="secret " * 10, max_tokens=1,
                                                        extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert hits("first") == 0 and hits("first") > 0
    assert hits("second") == 0 and hits("second") > 0
    assert hits("first", cache_salt="a") == 0 and hits("first", cache_salt="a") > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that has no token yet when its time is up has the status of other requests."""
    monkeypatch.setattr(served.service, "config", replace(served.service.config, request_timeout=0.5))
    answer = served.http.post("/v1/completions", json=LONG | {"stream": stream})
    assert "took longer than 0.5 seconds" in answer.text
    assert answer.status_code == 504 or (stream and answer.text.endswith("data: [DONE]\n\n"))
    served.assert_idle()


def test_a_request_may_have_a_deadline_of_its_own(served: Served) -> None:
    slow = {"prompt": "x", "max_tokens": 190, "ignore_eos": True, "timeout": 0.001}
    assert "0.001 seconds" in served.error("/v1/completions", 504, **slow)["message"]
    assert served.error("/v1/completions", prompt="x", timeout=0)["param"] == "timeout"
    served.assert_idle()


def test_no_web_page_may_call_it_unless_allowed(served: Served) -> None:
    answer = served.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)
