"""Bodies and stored conversations of too many values are refused before they are built; work is fair between keys."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.server import bodies, body_values
from outrider.server.bodies import HUGE, LARGE, MAX_NUMBERS, MAX_VALUES, parse_bounded
from outrider.server.body_turns import TURN_SECONDS, BodyTurns
from outrider.server.body_values import count_values
from outrider.server.errors import ApiError
from outrider.server.fair_threads import CURRENT_TENANT, LEAST_THREADS, FairThreads
from tests.server.rig import PATIENCE, Served, served_fixture, tiny_engine

MANY = MAX_VALUES + 1

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine), tool_call_parser="hermes",
                        reasoning_parser="deepseek_r1", max_body_bytes=1 << 26)


def marks_outside_of_texts(body: bytes) -> int:
    in_text = is_escaped = False
    total = 0
    for byte in body:
        if in_text and not is_escaped and byte == ord("\\"):
            is_escaped = True
            continue
        if byte == ord('"') and not is_escaped:
            in_text = not in_text
        is_escaped = False
        total += not in_text and byte in b",[{"
    return total


def test_values_are_counted_outside_of_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_values, "SLICE", 5)
    source = random.Random(3)
    for _ in range(2000):
        texts = ["".join(source.choice('",[{\\ax') for _ in range(source.randrange(9))) for _ in range(4)]
        body = json.dumps([texts[0], {texts[1]: [texts[2]]}, texts[3], []]).encode()
        assert count_values(body, 10**9) == marks_outside_of_texts(body), body
    assert count_values(b"[" * 100, 20) < 30, "it goes on behind its limit"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", b'{"messages":[' + b"{}," * MANY + b"{}]}"),
    ("/v1/completions", b'{"prompt":[' + b'"a",' * MANY + b'"a"]}'),
    ("/v1/responses", b'{"input":"x","metadata":{"a":[' + b"[]," * MANY + b"[]]}}"),
    ("/invocations", b'{"prompt":[' + b"0.5," * MANY + b"1]}"),
    ("/v1/completions", b'{"prompt":[' + b"1," * MAX_NUMBERS + b"1,1]}"),
    ("/detokenize", b'{"tokens":[' + b"1," * MAX_NUMBERS + b"1,1]}"),
    ("/v1/completions", b'{"prompt":[' + b'"a",' * MANY),  # no JSON
], ids=lambda value: value[:24] if isinstance(value, str) else "")
def test_a_body_of_too_many_values_is_refused(served: Served, path: str, body: bytes,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the body is parsed"))
    answer = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413, answer.text
    assert b"the body has more than " in answer.content


def test_commas_in_texts_are_no_values() -> None:
    body = {"prompt": ["," * 3 * MANY, "[" * MANY, '\\"{,' * MANY], "stop_token_ids": list(range(300_000))}
    assert parse_bounded(json.dumps(body).encode()) == body
    text = json.dumps({"prompt": str(list(range(100_000))), "a": "x"}).encode()
    assert parse_bounded(text) == json.loads(text)
    with pytest.raises(ApiError):  # numbers in a text are not those that the count leaves out
        parse_bounded(json.dumps({"prompt": str(list(range(100_000))), "a": [[]] * MANY}).encode())


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
    ("/v1/messages", {"max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}] * 1025}, "tools"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ("/v1/responses", {"input": "a", "metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ("/v1/responses", {"input": "a", "metadata": {"a": "x" * 513}}, "metadata"),
    ("/v1/responses", {"input": "a", "metadata": {"a": []}}, "metadata"),
    ("/detokenize", {"tokens": [1] * 65_537}, "tokens"),
    ("/v1/completions", {"prompt": [[1] * 300, [1]]}, "prompt"),
])
def test_a_field_of_too_many_values_is_refused_by_name(served: Served, path: str, fields: dict[str, Any],
                                                       param: str) -> None:
    body = fields if set(fields) & {"input", "prompt", "tokens"} else fields | {
        "messages": [{"role": "user", "content": "x"}]}
    assert served.error(path, **body)["param"] == param


@pytest.mark.parametrize("num", [1, 2000])
def test_what_is_wrong_with_a_large_body_is_said_as_with_a_small_one(served: Served, num: int) -> None:
    messages = [{"role": "user", "content": "x"}] * num + [{"role": "user", "content": [{"type": "video"}]}]
    error = served.error("/v1/chat/completions", messages=messages)
    assert error["param"] == "messages" and "texts and images are the only media" in error["message"]
    assert served.error("/v1/chat/completions", messages=messages[:num], no_field="x" * LARGE)["param"] == "no_field"
    broken = b'{"prompt": "' + b"x" * LARGE
    answer = served.http.post("/v1/completions", content=broken, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "not valid JSON" in answer.text


def test_a_stored_conversation_of_too_many_values_is_not_continued(served: Served,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request that names it would cost as much as all of it."""
    part = {"type": "reasoning_text", "text": ""}
    item = {"type": "reasoning", "summary": [], "content": [part] * 25_000}
    given = [item, {"role": "user", "content": "x"}]
    first = served.post("/v1/responses", input=given, max_output_tokens=1)
    assert first.status_code == 200, first.text
    read_in = []
    from outrider.server import responses

    messages = responses._messages
    monkeypatch.setattr(responses, "_messages", lambda *args: [read_in.append(threading.current_thread().name),
                                                               messages(*args)][1])
    second = served.post("/v1/responses", input=given, max_output_tokens=1, previous_response_id=first.json()["id"])
    assert second.status_code == 200 and "outrider-work" in read_in[0], "it is read in the event loop"
    error = served.error("/v1/responses", 413, input="x", previous_response_id=second.json()["id"])
    assert error["param"] == "previous_response_id" and f"more than {MAX_VALUES} values" in error["message"]


