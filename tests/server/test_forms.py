"""Response formats, structured output and forced calls through the official client, on a model whose tokens are bytes.
Its random weights would never write any of this by themselves."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import pydantic
import pytest

from outrider.async_llm import AsyncLLM
from outrider.core.structured import StructuredOutputsParams
from outrider.engine.request_checks import RequestChecks
from outrider.features.grammars import limits, turn_times
from outrider.features.grammars.compiled_forms import CompiledForms
from outrider.features.grammars.compiler import GrammarCompiler
from outrider.features.grammars.turn_times import RowTime
from outrider.server.errors import ApiError
from outrider.server.forms import chat_form, forced_calls, with_allowed_tools
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service
from tests.counted import count_calls
from tests.engine.local_compiler import LocalCompiler, compiler_of
from tests.server.rig import MODEL, PATIENCE, Served, chat_tokenizer, served_fixture, serving, tiny_engine

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "user", "content": "Go."}]
WORD = {"type": "string", "pattern": "^[a-z]{1,4}$"}
SCHEMA = {"type": "object", "properties": {"city": WORD, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
          "required": ["city", "days"], "additionalProperties": False}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
    "additionalProperties": False, "$defs": {"place": WORD}}}} for name in ("weather", "time")]


def start() -> AsyncLLM:
    return AsyncLLM.around(tiny_engine(eos_ids=(2,), max_model_len=256).engine)

served = served_fixture(start)
parsed = served_fixture(start, tool_call_parser="hermes", reasoning_parser="qwen3")


def test_grammars_that_take_long_delay_no_other_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the event loop has threads, which also render chats and read long prompts."""
    goes_on, compile_, check, arrived = threading.Event(), CompiledForms._compile, Service.check, []

    async def noted(service: Service, *args: Any) -> Any:
        arrived.append(args)
        return await check(service, *args)

    def slowly(own: CompiledForms, text: str) -> Any:
        assert goes_on.wait(PATIENCE)
        return compile_(own, text)

    monkeypatch.setattr(CompiledForms, "_compile", slowly)
    monkeypatch.setattr(limits, "COMPILE_SECONDS", PATIENCE)
    monkeypatch.setattr(Service, "check", noted)
    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(served.post, "/v1/completions", prompt="x", max_tokens=2,
                             structured_outputs={"regex": f"[a-z]{{1,{i + 100}}}"}) for i in range(40)]
        try:
            served.wait_for(lambda: len(arrived) == 40)
            assert served.post("/v1/chat/completions", messages=CHAT, max_tokens=2).status_code == 200
            assert not any(each.done() for each in asked)
        finally:
            goes_on.set()
        assert all(each.result().status_code == 200 for each in asked)


def test_response_formats(served: Served) -> None:
    client = served.client()
    asked: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, response_format=asked, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.metrics["speculative_decoding"]["mean_acceptance_length"] > 1.5  # type: ignore[attr-defined]
    same = client.chat.completions.create(model=MODEL, messages=CHAT, response_format=asked, seed=1,
                                          extra_body={"speculative": False})
    assert same.choices[0].message.content == answer.choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=CHAT, response_format=asked, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.content == answer.choices[0].message.content
    free = client.chat.completions.create(model=MODEL, messages=CHAT, response_format={"type": "json_object"},
                                          max_tokens=5, temperature=0)
    assert (free.choices[0].message.content or "").startswith("{")
    served.assert_idle()


def test_the_client_parses_answers_into_its_own_types(served: Served) -> None:
    class Trip(pydantic.BaseModel):
        kind: Literal["train", "ship"]
        days: Literal[1, 2, 3]
        stops: list[Literal["a", "b"]] = pydantic.Field(max_length=3)

    answer = served.client().chat.completions.parse(model=MODEL, messages=CHAT, response_format=Trip, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Trip)
    made = served.client().responses.parse(model=MODEL, input="Go.", text_format=Trip)
    assert isinstance(made.output_parsed, Trip)


