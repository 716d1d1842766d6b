"""LLM: prompts in, outputs out, in one process. Names follow vLLM's so that an import can be swapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.config import EngineConfig
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine.build import build_engine

Prompt = str | list[int] | dict[str, Any]


class LLM:
    """`LLM("smollm2")`, `LLM("path/to/folder")`, `LLM("model.gguf")`; further settings as in EngineConfig."""

    def __init__(self, model: str, **settings: Any) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise ValueError(f"LLM: unknown setting {name!r}; known are {', '.join(sorted(known))}")
        self.config = EngineConfig(model=str(model), **settings)
        self.engine = build_engine(self.config)
        self._num_requests = 0
        self._changed: dict[str, RequestOutput] = {}  # what a step gave to a request whose caller has not looked yet

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A prompt that cannot be served raises before any is started."""
        batch = _as_list(prompts)
        order = self._add(batch, _per_prompt(sampling_params, len(batch)))
        done: dict[str, RequestOutput] = {}
        try:
            mine = set(order)
            while len(done) < len(order):
                self._step()
                for request_id in mine & self._changed.keys():
                    output = self._changed.pop(request_id)
                    if output.finished:
                        done[request_id] = output
        except BaseException:
            self._abort(order)
            raise
        return [done[request_id] for request_id in order]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The growing output of one prompt, after every run."""
        order = self._add([prompt], [sampling_params or SamplingParams()])
        finished = False
        try:
            while not finished:
                if order[0] not in self._changed:
                    self._step()
                if (output := self._changed.pop(order[0], None)) is not None:
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._abort(order)

    def chat(self, messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             **options: Any) -> list[RequestOutput]:
        """One conversation, or several, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.encode_chat(c, **options) for c in conversations], sampling_params)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return self.get_tokenizer().encode_chat(messages, **options)

    def get_tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer files: give prompts as token ids")
        return self.engine.tokenizer

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[str]:
        encoded = [self._encode(prompt) for prompt in prompts]
        for (_, token_ids, _), own in zip(encoded, params, strict=True):
            self.engine.checked(token_ids, own)
        order: list[str] = []
        for (text, token_ids, salt), own in zip(encoded, params, strict=True):
            order.append(str(self._num_requests))
            self._num_requests += 1
            self.engine.add(order[-1], token_ids, own, prompt=text, cache_salt=salt)
        return order

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text if there was one, token ids, cache salt."""
        if isinstance(prompt, dict):
            salt = prompt.get("cache_salt")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"]), salt
            if "prompt" not in prompt:
                raise ValueError(f"a prompt needs 'prompt' or 'prompt_token_ids', got {', '.join(prompt) or 'nothing'}")
            return prompt["prompt"], self.get_tokenizer().encode(prompt["prompt"]), salt
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt), None
        if not isinstance(prompt, (list, tuple)):
            raise ValueError(f"a prompt is a text, token ids or a dict, got {prompt!r}")
        return None, list(prompt), None

    def _step(self) -> None:
        """One step for everyone: a stream that is not being read goes on too, and its reader finds it here."""
        for output in self.engine.step():
            self._changed[output.request_id] = output

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
        self._step()  # their ends
        while self.engine.has_work and not self.engine.has_requests:
            self._step()
        for request_id in request_ids:
            self._changed.pop(request_id, None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # one prompt as token ids
    return items


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num
    if isinstance(params, SamplingParams):
        return [params] * num
    if len(params) != num:
        raise ValueError(f"{len(params)} sampling_params for {num} prompts")
    return list(params)
