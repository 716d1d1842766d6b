"""/invocations, which reads from a body what is asked for, and the page at /docs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.rig import Served, served_fixture, serving

CHAT = [{"role": "user", "content": "Hello"}]
FIXED = {"max_tokens": 3, "temperature": 0}

served = served_fixture()


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": CHAT, **FIXED}), ("/v1/completions", {"prompt": "Hello", **FIXED}),
    ("/v1/embeddings", {"input": "a text"}), ("/pooling", {"input": "a text", "task": "token_embed", "dimensions": 2}),
    ("/score", {"queries": "a", "documents": ["b", "c"]}), ("/rerank", {"query": "a", "documents": ["b", "c"]}),
])
def test_a_body_is_served_as_by_its_own_route(served: Served, path: str, body: dict[str, Any]) -> None:
    own, invoked = (served.post(route, **body, request_id="same") for route in (path, "/invocations"))
    assert own.status_code == invoked.status_code == 200
    changing = re.compile(r'"created":\d+|"cached_tokens":\d+|-?\d+\.\d{4}\d*(e-\d+)?')
    assert changing.sub("", own.text) == changing.sub("", invoked.text)


def test_a_stream_of_an_invocation(served: Served) -> None:
    answer = served.post("/invocations", messages=CHAT, stream=True, **FIXED)
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("body", "param", "words"), [
    ({}, None, "messages, prompt, query, text_1, input"), ({"model": "x"}, None, "messages, prompt"),
    ({"prompt": "x", "temperatur": 1}, "temperatur", "did you mean"), ({"prompt": "x", "n": "two"}, "n", "n: "),
    ({"messages": CHAT, "suffix": "x"}, "suffix", "not supported"), ({"input": []}, "input", "empty"),
])
def test_a_wrong_invocation_is_told_as_by_its_own_route(served: Served, body: dict[str, Any], param: str | None,
                                                        words: str) -> None:
    error = served.error("/invocations", **body)
    assert error["param"] == param and words in error["message"]


def test_an_invocation_must_be_an_object(served: Served) -> None:
    for body in (b"[1]", b"{", b""):
        answer = served.http.post("/invocations", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_the_page_with_all_routes_and_fields(served: Served) -> None:
    page = served.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for path, methods in served.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    assert "<td><code>max_completion_tokens</code></td><td>whole number</td>" in page.text
    assert "<td>left&quot;" not in page.text and "&quot;left&quot; or &quot;right&quot;" in page.text
    assert not re.search(r"""<script|(src|href)\s*=|url\(|https?://""", page.text), "the page loads something"
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_page_needs_no_key() -> None:
    with serving(api_key=("first",)) as guarded:
        assert guarded.http.get("/docs").status_code == 200 and guarded.http.get("/openapi.json").status_code == 401