@pytest.mark.parametrize(("form", "pattern"), [
    ({"regex": "[0-9]{2}:[0-9]{2}"}, r"\d\d:\d\d"), ({"choice": ["yes", "no"]}, "yes|no"),
    ({"grammar": 'root ::= "a" ("b" | "c")'}, "a[bc]"), ({"json": {"type": "boolean"}}, "true|false"),
])
def test_structured_outputs(served: Served, form: dict[str, Any], pattern: str) -> None:
    answer = served.client().completions.create(model=MODEL, prompt=["When?", "How?"], n=2, max_tokens=20,
                                                extra_body={"structured_outputs": form})
    assert len(answer.choices) == 4
    assert all(re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop" for choice in answer.choices)


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs.regex cannot be compiled"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"type": "objec"}}}}},
     "response_format", "response_format.json_schema.schema['items'] cannot be compiled"),
    ({"structured_outputs": {"choice": ["x" * 300_000]}}, "structured_outputs", "at most 262144"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objec"}}}],
      "tool_choice": "required"}, "tools", "tools cannot be compiled"),
])
def test_a_form_that_cannot_be_compiled(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    error = served.error("/v1/chat/completions", messages=CHAT, **fields)
    assert words in error["message"] and error["param"] == param


def test_a_form_beyond_its_limits_is_the_requests_own_fault(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the text is written: before that nobody knows how many states it takes."""
    monkeypatch.setattr("outrider.features.grammars.limits.MAX_LEXER_STATES", 30)
    asked = {"prompt": "x", "temperature": 2.0, "seed": 1, "max_tokens": 90,
             "structured_outputs": {"regex": "(a|b)*a(a|b){11}c"}}
    error = served.error("/v1/completions", **asked)
    assert "structured_outputs: the grammar allows no further token (lexer error: too many states" in error["message"]
    events = served.post("/v1/completions", **asked, stream=True).text.removesuffix("data: [DONE]\n\n").strip()
    assert json.loads(events.split("\n\n")[-1].removeprefix("data: "))["error"] == error  # an event, or all of it
    assert served.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    served.assert_idle()


def test_responses_and_messages(served: Served) -> None:
    format_: Any = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
    answer = served.client().responses.create(model=MODEL, input="Go.", text={"format": format_})
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    made = served.post("/v1/messages", max_tokens=90, messages=CHAT, tools=tools,
                       tool_choice={"type": "tool", "name": "time"}).json()
    (block,) = made["content"]
    assert made["stop_reason"] == "tool_use" and block["name"] == "time"
    jsonschema.validate(block["input"], TOOLS[0]["function"]["parameters"])


@pytest.mark.parametrize("name", ["served", "parsed"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_forced_calls(name: str, choice: Any, request: pytest.FixtureRequest) -> None:
    """In the model's own format where that is JSON in tags, otherwise as a list."""
    client = request.getfixturevalue(name).client()
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "seed": 3,
                               "parallel_tool_calls": False, "extra_body": {"logit_bias": {str(ord("<")): -50}}}
    if name == "parsed":  # it may reason first: not here
        options["extra_body"] = {"logit_bias": {str(ord("h")): -50}}
    for _ in range(2):
        answer = client.chat.completions.create(**options).choices[0]
        assert answer.message.tool_calls is not None and len(answer.message.tool_calls) == 1, answer
        call = answer.message.tool_calls[0].function
        assert call.name in (("time",) if isinstance(choice, dict) else ("weather", "time"))
        jsonschema.validate(json.loads(call.arguments), TOOLS[0]["function"]["parameters"])
        assert answer.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
        assert not answer.message.content
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.name, call.arguments)


