"""From what a request asks for to the text of a grammar, as llguidance reads it. Importing this needs llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from outrider.core.structured import StructuredOutputsParams

MAX_GBNF_LENGTH = 1 << 13  # characters: the time of a conversion grows with the square
ANY_OBJECT = '{"type": "object"}'
# Keywords of a schema that hold schemas: by name, in a list, or one alone.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
          "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def grammar_text(asked: StructuredOutputsParams) -> str:
    """`asked` as `to_plain` gives it. Raises ValueError for a text that cannot be read at all."""
    if asked.is_json:
        schema = ANY_OBJECT if asked.json is None else asked.json
        if asked.disable_additional_properties:
            schema = json.dumps(_closed(json.loads(schema) if isinstance(schema, str) else schema))
        return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(asked))
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\n{choice_rule(asked.choice)}")
    assert asked.grammar is not None
    return LLMatcher.grammar_from_lark(_lark(asked.grammar))


def choice_rule(texts: Sequence[str]) -> str:
    """The rule `CHOICE`. A terminal: the parser could not follow more than 2000 alternatives at once."""
    return "CHOICE: " + " | ".join(map(json.dumps, texts))


@lru_cache(maxsize=64)
def _lark(grammar: str) -> str:
    """A grammar in Lark's form, from GBNF if need be."""
    if "::=" in grammar and len(grammar) > MAX_GBNF_LENGTH:
        raise ValueError(f"a GBNF grammar has at most {MAX_GBNF_LENGTH} characters: write a longer one in Lark's form")
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter has an exception of its own for every kind of mistake
        raise ValueError(str(error) or type(error).__name__) from None


def _json_options(asked: StructuredOutputsParams) -> Any:
    """Overrides, so that a schema cannot change them."""
    options: dict[str, Any] = {"whitespace_flexible": False, "lenient": False}
    if asked.whitespace_pattern is not None:
        return options | {"whitespace_flexible": True, "whitespace_pattern": asked.whitespace_pattern}
    comma, colon = (",", ":") if asked.disable_any_whitespace else (", ", ": ")
    return options | {"item_separator": comma, "key_separator": colon}


def _closed(schema: Any) -> Any:
    """The schema with objects that have no properties but those it names."""
    if not isinstance(schema, dict):
        return schema
    own = dict(schema)
    for path, child in subschemas(schema):
        if len(path) == 1:
            own[path[0]] = _closed(child)
        else:
            own[path[0]] = _with_part(own[path[0]], path[1], _closed(child))
    if "properties" in own and "additionalProperties" not in own:
        own["additionalProperties"] = False
    return own


def _with_part(parts: Any, key: str | int, value: Any) -> Any:
    copied = parts.copy()
    copied[key] = value
    return copied


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, str | int] | tuple[str], Any]]:
    """The schemas directly inside a schema, each with its path."""
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            yield from (((keyword, name), child) for name, child in value.items())
        elif keyword in _LISTED and isinstance(value, list):
            yield from (((keyword, index), child) for index, child in enumerate(value))
        elif keyword in _ALONE and isinstance(value, dict):
            yield (keyword,), value
