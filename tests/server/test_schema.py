"""Requests made from the OpenAPI schema: whatever it allows, and much that it does not, is never the server's fault."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from outrider.async_llm import AsyncLLM
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from tests.server.rig import MODEL, Served, served_fixture, tiny_engine

EXAMPLES = 25  # for each operation
APP = build_app(Service(EngineHost(lambda: AsyncLLM.around(tiny_engine().engine)), ServerConfig(), (MODEL,)))
SCHEMA = schemathesis.openapi.from_dict(APP.openapi())
OPERATIONS: dict[str, Any] = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(max_model_len=32).engine))


@pytest.mark.parametrize("label", sorted(OPERATIONS))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_of_the_schema_is_the_servers_fault(served: Served, label: str, data: st.DataObject) -> None:
    case = data.draw(OPERATIONS[label].as_strategy())
    if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), float) and case.body["timeout"] > 0:
        del case.body["timeout"]  # a request that gives itself no time is answered with 504
    answer = case.call(base_url=served.url, timeout=300)
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code in (200, 400, 404, 405), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


def test_every_route_is_in_the_schema() -> None:
    paths = {label.split()[1] for label in OPERATIONS}
    assert paths >= {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
                     "/v1/responses/input_tokens", "/v1/responses/{response_id}/input_items",
                     "/v1/score", "/v1/rerank", "/v2/rerank", "/pooling", "/invocations",
                     "/tokenize", "/detokenize", "/health", "/ready", "/metrics", "/v1/models", "/load", "/version"}