@pytest.mark.parametrize(("tool_format", "text"), [
    (None, '[{"name": "time", "arguments": {"at": "oslo"}}, {"name": "weather", "arguments": {"at": "a"}}]'),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {"at": "oslo"}}\n</tool_call>\n'
               '<tool_call>\n{"name": "weather", "arguments": {"at": "a"}}\n</tool_call>'),
])
def test_several_calls_may_be_forced(tool_format: str | None, text: str) -> None:
    for parallel in (True, False):
        asked = body(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        form = chat_form(asked, forced_calls(asked, tool_format), None, "", chat_tokenizer())
        assert form is not None and takes(form, text) == parallel
        assert not takes(form, text.replace("oslo", "Oslo")) and not takes(form, text.replace("time", "fly"))


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": CHAT} | fields)


def takes(form: StructuredOutputsParams, text: str) -> bool:
    """Whether the whole text has the form."""
    compiler = LocalCompiler(chat_tokenizer, (2,))
    compiler.prepare(0, form.to_plain()).result()
    matcher = compiler.forms.start(0).result()
    matcher.advance(chat_tokenizer().encode(text, add_special_tokens=False))
    return matcher.error is None and matcher.inner.is_accepting()


@pytest.mark.parametrize(("prompt_end", "texts"), [
    ("[assistant]", ["<think>so</think>\n\nyes", "yes", "<think></think>no"]), ("<think>\n", ["so\n</think>\nyes"]),
    ("<think>\n\n</think>\n\n", ["no"]),
])
def test_a_form_follows_the_reasoning(prompt_end: str, texts: list[str]) -> None:
    """The grammar takes texts of their form, and none that has text behind or before it."""
    asked = body(structured_outputs={"choice": ["yes", "no"]})
    form = chat_form(asked, None, "qwen3", prompt_end, chat_tokenizer())
    assert form is not None and all(takes(form, text) for text in texts)
    assert not any(takes(form, text + "!") for text in texts)
    assert not takes(form, "<think>so</think>maybe") and not takes(form, "x yes")


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(("fields", "right", "wrong"), [
    ({"json": OBJECT}, '{"a": 1, "b": 2}', '{"a":1,"b":2}'),
    ({"json": OBJECT, "disable_any_whitespace": True}, '{"a":1,"b":2}', '{"a": 1, "b": 2}'),
    ({"json": OBJECT, "whitespace_pattern": "~?"}, '{"a":~1,~"b":2}', '{"a": 1, "b": 2}'),
    ({"json": OBJECT, "disable_additional_properties": True}, '{"a": 1}', '{"a": 1, "c": 2}'),
    ({"grammar": 'start: "a" b\nb: "b" | "c"'}, "ac", "ad"), ({"grammar": 'root ::= "x" "y"'}, "xy", "x"),
    ({"regex": "a/b"}, "a/b", "a\\/b"), ({"regex": r"a\/b"}, "a/b", "a\\/b"), ({"regex": r"a\\/b"}, r"a\/b", "a/b"),
])
def test_all_of_a_form_holds_behind_reasoning(fields: dict[str, Any], right: str, wrong: str) -> None:
    asked = body(structured_outputs=fields)
    for reasoning, thoughts in ((None, ""), ("qwen3", "<think>so</think>")):
        form = chat_form(asked, None, reasoning, "", chat_tokenizer())
        assert form is not None and takes(form, thoughts + right) and not takes(form, thoughts + wrong)


@pytest.mark.parametrize("schema", ["no JSON", "[1]", '{"a":' * 200 + "1" + "}" * 200])
def test_a_schema_behind_reasoning_that_is_none(schema: str) -> None:
    with pytest.raises(ApiError, match="structured_outputs.json"):
        chat_form(body(structured_outputs={"json": schema}), None, "qwen3", "", chat_tokenizer())


def test_a_schema_that_fails_is_named_as_the_client_gave_it(served: Served, parsed: Served) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "trip", "schema": {"type": "nothing"}}}
    for own in (served, parsed):
        error = own.error("/v1/chat/completions", messages=CHAT, response_format=asked)
        assert "Invalid type" in error["message"] and error["param"] == "response_format"


