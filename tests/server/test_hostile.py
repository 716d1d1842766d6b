"""Requests that would cost others their time, and mistakes of integrators, which are answered with what to change."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

import outrider.server.chat as chat_module
import outrider.server.http_protocol as http_protocol
from outrider.async_llm import AsyncLLM
from outrider.server.messages import ContentBlocks
from outrider.server.work import EventStream
from tests.server.rig import PATIENCE, Served, served_fixture, serving, tiny_engine

CHAT = [{"role": "user", "content": "Go."}]

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine), tool_call_parser="hermes")


def test_a_huge_n_makes_no_parsers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*args: Any, **options: Any) -> None:
        made.append(args)
        assert len(made) < 10, "the event loop would be busy for minutes"

    monkeypatch.setattr(chat_module, "output_parser", counted)
    assert served.error("/v1/chat/completions", messages=CHAT, n=10**9)["param"] == "n"
    assert len(made) == 1


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"stop": ["x"] * 65}, "stop", "at most 64"), ({"stop": "x" * 20_000}, "stop", "16384 characters"),
    ({"bad_words": ["x"] * 1025}, "bad_words", "at most 1024"), ({"bad_words": ["x" * 20_000]}, "bad_words", "16384"),
    ({"allowed_token_ids": [1] * 257}, "allowed_token_ids", "more than the vocabulary's 256"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "more than the vocabulary's 256"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "not supported"),
])
def test_lists_that_are_too_long_and_fields_without_effect(served: Served, fields: dict[str, Any], param: str,
                                                           words: str) -> None:
    error = served.error("/v1/completions", prompt="a", **fields)
    assert error["param"] == param and words in error["message"]


def test_an_error_repeats_no_long_name_of_a_field(served: Served) -> None:
    for body in ({"k" * 5000: 1}, {"messages": [{"k" * 5000: 1}]}):
        assert len(json.dumps(served.error("/v1/chat/completions", **body))) < 400


def test_hints_to_other_servers_are_taken(served: Served) -> None:
    hints = {"prompt_cache_key": "k", "safety_identifier": "me", "return_tokens_as_token_ids": False}
    assert served.post("/v1/chat/completions", messages=CHAT, max_tokens=1, **hints).status_code == 200
    assert served.post("/v1/responses", input="x", max_output_tokens=1, **hints).status_code == 200


@pytest.mark.parametrize(("headers", "words"), [
    ({"content-type": "application/x-www-form-urlencoded"}, "Content-Type: application/json"),  # what curl -d sends
    ({"content-type": "text/plain"}, "Content-Type: application/json"), ({}, "Content-Type: application/json"),
    ({"content-type": "application/json", "content-encoding": "gzip"}, "compressed"),
])
def test_a_body_that_is_called_something_else(served: Served, headers: dict[str, str], words: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    if "content-encoding" in headers:
        body = gzip.compress(body)
    answer = served.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def talk(served: Served, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server says until it closes the connection. `pause`: seconds between the parts."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        answer = b""
        with suppress(ConnectionError):  # a server that refuses a request does not read the rest of it
            for part in parts:
                raw.sendall(part)
                time.sleep(pause)
            while got := raw.recv(1 << 16):
                answer += got
        return answer


def test_a_head_without_an_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any key is known."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    assert b"400" in talk(served, head, b"a" * 40_000, b"a" * 40_000)
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    assert talk(served) == b"" and talk(served, head) == b""


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("kind", ["field", "fields", "url"])
def test_a_head_of_exactly_the_bound(served: Served, kind: str, num_parts: int) -> None:
    """The piece in which a head ends counts, too."""
    rest = b"GET /health%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n"
    for more, status in ((0, b"200 OK"), (1, b"400 Bad Request\r\n")):
        size = http_protocol.MAX_HEAD_BYTES - len(rest % (b"", b"")) + more
        long = {"url": (b"?" + b"a" * (size - 1), b""), "field": (b"", b"X: " + b"a" * (size - 5) + b"\r\n"),
                "fields": (b"", (b"X: " + b"a" * 507 + b"\r\n") * (size // 512 - 1)
                           + b"X: " + b"a" * (size % 512 + 507) + b"\r\n")}[kind]
        head = rest % long
        assert len(head) == http_protocol.MAX_HEAD_BYTES + more
        cuts = [len(head) * i // num_parts for i in range(num_parts + 1)]
        assert status in talk(served, *(head[start:end] for start, end in itertools.pairwise(cuts)), pause=0.02)


def test_fields_behind_a_body_are_bounded_and_not_read(served: Served) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    body = b"\r\n%x\r\n%s\r\n0\r\n" % (len(b'{"prompt":"a"}'), b'{"prompt":"a"}')
    kind = b"Content-Type: application/json\r\n"
    assert b"200 OK" in talk(served, head + kind + body + b"X: a\r\n\r\n")
    assert b"send the body as JSON" in talk(served, head + body + kind + b"\r\n")
    for trailer in (b"X: " + b"a" * 70_000, b"X: aaa\r\n" * 10_000):
        assert b"400 Bad Request" in talk(served, head + kind + body, trailer[:50_000], trailer[50_000:], pause=0.05)


def test_requests_one_after_the_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of heads do not add up, and bodies do not count."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "cache_salt": "s" * 50_000}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\nX-Long: " + b"a" * 60_000 + b"\r\n\r\n"
    assert talk(served, *[one % len(body) + body] * 3, last).count(b"200 OK") == 4


def test_requests_that_do_not_wait_for_answers_are_few(served: Served) -> None:
    """The parser reads all that has come at once: 256 KB of requests held up every other client for seconds, and no key
    is needed for that."""
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert talk(served, one * 10 + b"GET /version HTTP/1.0\r\n\r\n").count(b"200 OK") == 11
    answers = talk(served, one * 10_000)
    assert answers.count(b"200 OK") <= http_protocol.MAX_WAITING + 1 and b"400 Bad Request" in answers


def test_requests_of_a_client_that_has_left_log_no_errors(monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """Each would be an error of thirty lines in the log."""
    monkeypatch.setattr(asyncio, "run", pytest.importorskip("uvloop").run)
    body = json.dumps({"prompt": "a", "max_tokens": 20}).encode()
    one = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    with serving(lambda: AsyncLLM.around(tiny_engine().engine)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        for _ in range(5):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(one * 10)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_tiny_chunks_and_fields_are_few(served: Served) -> None:
    head = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: application/json\r\n\r\n")
    blank, rest = b"1\r\n \r\n", b"e\r\n{\"prompt\":\"a\"}\r\n0\r\n\r\n"
    assert b"200 OK" in talk(served, head + blank * 1000 + rest)
    assert b"400 Bad Request" in talk(served, head + blank * 2000 + rest)
    small = b"100\r\n" + b" " * 256 + b"\r\n"
    assert b"200 OK" in talk(served, head + small * 5000 + rest)
    assert b"too large" in talk(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 300 + b"\r\n")


OFFER = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
         b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: application/json\r\n")


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_offer_of_another_protocol(served: Served, is_cut: bool) -> None:
    """As Java's client makes it, with a body behind it: the answer comes in this protocol, and so may more requests."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    sent = OFFER + b"Content-Length: %d\r\n\r\n" % len(body) + body
    sent += OFFER + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    sent += b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    parts = [sent[i : i + 1] for i in range(len(sent))] if is_cut else [sent]
    assert talk(served, *parts).count(b"200 OK") == 3
    assert b"400" in talk(served, b"CONNECT x:80 HTTP/1.1\r\nHost: [::]\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")


