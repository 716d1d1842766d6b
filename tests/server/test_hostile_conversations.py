"""Bodies of a valid form that once cost others their time or memory, or were answered as the server's own fault."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from outrider.async_llm import AsyncLLM
from outrider.beam_search import BeamSearchParams, beam_rounds
from outrider.core.outputs import CompletionOutput, Logprob, RequestOutput
from outrider.features.grammars.structural import MAX_PAIRS, structural_grammar
from outrider.server.chat_prompts import _check_roles
from outrider.server.forms import with_allowed_tools
from outrider.server.protocol import ChatMessage, ChatRequest
from outrider.server.response_bodies import InputCall, chat_messages
from tests.server.rig import Served, served_fixture, tiny_engine

MANY = 500

served = served_fixture(lambda: AsyncLLM.around(tiny_engine().engine), admin=True, max_body_bytes=2000)


class CountedText(str):
    """Counts how often it is compared, and how many characters of it are looked through."""

    num_compared = num_searched = 0

    def __eq__(self, other: object) -> bool:
        CountedText.num_compared += 1
        return str(self) == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __contains__(self, part: object) -> bool:
        return self.find(str(part)) >= 0

    def find(self, part: str, *places: Any) -> int:
        found = super().find(part, *places)
        CountedText.num_searched += (len(self) if found < 0 else found + len(part)) - (places[0] if places else 0)
        return found


def test_many_calls_in_a_row_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their list is made once, and not anew for each."""
    lists = []
    monkeypatch.setattr(ChatMessage, "__setattr__", lambda self, name, value: (
        lists.append(name), object.__setattr__(self, name, value)))  # type: ignore[func-returns-value]
    call = InputCall(type="function_call", call_id="c", name="f", arguments="{}")
    (message,) = chat_messages(None, [call] * MANY)
    assert len(message.tool_calls or ()) == MANY and lists == ["tool_calls"]


def test_many_allowed_tools() -> None:
    tools = [{"type": "function", "function": {"name": CountedText(f"f{i}")}} for i in range(MANY)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools[1:]}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools,
                                       "tool_choice": choice})
    CountedText.num_compared = 0
    assert len(with_allowed_tools(body).tools or ()) == MANY - 1
    assert CountedText.num_compared < 10 * MANY


def test_many_messages_of_unusual_roles() -> None:
    messages = [ChatMessage(role="critic", content=f" {i:09d} ") for i in range(MANY)]
    text = CountedText("".join(f"[critic]{i:09d}" for i in range(MANY)))
    CountedText.num_searched = 0
    _check_roles(messages, text)
    assert CountedText.num_searched == len(text)
    with pytest.raises(ValueError, match="leaves out messages of the role critic"):
        _check_roles(messages, text[:-1])


def test_many_triggers_of_many_tags() -> None:
    tags = [{"begin": "<fn>", "schema": {"type": "object"}, "end": "</fn>"}] * 2000
    made = structural_grammar(json.dumps({"structures": tags, "triggers": ["<fn"] * 2000}), str, {})
    assert len(made.splitlines()) < 2 * len(tags) + 10
    with pytest.raises(ValueError, match=f"more than {MAX_PAIRS} pairs"):
        structural_grammar(json.dumps({"structures": tags * 2, "triggers": ["<", "<f", "<fn"]}), str, {})


def test_beams_that_are_not_chosen_are_not_copied() -> None:
    """Each of the likeliest tokens would otherwise have a copy of the whole prompt before it."""
    limits = tiny_engine(max_logprobs=128).engine.limits
    rounds = beam_rounds([[1] * 100_000], BeamSearchParams(1, 2), None, (), limits)
    next(rounds)
    likely = {token: Logprob(-1.0 - token, rank=token + 1) for token in range(128)}
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "", [0], "length", logprobs=[likely])])
    tracemalloc.start()
    with pytest.raises(StopIteration) as end:  # longer than the model's context
        rounds.send([output])
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes < 10 * 8 * 100_000
    (found,) = end.value.value
    assert [beam.tokens[-1] for beam in found.sequences] == [0]


@pytest.mark.parametrize("penalty", [50, -50])
def test_the_largest_penalties_have_a_score(served: Served, penalty: int) -> None:
    body: dict[str, Any] = {"prompt": "a" * 150, "n": 2, "max_tokens": 2, "use_beam_search": True}
    assert served.post("/v1/completions", **body, length_penalty=penalty).status_code == 200
    for larger in (penalty * 1.01, penalty * 1e7):
        assert served.error("/v1/completions", **body, length_penalty=larger)["param"] == "length_penalty"


def test_embeddings_that_are_infinity_to_the_model(served: Served) -> None:
    values = np.full((1, served.llm.engine.limits.hidden_size), 1e300)
    header = json.dumps({"x": {"dtype": "F64", "shape": values.shape, "data_offsets": [0, values.nbytes]}}).encode()
    file = base64.b64encode(len(header).to_bytes(8, "little") + header + values.tobytes()).decode()
    error = served.error("/v1/completions", prompt_embeds=file, max_tokens=1)
    assert error["param"] == "prompt_embeds" and "infinity" in error["message"]


def test_a_limit_of_thousands_of_digits(served: Served) -> None:
    stored = served.post("/v1/responses", input="x", max_output_tokens=1).json()["id"]
    for limit in ("1" * 5000, "٣", "0", "-1", "1.0"):
        answer = served.http.get(f"/v1/responses/{stored}/input_items", params={"limit": limit})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"


def test_an_origin_that_is_no_address(served: Served) -> None:
    for origin in ("http://[", "null", "http://[::1", "//"):
        assert served.http.post("/reset_prefix_cache", headers={"origin": origin}).status_code == 403
    assert served.http.post("/reset_prefix_cache", headers={"origin": served.url}).status_code == 200


def test_a_conversation_is_no_larger_than_a_body(served: Served) -> None:
    """The model reads nothing of a summary, so no context ends such a conversation."""
    item = {"type": "reasoning", "content": [], "summary": ["x" * 1500]}
    body: dict[str, Any] = {"input": [item], "max_output_tokens": 1}
    first = served.post("/v1/responses", **body).json()["id"]
    second = served.post("/v1/responses", **body, previous_response_id=first).json()["id"]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        error = served.error(path, 413, input="x", previous_response_id=second)
        assert error["param"] == "previous_response_id"