@pytest.mark.parametrize(("fields", "words"), [
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "not one of tools"),
])
def test_choices_that_cannot_be_forced(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        forced_calls(body(**fields), "hermes")


def test_what_a_form_cannot_be_combined_with() -> None:
    both = body(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    with pytest.raises(ApiError, match="leave out response_format"):
        chat_form(both, forced_calls(both, None), None, "", chat_tokenizer())
    asked = body(structured_outputs={"grammar": 'start: "a"'})
    assert chat_form(asked, None, None, "", chat_tokenizer()) == StructuredOutputsParams(grammar='start: "a"')


def test_a_form_behind_the_channels_of_gpt_oss() -> None:
    asked = body(structured_outputs={"choice": ["yes", "no"]})
    form = chat_form(asked, None, "openai_gptoss", "<|start|>assistant", chat_tokenizer())
    assert form is not None and takes(form, "<|channel|>final<|message|>yes") and not takes(form, "yes")
    thoughts = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    assert takes(form, f"{thoughts}<|channel|>final<|message|>no") and not takes(form, f"{thoughts}no")


def test_structural_tags_in_a_response_format(served: Served, parsed: Served) -> None:
    tag = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}
    newer = {"type": "tags_with_separator", "separator": ";", "at_least_one": True, "tags": [
        {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</f>"}]}
    asked = body(response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<f>"]})
    form = chat_form(asked, None, "qwen3", "<think>", chat_tokenizer())
    assert form is not None and takes(form, "<f>1</think>so <f>true</f>") and not takes(form, "</think><f>1</f>")
    options: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "temperature": 0,
                    "response_format": {"type": "structural_tag", "format": newer}}
    answer = served.client().chat.completions.create(**options)
    assert re.match("<f>(true|false)<?", answer.choices[0].message.content or "")
    same = served.client().chat.completions.create(**options, extra_body={"speculative": False})
    assert same.choices[0].message.content == answer.choices[0].message.content
    empty = {"type": "structural_tag", "format": {}}
    wrong = served.error("/v1/chat/completions", messages=CHAT, response_format=empty)
    assert wrong["param"] == "response_format" and "needs the field 'type', which is a string" in wrong["message"]
    neither = served.error("/v1/chat/completions", messages=CHAT, response_format={"type": "structural_tag"})
    assert "one of structures and format" in neither["message"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_tools_may_be_allowed(served: Served) -> None:
    options: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS}
    answer = served.client().chat.completions.create(tool_choice=allowed("required", "time"), **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert {call.function.name for call in answer.message.tool_calls or []} == {"time"}
    auto = with_allowed_tools(body(tools=TOOLS, tool_choice=allowed("auto", "weather")))
    assert auto.tool_choice == "auto" and [tool.function.name for tool in auto.tools or []] == ["weather"]
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    (tool,) = with_allowed_tools(body(tools=TOOLS, tool_choice=flat)).tools or []
    assert tool.function.name == "time"


@pytest.mark.parametrize(("choice", "words"), [
    ({"type": "allowed_tools"}, "needs a mode"), (allowed("never", "time"), "needs a mode"),
    (allowed("auto"), "needs a mode"), (allowed("auto", "fly"), "'fly', which is not one of tools"),
])
def test_tools_that_cannot_be_allowed(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        with_allowed_tools(body(tools=TOOLS, tool_choice=choice))


@pytest.mark.parametrize("stop", [[], ["c本"], ["é"]])
def test_offsets_of_tokens_are_within_the_text_that_was_given(served: Served, stop: list[str]) -> None:
    """Also where a character has several tokens, and where a stop string cuts text off."""
    said = "aé😀 b日c本d"
    text = said[: said.index(stop[0])] if stop else said
    begins = [i for i, char in enumerate(text + "".join(stop)) for _ in char.encode()]
    expected = [min(begin, len(text)) for begin in begins] + ([] if stop else [len(text)])  # and the end token
    asked: Any = {"model": MODEL, "prompt": "日x", "n": 2, "stop": stop, "max_tokens": 40, "logprobs": 0,
                  "extra_body": {"structured_outputs": {"choice": [said]}}}
    client = served.client()
    for choice in client.completions.create(**asked).choices:
        assert choice.text == text and choice.logprobs.text_offset == expected
    for choice in client.completions.create(**asked, echo=True).choices:
        assert choice.logprobs.text_offset == [0, 0, 0, 1, *(2 + begin for begin in expected)]
    texts, offsets = ["", ""], [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
        assert max(choice.logprobs.text_offset, default=0) <= len(texts[choice.index])
    assert texts == [text, text] and offsets == [expected, expected]


def test_a_body_is_checked_once_and_its_grammar_compiled_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts and samples it has, on the side of the server; a worker compiles its own."""
    calls = count_calls(monkeypatch, (RequestChecks, "_check"), (RequestChecks, "_check_params"),
                        (GrammarCompiler, "check"), (CompiledForms, "_compile"))
    form = {"regex": "[xyz]{3,5}once"}
    answer = served.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=3, structured_outputs=form)
    assert len(answer.json()["choices"]) == 4
    assert calls == {"RequestChecks._check": 2, "RequestChecks._check_params": 1, "GrammarCompiler.check": 1,
                     "CompiledForms._compile": 1}


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": "x", "response_format": "FORMAT"}, "response_format"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": "FORMAT"}, "response_format"),
    ("/v1/responses", {"input": "x", "text": {"format": "FLAT"}}, "text"),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3, "output_config": {"format": "FLAT"}}, "output_config"),
])
def test_half_a_character_as_a_key_of_a_schema_is_the_requests_fault(served: Served, path: str, fields: dict[str, Any],
                                                                     param: str) -> None:
    schema = {"type": "object", "\ud800": {"type": "integer"}}
    flat = {"type": "json_schema", "schema": schema} | ({"name": "x"} if param == "text" else {})
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = json.dumps(fields).replace('"FORMAT"', json.dumps(nested)).replace('"FLAT"', json.dumps(flat))
    answer = served.http.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "schema must be a text or a dict, each key a text" in error["message"] and error["param"] == param


def test_a_client_whose_forms_wait_is_told_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.features.grammars.turns.MOST_WAITING", 0)
    answer = served.post("/v1/completions", prompt="x", max_tokens=2, structured_outputs={"regex": "[x-z]{1,77}"})
    assert answer.status_code == 429 and "try again later" in answer.text and answer.headers["Retry-After"]


def test_a_client_that_leaves_gives_up_its_turn_at_the_compiler() -> None:
    def start_here() -> AsyncLLM:
        llms.append(start())
        return llms[-1]

    llms: list[AsyncLLM] = []
    with serving(start_here) as served:
        turns = compiler_of(llms[0].engine)._trial._turns
        with turns.turn(""):  # another request's grammar takes long
            for stream in (False, True):
                with pytest.raises(httpx.ReadTimeout):
                    served.http.post("/v1/completions", timeout=0.5, json={
                        "prompt": "x", "max_tokens": 1, "stream": stream, "structured_outputs": {"regex": "a{3,9}"}})
                served.wait_for(lambda: not turns._waiting)
        answer = served.post("/v1/completions", prompt="x", max_tokens=1, structured_outputs={"regex": "a{3,9}"})
        assert answer.status_code == 200


def test_a_grammar_that_reads_texts_in_ever_more_ways_ends_alone(served: Served,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens take time with the cube of their number, in which every other request would wait."""
    ambiguous = 'start: s\ns: s s | s s s | "a" | ""'
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "structured_outputs": {"grammar": ambiguous}}
    monkeypatch.setattr(turn_times, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(turn_times, "MOST_DEBT", 0.002)
    monkeypatch.setattr(turn_times, "LEAST_SLOW", 0.0005)
    assert "so many ways" in served.error("/v1/completions", **body)["message"]
    plain = body | {"structured_outputs": {"grammar": "start: /a*/"}}
    assert served.post("/v1/completions", **plain).status_code == 200


def test_only_slow_rows_of_clients_in_debt_end() -> None:
    times = turn_times.TurnTimes()
    little = turn_times.LEAST_SLOW / 2
    much = turn_times.TURN_SECONDS + turn_times.MOST_DEBT / 2 - 2 * little
    turn = {0: RowTime("a", much), 1: RowTime("a", little), 2: RowTime("b", much / 3), 3: RowTime(None, much * 100)}
    assert not times.find_slow(turn) and not times.find_slow(turn), "the debt is not larger than it may be"
    assert times.find_slow(turn) == [0]
    assert not times.find_slow(turn), "the debt has been paid"
    times.find_slow({2: RowTime("b", little)})
    assert not times.find_slow(turn) and not times.find_slow(turn), "a client without rows is forgotten"
