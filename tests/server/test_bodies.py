"""Large bodies are read as small ones are, and hold up nobody meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from outrider.server import bodies, body_json
from outrider.server.bodies import LARGE, parse_bounded
from outrider.server.body_errors import MAX_PROBLEMS, bad_body
from outrider.server.body_json import LONG, SLICE, parse_large
from outrider.server.errors import ApiError
from outrider.server.protocol import CompletionRequest
from tests.server.rig import PATIENCE, serving

SOURCE = random.Random(5)
MANY_FIELDS = ",".join(f'"f{i}":1' for i in range(45_000))
NAMES = '"a",'


def ids(count: int) -> list[int]:
    return [SOURCE.randrange(130_000) for _ in range(count)]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", ":\t")])
@pytest.mark.parametrize("value", [
    {"prompt": ids(40_000)}, {"prompt": [ids(20_000), ids(3), ids(30_000)], "model": "x"}, ids(60_000),
    {"prompt": "x" * 200_000}, {"prompt": str(ids(40_000))}, {"prompt": f"a [{ids(40_000)}", "stop_token_ids": ids(9)},
    {"prompt": ids(40_000), "stop": [str(ids(40_000))]}, {"prompt": [0.5, *ids(40_000)]}, {"n": [-1, *ids(40_000)]},
], ids=lambda value: str(value)[:16])
def test_a_large_body_is_read_as_json_is(value: Any, separators: tuple[str, str]) -> None:
    assert parse_large(json.dumps(value, separators=separators).encode()) == value


@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_texts_are_read_in_pieces_as_json_reads_them(ascii_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece ends in an escape, in a character of several bytes, or between the two halves of one."""
    monkeypatch.setattr(body_json, "LONG", 20)
    parts = ["a", "\\", "\n", '"', "é", "€", "😀", "\ud83d", "\ude00", "\x01", "u", "d8", ",", "[1,2]"]
    for _ in range(3000):
        own = [parts[SOURCE.randrange(len(parts))] for _ in range(SOURCE.randrange(1, 4))]
        texts = ["".join(SOURCE.choices(own, k=SOURCE.randrange(80))) for _ in range(3)]
        text = json.dumps({texts[0]: [texts[1], 1.5, None, {}], "b": {"c": texts[2], "d": [True, [texts[1]]]}},
                          ensure_ascii=ascii_only)
        body = text.encode("utf-8", "surrogatepass")
        assert parse_large(body) == json.loads(body), text
        with pytest.raises(ValueError):
            parse_large(body[:-1])


@pytest.mark.parametrize("body", [
    json.dumps({"prompt": "a\n" * 1_000_000}).encode(), json.dumps({"stop": ["\"\\" * 500] * 1000}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "é" * 20}] * 20_000}).encode(),
], ids=["text", "texts", "objects"])
def test_no_call_into_the_parser_takes_more_than_a_part_of_a_large_body(body: bytes,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser in C keeps the interpreter to itself: 10 MB of line breaks held up all for a third of a second."""
    expected, sizes, loads = json.loads(body), list[int](), json.loads
    monkeypatch.setattr(json, "loads", lambda text: [sizes.append(len(text)), loads(text)][1])
    assert parse_bounded(body) == expected
    assert max(sizes, default=0) <= LONG + 2


@pytest.mark.parametrize("body", [
    b"[" + b"1," * 90_000 + b"]", b"[," + b"1," * 90_000 + b"1]", b'{"p":[' + b"1," * 90_000 + b"1", b"1," * 90_000,
    b"[" + b"1" * 200_000 + b"]", b"[1" + b", " * 90_000 + b"1]", b"[" + b"1 2," * 50_000 + b"1]",
    b"[" + b"01," * 50_000 + b"1]", b"[" + b"1," * 40_000 + b"," + b"1," * 40_000 + b"1]", b"{" + b" " * 200_000,
], ids=lambda body: body[:8].decode())
def test_what_is_no_json_is_refused(body: bytes) -> None:
    for parse in (json.loads, parse_large):
        with pytest.raises(ValueError):
            parse(body)


@pytest.mark.parametrize("body", [
    b"[%s]", b"[%s,]", b"[,%s]", b'{"p":[%s],}', b'{"p":[%s 1],"s":"x"}', b'["a\\"",[%s],"a\\\\",[%s],"a]',
    b'{"p":[%s]}',
])
def test_long_lists_of_wrong_bodies_are_read_in_pieces(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser keeps the interpreter to itself: two million numbers and a comma too many held up all for 0.2 s."""
    body = body.replace(b"%s", b"1" + b",1" * 300_000)
    sizes: list[int] = []
    loads = json.loads

    def counted(text: bytes) -> Any:
        sizes.append(len(text))
        return loads(text)

    monkeypatch.setattr(json, "loads", counted)
    with suppress(ValueError):
        parse_bounded(body)
    assert sizes and max(sizes) < 2 * SLICE


@pytest.mark.parametrize(("text", "told"), [
    (f'{{"prompt":"x",{MANY_FIELDS}}}', "there is no field 'f0'"),
    (f'{{"prompt":"x","stop":[{"1," * 50_000}1]}}', "stop.0: Input should be a valid string"),
    (f'{{"prompt":"x","stop":[{NAMES * 1000}{"1," * 50_000}1]}}', "mistakes, all of them beyond the first 100 items"),
    (f'{{"prompt":"x","stream_options":{{{MANY_FIELDS}}}}}', "there is no field 'stream_options.f0'"),
], ids=["fields", "items", "late items", "inner fields"])
def test_a_body_of_many_mistakes_is_refused_by_the_first(text: str, told: str) -> None:
    """Pydantic keeps the interpreter to itself while it lists them, half a second for a hundred thousand."""
    with pytest.raises((RequestValidationError, ApiError)) as refused:
        bodies._read(text.encode(), CompletionRequest)
    error: Exception = refused.value
    if isinstance(error, RequestValidationError):
        assert len(error.errors()) <= MAX_PROBLEMS
        error = bad_body(error.errors(), error.body)
    assert isinstance(error, ApiError) and told in str(error.body)


def test_blank_lists_are_read() -> None:
    assert parse_large(b"[" + b" " * LARGE + b"]") == []


def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large body waits, half read, until another request has been answered."""
    is_reading, may_go_on = threading.Event(), threading.Event()
    read_numbers = body_json._parse_numbers

    def slow(body: bytes, first: int, last: int) -> list[int]:
        is_reading.set()
        assert may_go_on.wait(PATIENCE)
        return read_numbers(body, first, last)

    monkeypatch.setattr(body_json, "_parse_numbers", slow)
    answers: list[Any] = []
    with serving() as served:
        client = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", prompt=ids(50_000))))
        client.start()
        assert is_reading.wait(PATIENCE)
        began = time.monotonic()
        assert served.http.get("/health").status_code == 200 and time.monotonic() - began < PATIENCE / 2
        may_go_on.set()
        client.join()
        assert answers[0].status_code == 400 and "the prompt has 50000 tokens" in answers[0].json()["error"]["message"]
