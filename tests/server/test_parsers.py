"""Parsers of reasoning and tool calls: what each format means, and the same events however the text is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    output_parser,
    settled,
)

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
    ("llama3_json", None, f'Now {BODY}; {{"name": "g", "parameters": {{}}}} Done {{so}}.',
     [("content", "Now"), F, G, ("content", " Done {so}.")]),
    ("llama3_json", "qwen3", f"<think>{BODY}</think>{BODY}", [("reasoning", BODY), F]),
    ("llama4_json", None, '{"name": "Ada", "age": 36}', [("content", '{"name": "Ada", "age": 36}')]),
    ("hermes", None, 'One <tool_call>{"name": "g"}</tool_call> two.\n<tool_call>{"name": "g"}</tool_call>\n',
     [("content", "One"), G, ("content", "  two."), G]),
    ("hermes", None, f'<tool_call>[{{"type": "function", "function": {BODY}}}, {{"arguments": {{}}, "name": "g"}}]'
     "</tool_call>", [F, G]),
    ("hermes", None, '<tool_call>{"name": "f", "arguments": ' + json.dumps(ARGS) + "}</tool_call>", [F]),
    ("hermes", None, f'<tool_call>{{"name": "f", "arguments": {ARGS}</tool_call>', [F]),
    ("hermes", None, 'a <tool_call>{"name": "f", "arguments": {"x": "y}</tool_call> b',
     [("content", 'a <tool_call>{"name": "f", "arguments": {"x": "y}</tool_call> b')]),
    ("hermes", None, 'a <tool_call>{"name": "f", "arguments": {x}}</tool_call> b',
     [("content", 'a <tool_call>{"name": "f", "arguments": {x}}</tool_call> b')]),
    ("granite4", None, f"<tool_call> {BODY} </tool_call>", [F]),
    ("ernie45", "ernie45", f"<think>t\n</think>\n<response>\nWell</response>\n<tool_call>\n{BODY}\n</tool_call>\n",
     [("reasoning", "t"), ("content", "Well"), F]),
    ("longcat", None, f"<longcat_tool_call>{BODY}</longcat_tool_call>", [F]),
    ("internlm", None, f"So<|action_start|><|plugin|>{BODY}<|action_end|>", [("content", "So"), F]),
    ("jamba", None, f" <tool_calls>[\n {BODY},\n {{\"name\": \"g\", \"arguments\": {{}}}}\n]</tool_calls>", [F, G]),
    ("hunyuan_a13b", "hunyuan_a13b",
     f"<think>\nt\n</think>\n<answer>\nHi <tool_calls>[{BODY}]</tool_calls>\n</answer>",
     [("reasoning", "t"), ("content", "Hi"), F]),
    ("cohere_command3", "cohere_command3", "<|START_THINKING|>t<|END_THINKING|><|START_ACTION|>[\n"
     f'{{"tool_call_id": "0", "tool_name": "f", "parameters": {ARGS}}}\n]<|END_ACTION|>', [("reasoning", "t"), F]),
    ("cohere_command4", "cohere_command4", "<|START_THINKING|>t<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>",
     [("reasoning", "t"), ("content", "Hi")]),
    ("granite", "granite", f"Here is my thought process: t Here is my response: Hi<|tool_call|>[{BODY}]",
     [("reasoning", "t"), ("content", "Hi"), F]),
    ("granite-20b-fc", None, f'<function_call> {BODY}\n<function_call> {{"name": "g", "arguments": {{}}}}', [F, G]),
    ("phi4_mini_json", None, f"functools[{BODY}]", [F]),
    ("phi4_mini_json", None, "functools[] is a module", [("content", "functools[] is a module")]),
    ("gigachat3", None, f"Hm<|message_sep|>\n\nfunction call<|role_sep|>\n{BODY}", [("content", "Hm"), F]),
    ("gigachat3", None, f"<|function_call|>{BODY}", [F]),
    ("xlam", "qwen3", f"<think>t</think>[{BODY}]", [("reasoning", "t"), F]),
    ("xlam", None, f"Let me.\n```json\n[{BODY}]\n```", [("content", "Let me."), F]),
    ("apertus", None, f'<|tools_prefix|>[{{"f": {ARGS}}}, {{"g": {{}}}}]<|tools_suffix|>', [F, G]),
    ("kimi_k2", "kimi_k2", "<think>t</think>Hi<|tool_calls_section_begin|> <|tool_call_begin|>functions.f:0"
     f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_call_begin|>g:1<|tool_call_argument_begin|>{{}}"
     "<|tool_call_end|><|tool_calls_section_end|>", [("reasoning", "t"), ("content", "Hi"), F, G]),
    ("mistral", None, f'[TOOL_CALLS]f[CALL_ID]abc[ARGS]{ARGS}', [F]), ("mistral", None, f"[TOOL_CALLS]f{ARGS}", [F]),
    ("qwen3_xml", "nemotron_v3", "<think></think>\n<tool_call><function=f><parameter=city>Köln \"am\" <Rhein>"
     "</parameter><parameter=days>3<parameter=flags>[true, null]</parameter></function></tool_call>", [F]),
    ("mimo", "mimo", "<think>t</think><tool_call>\n<function=g>\n</function>\n</tool_call>",
     [("reasoning", "t"), G]),
    ("step3p5", "step3p5", "<tool_call>\n<function=g>\n</function>\n</tool_call>", [G]),
    ("seed_oss", "seed_oss", "<seed:think>t</seed:think><seed:tool_call>\n<function=f>\n<parameter=city>Köln \"am\" "
     "<Rhein></parameter>\n<parameter=days>3</parameter>\n<parameter=flags>[True, None]</parameter>\n</function>\n"
     "</seed:tool_call>", [("reasoning", "t"), F]),
    ("minimax_m2", "minimax_m2", '<think>t</think><minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Köln '
     '"am" <Rhein></parameter>\n<parameter name="days">3</parameter>\n<parameter name="flags">[true, null]'
     '</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>', [("reasoning", "t"), F, G]),
    ("step3", "step3", "<think>t</think><｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
     '<steptml:invoke name="f"><steptml:parameter name="city">Köln "am" <Rhein></steptml:parameter>'
     '<steptml:parameter name="days">3'
     '</steptml:parameter><steptml:parameter name="flags">[true, null]</steptml:parameter></steptml:invoke>'
     "<｜tool_call_end｜><｜tool_calls_end｜>", [("reasoning", "t"), F]),
    ("hy_v3", "hy_v3", "<tool_calls>\n<tool_call>g<tool_sep>\n</tool_call>\n<tool_call>f<tool_sep>\n"
     '<arg_key>city</arg_key>\n<arg_value>Köln "am" <Rhein></arg_value>\n<arg_key>days</arg_key>'
     "<arg_value>3</arg_value><arg_key>flags</arg_key><arg_value>[true, null]</arg_value>\n</tool_call>\n</tool_calls>",
     [G, F]),
    ("glm47", "glm47", "<think>x</think><tool_call>g</tool_call>", [("reasoning", "x"), G]),
    ("poolside_v1", "poolside_v1",
     "<tool_call>h\n<arg_key>code</arg_key>\n<arg_value>  a\n</arg_value>\n</tool_call>",
     [("call", "h", {"code": "  a\n"})]),
    ("deepseek_v4", "deepseek_v4", '<think>t</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="h">\n'
     '<｜DSML｜parameter name="x" string="false">no JSON</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="y">12</｜DSML｜parameter>\n'
     "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", [("reasoning", "t"), ("call", "h", {"x": "no JSON", "y": "12"})]),
    ("deepseek_v32", "deepseek_v3", '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
     '<｜DSML｜parameter name="days" string="true">'
     "3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", [("call", "f", {"days": 3})]),
    ("deepseek_v32", None, '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
     '<｜DSML｜parameter name="arguments" string="true">'
     '{"days": 3}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>', [("call", "f", {"days": 3})]),
    ("deepseek_v32", None, '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
     '<｜DSML｜parameter name="input" string="true">'
     'x</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>', [("call", "f", {"input": "x"})]),
    ("llama4_pythonic", None, "<|python_start|>[f(city='Köln \"am\" <Rhein>', days=3, flags=[true, null]), g()]"
     "<|python_end|>", [F, G]),
    ("pythonic", None, "[see (1)]", [("content", "[see (1)]")]),
    ("olmo3", "olmo3", "<function_calls>f(city='Köln \"am\" <Rhein>', days=3, flags=[True, None])\ng()"
     "</function_calls>", [F, G]),
    ("lfm2", None, "Hi <|tool_call_start|>[a.f(x={'k': (1, -2)}, y='it\\'s, ok)')]<|tool_call_end|>Done.",
     [("content", "Hi"), ("call", "a.f", {"x": {"k": [1, -2]}, "y": "it's, ok)"}), ("content", " Done.")]),
    ("functiongemma", None, "<start_function_call>call:f{city:<escape>Köln \"am\" <Rhein><escape>,days:3,"
     "flags:[true,null]}<end_function_call>", [F]),
    (None, "gemma4", "Before\n<|channel>so<channel|>\nafter", [("content", "Before"), ("reasoning", "so"),
                                                             ("content", "\n\nafter")]),
    (None, "holo2", "<think>x</think>y", [("reasoning", "x"), ("content", "y")]),
    (None, "minimax_m3", "<mm:think>x</mm:think>y", [("reasoning", "x"), ("content", "y")]),
    (None, "mistral", "This [/THINK]is\n[/THINK] so[/THINK]", [("content", "This is\n so")]),
    (None, "gemma4", "This <channel|>is so<channel|>", [("content", "This is so")]),
    (None, "gemma4", "<|channel>t<channel|><channel|>so", [("reasoning", "t"), ("content", "so")]),
    (None, "minimax_m3", "\n</mm:think>\nso</mm:think>so", [("content", "so</mm:think>so")]),
    ("llama3_json", "qwen3", f"</think>\n{BODY}", [F]),
    (None, "qwen3", "<think>t</think></think>\n\nso </think>", [("reasoning", "t"), ("content", "so </think>")]),
    (None, "qwen3", "<think>never ends ", [("reasoning", "never ends ")]),
    (None, "qwen3", " plain </thin text\n", [("content", " plain </thin text\n")]),
]


def shape(events: list[Event]) -> list[Any]:
    """Calls with their arguments as values; texts of one kind that follow each other as one."""
    result: list[Any] = []
    for event in settled(events):
        match event:
            case CallBegin(name):
                result.append(("call", name, ""))
            case CallArguments(text):
                result[-1] = (*result[-1][:2], result[-1][2] + text)
            case CallEnd():
                result[-1] = (*result[-1][:2], json.loads(result[-1][2]))
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
])
def test_arguments_are_json_that_every_client_reads(tools: str, text: str, expected: dict[str, Any] | None) -> None:
    """No NaN, and no half of a character, which no client could encode again. Else the text stays content."""
    parser = output_parser(tools, None, schemas=SCHEMAS)
    assert parser is not None
    events = parser.feed(text) + parser.finish()
    assert shape(events) == [("content", text) if expected is None else ("call", "f", expected)]
    assert all(event.text.encode() for event in events if isinstance(event, CallArguments))


@pytest.mark.parametrize("properties", [None, [], "x", 5])
def test_a_schema_may_be_anything(properties: object) -> None:
    """The schemas come from a client; in a chat without forced calls nobody compiles them."""
    parser = output_parser("qwen3_coder", None, schemas={"f": {"properties": properties}})
    assert parser is not None
    events = parser.feed("<function=f>\n<parameter=days>\n3\n</parameter>\n</function>") + parser.finish()
    assert shape(events) == [("call", "f", {"days": "3"})]


def test_every_format_has_a_case_and_is_documented() -> None:
    assert {case[0] for case in CASES} - {None} == set(TOOL_FORMATS)
    assert {case[1] for case in CASES} - {None} == set(REASONING_FORMATS)
    docs = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    tools, thoughts = docs.split("`--tool-call-parser`, with")[1].split("`--reasoning-parser`, with")[:2]
    assert {name for name in TOOL_FORMATS if f"`{name}`" not in tools} == set()
    assert {name for name in REASONING_FORMATS if f"`{name}`" not in thoughts} == set()


IN_PIECES = [case[:3] for case in CASES if F in case[3] and '"arguments": "' not in case[2]]


@pytest.mark.parametrize(("tools", "thoughts", "text"), IN_PIECES)
def test_arguments_are_handed_out_while_the_call_is_written(tools: str, thoughts: str | None, text: str) -> None:
    """Before the model has written the last argument, and text of an argument before its end. Arguments in Python's
    form come when they are whole."""
    parser = output_parser(tools, thoughts, schemas=SCHEMAS)
    assert parser is not None
    written = text[: text.rindex("ull]") if "ull]" in text else text.rindex("None")]
    events = [event for char in written for event in parser.feed(char)]
    said = [event.text for event in events if isinstance(event, CallArguments)]
    assert CallBegin("f", "functions.f:0" if tools == "kimi_k2" else None) in events and '"days": 3' in "".join(said)
    assert any("Köln" in piece for piece in said) == (tools in ("pythonic", "llama4_pythonic", "olmo3"))


def test_a_stream_tells_that_a_call_went_wrong() -> None:
    text = 'a <tool_call>{"name": "f", "arguments": {"x": [NaN]}}</tool_call> b'
    parser = output_parser("hermes", None)
    assert parser is not None
    events = parser.feed(text) + parser.finish()
    assert events == [Content("a"), CallBegin("f"), CallArguments('{"x": [NaN]}'),
                      CallEnd(' <tool_call>{"name": "f", "arguments": {"x": [NaN]}'), Content("}</tool_call> b")]
    assert shape(events) == [("content", text)]


def test_a_model_may_name_its_calls() -> None:
    parser = output_parser("kimi_k2", None)
    assert parser is not None
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{"
    (begin, *_) = parser.feed(text)
    assert begin == CallBegin("f", "functions.f:7")


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"type": "string"}, "12", "12"), ({}, "12", "12"), (None, "12", "12"), ({"type": "number"}, "5.0", 5),
    ({"type": "integer"}, "many", "many"), ({"type": ["string", "null"]}, "NULL", None), ({"type": "bool"}, "1", True),
    ({"type": "boolean"}, "False", False), ({"type": "varchar"}, "true", "true"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "7", "7"), ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1), ({"$ref": "#/$defs/a"}, '{"a": 1}', {"a": 1}),
    ({"type": "object"}, "{'a': 'b'}", {"a": "b"}), ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({"type": "number"}, "1e999", "1e999"),
])
def test_text_takes_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    parser = output_parser("qwen3_coder", None, schemas={"f": {"properties": {"x": schema}}})
    assert parser is not None
    events = parser.feed(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>") + parser.finish()
    assert shape(events) == [("call", "f", {"x": value})] and repr(shape(events)[0][2]["x"]) == repr(value)


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    expected = [("reasoning", "hm"), ("content", "yes")]
    for text in ("hm</think>yes", "<think>hm</think>\nyes"):  # some models open it once more
        for pieces in ([text], list(text)):
            assert parsed("hermes", "deepseek_r1", pieces, prompt_end="<|Assistant|><think>\n") == expected


def test_content_without_markers_is_not_held_back() -> None:
    parser = output_parser("hermes", "qwen3")
    assert parser is not None
    assert parser.feed("Hello") == [Content("Hello")] and parser.feed(" you <") == [Content(" you")]
    assert parser.feed("b>") == [Content(" <b>")]
