"""Pieces of text join to the whole for any tokens and any split into runs; stop strings are found across pieces."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from outrider.engine.detokenize import Detokenizer, StopStrings, TokenOffsets
from outrider.engine.text import Tokenizer, TokenizerError

SPECIAL = ["<s>", "</s>"]
PLAIN_ADDED = ["<tool> x"]  # holds a space, which no byte-level token does


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes as tokens, some pairs that cut characters in half, and added tokens."""
    chars = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    table = dict(zip(range(256), _bytes_to_chars(), strict=True))
    cut = ["Ġthe", table[0x98] + table[0x80], "a" + table[0xF0] + table[0x9F], table[0xEF] + table[0xBF] + table[0xBD]]
    return _with_added(models.BPE({t: i for i, t in enumerate([*chars, *cut])}, []), decoders.ByteLevel())


def _bytes_to_chars() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def sentencepiece_tokenizer(strips: bool = True) -> Tokenizer:
    words = ["▁", "▁▁", "▁Hello", "▁world", "ing", "é", "▁日本", "<0x4", "�"]
    vocab = {t: i for i, t in enumerate([*(f"<0x{b:02X}>" for b in range(256)), *words])}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    return _with_added(models.BPE(vocab, [], byte_fallback=True), decoders.Sequence([*steps, *strip]))


def metaspace_tokenizer() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["▁", "▁a", "b", "▁▁c", "日"])}
    return _with_added(models.BPE(vocab, []), decoders.Metaspace())


