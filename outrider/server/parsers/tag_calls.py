"""Formats whose calls are tags around parameters: Qwen3-Coder, GLM-4.5, DeepSeek V3.2.

Values are text; the tool's schema says which of them are something else.
"""

from __future__ import annotations

import json
import re
from typing import Any

from outrider.server.parsers.machine import Call, CallRegion, Schemas, read_json

_QWEN_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_GLM_PARAMETER = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DSML_CALL = re.compile(r'<｜DSML｜invoke name="([^"]*)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]*)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL)


def parse_qwen_function(body: str, schemas: Schemas) -> list[Call]:
    """`F>` and its parameters: the body of <function=."""
    name, closed, rest = body.partition(">")
    if not closed or not re.fullmatch(r"[\w.:-]+", name.strip()):
        raise ValueError("no call")
    pairs = [(key, _without_newlines(value)) for key, value in _QWEN_PARAMETER.findall(rest)]
    return [_call(name.strip(), pairs, schemas)]


def parse_qwen(body: str, schemas: Schemas) -> list[Call]:
    functions = re.findall(r"<function=(.*?)(?:</function>|$)", body, re.DOTALL)
    if not functions:
        raise ValueError("no call")
    return [call for function in functions for call in parse_qwen_function(function, schemas)]


def parse_glm(body: str, schemas: Schemas) -> list[Call]:
    name = body.partition("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError("no call")
    return [_call(name, [(key.strip(), value) for key, value in _GLM_PARAMETER.findall(body)], schemas)]


def parse_dsml(body: str, schemas: Schemas) -> list[Call]:
    calls = []
    for name, parameters in _DSML_CALL.findall(body):
        arguments = {key: value if is_text == "true" else json.loads(value)
                     for key, is_text, value in _DSML_PARAMETER.findall(parameters)}
        calls.append(Call.from_values(name, arguments))
    if not calls:
        raise ValueError("no call")
    return calls


def _call(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> Call:
    properties = schemas.get(name, {}).get("properties")
    kinds = properties if isinstance(properties, dict) else {}  # a client may send anything
    arguments = {key: _typed(value, kinds.get(key)) for key, value in pairs}
    return Call.from_values(name, arguments)


def _typed(value: str, schema: Any) -> Any:
    """Text stays text where the schema says so, or says nothing and it is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind and value != "null"):
        return value
    try:
        return read_json(value)
    except ValueError:
        lowered = value.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, value) if kind is not None else value


def _without_newlines(value: str) -> str:
    """The newline after the opening tag and the one before the closing tag belong to the tags."""
    return value.removeprefix("\n").removesuffix("\n")


QWEN3_CODER = (CallRegion("<tool_call>", "</tool_call>", parse_qwen),
               CallRegion("<function=", "</function>", parse_qwen_function))
GLM = (CallRegion("<tool_call>", "</tool_call>", parse_glm),)
DSML = (CallRegion("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", parse_dsml),
        CallRegion("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", parse_dsml))
