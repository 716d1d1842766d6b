"""/v1/responses: OpenAI's newer API, served by the same code as chat completions. Responses are stored, so that a
conversation can continue."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from outrider.core.fields import shown
from outrider.server.bodies import IS_LARGE, LARGE, MAX_VALUES, BodyRoute, beside_loop
from outrider.server.body_errors import check_query
from outrider.server.body_json import parse_large
from outrider.server.chat_prompts import ChatInput
from outrider.server.errors import ApiError
from outrider.server.guard import TENANT
from outrider.server.protocol import ChatRequest, ResponseFormat
from outrider.server.response_bodies import (
    InputMessage,
    Item,
    ResponsesPrompt,
    ResponsesRequest,
    chat_messages,
    forget_item_images,
)
from outrider.server.response_items import ResponseItems
from outrider.server.response_store import ResponseStore, StoredItem, StoredResponse
from outrider.server.service import Service, new_id
from outrider.server.translated_chat import TranslatedChat
from outrider.server.work import EventStream, JsonWork, Work, carried_out, compact

Json = dict[str, Any]
SHARED = ("model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "seed", "top_k", "min_p",
          "speculative", "priority", "cache_salt", "cache_session", "chat_template_kwargs", "reasoning_effort",
          "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids",
          "include_stop_str_in_output", "ignore_eos", "logit_bias", "vllm_xargs", "structured_outputs")
CONVERSATION = TypeAdapter(list[Item])
MAX_ITEMS = 100  # in one answer of input_items
INCLUDE = ("include", "include[]")  # accepted: whatever a response has is in it


def response_routes(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        return await create_response(service, body, request.scope[TENANT])

    @routes.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesPrompt, request: Request) -> Json:
        """Count the tokens of the body's prompt."""
        return {"object": "response.input_tokens",
                "input_tokens": await count_tokens(service, body, request.scope[TENANT])}

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        check_query(request.query_params, INCLUDE)
        return _written(service.responses.find(request.scope[TENANT], response_id).json)

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Json:
        service.responses.delete(request.scope[TENANT], response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Json:
        service.responses.find(request.scope[TENANT], response_id)
        raise ApiError(400, "Cannot cancel a synchronous response: it has ended. To end one that runs, disconnect")

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request, limit: Annotated[str, Query()] = "20",
                          order: Annotated[str, Query()] = "desc",
                          after: Annotated[str | None, Query()] = None) -> Response:
        """Return all items that the model was given, including those of earlier responses."""
        check_query(request.query_params, ("limit", "order", "after", *INCLUDE))
        if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MAX_ITEMS:
            raise ApiError(400, f"limit must be from 1 to {MAX_ITEMS}, got {shown(limit)}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order must be asc or desc, got {shown(order)}", param="order")
        items = service.responses.find(request.scope[TENANT], response_id).input
        return _item_page(items if order == "asc" else items[::-1], int(limit), after)

    @routes.delete("/v1/cache_sessions/{name:path}")
    async def drop_session(name: str, request: Request) -> Json:
        """Delete the cached pages of the last turn of the conversation that has this `cache_session`. `deleted` is the
        number of replicas that knew the name."""
        gone = await carried_out(service.host.llm.drop_cache_session((request.scope[TENANT] or "", name)))
        return {"id": name, "object": "cache_session", "deleted": int(gone)}

    return routes


