"""Answers for failed requests, in the form of the API that was called: refused values, wrong bodies, unknown routes,
and unexpected errors."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.server import admin
from outrider.server.body_errors import bad_body
from outrider.server.errors import INTERNAL, ApiError
from outrider.server.guard import REQUEST_ID_HEADER
from outrider.server.work import api_error

log = logging.getLogger("outrider")
# Routes of vLLM that are not here, with what to do instead.
NOT_SERVED = {
    **dict.fromkeys(admin.PATHS, admin.NEEDS_FLAG),
    "/v1/audio/transcriptions": "audio is not served", "/v1/audio/translations": "audio is not served",
}


def answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_bad_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_surprise)


def _answer(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body_for(request.url.path), error.status, headers=error.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    return _answer(request, api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404 and path in NOT_SERVED:
        return _answer(request, ApiError(404, f"{path} is not supported: {NOT_SERVED[path]}"))
    messages = {404: "there is no such route", 405: "this route has another method", 400: "the body cannot be read"}
    answer = _answer(request, ApiError(error.status_code, messages.get(error.status_code, str(error.detail))))
    answer.headers.update(error.headers or {})  # 405 says which methods there are
    return answer


async def _on_surprise(request: Request, error: Exception) -> Response:
    log.error("a request failed unexpectedly", exc_info=error)
    answer = _answer(request, ApiError(500, INTERNAL))
    answer.headers[REQUEST_ID_HEADER] = request.scope[REQUEST_ID_HEADER]  # this answer does not pass the guard
    # The error is raised again behind this answer, and uvicorn then closes the connection. A client that is not told
    # sends its next request on the same connection, and that request is lost.
    answer.headers["connection"] = "close"
    return answer


async def _on_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(request, bad_body(error.errors(), error.body))
