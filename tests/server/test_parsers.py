"""Parsers of reasoning and tool calls: what each format means, and the same events however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.parsers import REASONING_FORMATS, TOOL_FORMATS, Call, Content, Event, Reasoning, output_parser

SCHEMAS = {"f": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "flags": {"type": "array"}}}}
ARGUMENTS = {"city": "Köln \"am\" <Rhein>", "days": 3, "flags": [True, None]}
BODY = json.dumps({"name": "f", "arguments": ARGUMENTS}, ensure_ascii=False)
ARGS = json.dumps(ARGUMENTS, ensure_ascii=False)
F = ("call", "f", ARGUMENTS)
G = ("call", "g", {})
CASES: list[tuple[str | None, str | None, str, list[Any]]] = [
    ("hermes", "qwen3", f"<think>\nhm <b>\n</think>\n\nHi <i>\n<tool_call>\n{BODY}\n</tool_call>\n"
     '<tool_call>{"name": "g", "arguments": {}}</tool_call>', [("reasoning", "hm <b>"), ("content", "Hi <i>"), F, G]),
    ("hermes", None, f"a <tool_call>{BODY}", [("content", "a"), F]),
    ("hermes", None, "a <tool_call>{broken</tool_call> b", [("content", "a <tool_call>{broken</tool_call> b")]),
    ("hermes", None, "x <tool_c <tool_call", [("content", "x <tool_c <tool_call")]),
    ("qwen3_coder", "qwen3", "<think>so<tool_call>\n<function=f>\n<parameter=city>\nKöln \"am\" <Rhein>\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=flags>\n[true, null]\n</parameter>\n</function>\n</tool_call>",
     [("reasoning", "so"), F]),
    ("qwen3_coder", None, "<function=g>\n</function> done", [G, ("content", "done")]),
    ("llama3_json", None, f' {BODY.replace("arguments", "parameters")}; {{"name": "g", "parameters": {{}}}}', [F, G]),
    ("llama3_json", None, f"<|python_tag|>{BODY}", [F]),
    ("llama3_json", None, "no { call", [("content", "no { call")]),
    ("llama3_json", None, "{not json", [("content", "{not json")]),
    ("pythonic", None, "[f(city='Köln \"am\" <Rhein>', days=3, flags=[True, None]), g()]", [F, G]),
    ("pythonic", None, "[1, 2]", [("content", "[1, 2]")]),
    ("mistral", "mistral", f"[THINK]t[/THINK]ok[TOOL_CALLS][{BODY}]", [("reasoning", "t"), ("content", "ok"), F]),
    ("mistral", None, f"[TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]g[ARGS]{{}}", [F, G]),
    ("deepseek_v3", "deepseek_r1", "why</think>yes<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
     f"<｜tool▁sep｜>f\n```json\n{ARGS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     [("content", "why</think>yes"), F]),
    ("deepseek_v31", None, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [F, G]),
    ("deepseek_v32", None, '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
     '<｜DSML｜parameter name="city" string="true">Köln "am" <Rhein></｜DSML｜parameter>'
     '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>'
     '<｜DSML｜parameter name="flags" string="false">[true, null]</｜DSML｜parameter></｜DSML｜invoke>'
     "</｜DSML｜function_calls>", [F]),
    ("glm45", "glm45", "<think>x</think><tool_call>f\n<arg_key>city</arg_key>\n"
     "<arg_value>Köln \"am\" <Rhein></arg_value>"
     "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>flags</arg_key><arg_value>[true, null]</arg_value>"
     "</tool_call>", [("reasoning", "x"), F]),
    ("gemma4", "gemma4", '<|channel>thought\nhm<channel|>ok<|tool_call>call:f{city:<|"|>Köln "am" <Rhein><|"|>,days:3,'
     "flags:[true,null]}<tool_call|><|tool_call>call:g{}<tool_call|>", [("reasoning", "hm"), ("content", "ok"), F, G]),
    ("openai", "openai_gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>", [("reasoning", "hm"), F]),
    ("openai", "openai_gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.g<|channel|>"
     "commentary json<|message|>{}", [("reasoning", "hm"), G]),
    ("openai", "openai_gptoss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
     "Hello you<|return|>", [("reasoning", "hm"), ("content", "Hello you")]),
    (None, "qwen3", "<think>never ends ", [("reasoning", "never ends ")]),
    (None, "qwen3", " plain </thin text\n", [("content", " plain </thin text\n")]),
]  # fmt: skip


def shape(events: list[Event]) -> list[Any]:
    result: list[Any] = []
    for event in events:
        match event:
            case Call(name, arguments):
                result.append(("call", name, json.loads(arguments)))
            case Content(text) | Reasoning(text):
                kind = "content" if isinstance(event, Content) else "reasoning"
                if result and result[-1][0] == kind:
                    result[-1] = (kind, result[-1][1] + text)
                else:
                    result.append((kind, text))
    return result


def parsed(tools: str | None, thoughts: str | None, pieces: list[str], prompt_end: str = "") -> list[Any]:
    parser = output_parser(tools, thoughts, schemas=SCHEMAS, prompt_end=prompt_end)
    assert parser is not None
    return shape([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(("tools", "thoughts", "text", "expected"), CASES)
def test_every_format_whole_and_cut_at_every_place(tools: str | None, thoughts: str | None, text: str,
                                                   expected: list[Any]) -> None:
    assert parsed(tools, thoughts, [text]) == expected
    assert parsed(tools, thoughts, list(text)) == expected
    for place in range(len(text)):
        assert parsed(tools, thoughts, [text[:place], text[place:]]) == expected, text[:place]


@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=8), st.sampled_from(["", " ", "x", "\n<", "</"]))
def test_any_cut_of_any_text_gives_the_events_of_the_whole(case: Any, places: list[int], more: str) -> None:
    tools, thoughts, text, _ = case
    text = text[: places[0] % len(text)] + more + text if places else text + more
    assert parsed(tools, thoughts, cut(text, places)) == parsed(tools, thoughts, [text])


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.sampled_from(sorted(REASONING_FORMATS)), st.data())
def test_random_mixtures_of_markers_never_fail_and_do_not_depend_on_cuts(tools: str, thoughts: str, data: Any) -> None:
    words = [part for regions in (TOOL_FORMATS[tools], REASONING_FORMATS[thoughts]) for region in regions
             for part in (region.begin, getattr(region, "end", None)) if part]
    text = "".join(data.draw(st.lists(st.sampled_from([*words, "{", "}", "f", " ", '"name"', ":", "<", "[1]"]),
                                      max_size=12)))
    places = data.draw(st.lists(st.integers(0, 200), max_size=6))
    assert parsed(tools, thoughts, cut(text, places)) == parsed(tools, thoughts, [text])


@pytest.mark.parametrize(("tools", "text", "expected"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),
    ("llama3_json", '{"name": "", "arguments": {}}', None),
    ("pythonic", "[f(x=1e999)]", None),
    ("pythonic", "[f(x={1})]", None),
    ("qwen3_coder", "<function=f>\n<parameter=days>\nNaN\n</parameter>\n</function>", {"days": "NaN"}),
    ("gemma4", "<|tool_call>call:f{days:Infinity}<tool_call|>", {"days": "Infinity"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>', {"x": "\ud83d"}),
])  # fmt: skip
def test_arguments_are_json_that_every_client_reads(tools: str, text: str, expected: dict[str, Any] | None) -> None:
    """No NaN, and no half of a character, which no client could encode again. Else the text stays content."""
    parser = output_parser(tools, None, schemas=SCHEMAS)
    assert parser is not None
    events = parser.feed(text) + parser.finish()
    assert shape(events) == [("content", text) if expected is None else ("call", "f", expected)]
    assert all(event.arguments.encode() for event in events if isinstance(event, Call))


@pytest.mark.parametrize("properties", [None, [], "x", 5])
def test_a_schema_may_be_anything(properties: object) -> None:
    """The schemas come from a client; in a chat without forced calls nobody compiles them."""
    parser = output_parser("qwen3_coder", None, schemas={"f": {"properties": properties}})
    assert parser is not None
    events = parser.feed("<function=f>\n<parameter=days>\n3\n</parameter>\n</function>") + parser.finish()
    assert shape(events) == [("call", "f", {"days": 3})]


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    expected = [("reasoning", "hm"), ("content", "yes")]
    assert parsed("hermes", "deepseek_r1", ["hm</thi", "nk>yes"], prompt_end="<|Assistant|><think>\n") == expected


def test_content_without_markers_is_not_held_back() -> None:
    parser = output_parser("hermes", "qwen3")
    assert parser is not None
    assert parser.feed("Hello") == [Content("Hello")] and parser.feed(" you <") == [Content(" you")]
    assert parser.feed("b>") == [Content(" <b>")]
