"""Images on the page at / in a real browser: `make test-browser`."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.browser.webdriver import Browser, browser
from tests.images.made_images import data_url, picture, png
from tests.server.image_rig import ImageEngine, serving_images

pytestmark = pytest.mark.skipif("OUTRIDER_BROWSER" not in os.environ, reason="needs a browser: make test-browser")
GIVE = """
const bytes = Uint8Array.from(atob(arguments[1]), c => c.charCodeAt(0)), data = new DataTransfer();
data.items.add(new File([bytes], "a.png", {type: "image/png"}));
const [kind, place] = arguments[0] === "paste" ? [ClipboardEvent, "say"] : [DragEvent, "chat"];
const key = arguments[0] === "paste" ? "clipboardData" : "dataTransfer";
document.getElementById(place).dispatchEvent(new kind(arguments[0], {[key]: data, bubbles: true, cancelable: true}));
"""


@pytest.fixture
def shown() -> Iterator[tuple[Browser, ImageEngine]]:
    with serving_images() as (served, engine), browser() as page:
        page.open(served.url)
        page.wait_for("return document.getElementById('state').textContent === 'serving'")
        yield page, engine
        assert not page.problems()


def give(page: Browser, way: str, data: bytes, num: int) -> None:
    page.run(GIVE, way, base64.b64encode(data).decode())
    page.wait_for(f"return document.querySelectorAll('#images img').length === {num}")


def wait_for_answers(page: Browser, num: int) -> None:
    page.wait_for(f"return document.querySelectorAll('#talk .note').length === {num} && "
                  "!document.getElementById('send').disabled")


def test_images_are_pasted_dropped_and_shown(shown: tuple[Browser, ImageEngine]) -> None:
    page, engine = shown
    give(page, "paste", png(), 1)
    give(page, "drop", png(4, 3, seed=1), 2)
    page.run("document.querySelector('#images button').click()")  # leaves the first one out
    page.wait_for("return document.querySelectorAll('#images img').length === 1")
    give(page, "drop", png(), 2)
    page.say("What is it?")
    wait_for_answers(page, 1)
    assert engine.text.startswith("[user](image)(image)What is it?[assistant]")
    assert np.array_equal(engine.images[1], picture(5, 7))
    assert page.run("return [...document.querySelectorAll('#talk .user img')].map(i => i.src)") == [
        data_url(png(4, 3, seed=1)), data_url(png())]
    assert page.run("return [...document.querySelectorAll('#talk .user img')].every(i => i.naturalWidth > 0)")
    assert page.run("return document.getElementById('images').hidden")
    page.say("And now?")
    wait_for_answers(page, 2)
    assert len(engine.images) == 2, "the conversation still has them"
    page.run("location.reload()")
    page.wait_for("return document.querySelectorAll('#talk .user img').length === 2")


def test_a_refused_image_comes_back_to_be_changed(shown: tuple[Browser, ImageEngine]) -> None:
    page, _ = shown
    give(page, "paste", b"\x89PNG no image", 1)
    page.say("What?")
    wait_for_answers(page, 1)
    assert "cannot be read" in page.text("#talk .note")
    page.wait_for("return document.querySelectorAll('#images img').length === 1")
    assert page.run("return document.getElementById('say').value") == "What?"