def _with_added(model: models.Model, decoder: decoders.Decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "sentencepiece_unstripped": sentencepiece_tokenizer(strips=False),
    "metaspace": metaspace_tokenizer(),
}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte-level tokens of a text, one for each byte."""
    ids = [tokenizer.token_to_id(_bytes_to_chars()[byte]) for byte in text.encode()]
    return [i for i in ids if i is not None]


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, list[list[int]], bool]:
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    # Two ids beyond the vocabulary: a model's may be padded.
    token = st.integers(0, TOKENIZERS[name].vocab_size + 1)
    return name, draw(st.lists(st.lists(token, max_size=5), max_size=12)), draw(st.booleans())


@given(runs())
def test_pieces_join_to_the_whole_for_any_tokens_and_runs(case: tuple[str, list[list[int]], bool]) -> None:
    name, split, skip = case
    tokenizer = TOKENIZERS[name]
    whole = [token for run in split for token in run]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(run) for run in split]
    assert [len(p) for p in pieces] == [len(run) for run in split]
    text = "".join(piece for run in pieces for piece in run) + detokenizer.finish()
    assert text == tokenizer.decode(whole, skip_special_tokens=skip)
    # A token's piece does not depend on the run it came in.
    again = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert [again.feed([token])[0] for token in whole] == [piece for run in pieces for piece in run]


@given(runs())
def test_offsets_of_tokens_rise_and_stay_within_the_text(case: tuple[str, list[list[int]], bool]) -> None:
    name, split, skip = case
    tokenizer = TOKENIZERS[name]
    offsets = TokenOffsets(tokenizer, skip_special_tokens=skip)
    found = [offset for run in split for offset in offsets.feed(run)]
    whole = [token for run in split for token in run]
    text = tokenizer.decode(whole, skip_special_tokens=skip)
    assert found == sorted(found) and all(0 <= offset <= len(text) for offset in found) and len(found) == len(whole)


@given(st.text(max_size=12), st.booleans())
def test_every_byte_of_a_character_has_the_offset_of_the_character(text: str, falls_back: bool) -> None:
    tokenizer = TOKENIZERS["sentencepiece_unstripped" if falls_back else "byte_level"]
    ids = list(text.encode()) if falls_back else ids_of(tokenizer, text)
    expected = [i for i, char in enumerate(text) for _ in char.encode()]
    assert tokenizer.decode(ids) == text and TokenOffsets(tokenizer).feed(ids) == expected


@pytest.mark.parametrize(("name", "tokens", "expected"), [
    ("byte_level", ["a", "aðŁ", "ĺĢ", "Ġthe", "</s>", "x"], [0, 1, 2, 3, 7, 7]),  # aa😀 thex
    ("byte_level", ["Ã", "a", "b"], [0, 1, 2]),  # a byte that begins a character and is none: �ab
    ("sentencepiece", ["▁Hello", "▁world", "ing"], [0, 5, 11]),
    ("sentencepiece", ["<0xE6>", "<0x97>", "<0xA5>", "<0xC3>", "<0xA9>", "▁Hello", "ing"], [0, 0, 0, 1, 1, 2, 8]),
])
def test_where_tokens_begin(name: str, tokens: list[str], expected: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert TokenOffsets(tokenizer).feed([tokenizer.backend.token_to_id(token) for token in tokens]) == expected


@given(st.text(max_size=20))
@example("日本 naïve 👩‍👩‍👧 ok")
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    pieces = detokenizer.feed(ids_of(tokenizer, text))
    assert "".join(pieces) == text and detokenizer.finish() == ""
    # Each piece is empty or the character that its byte completed.
    assert [p for p in pieces if p] == list(text)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "a日")[:-1]
    assert detokenizer.feed(ids) == ["a", "", ""]
    assert "a" + detokenizer.finish() == tokenizer.decode(ids) == "a�"


def test_only_the_first_text_loses_its_leading_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    start, hello, world, byte = (tokenizer.token_to_id(t) for t in ("<s>", "▁Hello", "▁world", "<0x0A>"))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed([start, hello, start, world, byte, byte, world]) == (
        ["", "Hello", "", " world", "", "", "\n\n world"]
    )


def test_a_decoder_that_looks_ahead_is_refused_by_name() -> None:
    tokenizer = _with_added(models.BPE({"a": 0}, []), decoders.BPEDecoder())
    with pytest.raises(TokenizerError, match="BPEDecoder"):
        Detokenizer(tokenizer)


def stop_by_characters(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: read character by character; the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


RUNS = st.lists(st.lists(st.text("abc", max_size=4), max_size=4), max_size=6)


@given(RUNS, st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), st.text("abc", max_size=4))
@example([["ab", "ab"], ["c"]], ["ababc"], "")
@example([["abc"]], ["abc", "b"], "")
@example([["a"]], ["ab"], "b")
def test_stop_strings_do_not_depend_on_the_split(split: list[list[str]], stops: list[str], tail: str) -> None:
    whole = "".join(piece for run in split for piece in run)
    expected, expected_stop = stop_by_characters(whole + tail, stops)
    checker = StopStrings(stops)
    text, stop, seen = "", None, ""
    for run in split:
        result = checker.feed(run)
        text, stop = text + result.text, result.stop
        seen += "".join(run[: result.num_tokens])
        if stop is not None:
            # The last token that belongs to the output is the one that completed the stop string.
            assert stop in seen and not any(s in seen[: len(seen) - len(run[result.num_tokens - 1])] for s in stops)
            break
        assert result.num_tokens == len(run)
        # Nothing is shown that a stop string could still take back, and no more is held than that.
        assert seen.startswith(text) and len(seen) - len(text) < max([len(s) for s in stops], default=1)
    else:
        result = checker.finish(tail)
        text, stop = text + result.text, result.stop
    assert (text, stop) == (expected, expected_stop)


def test_the_stop_string_can_be_kept() -> None:
    result = StopStrings(["END"], include_stop=True).feed(["a", "E", "ND more", "x"])
    assert (result.text, result.stop, result.num_tokens) == ("aEND", "END", 3)


def test_the_first_tokens_can_be_exempt() -> None:
    result = StopStrings(["x"], min_tokens=2).feed(["x", "x", "yx", "z"])
    assert (result.text, result.stop, result.num_tokens) == ("xxy", "x", 3)


def test_without_stop_strings_everything_passes() -> None:
    checker = StopStrings([])
    assert checker.feed(["a", "", "b"]).text == "ab"
    assert checker.finish("c").text == "c"
