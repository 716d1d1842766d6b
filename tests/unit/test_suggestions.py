"""A suggestion is made where a name was misspelt or begun, and not for every word that shares letters with one."""

from __future__ import annotations

import pytest

from outrider.core import fields
from outrider.core.fields import did_you_mean, nearest


@pytest.mark.parametrize(("word", "known", "meant"), [
    ("foo", ["tools"], None), ("--foo", ["--tools", "--too"], "--too"), ("complete", ["simulate", "serve"], None),
    ("/v1/foo", ["/v1/models", "/v1/chat/completions"], None), ("--temperture", ["--temperature"], "--temperature"),
    ("ot", ["to"], None), ("temp", ["temperature", "seed"], "temperature"), ("te", ["temperature"], None),
    ("/v1/chat/completion", ["/v1/completions", "/v1/chat/completions"], "/v1/chat/completions"),
])
def test_only_a_name_that_is_close_is_suggested(word: str, known: list[str], meant: str | None) -> None:
    assert did_you_mean(word, known) == ("" if meant is None else f": did you mean {meant}?")


def test_nothing_is_compared_with_a_word_of_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes seconds, in which a server would do nothing else."""
    monkeypatch.setattr(fields.difflib, "get_close_matches", lambda *_, **__: pytest.fail("it is compared"))
    assert nearest("k" * 1_000_000, ["tools", "temperature"]) is None
    assert did_you_mean("temp" * 20, ["tools", "temperature"]) == ""


def test_a_word_that_may_be_alike_is_compared() -> None:
    assert nearest("temperature" + "x" * 14, ["temperature", "seed"]) == "temperature"
    assert nearest("temperature" + "x" * 15, ["temperature", "seed"]) is None
    assert nearest("a", []) is None
