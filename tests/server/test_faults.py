"""Bad days: clients that leave at any moment, bodies of any shape. Everybody gets an answer, and no page is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.messages import MessagesRequest
from outrider.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.responses import ResponsesRequest
from tests.server.rig import PATIENCE, Served, served_fixture

ROUTES: dict[str, Any] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}
GOOD: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [1],
                        "max_tokens": 2, "max_output_tokens": 2}
SCALARS = st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
                      max_leaves=6)

served = served_fixture(max_num_queued_reqs=40)


@settings(max_examples=60)
@given(route=st.sampled_from(sorted(ROUTES)), data=st.data())
def test_no_body_is_the_servers_fault(served: Served, route: str, data: st.DataObject) -> None:
    fields = ROUTES[route].model_fields
    body = {name: value for name, value in GOOD.items() if name in fields}
    names = data.draw(st.lists(st.sampled_from([*sorted(fields), "response_format", "other"]), max_size=3))
    body |= {name: data.draw(VALUES) for name in names}
    answer = served.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (body, answer.text)
    assert answer.status_code == 200 or answer.json()["error"]["message"], body


def test_clients_that_leave_at_any_moment(served: Served) -> None:
    chosen, ends = random.Random(7), Counter[str]()
    host, port = served.url.removeprefix("http://").split(":")

    async def one(is_patient: bool) -> None:
        body = json.dumps({"prompt": "ab" * chosen.randrange(1, 40), "max_tokens": chosen.randrange(1, 60), "n": 2,
                           "stream": chosen.random() < 0.7, "priority": chosen.randrange(3)}).encode()
        await asyncio.sleep(chosen.random())
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        sent = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        writer.write(sent if is_patient else sent[: chosen.randrange(1, len(sent)) if chosen.random() < 0.2 else None])
        if is_patient:
            answer = await reader.read(-1)
            ends[answer.split(maxsplit=2)[1].decode()] += 1
            assert b"finish_reason" in answer or b"429" in answer, answer
        else:
            await asyncio.sleep(chosen.random() / 4)
        writer.close()

    async def everyone() -> None:
        await asyncio.gather(*(one(is_patient=i % 3 == 0) for i in range(90)))

    asyncio.run(asyncio.wait_for(everyone(), PATIENCE))
    # How many find the queue full depends on the machine's speed.
    assert sum(ends.values()) == 30 and set(ends) <= {"200", "429"} and ends["200"] > 0, ends
    served.assert_idle()
    assert served.post("/v1/completions", prompt="x").status_code == 200
