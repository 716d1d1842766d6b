"""Converts values that a model writes as plain text to the types in the tool's schema."""

from __future__ import annotations

import ast
import math
from typing import Any

from outrider.server.parsers.machine import json_text, read_json

_STRING_NAMES = {"string", "str", "text", "varchar", "char", "enum"}  # as schemas in use spell it
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_BOOLEAN_NAMES = {"boolean", "bool"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_MAX_NESTED = 8


def parameters(schema: Any) -> dict[str, Any]:
    """Return the schemas of a function's parameters. Empty if the client's schema has another form."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def schema_types(schema: Any, depth: int = 0) -> set[str]:
    """Return the names of the types that a schema allows. A schema without types allows strings."""
    if not isinstance(schema, dict) or depth > _MAX_NESTED:
        return {"string"}
    given = schema.get("type")
    found = {name.strip().lower() for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        found |= {_NAMES.get(type(value), "null") for value in schema["enum"]}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for other in schema[keyword] if isinstance(schema.get(keyword), list) else []:
            found |= schema_types(other, depth + 1)
    if "$ref" in schema:
        found.add("other")
    return {"string" if name in _STRING_NAMES else name for name in found} or {"string"}


def typed(text: str, types: set[str]) -> Any:
    """Convert a text to a value of one of the types. It stays a string if no other type fits and a string is allowed,
    or if it is not JSON."""
    said = text.strip().lower()
    if types == {"string"}:
        return text
    if "null" in types and said == "null":
        return None
    if types & _BOOLEAN_NAMES and said in _BOOLEANS:
        return _BOOLEANS[said]
    try:
        value = _read(text)
        json_text(value)
    except (ValueError, RecursionError):
        return text
    if "string" in types and not _fits(value, types):
        return text
    return int(value) if isinstance(value, float) and value.is_integer() and math.isfinite(value) else value


def _read(text: str) -> Any:
    """Parse JSON, or an object or a list in Python's literal syntax."""
    try:
        return read_json(text)
    except ValueError:
        if text.strip()[:1] not in ("{", "["):
            raise
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError("the text is not a value") from error


def _fits(value: Any, types: set[str]) -> bool:
    """Whether a value that is not a string has one of the types."""
    match value:
        case bool() | str() | None:
            return False
        case int():
            return not types.isdisjoint({"integer", "number", "int", "float", "other"})
        case float():
            return not types.isdisjoint({"number", "float", "other"})
        case list():
            return not types.isdisjoint({"array", "list", "other"})
    return not types.isdisjoint({"object", "dict", "other"})
