"""Libraries that people call the server with: each script of `clients/` in an environment of its own.

The packages are fetched when the test runs, because they pin other versions of packages that the tests use. The model's
words are written here, so that the scripts see reasoning, calls and forms: what is tested is how the two sides read
each other's objects.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import torch

from outrider.async_llm import AsyncLLM
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleEnd, SampleKey
from tests.engine.harness import CONFIGS, Rig, random_model
from tests.server.rig import Served, chat_tokenizer, serving
from tests.server.test_other_clients import environment

pytestmark = pytest.mark.long
CLIENTS = {
    "anthropic_blocks": ["anthropic"],
    "openai_objects": ["openai"],
    "langchain_chat": ["langchain-openai", "langchain-anthropic"],
    "instructor_models": ["instructor[anthropic]"],
    "pydantic_agent": ["pydantic-ai-slim[openai,anthropic]"],
    "llama_index_chat": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "litellm_chat": ["litellm", "mcp"],
}
TEMPLATE = ("{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
PERSON = {"name": "Ada", "age": 36}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose model asks for the weather once, then answers; and that is Ada where a person is asked for."""
    model = random_model(CONFIGS["llama"] | {"max_position_embeddings": 8192}, torch.float32, seed=0)
    engine = Rig(model, tokenizer=chat_tokenizer(), eos_ids=(2,), max_model_len=8192, num_pages=1024).engine
    with serving(lambda: AsyncLLM.around(engine), tool_call_parser="hermes", reasoning_parser="qwen3") as served:
        served.service._chat_template = TEMPLATE
        served.llm.increments = increments  # type: ignore[method-assign, assignment]
        yield served


def words(prompt: str, has_form: bool) -> str:
    found = re.search("<tools>(.*?)</tools>", prompt)
    tools = {tool["function"]["name"]: tool["function"]["parameters"]["properties"]
             for tool in (json.loads(found[1]) if found else [])}
    person = next((name for name, fields in tools.items() if fields.keys() == PERSON.keys()), None)
    if person is not None:
        return call(person, PERSON)
    if "weather" in tools and "[tool]" not in prompt:
        return "One moment.\n" + call("weather", {"city": "Köln"})
    return json.dumps(PERSON) if has_form or "Who?" in prompt else "It is sunny."


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def increments(request: CheckedRequest, request_id: str) -> AsyncGenerator[list[OutputIncrement], None]:
    prompt = bytes(token for token in request.token_ids if token < 256).decode()
    text = "<think>\nI must ask.\n</think>\n\n" + words(prompt, request.sampling.structured_outputs is not None)
    metrics = RequestMetrics()
    for start in range(0, len(text), 5):
        end = SampleEnd("stop") if start + 5 >= len(text) else None
        yield [OutputIncrement(SampleKey(request_id, 0, 0, metrics), [1], text[start:start + 5], end=end)]


@pytest.mark.parametrize("script", CLIENTS)
def test_a_library_calls_the_server(served: Served, script: str, tmp_path: Path) -> None:
    python = environment(tmp_path / script, *CLIENTS[script]) / "python"
    path = Path(__file__).parent / "clients" / f"{script}.py"
    done = subprocess.run([python, path, served.url], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
