"""Bodies as clients and gateways send them are answered. `clients/bodies.json` says of each how it was found.

Texts and schemas in them are shortened; fields and their types are the client's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.server.known_fields import OF_BODIES, OF_PARTS
from tests.server.rig import Served, served_fixture, tiny_engine

CLIENTS = json.loads((Path(__file__).parent / "clients" / "bodies.json").read_text())
BODIES = [(name, path, body) for name, client in CLIENTS.items() for path, body in client["bodies"]]

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine),
                        tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize(("name", "path", "body"), BODIES, ids=[f"{name}: {path}" for name, path, _ in BODIES])
def test_a_clients_body_is_answered(served: Served, name: str, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert not body.get("stream") or '"error":{' not in answer.text
    ignored = set(filter(None, answer.headers.get("X-Outrider-Ignored", "").split(", ")))
    assert ignored <= names_in(body) and ignored <= OF_BODIES.keys() | OF_PARTS.keys()


def names_in(value: Any) -> set[str]:
    """All names of fields in a body."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    return set(value).union(*map(names_in, value.values())) if isinstance(value, dict) else set()


def test_there_are_many_clients_and_gateways() -> None:
    gateways = {name for name in CLIENTS if name.endswith("gateway")}
    assert len(gateways) >= 5 and len(CLIENTS) - len(gateways) >= 12


@pytest.mark.parametrize(("name", "number", "ignored"), [
    ("openai SDK", 0, "metadata, prediction, prompt_cache_key, prompt_cache_retention, safety_identifier, "
                      "service_tier, store, user, verbosity"),
    ("Claude Code", 0, "cache_control, context_management, eager_input_streaming, metadata"),
    ("llama.cpp's page", 0, "backend_sampling, cache_prompt, dry_allowed_length, dry_base, dry_penalty_last_n, "
                            "dynatemp_exponent, repeat_last_n, return_progress, timings_per_token, xtc_threshold"),
    ("OpenRouter gateway", 0, "models, provider, reasoning_details, route, session_id, transforms, usage, user"),
    ("Codex", 0, "client_metadata, prompt_cache_key, summary"),
])
def test_a_client_learns_what_has_no_effect(served: Served, name: str, number: int, ignored: str) -> None:
    path, body = CLIENTS[name]["bodies"][number]
    assert served.post(path, **body).headers["X-Outrider-Ignored"] == ignored
