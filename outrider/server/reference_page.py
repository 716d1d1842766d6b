"""The page at /docs: every route with the fields of its body, made from the schema at /openapi.json.

The page is plain HTML without scripts and loads nothing from elsewhere, so it works without another network.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi.responses import HTMLResponse

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 2rem 0 0.3rem } code { font-size: 0.9em }
table { border-collapse: collapse } td { padding: 0.1rem 1rem 0.1rem 0; vertical-align: top }"""
WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false",
         "object": "object", "null": "null"}
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
           "X-Content-Type-Options": "nosniff"}


def reference_page(schema: dict[str, Any]) -> HTMLResponse:
    """Write the page. schema: the application's OpenAPI schema."""
    bodies = schema.get("components", {}).get("schemas", {})
    parts = [_route(method, path, operation, bodies) for path, methods in schema["paths"].items()
             for method, operation in methods.items()]
    title = escape(schema["info"]["title"])
    return HTMLResponse(f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}: routes</title>"
                        f"<style>{STYLE}</style><h1>{title}</h1><p>The routes of this server, and the fields of their "
                        f"bodies. The same as a schema: <code>/openapi.json</code></p>{''.join(parts)}</html>",
                        headers=HEADERS)


def _route(method: str, path: str, operation: dict[str, Any], bodies: dict[str, Any]) -> str:
    text = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
    rows = [_row(field["name"], field["schema"], field.get("required", False))
            for field in operation.get("parameters", ())]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = bodies.get(content.get("$ref", "").rpartition("/")[2], {})
    rows += [_row(name, field, name in body.get("required", ())) for name, field in body.get("properties", {}).items()]
    return f"{text}<table>{''.join(rows)}</table>"


def _row(name: str, field: dict[str, Any], is_required: bool) -> str:
    notes = [note for note in ("required" if is_required else "", field.get("description", "")) if note]
    cells = (f"<code>{escape(name)}</code>", escape(_kind(field)), escape("; ".join(notes)))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _kind(field: dict[str, Any]) -> str:
    """Describe in words which values a field takes, from its schema."""
    match field:
        case {"$ref": str() as place}:
            return place.rpartition("/")[2]
        case {"anyOf": list() as kinds}:
            return " or ".join(dict.fromkeys(_kind(kind) for kind in kinds if kind.get("type") != "null"))
        case {"enum": list() as values}:
            return " or ".join(map(json.dumps, values))
        case {"const": value}:
            return json.dumps(value)
        case {"type": "array"}:
            return f"list of {_kind(field.get('items', {}))}"
    return WORDS.get(field.get("type", ""), "anything")
