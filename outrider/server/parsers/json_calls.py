"""Formats whose calls are JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek V3 and V3.1."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from outrider.server.parsers.machine import Call, CallRegion, Schemas

_DECODER = json.JSONDecoder()


def call_from(value: Any) -> Call:
    """{"name": .., "arguments": {..}}; some models write "parameters" for arguments, or the arguments as text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return Call.from_values(value["name"], arguments)


def parse_one(body: str, schemas: Schemas) -> list[Call]:
    return [call_from(json.loads(body))]


def parse_llama3(body: str, schemas: Schemas) -> list[Call]:
    """Objects with semicolons between them."""
    calls, place = [], 0
    while place < len(body.rstrip()):
        value, place = _DECODER.raw_decode(body, place + len(body[place:]) - len(body[place:].lstrip("; \n\t")))
        calls.append(call_from(value))
    return _some(calls)


def parse_llama3_after_brace(body: str, schemas: Schemas) -> list[Call]:
    return parse_llama3("{" + body, schemas)


def parse_pythonic(body: str, schemas: Schemas) -> list[Call]:
    """[f(a=1), g()] without its first bracket."""
    try:
        tree = ast.parse("[" + body.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError("no calls") from error
    if not isinstance(tree, ast.List):
        raise ValueError("no list")
    return _some([_pythonic(node) for node in tree.elts])


def _pythonic(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("no call")
    arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    return Call.from_values(node.func.id, arguments)


def parse_mistral(body: str, schemas: Schemas) -> list[Call]:
    """Until version 10 a list of objects; from 11 on `F[ARGS]{..}`, with the marker before each."""
    if body.lstrip().startswith("["):
        return _some([call_from(value) for value in json.loads(body)])
    calls = []
    for part in body.split("[TOOL_CALLS]"):
        name, args, arguments = part.partition("[ARGS]")
        if not args:
            raise ValueError("no call")
        name = name.partition("[CALL_ID]")[0].strip()
        calls.append(call_from({"name": name, "arguments": json.loads(arguments)}))
    return calls


def parse_list_after_bracket(body: str, schemas: Schemas) -> list[Call]:
    """[{"name": .., "arguments": {..}}, ..] without its first bracket: forced calls of models without JSON calls."""
    return _some([call_from(value) for value in json.loads("[" + body)])


def parse_deepseek(body: str, schemas: Schemas) -> list[Call]:
    """V3: `function<sep>F` and a fenced object; V3.1: `F<sep>{..}`."""
    calls = []
    for text in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", body, re.DOTALL):
        first, _, second = text.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", second, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first.strip(), second)
        calls.append(call_from({"name": name, "arguments": json.loads(arguments)}))
    return _some(calls)


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("no call")
    return calls


HERMES = (CallRegion("<tool_call>", "</tool_call>", parse_one),)
LLAMA3 = (CallRegion("<|python_tag|>", None, parse_llama3, only_first=True),
          CallRegion("{", None, parse_llama3_after_brace, only_first=True))
PYTHONIC = (CallRegion("<|python_start|>[", "<|python_end|>", parse_pythonic, only_first=True),
            CallRegion("[", None, parse_pythonic, only_first=True))
MISTRAL = (CallRegion("[TOOL_CALLS]", None, parse_mistral),)
DEEPSEEK = (CallRegion("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", parse_deepseek),)
FORCED_LIST = (CallRegion("[", None, parse_list_after_bracket, only_first=True),)
