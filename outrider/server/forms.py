"""Constraints on an answer's text: from a response format, from structured output, or from forced tool calls.

The constraint is called the form of the answer, and is given to the engine as a grammar. If the chat's model may reason
first, only the text after the reasoning is constrained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.structured import INSTALL, StructuredOutputsParams
from outrider.engine.text import Tokenizer
from outrider.feature_list import feature_object
from outrider.server.errors import ApiError, bad_value
from outrider.server.parsers.formats import FORCED_LIST, REASONING_FORMATS, TOOL_FORMATS
from outrider.server.parsers.machine import ReasoningRegion, Region
from outrider.server.protocol import ChatRequest, Tool

MAX_CALLS = 16  # most calls of an answer whose calls are forced
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
NEWLINE, NEWLINES, COMMA = r'"\n"', r"/\n{0,2}/", '", "'  # in a grammar
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ForcedCalls:
    """The tools that the model may call when it must call one, and the format of the calls."""

    tools: Sequence[Tool]
    is_named: bool  # the request names the tool
    most: int
    tool_format: str | None  # None: a JSON list, which every model can write

    @property
    def regions(self) -> Sequence[Region]:
        return FORCED_LIST if self.tool_format is None else TOOL_FORMATS[self.tool_format]

    def rules(self, tokenizer: Tokenizer) -> str:
        """Write grammar rules that allow only calls of these tools. The first rule is `form`, the form of the
        answer."""
        calls = [self._call(index, tool) for index, tool in enumerate(self.tools)]
        any_call = "any_call: " + " | ".join(f"call_{index}" for index in range(len(calls)))
        if self.tool_format == "hermes":
            begin, end = (_marker(text, tokenizer) for text in ("<tool_call>", "</tool_call>"))
            body = f'form: tagged{self._more(NEWLINE, "tagged")}\ntagged: {begin} {NEWLINE} any_call {NEWLINE} {end}'
        else:
            body = f'form: "[" any_call{self._more(COMMA, "any_call")} "]"'
        return "\n".join([body, any_call, *calls])

    def _more(self, between: str, rule: str) -> str:
        return f" ({between} {rule}){{0,{self.most - 1}}}" if self.most > 1 else ""

    @staticmethod
    def _call(index: int, tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        schema = json.dumps((tool.function.parameters or NO_ARGUMENTS) | {"x-guidance": JSON_STYLE})
        return f'call_{index}: {json.dumps(head)} arguments_{index} "}}"\narguments_{index}: %json {schema}'


def forced_calls(body: ChatRequest, tool_format: str | None) -> ForcedCalls | None:
    """Return the calls that `tool_choice` demands; None if it demands none."""
    choice, tools = body.tool_choice, body.tools or []
    if choice is None or choice in ("none", "auto"):
        return None
    if not tools:
        raise ApiError(400, "tool_choice needs tools: give tools, or leave tool_choice out", param="tool_choice")
    own_format = "hermes" if tool_format == "hermes" else None
    most = 1 if body.parallel_tool_calls is False else MAX_CALLS
    if choice == "required":
        return ForcedCalls(tools, False, most, own_format)
    name = _named(choice)
    if name is None:
        raise ApiError(400, 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
                            '{"name": ...}}', param="tool_choice")
    chosen = [tool for tool in tools if tool.function.name == name]
    if not chosen:
        raise ApiError(400, f"tool_choice names {name[:100]!r}, which is not one of tools: name one of "
                            "them", param="tool_choice")
    return ForcedCalls(chosen[:1], True, 1, own_format)


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """Return the body with only the tools that `tool_choice` allows. OpenAI's chat API nests the list of allowed tools;
    its responses API does not."""
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    given = choice.get("allowed_tools", choice)
    mode, allowed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(allowed, list) or not allowed:
        raise ApiError(400, 'allowed_tools needs a mode, "auto" or "required", and a list of tools',
                       param="tool_choice")
    names = [_named(tool) if isinstance(tool, dict) else None for tool in allowed]
    wanted, known = set(names), {tool.function.name for tool in body.tools or []}
    for name in names:
        if name not in known:
            raise ApiError(400, f"allowed_tools names {str(name)[:100]!r}, which is not one of tools: name one of "
                                "them", param="tool_choice")
    tools = [tool for tool in body.tools or [] if tool.function.name in wanted]
    return body.model_copy(update={"tools": tools, "tool_choice": mode})


def _named(choice: str | dict[str, Any]) -> str | None:
    """Return the tool name in a `tool_choice`. OpenAI's chat API nests the name; its responses API does not."""
    if isinstance(choice, str) or choice.get("type") != "function":
        return None
    function = choice.get("function") or choice
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def chat_form(body: ChatRequest, forced: ForcedCalls | None, reasoning: str | None, prompt_end: str,
              tokenizer: Tokenizer) -> StructuredOutputsParams | None:
    """Return the grammar or other constraint for the whole output of a chat, reasoning included. None if the text is
    free."""
    asked = body.form()
    if forced is not None and asked is not None:
        raise ApiError(400, "a tool_choice that forces a call sets the answer's form: leave out response_format and "
                            "structured_outputs", param="tool_choice")
    if forced is None and (asked is None or reasoning is None):
        return asked
    rules = _rules(asked) if asked is not None else forced.rules(tokenizer) if forced is not None else ""
    thoughts = None if reasoning is None else _thoughts(reasoning, prompt_end, tokenizer)
    return StructuredOutputsParams(grammar=f"{thoughts or 'start: form'}\n{rules}")


