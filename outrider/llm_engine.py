"""LLMEngine: the caller adds requests one by one and makes the engine's steps. Names follow vLLM's.

It uses the same request loop as LLM, so `llm.llm_engine` shares the engine with the methods of LLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outrider.adapter_loading import loaded
from outrider.compat.executor import VllmPlace, executor_around
from outrider.compat.metrics import Metric, engine_metrics
from outrider.core.any_output import Output
from outrider.core.fields import Text, check_value
from outrider.core.hidden_params import RequestParams
from outrider.core.output_reader import OutputReader
from outrider.core.prompts import Prompt
from outrider.engine.engine import Engine
from outrider.engine.request_loop import Caller, RequestLoop
from outrider.front import Front
from outrider.lora_request import LoRARequest


class LLMEngine(Front):
    """An engine that the caller steps: create it with `LLMEngine.from_engine_args(EngineArgs(...))`, call
    `add_request`, then call `step` while `has_unfinished_requests`."""

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        self._drive(RequestLoop(engine))

    @classmethod
    def inside(cls, front: Front, loop: RequestLoop) -> LLMEngine:
        """Make an LLMEngine for `LLM.llm_engine`. It shares the engine and the request loop with the LLM, or with
        another front."""
        self = cls.__new__(cls)
        self._config = front._config
        Front._start(self, front.engine)
        self._maintenance = front._maintenance  # which knows what an engine waits for
        self._drive(loop)
        return self

    def _drive(self, loop: RequestLoop) -> None:
        self._loop, self._caller = loop, Caller()
        self._names: dict[str, str] = {}  # the loop's id of a request by the caller's

    def add_request(self, request_id: str, prompt: Prompt, params: RequestParams, arrival_time: float | None = None,
                    lora_request: LoRARequest | None = None, tokenization_kwargs: None = None,
                    trace_headers: None = None, priority: int = 0) -> str:
        """Queue a request. One that cannot be served raises ValueError. Returns its id."""
        if tokenization_kwargs is not None:
            raise ValueError("tokenization_kwargs is not supported: encode the prompt with get_tokenizer() and give "
                             "prompt_token_ids")
        check_value("request_id", Text, request_id)
        if request_id in self._names:
            raise ValueError(f"request id {request_id!r} is in use: choose another, or wait until that request has "
                             "ended")
        (request,) = self.engine.checks.check_all([prompt], [params], [priority])
        with loaded(self.engine, self._loop.run, [request], lora_request) as requests:
            (own,) = self._loop.add(self._caller, requests)
        self._names[request_id] = own
        self._caller.readers[own] = OutputReader(request.sampling.output_kind)
        return request_id

    def step(self) -> list[Output]:
        """Advance the engine by one step, and return the outputs that have grown. `output_kind` of their parameters
        says whether an output has all tokens or only the new ones."""
        given = {own: request_id for request_id, own in self._names.items()}
        read: list[Output] = []
        for output in self._loop.step(self._caller):
            part = self._caller.read(output)
            if part is not None:
                part.request_id = given[output.request_id]
                read.append(part)
            if output.finished:
                self._forget(given[output.request_id])
        return read

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests. `step` does not return them any more; an unknown id is no error."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._names:
                self._caller.left.discard(self._names[name])
                self._forget(name)
        self._loop.run(lambda: None)  # which tells the engine to end requests that no caller wants

    def _forget(self, request_id: str) -> None:
        self._caller.readers.pop(self._names.pop(request_id), None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._caller.left)

    def get_num_unfinished_requests(self) -> int:
        return len(self._caller.left)

    def get_metrics(self) -> list[Metric]:
        """Return counts and gauges of the engine since it started, under vLLM's names."""
        return engine_metrics(self.engine, self.engine.model.name)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached pages except pages of running requests. `reset_running_requests=True` preempts these
        requests and forgets their pages too."""
        return self._loop.run(lambda: self._maintenance.reset_prefix_cache(
            reset_running_requests=reset_running_requests))

    @property
    def model_executor(self) -> VllmPlace:
        """The object through which trainers load weights into an engine of their own process:
        `model_executor.driver_worker.model_runner.model.load_weights([(name, tensor)])`. See `LLM.load_weights`."""
        return executor_around(self._load_weights)

    def _load_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        self._maintenance.load_weights(weights, self._loop.run)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and give its memory back."""
        self.engine.close()
