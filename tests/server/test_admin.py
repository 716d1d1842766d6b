"""Routes of the server's operator: sleep, wake up, empty the prefix cache."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.server import admin
from tests.server.rig import MODEL, Served, served_fixture, serving

KEY = {"Authorization": "Bearer first"}

served = served_fixture(admin=True, stall_timeout=0.2, request_timeout=30)


def is_sleeping(served: Served) -> bool:
    return served.http.get("/is_sleeping").json()["is_sleeping"]


def sleep_state(served: Served) -> str:
    """The one that /metrics shows."""
    (found,) = re.findall(r'vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} 1\n', served.http.get("/metrics").text)
    return str(found)


def test_requests_wait_while_the_server_sleeps(served: Served) -> None:
    """However long that takes: a server that sleeps is healthy, and its worker is not taken for a stalled one."""
    body = {"prompt": "a b c", "max_tokens": 6, "temperature": 0}
    first, expected = served.llm, served.post("/v1/completions", **body).json()["choices"]
    report = served.http.post("/sleep?level=1")
    assert report.status_code == 200 and report.json()["total_bytes"] > 0 and is_sleeping(served)
    assert "the engine sleeps" in served.http.get("/health").json()["reason"]
    assert sleep_state(served) == "weights_offloaded"
    ready = served.http.get("/ready")
    assert ready.status_code == 503 and "the engine sleeps" in ready.json()["error"]["message"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/v1/completions", **body)
        served.wait_for(lambda: first.engine.num_requests)
        time.sleep(0.8)  # four times the timeout of the watch
        assert served.llm is first and not answer.done()
        assert served.http.post("/wake_up?tags=weights").status_code == 200 and is_sleeping(served)
        assert served.http.post("/wake_up", params={"tags": ["kv_cache", "weights"]}).json()["seconds"] >= 0
        assert answer.result().json()["choices"] == expected
    assert sleep_state(served) == "awake"
    assert not is_sleeping(served) and served.host.num_restarts == 0
    assert served.http.get("/health").content == b"" and served.http.get("/ready").status_code == 200


def test_the_prefix_cache_is_emptied(served: Served) -> None:
    def hits() -> int:
        answer = served.post("/v1/completions", prompt="a prefix " * 10, max_tokens=1).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    hits()
    assert hits() > 0
    assert served.http.post("/reset_prefix_cache").json() == {"success": True} and hits() == 0
    assert served.http.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}


@pytest.mark.parametrize(("path", "param"), [
    ("/sleep?level=3", "level"), ("/sleep?level=one", "level"), ("/sleep?mode=abort", "mode"),
    ("/sleep?levels=1", "levels"), ("/wake_up?tags=kv", "tags"), ("/wake_up?tag=weights", "tag"),
    ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
])
def test_wrong_parameters_are_named(served: Served, path: str, param: str) -> None:
    answer = served.http.post(path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and not is_sleeping(served)


def test_web_pages_of_other_origins_are_refused(served: Served) -> None:
    """A page could send the request without the server's leave, as it needs no body."""
    refused = served.http.post("/sleep", headers={"Origin": "https://example.org"})
    assert refused.status_code == 403 and "--allowed-origins" in refused.text and not is_sleeping(served)
    assert served.http.post("/wake_up", headers={"Origin": served.url}).status_code == 200


def test_the_routes_need_the_flag_and_the_key() -> None:
    with serving() as plain:
        for path in admin.PATHS:
            for method in ("GET", "POST"):
                answer = plain.http.request(method, path)
                assert answer.status_code == 404 and "--admin" in answer.json()["error"]["message"]
    with serving(admin=True, api_key=("first",)) as guarded:
        for path in admin.PATHS:
            assert guarded.http.post(path).status_code == 401
        assert guarded.http.get("/is_sleeping", headers=KEY).json() == {"is_sleeping": False}
        assert guarded.http.get("/v1/models", headers=KEY).json()["data"][0]["id"] == MODEL
