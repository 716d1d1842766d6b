"""JSON schemas: reads the schema that a request asks for, the style of its JSON, and the schemas inside a schema.
Importing this does not need llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.core.structured import StructuredOutputsParams

# Keywords of a schema that hold schemas: by name, in a list, or one alone.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
          "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def asked_schema(asked: StructuredOutputsParams) -> dict[str, Any]:
    """The JSON schema of a request whose output is JSON. A request that gives no schema may output any object."""
    if asked.json is None:
        return {"type": "object"}
    schema: dict[str, Any] = json.loads(asked.json) if isinstance(asked.json, str) else asked.json
    return _closed(schema) if asked.disable_additional_properties else schema


def json_options(asked: StructuredOutputsParams) -> dict[str, Any]:
    """The style in which JSON is written, as llguidance's options. They override the schema's own settings."""
    options: dict[str, Any] = {"whitespace_flexible": False, "lenient": False}
    if asked.whitespace_pattern is not None:
        return options | {"whitespace_flexible": True, "whitespace_pattern": asked.whitespace_pattern}
    comma, colon = (",", ":") if asked.disable_any_whitespace else (", ", ": ")
    return options | {"item_separator": comma, "key_separator": colon}


def _closed(schema: Any) -> Any:
    """The schema, changed so that objects that name their properties allow no others."""
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