def _thoughts(reasoning: str, prompt_end: str, tokenizer: Tokenizer) -> str | None:
    """Return the grammar rules for reasoning that comes before the rule `form`. None if the prompt has already closed
    the reasoning."""
    region = next(region for region in REASONING_FORMATS[reasoning] if isinstance(region, ReasoningRegion))
    said = prompt_end.rstrip()
    if said.endswith(region.end):
        return None
    if _is_special(region.end, tokenizer):
        thoughts = f"thoughts: /(?s:.*)/ {_marker(region.end, tokenizer)}"
    else:
        thoughts = f"thoughts[suffix={json.dumps(region.end)}]: /(?s:.*)/"
    begin, gap, answer = (_markers(text, tokenizer) for text in (region.begin, region.gap, region.answer))
    first = f"start: thoughts gap {answer} form" if said.endswith(region.begin.rstrip()) else (
        f"start: ({begin} thoughts gap)? {answer} form")
    return f"{first}\ngap: {gap or NEWLINES}\n{thoughts}"


def _rules(asked: StructuredOutputsParams) -> str:
    """Convert the structured output that the body asks for to grammar rules, so that reasoning can be allowed before
    it."""
    try:
        form_rule = feature_object("grammars", "outrider.features.grammars.answer_rules:form_rule")
        return str(form_rule(asked.to_plain()))
    except ValueError as error:
        raise bad_value(error, ChatRequest.model_fields) from None
    except ImportError:
        raise ApiError(400, INSTALL, param="structured_outputs") from None


def _markers(text: str, tokenizer: Tokenizer) -> str:
    """Convert a text that may contain several markers, such as `<|start|>`, to a grammar expression."""
    return " ".join(_marker(part, tokenizer) for part in re.split(r"(<\|?[^<>|]+\|?>)", text) if part)


def _is_special(marker: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(marker) in tokenizer.special_token_ids


def _marker(marker: str, tokenizer: Tokenizer) -> str:
    """Convert a marker to a grammar expression. A marker that is a special token is written as its id, because grammars
    cannot match special tokens as text."""
    return f"<[{tokenizer.token_to_id(marker)}]>" if _is_special(marker, tokenizer) else json.dumps(marker)
