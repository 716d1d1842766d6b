"""Fields that no body here has: ignored with a header, refused with what to use, or taken for a misspelt one."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.commands.serve_replicas import guarded
from outrider.config import EngineConfig
from outrider.server.app import build_app
from outrider.server.known_fields import OF_BODIES, OF_PARTS, SCHEMAS, IgnoredField, KnownFields, RefusedField
from outrider.server.messages import MessagesRequest
from outrider.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, RequestBody, field_names
from outrider.server.response_bodies import ResponsesRequest
from outrider.server.settings import ServerConfig
from tests.server.rig import Served, served_fixture, serving, tiny_engine
from tests.server.test_nulls import BODIES, answer, objects

HEADER = "X-Outrider-Ignored"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 1}
MODELS: dict[str, type[RequestBody]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/detokenize": DetokenizeRequest}
ANY: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", CHAT), ("/detokenize", {"tokens": [97]})]
OWN_OF_PARTS = {"strict", "summary"}  # fields that some parts have here
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}), ("/v1/embeddings", {"input": "a"}),
    ("/pooling", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}), ("/v1/score_tokens", {"prompt": "ab"}),
    ("/invocations", {"prompt": "a", "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses/input_tokens", {"input": "a"})]

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine))


def ignored(fields: KnownFields) -> dict[str, Any]:
    return {name: {"colour": "red"} for name, field in fields.items() if isinstance(field, IgnoredField)}


@pytest.mark.parametrize(("path", "body"), [BODIES[i] for i in (0, 2, 5, 6)])
def test_fields_that_change_nothing_are_ignored_and_named(served: Served, path: str, body: dict[str, Any]) -> None:
    plain, more = answer(served, path, body), copy.deepcopy(body)
    own, parts = field_names(MODELS[path]), {name: value for name, value in ignored(OF_PARTS).items()
                                             if name not in OWN_OF_PARTS}
    for place in list(objects(more))[1:]:
        place |= parts
    more |= {name: value for name, value in ignored(OF_BODIES).items() if name not in own}
    assert answer(served, path, more) == plain
    found = served.post(path, **more).headers[HEADER]
    assert found == ", ".join(sorted({*ignored(OF_BODIES)} - set(own) | set(parts))), "each once, in order"
    assert HEADER not in served.post(path, **body).headers


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_every_route_names_what_it_ignores(served: Served, path: str, body: dict[str, Any]) -> None:
    plain = served.post(path, **body)
    assert plain.status_code == 200 and HEADER not in plain.headers, plain.text
    assert served.post(path, **body, user="me", cache_prompt=True).headers[HEADER] == "cache_prompt, user"
    error = served.error(path, **body, n_predict=5)
    assert error["param"] == "n_predict" and "n_predict is not supported with the value 5: use" in error["message"]


def test_large_bodies_and_refused_ones_have_the_header_too(served: Served) -> None:
    """A thread checks a large body, and a larger one waits for its turn."""
    for size in (20_000, 300_000):
        found = served.post("/tokenize", prompt="x" * size, id_slot=1)
        assert found.headers[HEADER] == "id_slot"
    assert served.post("/v1/completions", **TEXT | {"max_tokens": 0}, store=True).headers[HEADER] == "store"


@pytest.mark.parametrize("name", sorted(name for name in OF_BODIES if isinstance(OF_BODIES[name], RefusedField)))
def test_fields_that_would_change_the_answer_are_refused(served: Served, name: str) -> None:
    path, body = next((path, body) for path, body in ANY if name not in field_names(MODELS[path]))
    known = OF_BODIES[name]
    assert isinstance(known, RefusedField)
    error = served.error(path, **body, **{name: "colour"})
    shown = "..." if name == "image_data" else "'colour'"  # images are not repeated in errors
    assert error["param"] == name and error["message"].endswith(f"with the value {shown}: {known.instead}")
    for value in known.neutral:
        assert served.post(path, **body, **{name: value}).status_code == 200


@pytest.mark.parametrize("message", [
    {"role": "user", "content": "What is this?", "images": ["aGVsbG8="]},
    {"role": "user", "content": [{"type": "text", "text": "What is this?", "images": ["aGVsbG8="]}]},
])
def test_a_picture_is_never_ignored(served: Served, message: dict[str, Any]) -> None:
    assert "use parts of the type image_url" in served.error("/v1/chat/completions", messages=[message])["message"]
    assert served.post("/v1/chat/completions", messages=[message | {"content": "x", "images": []}],
                       max_tokens=1).status_code == 200


def test_numbers_have_two_forms_and_truths_are_no_numbers(served: Served) -> None:
    for value in (1, 1.0):
        assert served.post("/v1/completions", **TEXT, repeat_penalty=value).status_code == 200
    for value in (True, 1.1):
        assert "use repetition_penalty" in served.error("/v1/completions", **TEXT, repeat_penalty=value)["message"]


def test_the_table_says_each_thing_once() -> None:
    assert len(OF_BODIES) == sum(map(len, SCHEMAS.values()))
    for name, field in (OF_BODIES | OF_PARTS).items():
        text = field.why if isinstance(field, IgnoredField) else field.instead
        assert name.isascii() and name.isprintable() and "," not in name, "it is in a header"
        assert text and not text.endswith("."), name


def test_what_refusals_tell_to_use_is_a_field_or_a_flag_of_the_server() -> None:
    fields = {name for kind in MODELS.values() for name in field_names(kind)}
    words = [(name, word) for name, field in OF_BODIES.items() if isinstance(field, RefusedField)
             for word in re.findall(r"--[\w-]+|\w+_\w+", re.sub(r"structured_outputs: {.*}", "", field.instead))]
    flags = {f"--{name.replace('_', '-')}" for kind in (ServerConfig, EngineConfig)
             for name in inspect.signature(kind).parameters}
    unknown = {(name, word) for name, word in words if word not in fields | flags}
    assert unknown <= {("activation", "use_activation"), ("softmax", "use_activation")}  # of /classify


@pytest.mark.parametrize(("path", "body", "name"), [
    ("/v1/chat/completions", CHAT | {"user": "me"}, "user"), ("/v1/messages", CHAT | {"metadata": {}}, "metadata"),
    ("/tokenize", {"prompt": "a" * 20_000, "store": True}, "store"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "annotations": []}]}, "annotations")])
def test_a_strict_server_refuses_fields_without_effect(path: str, body: dict[str, Any], name: str) -> None:
    with serving(strict=True) as served:
        found = served.post(path, **body)
        message = found.json()["error"]["message"]
        assert found.status_code == 400 and f"{name} has no effect here" in message and "--strict" in message
        assert served.post("/v1/chat/completions", **CHAT, stop=None, best_of=1, user=None).status_code == 200


def test_web_pages_of_other_origins_may_read_the_header() -> None:
    origins = ServerConfig(allowed_origins=("https://example.org",))
    with serving(allowed_origins=origins.allowed_origins) as served:
        headers = {"origin": "https://example.org"}
        found = served.http.post("/v1/completions", json=TEXT | {"store": True}, headers=headers)
        assert HEADER in found.headers["access-control-expose-headers"] and found.headers[HEADER] == "store"
    middleware: Any = guarded(build_app, origins)
    assert HEADER in middleware.simple_headers["Access-Control-Expose-Headers"]


MISSPELT = {
    "/v1/chat/completions": """
        response_fromat response_format | stops stop | max_token max_tokens | maxTokens max_tokens | mesages messages
        temprature temperature | temperture temperature | topp top_p | top-p top_p | topk top_k | top_K top_k
        minp min_p | presense_penalty presence_penalty | frequencey_penalty frequency_penalty | seeds seed
        repitition_penalty repetition_penalty | max_completions_tokens max_completion_tokens | strem stream
        stream_option stream_options | tool tools | tool_choise tool_choice | paralel_tool_calls parallel_tool_calls
        toplogprobs top_logprobs | logprob logprobs | log_probs logprobs | logitbias logit_bias | modle model
        reasoning_efort reasoning_effort | responseFormat response_format | chat_template_kwarg chat_template_kwargs
        structured_output structured_outputs | stop_tokens_ids stop_token_ids | ignore_eso ignore_eos
        prioirty priority | safety_identifer safety_identifier | cach_prompt cache_prompt | guided_jsn guided_json""",
    "/v1/completions": "promt prompt | prompts prompt | max_new_tokens max_tokens | bad_word bad_words",
    "/v1/responses": """max_output_token max_output_tokens | intructions instructions
        previous_responce_id previous_response_id""",
    "/v1/messages": "stop_sequence stop_sequences | sytem system", "/rerank": "document documents",
    "/v1/embeddings": "dimension dimensions | encoding_fromat encoding_format",
    "/tokenize": "add_special_token add_special_tokens",
}
PAIRS = [(path, *pair.split()) for path, table in MISSPELT.items() for pair in re.split(r"[|\n]", table)
         if pair.strip()]


@pytest.mark.parametrize(("path", "name", "meant"), PAIRS)
def test_a_misspelt_field_is_refused_with_a_suggestion(served: Served, path: str, name: str, meant: str) -> None:
    found = served.post(path, **{name: "x"})
    message = found.json()["error"]["message"]
    assert found.status_code == 400 and message == f"there is no field {name!r}: did you mean {meant}?"


@pytest.mark.parametrize(("path", "body", "words"), [
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usages": True}},
     "'stream_options.include_usages': did you mean include_usage?"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "contents": "a"}]},
     "'messages.0.contents': did you mean content?"),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
     "'tools.0.function.paramters': did you mean parameters?"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
     "'response_format.json_schema.shema': did you mean schema?"),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
     "'messages.0.content.0.txt': did you mean text?"),
    ("/v1/responses", {"input": "a", "text": {"fromat": {}}}, "'text.fromat': did you mean format?"),
])
def test_a_misspelt_field_inside_a_body_is_refused_with_a_suggestion(served: Served, path: str, body: dict[str, Any],
                                                                     words: str) -> None:
    assert f"there is no field {words}" in served.post(path, **body).json()["error"]["message"]
