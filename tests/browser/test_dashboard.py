"""The page at / in a real browser: `make test-browser`. Not part of `make test`, because a browser is needed."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator

import pytest

from outrider.async_llm import AsyncLLM
from tests.browser.webdriver import Browser, browser
from tests.server.rig import Served, served_fixture, serving, tiny_engine

pytestmark = pytest.mark.skipif("OUTRIDER_BROWSER" not in os.environ, reason="needs a browser: make test-browser")

served = served_fixture()


@pytest.fixture
def page(served: Served) -> Iterator[Browser]:
    with browser() as page:
        page.open(served.url)
        yield page
        assert not page.problems()


@pytest.fixture(scope="module")
def same_page(served: Served) -> Iterator[Browser]:
    """For tests that leave the page as it is: a browser takes seconds to start."""
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
        page.wait_for("return /^[1-9]\\d* requests?, \\d+ aborted, 0 failed, 0 refused$/.test("
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


def test_refused_requests_are_counted(page: Browser, served: Served) -> None:
    page.wait_for("return / refused$/.test(document.getElementById('totals').textContent)")
    before = int(page.text("#totals").split()[-2])
    for _ in range(8):
        served.error("/v1/completions", prompt="x", temperature=-1)
    page.wait_for(f"return / {before + 8} refused$/.test(document.getElementById('totals').textContent)")


def test_charts_and_the_chat_outlive_a_reload(page: Browser, served: Served) -> None:
    page.say("hello")
    page.wait_for("return document.querySelector('.note') !== null")
    page.wait_for("return history.tokens?.length >= 3")
    first = page.run("return history.tokens[0][0]")
    page.open(served.url)
    assert page.run("return history.tokens[0][0]") == first
    assert page.text("#talk .user") == "hello" and page.text("#talk .assistant")
    page.run("document.getElementById('fresh').click()")
    page.open(served.url)
    assert not page.text("#talk") and page.run("return messages.length") == 0


def test_a_server_without_a_drafter_shows_no_charts_of_drafts(page: Browser) -> None:
    shown = "return [...document.querySelectorAll('.drafts, #legend')].map(part => part.checkVisibility())"
    page.wait_for("return document.getElementById('facts').textContent !== ''")
    assert page.run(shown) == [True] * 3
    with serving(lambda: AsyncLLM.around(tiny_engine(speculative_config=None).engine)) as plain:
        page.open(plain.url)
        page.wait_for("return document.getElementById('facts').textContent !== ''")
        assert page.run(shown) == [False] * 3


def test_enter_sends_and_with_shift_begins_a_line(page: Browser) -> None:
    press = ("const box = document.getElementById('say'), event = new KeyboardEvent('keydown', {key: 'Enter', "
             "shiftKey: arguments[0], isComposing: arguments[1], cancelable: true}); return box.dispatchEvent(event)")
    page.run("document.getElementById('say').value = 'one\\ntwo'; fit()")
    assert page.run("return document.getElementById('say').clientHeight") > 50, "it has room for two lines"
    for is_shift, is_composing in ((True, False), (False, True)):
        assert page.run(press, is_shift, is_composing) is True and not page.text("#talk")
    assert page.run(press, False, False) is False
    assert page.text("#talk .user") == "one\ntwo"
    page.wait_for("return document.querySelector('.note') !== null")


def test_an_answer_can_be_stopped(page: Browser) -> None:
    page.run("document.getElementById('say').value = 'abab'; document.querySelector('form').requestSubmit();"
             "document.getElementById('stop').click()")
    page.wait_for("return document.querySelector('.note') !== null")
    assert page.text("#talk .note") == "stopped"
    assert page.run("return document.getElementById('stop').hidden && !document.getElementById('send').hidden")
    page.say("hello")
    page.wait_for("return document.querySelectorAll('.note').length === 2")
    assert "tokens" in page.run("return document.querySelectorAll('.note')[1].textContent")


def test_a_key_is_asked_for_only_where_the_server_has_one(page: Browser) -> None:
    hidden = "return document.getElementById('key').hidden"
    page.wait_for("return document.getElementById('state').textContent === 'serving'")
    assert page.run(hidden)
    with serving(api_key=("secret",)) as locked:
        page.open(locked.url)
        page.wait_for("return document.getElementById('state').textContent === 'needs a key'")
        assert not page.run(hidden)
        page.run("const box = document.getElementById('key'); box.value = 'secret';"
                 "box.dispatchEvent(new Event('change'))")
        page.wait_for("return document.getElementById('state').textContent === 'serving'")
        assert page.run(hidden)
        page.open(locked.url)
        page.wait_for("return document.getElementById('state').textContent === 'serving'")


@pytest.mark.parametrize(("width", "is_first"), [(400, True), (1280, False)])
def test_the_chat_comes_first_on_a_narrow_screen(page: Browser, width: int, is_first: bool) -> None:
    page.resize(width, 800)
    page.wait_for("return document.getElementById('facts').textContent !== ''")
    places = page.run("return ['chat', 'c-tokens'].map(id => document.getElementById(id).getBoundingClientRect().top)")
    assert (places[0] < places[1]) is is_first
    assert page.run("return document.documentElement.scrollWidth") == width, "nothing is wider than the screen"


@pytest.mark.parametrize(("text", "html"), [
    ("Plain & <b>text</b>", "<p>Plain &amp; &lt;b&gt;text&lt;/b&gt;</p>"),
    ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("[a](javascript:alert(1)) <img src=x onerror=alert(1)>",
     "<p>[a](javascript:alert(1)) &lt;img src=x onerror=alert(1)&gt;</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("**bold** and *it* and `a*b*`", "<p><strong>bold</strong> and <em>it</em> and <code>a*b*</code></p>"),
    ("2 * 3 * 4, a_b_c, **open", "<p>2 * 3 * 4, a_b_c, **open</p>"),
    ("***both***", "<p><strong><em>both</em></strong></p>"),
    (r"\*not\* it", "<p>*not* it</p>"),
    ("# Head\ntext", "<h3>Head</h3><p>text</p>"),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("3. c\n4. d", '<ol start="3"><li>c</li><li>d</li></ol>'),
    ("1. a\n   - b\n\n2. c", '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
    ("- a\n\nafter", "<ul><li>a</li></ul><p>after</p>"),
    ("1. a\n```\nx\n```\n2. b", '<ol start="1"><li>a</li></ol><pre><code>x</code></pre><ol start="2"><li>b</li></ol>'),
    ("```py\n<b>\n\n **x**\n```\nend", '<pre><code title="py">&lt;b&gt;\n\n **x**</code></pre><p>end</p>'),
    ("```\nunfinished", "<pre><code>unfinished</code></pre>"),
    ("> quoted\n> more", "<blockquote><p>quoted<br>more</p></blockquote>"),
    ("|a|b|\n|-|-|\n|1|*2*|", "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><em>2</em></td></tr></table>"),
    ("---", "<hr>"), ("", ""), ("*" * 400, "<hr>"), ("- " * 50, None), ("> " * 50 + "x", None), ("`" * 7, None),
    ("|" * 50 + "\n" + "|-" * 50, None),
])
def test_what_a_model_writes_is_shown_as_markdown_and_never_as_html(same_page: Browser, text: str,
                                                                    html: str | None) -> None:
    """Text of a model enters the page as text; every beginning of an answer is shown too, while it streams in."""
    show = ("const box = document.createElement('div'), text = arguments[0];"
            "box.append(markdown(text, (parent, from, to) => parent.append(text.slice(from, to))));"
            "return box.innerHTML")
    for end in range(len(text)):
        same_page.run(show, text[:end])
    shown = same_page.run(show, text)
    if html is not None:
        assert shown == html, json.dumps(shown)


def test_drafts_keep_their_colour_within_markdown(page: Browser) -> None:
    page.run("const answer = new Answer(); answer.add('**bo', false); answer.add('ld** and `co', true);"
             "answer.add('de`', false); answer.draw()")
    assert page.run("return document.querySelector('.assistant').innerHTML") == (
        '<p><strong>bo<span class="draft">ld</span></strong><span class="draft"> and </span>'
        '<code><span class="draft">co</span>de</code></p>')