def _item_page(items: tuple[StoredItem, ...], limit: int, after: str | None) -> Response:
    if after is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(400, f"after must be the id of an item, got {shown(after)}", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    head = {"object": "list", "first_id": page[0].id if page else None, "last_id": page[-1].id if page else None,
            "has_more": len(items) > limit}
    parts = [compact(head)[:-1].encode(), b',"data":[']
    for item in page:
        parts += [b"," if len(parts) > 2 else b"", item.whole_json]
    return JsonWork(_ready([*parts, b"]}"]), None)


async def _ready(parts: list[bytes]) -> list[bytes]:
    """Make a response from parts that are already JSON. The parts are the stored items themselves, so a client that
    reads slowly causes no copies."""
    return parts


def _joined(items: Iterable[StoredItem]) -> bytes:
    return b"[" + b",".join(item.whole_json for item in items) + b"]"


def _written(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")


async def create_response(service: Service, body: ResponsesRequest, tenant: str | None) -> Work:
    earlier = _earlier_items(service, body, tenant)
    session = _session(service, body, tenant)
    body = body.model_copy(update={"cache_session": session})
    chat = await beside_loop(lambda: _chat(body, earlier))
    conversation = TranslatedChat(service, chat, {"max_tokens": "max_output_tokens", "messages": "input",
                                                "response_format": "text"})
    given = await beside_loop(lambda: _input_items(service.responses, body, tenant))
    await conversation.prepare(tenant)
    run = _Response(service, conversation, body, tenant, (*earlier, *given))
    timeout = service.deadline(body)
    return EventStream(run.frames(), timeout, end=b"") if body.stream else JsonWork(run.answer(), timeout)


async def count_tokens(service: Service, body: ResponsesPrompt, tenant: str | None) -> int:
    service.check_model(body.model)
    earlier = _earlier_items(service, body, tenant)
    messages = await beside_loop(lambda: _messages(body, earlier))
    tools = None if body.tool_choice == "none" else body.chat_tools or None
    chat = ChatInput(messages, tools, body.chat_template_kwargs, reasoning_effort=body.reasoning_effort)
    return len(await service.count_chat(chat, tenant))


def _earlier_items(service: Service, body: ResponsesPrompt, tenant: str | None) -> tuple[StoredItem, ...]:
    if body.previous_response_id is None:
        return ()
    previous = service.responses.find(tenant, body.previous_response_id, "previous_response_id")
    items, most = previous.input + previous.output, service.config.max_body_bytes
    num_bytes = sum(len(item.json) for item in items)
    if num_bytes > most:  # to read it takes as long as if it were in the body
        raise ApiError(413, f"the conversation of previous_response_id exceeds {most} bytes, the most that a body may "
                            "have: begin a new conversation, or raise --max-body-bytes", param="previous_response_id")
    if sum(item.num_values for item in items) > MAX_VALUES:
        raise ApiError(413, f"the conversation of previous_response_id has more than {MAX_VALUES} values (objects, "
                            "lists and their items), the most that a body may have: begin a new conversation",
                       param="previous_response_id")
    if num_bytes >= LARGE:
        IS_LARGE.set(True)
    return items


def _session(service: Service, body: ResponsesRequest, tenant: str | None) -> str | None:
    """The cache session of a response: the one that the client names, or one for all responses that continue the
    same one."""
    named = body.session_name
    if named is not None or body.previous_response_id is None:
        return named
    previous = service.responses.find(tenant, body.previous_response_id, "previous_response_id")
    return previous.cache_session or previous.id


def _chat(body: ResponsesRequest, earlier: tuple[StoredItem, ...]) -> ChatRequest:
    return ChatRequest(messages=_messages(body, earlier), tools=body.chat_tools or None,
                       max_tokens=body.max_output_tokens, logprobs=body.wants_logprobs,
                       top_logprobs=body.top_logprobs if body.wants_logprobs else None,
                       response_format=ResponseFormat.model_validate(body.text_format.to_chat()),
                       **{name: getattr(body, name) for name in SHARED})


def _messages(body: ResponsesPrompt, earlier: tuple[StoredItem, ...]) -> list[Any]:
    items = CONVERSATION.validate_python(parse_large(_joined(earlier)))  # pydantic's own parser refuses deep values
    return chat_messages(body.instructions, [*items, *body.input_items])


def _input_items(store: ResponseStore, body: ResponsesRequest, tenant: str | None) -> list[StoredItem]:
    """Return the items of the body to keep with the response, if it is stored. The images are removed from the body,
    because the messages hold them until the engine has them."""
    items = []
    if store.keeps(body.store):
        store.images.check_room(tenant)
        items = [StoredItem.from_json(*store.images.take_from(_input_item(item), tenant)) for item in body.input_items]
    for item in body.input if isinstance(body.input, list) else ():
        forget_item_images(item)
    return items


class _Response:
    """One request to /v1/responses: runs it and makes the answer from the parser's events, streamed or whole.
    `given`: the items to keep of this request and of the response that it continues."""

    def __init__(self, service: Service, conversation: TranslatedChat, body: ResponsesRequest, tenant: str | None,
                 given: tuple[StoredItem, ...]) -> None:
        self._store, self._tenant, self._given = service.responses, tenant, given
        self._conversation, self._body = conversation, body
        self._is_stored = self._store.keeps(body.store)
        self._id = new_id("resp")
        self._created = int(time.time())
        self._items = ResponseItems()

    async def answer(self) -> list[bytes]:
        async with aclosing(self._changes()) as parts:
            async for _ in parts:
                pass
        response = await beside_loop(self._finished)
        self._keep(response)
        return [response.json]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._changes()) as parts:
            async for changes in parts:
                if not begun:
                    begun = True
                    state = self._response("in_progress") | {"output": []}
                    begin = [("response.created", {"response": state}), ("response.in_progress", {"response": state})]
                    yield await beside_loop(lambda: self._framed(begin))  # noqa: B023
                if changes:
                    yield self._framed(changes)
        response = await beside_loop(self._finished)
        self._keep(response)
        number = self._items.number()
        kind = f"response.{self._status}"
        head = compact({"type": kind, "sequence_number": number})[:-1]
        yield f'event: {kind}\ndata: {head},"response":'.encode() + response.json + b"}\n\n"

    async def _changes(self) -> AsyncGenerator[list[tuple[str, Json]], None]:
        async with aclosing(self._conversation.events(self._id)) as parts:
            async for events, logprobs in parts:
                last = len(events) - 1
                yield [change for i, event in enumerate(events)
                       for change in self._items.take(event, logprobs if i == last else [])]
        yield list(self._items.close(self._status))

    def _framed(self, changes: Iterable[tuple[str, Json]]) -> bytes:
        numbered = [{"type": kind, "sequence_number": self._items.number()} | data for kind, data in changes]
        return b"".join(f"event: {data['type']}\ndata: {compact(data)}\n\n".encode() for data in numbered)

    @property
    def _status(self) -> str:
        return "incomplete" if self._conversation.finish_reason == "length" else "completed"

    def _finished(self) -> StoredResponse:
        """Return the whole response, and the items to keep if it is stored."""
        response = self._response(self._status)
        return StoredResponse(self._id, compact(response).encode(), self._given,
                              tuple(map(StoredItem.from_json, response["output"])), self._body.cache_session)

    def _keep(self, response: StoredResponse) -> None:
        """Store the response. This is called before the client learns that the response has ended, because the client
        may then continue it at once."""
        if self._is_stored:
            self._store.add(self._tenant, response)

    def _response(self, status: str) -> Json:
        body = self._body
        usage = self._conversation.usage.to_json() if status != "in_progress" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "model": self._conversation.model, "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "store": self._is_stored,
            "temperature": body.temperature, "top_p": body.top_p, "top_logprobs": body.top_logprobs,
            "background": False,
            "text": {"format": body.text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto", "truncation": "disabled",
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump() | {"summary": None},
            "tools": [tool.model_dump() for tool in body.tools or []], "usage": usage and {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0}},
        }


def _input_item(item: Item) -> Json:
    """Convert an item to the form of `GET .../input_items`: it has an id, and a plain text becomes a list of one
    part."""
    prefix = {"message": "msg", "reasoning": "rs"}.get(item.type, "fc")
    given = {"id": new_id(prefix), "status": "completed"} | item.model_dump(exclude_none=True)
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": item.content}]
    return given
