"""Writes the grammar of a request's structured outputs in llguidance's language. Importing this needs llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from outrider.core.structured import StructuredOutputsParams
from outrider.features.grammars.schemas import asked_schema, json_options
from outrider.features.grammars.structural import structural_grammar

MAX_GBNF_LENGTH = 1 << 13  # characters: the time of a conversion grows with the square


def grammar_text(asked: StructuredOutputsParams) -> str:
    """The text of the grammar for a request's structured outputs. `asked` is the result of `to_plain`. Raises
    ValueError for a text that cannot be read at all."""
    if asked.is_json:
        options: Any = json_options(asked)
        return LLMatcher.grammar_from_json_schema(json.dumps(asked_schema(asked)), overrides=options)
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\n{choice_rule(asked.choice)}")
    return LLMatcher.grammar_from_lark(lark_text(asked))


def lark_text(asked: StructuredOutputsParams) -> str:
    """The grammar text, in Lark's syntax, for a request with a grammar or a structural tag."""
    if asked.structural_tag is not None:
        assert isinstance(asked.structural_tag, str)
        return structural_grammar(asked.structural_tag, _lark, json_options(asked))
    assert asked.grammar is not None
    return _lark(asked.grammar)


def choice_rule(texts: Sequence[str]) -> str:
    """The Lark rule `CHOICE`, which lists the allowed texts. It is a terminal, because the parser could not follow more
    than 2000 alternatives at once."""
    return "CHOICE: " + " | ".join(map(json.dumps, texts))


@lru_cache(maxsize=64)
def _lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax. A grammar in GBNF is converted."""
    if "::=" in grammar and len(grammar) > MAX_GBNF_LENGTH:
        raise ValueError(f"a GBNF grammar has at most {MAX_GBNF_LENGTH} characters: write a longer one in Lark's form")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter has an exception of its own for every kind of mistake
        raise ValueError(str(error) or type(error).__name__) from None
