"""The page at / in a real browser: `make test-browser`. Not part of `make test`, because a browser is needed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator

import pytest

from tests.browser.webdriver import Browser, browser
from tests.server.rig import Served, serving

pytestmark = pytest.mark.skipif("OUTRIDER_BROWSER" not in os.environ, reason="needs a browser: make test-browser")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def page(served: Served) -> Iterator[Browser]:
    with browser() as page:
        page.open(served.url)
        yield page
        assert not page.problems()


def test_charts_move_while_requests_run(page: Browser, served: Served) -> None:
    page.wait_for("return document.getElementById('model').textContent === 'tiny'")
    page.wait_for("return document.getElementById('v-tokens').textContent === '0'")
    blank = page.run("return document.getElementById('c-tokens').toDataURL()")
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            served.post("/v1/completions", prompt="abab" * 8, max_tokens=100, temperature=0, ignore_eos=True)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        page.wait_for("return parseFloat(document.getElementById('v-tokens').textContent) > 0")
        page.wait_for("return document.getElementById('v-ttft').textContent.includes(' / ')")
        page.wait_for("return parseFloat(document.getElementById('v-pages').textContent) > 0")
        page.wait_for("return document.getElementById('v-accept').textContent !== '–'")
        page.wait_for("return parseFloat(document.getElementById('v-drafts').textContent) > 0")
        assert page.run("return document.getElementById('c-tokens').toDataURL()") != blank
        page.wait_for("return /^[1-9]\\d* requests, \\d+ aborted, 0 failed, 0 refused$/.test("
                      "document.getElementById('totals').textContent)")
        assert re.fullmatch(r"context \d+ tokens · CPU, \d+ threads · up \d+ (s|min)", page.text("#facts"))
    finally:
        stop.set()
        thread.join()
    assert page.text("#state") == "serving"


def test_the_chat_streams_with_accepted_drafts_coloured(page: Browser, served: Served) -> None:
    page.wait_for("return document.getElementById('model').textContent === 'tiny'")
    page.run("window.sizes = new Set();"
             "setInterval(() => sizes.add(document.querySelector('.assistant')?.textContent), 1)")
    page.say("abababababababab")
    page.wait_for("return document.querySelector('.note') !== null && !document.getElementById('send').disabled")
    assert "tokens a step" in page.text("#talk .note")
    answer = page.text("#talk .assistant")
    assert answer and page.run("return window.sizes.size") > 2, "the answer came in one piece"
    assert page.run("return document.querySelectorAll('#talk .draft').length") > 0, "no accepted draft is coloured"
    assert page.text("#talk .user") == "abababababababab"


def test_a_refused_chat_says_why_and_the_next_one_works(page: Browser) -> None:
    page.say("refuse this")
    page.wait_for("return document.querySelector('.note') !== null")
    assert "No." in page.text("#talk .note")
    page.say("hello")
    page.wait_for("return document.querySelector('.assistant:last-of-type')?.textContent.length > 0")
