"""Prompts that are cut to a number of tokens keep the tokens that the tokenizer puts around a text."""

from __future__ import annotations

import pytest
from tokenizers import processors

from outrider.server.truncation import Side, Truncation
from tests.engine.harness import byte_tokenizer

BEGIN, END = 256, 257


@pytest.mark.parametrize(("num_tokens", "side", "expected"), [
    (9, "left", [BEGIN, *b"abcdef", END]), (8, "right", [BEGIN, *b"abcdef", END]),
    (5, "left", [BEGIN, *b"def", END]), (5, "right", [BEGIN, *b"abc", END]), (3, "left", [BEGIN, *b"f", END]),
    (2, "right", [BEGIN, *b"a"]), (2, "left", [*b"f", END]),
])
def test_tokens_around_the_text_stay(num_tokens: int, side: Side, expected: list[int]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", BEGIN), ("<|end|>", END)])
    assert Truncation(num_tokens, side).encode(tokenizer, "abcdef", add_special_tokens=True) == expected


def test_special_tokens_of_the_text_itself_are_cut_like_others() -> None:
    cut = Truncation(3, "left").encode(byte_tokenizer(), "<|begin|>abc<|end|>", add_special_tokens=True)
    assert cut == [*b"bc", END]
