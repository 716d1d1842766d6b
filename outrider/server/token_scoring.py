"""/v1/score_tokens: log-probabilities of given tokens under the served weights, for trainers and teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.core.checked_request import CheckedRequest
from outrider.core.fields import INT32
from outrider.core.params import SamplingParams
from outrider.core.token_ids import bias_from_json
from outrider.server.answer_json import write_answer
from outrider.server.bodies import beside_loop
from outrider.server.errors import ApiError, bad_value
from outrider.server.generation import Usage, finite, num_values, whole_outputs
from outrider.server.protocol import MAX_BIASES, Prompted, Prompts, Texts, TokenIds, check_texts
from outrider.server.service import Service, name_request
from outrider.server.work import JsonWork, Work
from outrider.token_scores import Scoring, TokenScores

MAX_NUMBERS = 1 << 21  # log-probabilities of an answer
OTHER_NAMES = (("prompt_logprobs_mode", "logprobs_mode"),)  # of fields, in the engine's error messages
FILTERS = ("temperature", "top_p", "top_k", "min_p", "bad_words", "allowed_token_ids")


class ScoreTokensRequest(Prompted):
    model: str | None = None
    prompt: Prompts = Field(description="the sequences: token ids or texts, one or several")
    add_special_tokens: bool | None = Field(default=None, description="of texts; default true")
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=INT32,
                                        description="likeliest tokens beside each; default 0, -1: all")
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] | None = Field(
        default=None, description="processed: after the temperature and filters below; default raw")
    return_kept_ids: bool | None = Field(default=None, description="the ids that the filters keep at each place")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)


async def score_tokens(service: Service, body: ScoreTokensRequest, tenant: str | None) -> Work:
    model = service.check_model(body.model)
    service.check_load(tenant)
    service.check_id_counts(body)
    scoring = await beside_loop(lambda: _scoring(body))
    prompts = await service.encode_prompts(body.prompt, "prompt", body.add_special_tokens is not False,
                                           service.truncation(body, "left", 1))
    _check_size(sum(map(len, prompts)), scoring, service.host.llm.engine.limits.vocab_size)
    requests = await service.check(body, prompts, scoring.params, tenant, OTHER_NAMES)
    return JsonWork(_answer(service, body, requests, scoring, model), service.deadline(body))


def _scoring(body: ScoreTokensRequest) -> Scoring:
    check_texts(body)
    given: dict[str, Any] = {name: value for name in FILTERS if (value := getattr(body, name)) is not None}
    try:
        if body.logit_bias is not None:
            given["logit_bias"] = bias_from_json(body.logit_bias)
        return Scoring.from_arguments(SamplingParams(**given) if given else None, body.prompt_logprobs or 0,
                                      body.logprobs_mode or "raw", body.return_kept_ids is True)
    except ValueError as error:
        raise bad_value(error, type(body).model_fields) from None


def _check_size(num_tokens: int, scoring: Scoring, vocab_size: int) -> None:
    width = num_values(1, scoring.params.prompt_logprobs, vocab_size) - 1
    if num_tokens * width > MAX_NUMBERS:
        raise ApiError(400, f"prompt has {num_tokens} tokens with {width} log-probabilities each, and an answer has at "
                            f"most {MAX_NUMBERS}: send fewer tokens, or ask for fewer prompt_logprobs", param="prompt")


async def _answer(service: Service, body: ScoreTokensRequest, requests: Sequence[CheckedRequest], scoring: Scoring,
                  model: str) -> list[bytes]:
    name, usage = name_request("score", body), Usage(requests)
    outputs = await whole_outputs(service.run(requests, name.engine), requests, usage)
    usage.leave_out_completions()
    vocab_size = service.host.llm.engine.limits.vocab_size

    def make() -> dict[str, Any]:
        data = [_to_json(index, scoring.read(output, vocab_size)) for index, output in enumerate(outputs)]
        return {"id": name.answer, "object": "list", "model": model, "data": data, "usage": usage.to_json()}

    num_tokens = sum(len(request.token_ids) for request in requests)
    return await write_answer(make, num_values(num_tokens, scoring.params.prompt_logprobs, vocab_size))


def _to_json(index: int, scores: TokenScores) -> dict[str, Any]:
    return {"index": index, "object": "token_scores", "token_ids": scores.token_ids,
            "logprobs": list(map(finite, scores.logprobs)),
            "ranks": scores.ranks, "top_ids": scores.top_ids,
            "top_logprobs": [None if top is None else list(map(finite, top)) for top in scores.top_logprobs],
            "kept_ids": scores.kept_ids, "weights_version": scores.weights_version,
            "weight_versions": scores.weight_versions}
