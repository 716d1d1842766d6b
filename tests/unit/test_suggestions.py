"""A suggestion is made where a name was misspelt or begun, and not for every word that shares letters with one."""

from __future__ import annotations

import pytest

from outrider.core.fields import did_you_mean


@pytest.mark.parametrize(("word", "known", "meant"), [
    ("foo", ["tools"], None), ("--foo", ["--tools", "--too"], "--too"), ("complete", ["simulate", "serve"], None),
    ("/v1/foo", ["/v1/models", "/v1/chat/completions"], None), ("--temperture", ["--temperature"], "--temperature"),
    ("ot", ["to"], None), ("temp", ["temperature", "seed"], "temperature"), ("te", ["temperature"], None),
    ("/v1/chat/completion", ["/v1/completions", "/v1/chat/completions"], "/v1/chat/completions"),
])
def test_only_a_name_that_is_close_is_suggested(word: str, known: list[str], meant: str | None) -> None:
    assert did_you_mean(word, known) == ("" if meant is None else f": did you mean {meant}?")
