"""A server in a thread around a tiny random model whose tokens are bytes. One per module: tests share it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from outrider.async_llm import AsyncLLM
from outrider.engine.text import Tokenizer
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost, Serving
from outrider.server.http_protocol import BoundedHttp
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from tests.engine.harness import Rig, byte_tokenizer, tiny_model

TEMPLATE = ("{% if tools %}({{ tools | length }} tools){% endif %}"
            "{% for m in messages %}[{{ m.role }}]{% if 'refuse' in m.content %}{{ raise_exception('No.') }}{% endif %}"
            "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
MODEL = "tiny"
PATIENCE = 300.0  # seconds: what takes longer never comes, however busy the machine is


def chat_tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer().backend, chat_templates={"default": TEMPLATE})


def tiny_engine(**settings: Any) -> Rig:
    given = {"max_model_len": 200, "num_pages": 256, "speculative_config": DRAFTS, "max_logprobs": 5} | settings
    return Rig(tiny_model("llama", torch.float32), tokenizer=chat_tokenizer(), **given)


class Served:
    """Listens at `url` until the block of `serving` ends."""

    def __init__(self, start: Callable[[], AsyncLLM], config: ServerConfig, secret: bytes | None = None) -> None:
        self.host = EngineHost(start, stall_timeout=config.stall_timeout, max_restarts=config.max_restarts)
        self.service = Service(self.host, config, config.served_model_name or (MODEL,))
        # uvicorn closes idle connections after 5 seconds, as httpx does: a client would race with the server.
        config_of_server = uvicorn.Config(build_app(self.service, secret), http=BoundedHttp, log_level="warning",
                                          lifespan="on", timeout_graceful_shutdown=5, timeout_keep_alive=int(PATIENCE))
        self._server = uvicorn.Server(config_of_server)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.host.close()
        self._socket.close()

    @property
    def llm(self) -> AsyncLLM:
        return self.host.llm

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def error(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == status and error["message"] and error["type"]
        return error

    def assert_idle(self) -> None:
        """No request and no page is left."""
        engine = self.llm.engine
        self.wait_for(lambda: not engine.has_work and self.service.admission.num_live == 0)
        engine.scheduler.check_integrity()
        assert engine.scheduler.cache.usage() == 0.0


@contextmanager
def serving(start: Callable[[], AsyncLLM] | None = None, secret: bytes | None = None,
            **settings: Any) -> Iterator[Served]:
    served = Served(start or (lambda: AsyncLLM.around(tiny_engine().engine)), ServerConfig(**settings), secret)
    try:
        served.wait_for(lambda: isinstance(served.host.state, Serving))
        yield served
    finally:
        served.close()


def served_fixture(start: Callable[[], AsyncLLM] | None = None, **settings: Any) -> Any:
    """The fixture `served` of a module: one server for its tests, which must leave no request and no page behind."""

    @pytest.fixture(scope="module")
    def served() -> Iterator[Served]:
        with serving(start, **settings) as served:
            yield served
            served.assert_idle()

    return served