def test_methods(served: Served) -> None:
    assert served.http.get("/v1/completions").headers["allow"] == "POST"
    for path in ("/health", "/ping", "/ready"):
        assert served.http.head(path).status_code == 200


def test_errors_use_the_names_of_their_own_api(served: Served) -> None:
    assert served.error("/v1/responses", input="x", n=2)["message"] == "there is no field 'n'"
    error = served.error("/v1/responses", input="x", max_output_tokens=0)
    assert error["param"] == "max_output_tokens" and error["message"].startswith("max_output_tokens must be")
    message = {"messages": CHAT, "max_tokens": 1}
    assert served.error("/v1/messages", **message, stop_sequences=[""])["param"] == "stop_sequences"
    assert served.error("/v1/embeddings", input="a", dimensions=0)["param"] == "dimensions"


@pytest.mark.parametrize(("path", "param", "body"), [
    ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}),
    ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ("/v1/responses", "input", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}),
    ("/v1/messages", "messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document"}]}]}),
])
def test_other_media_are_refused_by_name(served: Served, path: str, param: str, body: dict[str, Any]) -> None:
    error = served.error(path, **body)
    assert error["param"] == param and "texts and images are the only media" in error["message"]


def test_thousands_of_choices(served: Served) -> None:
    """More than a parser follows at once."""
    choices = [f"c{i}" for i in range(3000)]
    answer = served.post("/v1/completions", prompt="a", max_tokens=9, structured_outputs={"choice": choices})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in choices


def test_the_chosen_token_is_among_the_top_ones(served: Served) -> None:
    """Also where it was not likely."""
    answer = served.post("/v1/completions", prompt="a", max_tokens=20, logprobs=1, temperature=5, seed=1,
                         allowed_token_ids=list(range(97, 123)))
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert all(top[token] == value for top, token, value in zip(
        logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True))
    assert max(len(top) for top in logprobs["top_logprobs"]) == 2


