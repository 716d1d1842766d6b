"""Service: the state that all routes share. It knows the models' names, turns prompts into token ids, and decides which
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
from outrider.core.checked_request import CheckedRequest
from outrider.core.hidden_params import RequestParams
from outrider.core.outputs import RequestOutput
from outrider.core.prompts import Prompt
from outrider.engine.text import Tokenizer
from outrider.server.admission import QueueBound
from outrider.server.beams import beam_outputs, beam_sampling
from outrider.server.bodies import beside_loop
from outrider.server.engine_host import EngineHost, Serving
from outrider.server.errors import ApiError, bad_value
from outrider.server.generation import Increments, Usage, checked, generate, whole_outputs
from outrider.server.metrics import ServerMetrics
from outrider.server.protocol import ROLES, ChatMessage, Prompted, SamplingFields, Scheduled, StreamOptions, Tool
from outrider.server.response_store import ResponseStore
from outrider.server.served_adapters import ServedAdapters
from outrider.server.settings import RESERVED, ServerConfig
from outrider.server.templating import plain_text, template_messages, template_tools
from outrider.server.tracing import Tracing
from outrider.server.truncation import Side, Truncation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TokensOrEmbeds: TypeAlias = "list[int] | NDArray[np.floating]"
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
        self._chat_template = chat_template
        self._created = int(time.time())
        self.adapters = ServedAdapters(config.lora_modules, config.lora_root, self.model_names)

    # Models

    def model_card(self, name: str) -> dict[str, Any]:
        state = self.host.state
        max_len = state.llm.engine.limits.max_len if isinstance(state, Serving) else None
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "outrider",
                "root": self.model_names[0], "parent": None, "max_model_len": max_len}
        return card | self.adapters.card(name)

    @property
    def all_names(self) -> list[str]:
        """The names that a request may give as its model: the model's own names, then the adapters'."""
        return [*self.model_names, *self.adapters.names]

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

    async def encode_chat(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None,
                          variables: dict[str, Any] | None, add_generation_prompt: bool | None,
                          continue_final_message: bool | None = None, add_special_tokens: bool | None = None,
                          truncation: Truncation | None = None, reasoning_effort: str | None = None) -> list[int]:
        """Render messages through the chat template and tokenize them. add_special_tokens: also add the tokens that the
        tokenizer puts around a text. reasoning_effort: how much the model should reason, or "none", for templates
        that read a variable for it."""
        variables = variables or {}
        for name in variables.keys() & set(RESERVED):
            raise ApiError(400, f"chat_template_kwargs must not set {name}: set it as a field of the request",
                           param="chat_template_kwargs")
        tokenizer = self.tokenizer
        hints = (self.config.default_chat_template_kwargs or {}) | _reasoning_hints(reasoning_effort)

        def work() -> list[int]:
            try:
                text = tokenizer.render_chat(template_messages(messages), tools=template_tools(tools),
                                             add_generation_prompt=add_generation_prompt,
                                             continue_final_message=continue_final_message is True,
                                             chat_template=self._chat_template, chat_template_kwargs=variables,
                                             hints=hints)
                _check_roles(messages, text)
            except ValueError as error:
                refused = bad_value(error, ("messages", "tools", "documents", "continue_final_message"))
                is_variable = str(error).startswith(tuple(f"{name} " for name in variables))
                refused.param = refused.param or ("chat_template_kwargs" if is_variable else "messages")
                raise refused from None
            return self._encoded(text, "messages", add_special_tokens is True, truncation)

        return await asyncio.to_thread(work)  # a template may take seconds

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

    async def check_sampled(self, body: SamplingFields, prompts: Sequence[TokensOrEmbeds], tenant: str | None,
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

    async def check(self, body: Scheduled, prompts: Sequence[TokensOrEmbeds], params: RequestParams,
                    tenant: str | None, names: Sequence[tuple[str, str]] = ()) -> list[CheckedRequest]:
        """Make one checked request for each prompt, or raise ApiError. `names`: pairs of a parameter's name in the
        engine's error messages and the body field that it came from."""
        salt = body.cache_salt if tenant is None else f"{tenant}:{body.cache_salt or ''}"
        given: list[Prompt] = [{"prompt_token_ids" if isinstance(prompt, list) else "prompt_embeds": prompt,
                                "cache_salt": salt} for prompt in prompts]
        try:
            return await checked(self.host.llm, given, params, body.priority or 0,
                                 self.adapters.find(body.model_name), tenant)
        except ValueError as error:
            raise bad_value(error, type(body).model_fields, names) from None

    def deadline(self, body: Scheduled) -> float | None:
        """The seconds that the request may take: the smaller of its own limit and the server's."""
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
        """Refuse the request, before it is tokenized, if no further sample of its tenant may wait in the queue."""
        with self.admission.admit(1, self.host.llm.engine.limits.max_requests, tenant):
            pass

    def _encoded(self, text: str, param: str, add_special_tokens: bool, truncation: Truncation | None) -> list[int]:
        """Tokenize a text. If it has so many characters that it cannot fit, it is refused or shortened first: a token
        has a known maximum of characters."""
        max_len = self.host.llm.engine.limits.max_len
        if len(text) > max_len and len(text) > max_len * self._longest_token:
            if truncation is None:
                raise ApiError(400, f"the prompt has {len(text)} characters, more than {max_len} tokens "
                                    "(max_model_len) can have: shorten it", param=param)
            text = truncation.shorten(text, max_len * self._longest_token)
        try:
            if truncation is not None:
                return truncation.encode(self.tokenizer, text, add_special_tokens)
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)


def _check_roles(messages: Sequence[ChatMessage], text: str) -> None:
    """Refuse messages with unusual roles that the chat template left out. The search for each message begins after the
    previous one: searching the whole text for each of many thousands would take minutes."""
    end = 0
    for message in messages:
        if message.role not in ROLES:
            content = plain_text(message.content).strip()
            place = text.find(content, end)
            if place < 0:
                raise ValueError(f"messages: the model's chat template leaves out messages of the role {message.role}"
                                 "; use a role that it shows, such as user")
            end = place + len(content)


def _reasoning_hints(effort: str | None) -> dict[str, Any]:
    """The variables that tell chat templates how much to reason. Few templates read more than one of them."""
    does_reason = effort != "none"
    return {} if effort is None else {
        "reasoning_effort": effort, "enable_thinking": does_reason, "thinking": does_reason}


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
