"""The routes that turn text into token ids and back: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from outrider.server.bodies import BodyRoute, beside_loop
from outrider.server.chat_prompts import ChatInput
from outrider.server.errors import ApiError
from outrider.server.guard import TENANT
from outrider.server.protocol import DetokenizeRequest, TokenizeRequest
from outrider.server.service import Service
from outrider.server.work import compact

LEAST_DETOKENIZED = 1 << 16  # the decoder lets no other thread run until it is done, which takes 20 ms for so many
WRITTEN_AT_ONCE = 20_000  # token ids


def text_routes(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages, not both", param="prompt")
        if body.messages is not None:
            chat = ChatInput(body.messages, body.tools, body.chat_template_kwargs, body.add_generation_prompt,
                                body.continue_final_message)
            ids = await service.count_chat(chat, request.scope[TENANT], body.add_special_tokens)
        else:
            ids = await service.encode(body.prompt or "", "prompt", body.add_special_tokens is not False)
        names = service.tokenizer.id_to_token if body.return_token_strs else None
        head = {"count": len(ids), "max_model_len": service.host.llm.engine.limits.max_len}
        write = partial(_token_lists, head, ids, names)
        return Response(await beside_loop(write), media_type="application/json")

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return special tokens and chat template. Clients that tokenize through the server ask for these first."""
        tokenizer = service.tokenizer
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        names = {name: None if i is None else tokenizer.id_to_token(i) for name, i in ids.items()}
        return names | {"chat_template": tokenizer.chat_templates.get("default"),
                        "model_max_length": service.host.llm.engine.limits.max_len}

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        most = max(LEAST_DETOKENIZED, service.host.llm.engine.limits.max_len)
        if len(body.tokens) > most:
            raise ApiError(400, f"tokens has {len(body.tokens)} ids, and at most {most} are allowed in one request: "
                                "send fewer", param="tokens")
        for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= token < service.host.llm.engine.limits.vocab_size:
                raise ApiError(400, f"token id {str(token)[:30]} is outside the vocabulary: ids are from 0 to the "
                                    "model's vocab_size - 1", param="tokens")
        decode = partial(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": await beside_loop(decode)}

    return routes


def _token_lists(head: dict[str, Any], ids: list[int], name: Callable[[int], str | None] | None) -> bytes:
    """Write the answer of /tokenize as JSON, a slice of the lists at a time, because no other thread runs during a call
    of the JSON encoder."""
    slices = [ids[start : start + WRITTEN_AT_ONCE] for start in range(0, len(ids), WRITTEN_AT_ONCE)]
    numbers = ",".join(compact(part)[1:-1] for part in slices)
    names = "null" if name is None else f"[{','.join(compact([name(i) for i in part])[1:-1] for part in slices)}]"
    return f'{compact(head)[:-1]},"tokens":[{numbers}],"token_strs":{names}}}'.encode()