def test_a_prompt_is_scored_without_an_answer(served: Served) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "temperature": 0}
    longer = served.post("/v1/completions", max_tokens=1, **body).json()["choices"][0]["logprobs"]
    answer = served.post("/v1/completions", max_tokens=0, **body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"] == {name: values[:3] for name, values in longer.items()}
    assert served.error("/v1/completions", prompt="abc", max_tokens=0)["param"] == "max_tokens"


def test_long_texts_of_many_tokens(served: Served) -> None:
    assert served.post("/detokenize", tokens=[97] * 25_000).json() == {"prompt": "a" * 25_000}


def test_tokens_of_messages_are_counted(served: Served) -> None:
    prompt = {"messages": [{"role": "user", "content": [{"type": "text", "text": "How?"}]}], "system": "Brief.",
              "tools": [{"name": "f", "input_schema": {}}]}
    usage = served.post("/v1/messages", max_tokens=1, **prompt).json()["usage"]
    assert served.post("/v1/messages/count_tokens", **prompt).json() == {"input_tokens": usage["input_tokens"]}
    assert served.error("/v1/messages/count_tokens", messages=[])["param"] == "messages"


def test_an_error_in_a_stream_of_messages_has_a_name(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's clients read events by their names: without one the stream would just end."""
    take, num_taken = ContentBlocks.take, [0]

    def failing(self: ContentBlocks, event: Any) -> Any:
        num_taken[0] += 1
        if num_taken[0] == 3:
            raise RuntimeError("injected")
        return take(self, event)

    monkeypatch.setattr(ContentBlocks, "take", failing)
    text = served.post("/v1/messages", messages=CHAT, max_tokens=30, stream=True, temperature=0).text
    head, data = text.strip().split("\n\n")[-1].split("\ndata: ")
    assert head == "event: error" and json.loads(data)["error"]["type"] == "api_error"
    assert json.loads(data)["type"] == "error" and "injected" not in data
    served.assert_idle()


@pytest.mark.parametrize("num_cancels", [1, 2])
def test_a_reader_that_does_not_read_does_not_keep_a_server_that_ends(num_cancels: int) -> None:
    num_sent = 0

    async def frames() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: {}\n\n"

    async def receive() -> Any:
        await asyncio.sleep(600)

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 3:
            await asyncio.sleep(600)

    async def run() -> None:
        task = asyncio.ensure_future(EventStream(frames(), None)({"type": "http"}, receive, send))
        for _ in range(num_cancels):
            await asyncio.sleep(0.05)
            task.cancel()
        await asyncio.wait_for(task, PATIENCE)

    asyncio.run(run())
    assert num_sent > 4, "it was told that the server ends"


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    """Its first event has been sent, so its status cannot say so any more."""
    sent: list[dict[str, Any]] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"data: {}\n\n"
        await asyncio.sleep(600)

    async def receive() -> Any:
        await asyncio.sleep(600)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(EventStream(frames(), 0.05)({"type": "http"}, receive, send))
    assert sent[0]["status"] == 200 and b"took longer than 0.05 seconds" in sent[-1]["body"]
    assert sent[-1]["body"].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("num_rounds", range(8))
def test_a_stream_that_the_server_cuts_off_says_so(num_rounds: int) -> None:
    """At the end of the time for a shutdown, the web server cancels whatever still runs, and so does the event loop
    some rounds later, when the web server has ended."""
    sent: list[bytes] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"data: {}\n\n"
        await asyncio.sleep(600)

    async def receive() -> Any:
        await asyncio.sleep(600)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        task = asyncio.ensure_future(EventStream(frames(), None)({"type": "http"}, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        task.cancel()
        await task  # not cancelled: nobody need log it

    asyncio.run(run())
    assert b"the server is stopping" in sent[-1] and sent[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("fields", "words"), [
    ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["e"]}, "bad_words, structured_outputs"),
    ({"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [97]}, "allowed_token_ids, structured_outputs"),
    ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids, bad_words"),
    ({"allowed_token_ids": [2], "min_tokens": 3}, "allowed_token_ids, min_tokens"),
])
def test_parameters_that_contradict_each_other(served: Served, fields: dict[str, Any], words: str) -> None:
    """It shows only when there is nothing left to choose; the fault is the client's all the same."""
    assert words in served.error("/v1/completions", prompt="a", max_tokens=9, **fields)["message"]
    streamed = served.post("/v1/completions", prompt="a", max_tokens=9, stream=True, **fields).text
    assert '"code":400' in streamed and words in streamed
    served.assert_idle()


@pytest.mark.parametrize(("choice", "words"), [
    ({"type": {}}, "tool_choice.type"), ({"type": "tool"}, "name is for the type tool"), ({}, "tool_choice.type"),
    ({"type": "auto", "name": "f"}, "name is for"), ({"type": "any", "parallel": 1}, "no field 'tool_choice.parallel'"),
    ({"type": "any", "disable_parallel_tool_use": "no"}, "disable_parallel_tool_use"),
])
def test_a_choice_of_tools_in_messages_that_is_none(served: Served, choice: Any, words: str) -> None:
    for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
        error = served.error(path, messages=CHAT, tools=[{"name": "f", "input_schema": {}}], tool_choice=choice, **more)
        assert error["param"] == "tool_choice" and words in error["message"]
