"""Service: the state that all routes share. It holds the models' names, turns prompts into token ids, and decides which
requests may run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast
from uuid import uuid4

from outrider.async_llm import LONG_TEXT
from outrider.core import SamplingParams
from outrider.core.checked_request import CheckedRequest
from outrider.core.hidden_params import RequestParams
from outrider.core.outputs import RequestOutput
from outrider.engine.text import Tokenizer
from outrider.server.admission import QueueBound
from outrider.server.beams import beam_outputs, beam_sampling
from outrider.server.bodies import beside_loop
from outrider.server.chat_prompts import ChatInput, Encode
from outrider.server.engine_host import EngineHost, Serving
from outrider.server.errors import ApiError, bad_value
from outrider.server.generation import Increments, Usage, checked, generate, whole_outputs
from outrider.server.images import ImagePrompt, RequestImages, has_images
from outrider.server.metrics import ServerMetrics
from outrider.server.protocol import Prompted, SamplingFields, Scheduled, StreamOptions
from outrider.server.response_store import ResponseStore
from outrider.server.served_adapters import ServedAdapters
from outrider.server.settings import ServerConfig
from outrider.server.tracing import Tracing
from outrider.server.truncation import Side, Truncation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PromptInput: TypeAlias = "list[int] | ImagePrompt | NDArray[np.floating]"
Sampled = TypeVar("Sampled", bound=SamplingFields)


class Service:
    """The shared state of the routes, in one event loop."""

    def __init__(self, host: EngineHost, config: ServerConfig, model_names: Sequence[str],
                 chat_template: str | None = None, tracing: Tracing | None = None) -> None:
        self.host = host
        self.config = config
        self.model_names = tuple(model_names)
        self.admission = QueueBound(config.max_num_queued_reqs)
        self.metrics = ServerMetrics(self.model_names[0], tracing)
        self.responses = ResponseStore(config.max_stored_responses)
        self.images = RequestImages(config)
        self._chat_template = chat_template
        self._created = int(time.time())
        self.adapters = ServedAdapters(config.lora_modules, config.lora_root, self.model_names)

    # Models

    def model_card(self, name: str) -> dict[str, Any]:
        state = self.host.state
        max_len = state.llm.engine.limits.max_len if isinstance(state, Serving) else None
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "outrider",
                "root": self.model_names[0], "parent": None, "max_model_len": max_len}
        card |= {"modalities": ["text", "image"] if self.takes_images else ["text"],
                 "capabilities": {"vision": self.takes_images}}
        return card | self.adapters.card(name)

    @property
    def all_names(self) -> list[str]:
        """Return the names that a request may give as its model: the model's own names, then the adapters'."""
        return [*self.model_names, *self.adapters.names]

    @property
    def takes_images(self) -> bool:
        """Whether the loaded model accepts images."""
        state = self.host.state
        return isinstance(state, Serving) and state.llm.engine.model.takes_images

    def check_model(self, name: str | None) -> str:
        """Refuse a name that is not served. Return the name for the answer: the client's, or the first."""
        if name is None or name in self.all_names:
            return name or self.model_names[0]
        raise ApiError(404, f"this server has no model {name[:100]!r}; use one of "
                            f"{', '.join(self.all_names[:20])}", param="model")

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.host.llm.engine.model.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give prompts as token ids to /v1/completions")
        return tokenizer

    # Prompts

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text from the field `param` of a body."""
        (ids,) = await self.encode_prompts(text, param, add_special_tokens)
        return ids

    async def encode_prompts(self, given: str | list[str] | list[int] | list[list[int]], param: str,
                             add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[list[int]]:
        """Tokenize one prompt or several, each a text or token ids, from the field `param` of a body. Many characters
        are tokenized in a thread."""
        if not given and not isinstance(given, str):
            raise ApiError(400, f"{param} is an empty list: give at least one", param=param)
        prompts: Sequence[str | list[int]] = cast(
            "Sequence[str | list[int]]", [given] if isinstance(given, str) or isinstance(given[0], int) else given)
        if len(prompts) > self.config.max_prompts:
            raise ApiError(400, f"{param} has {len(prompts)} prompts, and one request may have at most "
                                f"{self.config.max_prompts}: send fewer", param=param)

        def work() -> list[list[int]]:
            return [self._encoded(each, param, add_special_tokens, truncation) if isinstance(each, str)
                    else each if truncation is None else truncation.cut(each) for each in prompts]

        num_characters = sum(len(each) for each in prompts if isinstance(each, str))
        return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()

    async def encode_chat(self, chat: ChatInput, add_special_tokens: bool | None = None,
                          truncation: Truncation | None = None, *, takes_images: bool = False) -> list[int]:
        """Render a conversation through the chat template and tokenize it. The ids have one placeholder for each image.
        add_special_tokens: also add the tokens that the tokenizer puts around a text. takes_images: the caller puts the
        conversation's images into the prompt."""
        _, model = self.tokenizer, self.host.llm.engine.model  # without a tokenizer, an error
        self.images.check(chat.messages, model, takes_images=takes_images, is_cut=truncation is not None)

        def work() -> list[int]:
            rendered = chat.render(model, self._chat_template, self.config.default_chat_template_kwargs)
            return self._encoded(rendered.text, "messages", add_special_tokens is True, truncation, rendered.encode)

        return await asyncio.to_thread(work)  # a template may take seconds

    async def count_chat(self, chat: ChatInput, tenant: str | None,
                         add_special_tokens: bool | None = None) -> list[int]:
        """Count the tokens of a conversation like `encode_chat`, but with all tokens of its images."""
        ids = await self.encode_chat(chat, add_special_tokens, takes_images=True)
        if not has_images(chat.messages):
            return ids
        async with self.images.decoded(chat.messages, tenant) as images:
            (request,) = await self.check(Scheduled(), [images.in_prompt(ids)], SamplingParams(max_tokens=1), tenant)
        return list(request.token_ids)

    def with_defaults(self, body: Sampled) -> Sampled:
        """Copy the body, with the server's settings in fields that the body leaves empty."""
        given = body.implied_fields()
        if self.config.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            given["return_tokens_as_token_ids"] = True
        if self.config.enable_force_include_usage and body.stream:
            given["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
        return body.model_copy(update=given) if given else body

    def truncation(self, body: Prompted, side: Side = "right", num_new: int = 0) -> Truncation | None:
        return Truncation.from_body(body, self.host.llm.engine.limits.max_len, side, num_new)

    async def check_sampled(self, body: SamplingFields, prompts: Sequence[PromptInput], tenant: str | None,
                            **more: Any) -> list[CheckedRequest]:
        """Make one checked request for each prompt. `more`: sampling parameters whose fields have other names in the
        body."""
        limits = self.host.llm.engine.limits
        self.check_id_counts(body)
        if body.use_beam_search:
            params = beam_sampling(body, more.get("max_tokens"), more.get("structured_outputs") or body.form(), limits)
        else:
            params = await beside_loop(lambda: body.sampling(**more))
        names: tuple[tuple[str, str], ...] = ()
        if body.structured_outputs is None:  # the form is another field's; behind reasoning it is part of a grammar
            own = "tools" if body.response_format is None else "response_format.json_schema.schema"
            names = (("structured_outputs.json", own), ("structured_outputs.grammar", own),
                     ("structured_outputs.structural_tag", "response_format"))
        return await self.check(body, prompts, params, tenant, names)

    def check_id_counts(self, body: Scheduled) -> None:
        """Refuse a field with more token ids than the vocabulary has. Otherwise checking each of millions would take
        long."""
        vocab_size = self.host.llm.engine.limits.vocab_size
        for name in ("allowed_token_ids", "stop_token_ids"):
            num_ids = len(getattr(body, name, None) or ())
            if num_ids > vocab_size:
                raise ApiError(400, f"{name} has {num_ids} ids, more than the vocabulary's {vocab_size}: give each id "
                                    "once", param=name)

    async def check(self, body: Scheduled, prompts: Sequence[PromptInput], params: RequestParams,
                    tenant: str | None, names: Sequence[tuple[str, str]] = ()) -> list[CheckedRequest]:
        """Make one checked request for each prompt, or raise ApiError. `names`: pairs of a parameter's name in the
        engine's error messages and the body field that it came from."""
        salt = body.cache_salt if tenant is None else f"{tenant}:{body.cache_salt or ''}"
        session = {} if body.session_name is None else {"cache_session": (tenant or "", body.session_name)}
        given = [_as_dict(prompt) | {"cache_salt": salt} | session for prompt in prompts]
        try:
            return await checked(self.host.llm, given, params, body.priority or 0,
                                 self.adapters.find(body.model_name), tenant)
        except ValueError as error:
            raise bad_value(error, type(body).model_fields, names) from None

    def deadline(self, body: Scheduled) -> float | None:
        """Return the seconds that the request may take: the smaller of its own limit and the server's."""
        return min((limit for limit in (body.timeout, self.config.request_timeout) if limit is not None), default=None)

    # Running

    async def run(self, requests: Sequence[CheckedRequest], request_id: str) -> Increments:
        """Run the requests and yield increments with the index of their prompt."""
        llm = self.host.llm
        num_samples = sum(request.num_samples for request in requests)
        with self.admission.admit(num_samples, llm.engine.limits.max_requests, requests[0].tenant):
            async with aclosing(generate(llm, requests, request_id, self.metrics)) as pairs:
                async for pair in pairs:
                    yield pair

    async def whole(self, body: SamplingFields, requests: Sequence[CheckedRequest], request_id: str, usage: Usage, *,
                    skip_special_tokens: bool) -> list[RequestOutput]:
        """Run the requests and return the finished output of each prompt, sampled or found by a beam search."""
        if not body.use_beam_search:
            return await whole_outputs(self.run(requests, request_id), requests, usage)
        llm = self.host.llm
        num_samples = sum(request.num_samples for request in requests)
        with self.admission.admit(num_samples, llm.engine.limits.max_requests, requests[0].tenant):
            outputs = await beam_outputs(llm, body, requests, request_id, skip_special_tokens=skip_special_tokens)
        usage.count_completions(outputs)
        return outputs

    def check_load(self, tenant: str | None = None) -> None:
        """Refuse the request, before it is tokenized, if the queue has no room for another sample of its tenant."""
        with self.admission.admit(1, self.host.llm.engine.limits.max_requests, tenant):
            pass

    def _encoded(self, text: str, param: str, add_special_tokens: bool, truncation: Truncation | None,
                 encode: Encode | None = None) -> list[int]:
        """Tokenize a text. If it has so many characters that it cannot fit, it is refused or shortened first: a token
        has a known maximum of characters. encode: replaces the tokenizer's method."""
        max_len = self.host.llm.engine.limits.max_len
        if len(text) > max_len and len(text) > max_len * self._longest_token:
            if truncation is None:
                raise ApiError(400, f"the prompt has {len(text)} characters, more than {max_len} tokens "
                                    "(max_model_len) can have: shorten it", param=param)
            text = truncation.shorten(text, max_len * self._longest_token)
        try:
            if encode is not None:
                ids = encode(text, add_special_tokens)
                return ids if truncation is None else truncation.cut(ids)
            if truncation is not None:
                return truncation.encode(self.tokenizer, text, add_special_tokens)
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)


def _as_dict(prompt: PromptInput) -> dict[str, Any]:
    """Convert a prompt to the form that the engine reads."""
    if isinstance(prompt, ImagePrompt):
        return prompt.as_dict()
    return {"prompt_token_ids" if isinstance(prompt, list) else "prompt_embeds": prompt}


class RequestName(NamedTuple):
    answer: str  # the id that the client sees
    engine: str  # unique, whatever ids clients choose


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex}"


def name_request(prefix: str, body: Prompted) -> RequestName:
    """Make the request's id. It contains the client's own id if the body has one."""
    if body.request_id is None:
        own = new_id(prefix)
        return RequestName(own, own)
    return RequestName(f"{prefix}-{body.request_id}", new_id(f"{prefix}-{body.request_id}"))
