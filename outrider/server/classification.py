"""/classify: the probability of each class for every prompt, computed by a classifier model. The body is vLLM's."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from outrider.pooling_params import PoolingParams
from outrider.server.errors import ApiError
from outrider.server.pooled import pooled_vectors, prompt_usage
from outrider.server.protocol import Prompted, Prompts
from outrider.server.service import Service, name_request
from outrider.server.work import JsonWork, Work

NO_CLASSES = ("this model has no head that classifies: ask /v1/completions for one of the classes, with "
              'structured_outputs: {"choice": [...]}')


class ClassifyRequest(Prompted):
    input: Prompts
    model: str | None = None
    use_activation: bool | None = Field(default=None, description="false: the head's scores, not probabilities")


async def create_classes(service: Service, body: ClassifyRequest, tenant: str | None) -> Work:
    model = service.check_model(body.model)
    service.check_load(tenant)
    classes = service.host.llm.engine.model.classes
    if classes is None:
        raise ApiError(400, NO_CLASSES, param="model")
    prompts = await service.encode_prompts(body.input, "input", truncation=service.truncation(body))
    params = PoolingParams(task="classify", use_activation=body.use_activation)
    requests = await service.check(body, prompts, params, tenant)

    async def answer() -> dict[str, Any]:
        name = name_request("classify", body)
        vectors = await pooled_vectors(service, requests, name.engine)
        data = [{"index": i, "label": classes.labels[int(vector.argmax())], "probs": vector.tolist(),
                 "num_classes": len(vector)} for i, vector in enumerate(vectors)]
        return {"id": name.answer, "object": "list", "created": int(time.time()), "model": model, "data": data,
                "usage": prompt_usage(requests)}

    return JsonWork(answer(), service.deadline(body))
