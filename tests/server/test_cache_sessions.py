"""Cache sessions over HTTP: a field or a header names them, stored responses continue them, a route drops them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from outrider.async_llm import AsyncLLM
from outrider.cache.sessions import CacheSessions
from outrider.cache.with_media import CacheWithMedia
from outrider.config import EngineConfig
from outrider.server.tenant_secret import kept_secret
from tests.server.rig import MODEL, Served, served_fixture, serving, tiny_engine

PROMPT = "a conversation that several turns continue " * 2


def start() -> AsyncLLM:
    return AsyncLLM.around(tiny_engine(host_cache_memory=16 << 20).engine)


served = served_fixture(start, api_key=("one", "two"))


def sessions_of(served: Served) -> CacheSessions:
    cache = served.llm.engine.scheduler.cache
    assert isinstance(cache, CacheWithMedia)
    return cache.sessions


def names(served: Served) -> list[str]:
    served.assert_idle()
    return [name for _, name in sessions_of(served)._sessions]


def post(served: Served, path: str, key: str = "one", session: str | None = None, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | ({} if session is None else {"X-Cache-Session": session})
    answer = served.http.post(path, json={"model": MODEL} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def drop(served: Served, name: str, key: str = "one") -> bool:
    answer = served.http.delete(f"/v1/cache_sessions/{name}", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200 and answer.json()["id"] == name
    return bool(answer.json()["deleted"])


def test_a_field_or_a_header_names_a_session(served: Served) -> None:
    post(served, "/v1/completions", prompt=PROMPT, max_tokens=2, cache_session="by field")
    post(served, "/v1/completions", prompt=PROMPT + "!", max_tokens=2, session="by header")
    chat = [{"role": "user", "content": PROMPT}]
    post(served, "/v1/chat/completions", messages=chat, max_tokens=2, session="by/chat")
    post(served, "/v1/messages", messages=chat, max_tokens=2, session="by messages")
    post(served, "/v1/completions", prompt=PROMPT, max_tokens=2)
    assert names(served) == ["by field", "by header", "by/chat", "by messages"]
    assert all(session.pages for session in sessions_of(served)._sessions.values())
    for name in names(served):
        assert drop(served, name) and not drop(served, name)
    assert not names(served)


def test_keys_have_sessions_of_their_own(served: Served) -> None:
    post(served, "/v1/completions", prompt=PROMPT, max_tokens=2, cache_session="same")
    post(served, "/v1/completions", "two", prompt=PROMPT, max_tokens=2, cache_session="same")
    assert names(served) == ["same", "same"]
    assert not drop(served, "another") and drop(served, "same", "two") and not drop(served, "same", "two")
    assert names(served) == ["same"] and drop(served, "same")


def test_responses_continue_a_session_without_being_asked(served: Served) -> None:
    first = post(served, "/v1/responses", input=PROMPT, max_output_tokens=3).json()
    assert not names(served), "a response that nobody continues takes no room"
    second = post(served, "/v1/responses", input="and?", max_output_tokens=3, previous_response_id=first["id"]).json()
    third = post(served, "/v1/responses", input="more", max_output_tokens=3, previous_response_id=second["id"])
    assert names(served) == [first["id"]] and third.json()["output"]
    post(served, "/v1/responses", input="named", max_output_tokens=3, previous_response_id=second["id"],
         cache_session="mine")
    assert names(served) == [first["id"], "mine"]
    assert drop(served, first["id"]) and drop(served, "mine")


def test_bad_names_are_refused(served: Served) -> None:
    for body, session in (({"cache_session": ""}, None), ({"cache_session": 5}, None), ({}, "x" * 201)):
        headers = {"Authorization": "Bearer one"} | ({} if session is None else {"X-Cache-Session": session})
        answer = served.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"} | body, headers=headers)
        assert answer.status_code == 400 and "cache_session" in answer.text


def test_metrics_tell_what_was_not_loaded_by_reason(served: Served) -> None:
    cache = served.llm.engine.scheduler.cache
    assert isinstance(cache, CacheWithMedia)
    cache.media.stats.num_unloaded.update({"too small": 2, "too late": 1})
    text = served.http.get("/metrics", headers={"Authorization": "Bearer one"}).text
    assert text.count("# TYPE vllm:cache_unloaded_total counter") == 1
    for reason, count in (("too small", 2), ("too late", 1)):
        assert f'reason="{reason}"}} {count}\n' in text
    for name in ("cache_host_pages{", "cache_host_pages_loaded_total{", "cache_host_bytes_loaded_total{"):
        assert f"vllm:{name}" in text, "the page shows it"


def test_a_key_finds_its_own_pages_after_a_restart(tmp_path: Path) -> None:
    folder, loaded = str(tmp_path / "cache"), []

    def start() -> AsyncLLM:
        return AsyncLLM.around(tiny_engine(disk_cache_dir=folder).engine)

    for key in ("one", "two", "one"):
        with serving(start, kept_secret(EngineConfig("tiny", disk_cache_dir=folder)), api_key=("one", "two")) as served:
            post(served, "/v1/completions", key, prompt=PROMPT, max_tokens=2)
            served.assert_idle()
            cache = served.llm.engine.scheduler.cache
            assert isinstance(cache, CacheWithMedia)
            loaded.append(cache.media.stats.num_loaded["disk"])
    assert loaded[:2] == [0, 0] and loaded[2] > 0
    (tmp_path / "cache" / "secret").write_bytes(b"short")
    assert kept_secret(EngineConfig("tiny", disk_cache_dir=folder)) is None