def test_a_tenant_whose_work_runs_nowhere_gets_a_thread() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(FairThreads(2))
        may_end, started = threading.Event(), list[str]()

        def wait(name: str) -> None:
            started.append(name)
            assert may_end.wait(PATIENCE)

        CURRENT_TENANT.set("one")
        tasks = [asyncio.create_task(asyncio.to_thread(wait, f"one {i}")) for i in range(50)]
        await asyncio.sleep(0)
        for name in ("two", "three"):
            CURRENT_TENANT.set(name)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), PATIENCE) == 5
        assert started == ["one 0", "one 1"]
        tasks[5].cancel()
        await asyncio.gather(tasks[5], return_exceptions=True)
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(started) == 49 and "one 5" not in started

    assert LEAST_THREADS >= 2
    asyncio.run(run())


def test_bodies_of_one_tenant_take_turns_and_others_do_not_wait_for_them() -> None:
    async def run() -> None:
        turns, had = BodyTurns(), list[str]()

        async def wait(tenant: str, name: str) -> None:
            await turns.wait(tenant)
            had.append(name)

        began = time.monotonic()
        tasks = [asyncio.create_task(wait("one", f"one {i}")) for i in range(20)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await wait("two", "two")
        assert had == ["one 0", "two"]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
        assert had[2:] == [f"one {i}" for i in range(1, 20) if i != 3]
        assert time.monotonic() - began > 17 * TURN_SECONDS
        await asyncio.sleep(2 * TURN_SECONDS)
        assert not turns._lines, "tenants are kept"

    asyncio.run(run())


def test_large_bodies_of_one_tenant_are_read_one_after_the_other(served: Served,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs one thread at a time. Small bodies do not wait."""
    at_once, most, read = 0, 0, bodies._read

    def counted(body: bytes, kind: Any) -> Any:
        nonlocal at_once, most
        if len(body) < HUGE:
            return read(body, kind)
        at_once += 1
        most = max(most, at_once)
        try:
            time.sleep(0.02)
            return read(body, kind)
        finally:
            at_once -= 1

    monkeypatch.setattr(bodies, "_read", counted)
    statuses: list[int] = []

    def send(size: int) -> None:
        answer = served.post("/v1/completions", prompt="a", max_tokens=1, cache_salt="s" * size)
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=send, args=(size,)) for size in [HUGE] * 6 + [LARGE] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert most == 1 and statuses == [200] * 9


def test_errors_of_work_are_its_callers() -> None:
    threads = FairThreads(1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(PATIENCE)
    assert threads.submit(lambda value: value + 1, 2).result(PATIENCE) == 3
    threads.shutdown()


def test_a_long_answer_of_tokens_is_written_whole(served: Served) -> None:
    text = "ab" * 4000
    answer = served.post("/tokenize", prompt=text[:150], return_token_strs=True).json()
    assert answer["count"] == 150 and answer["tokens"][:2] == [97, 98] and answer["token_strs"][:2] == ["a", "b"]
    assert served.post("/tokenize", prompt="ab").json()["token_strs"] is None
