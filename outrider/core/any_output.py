"""Output: the type of any request's output, for text or for hidden states. No torch."""

from __future__ import annotations

from typing import TypeAlias

from outrider.core.checked_request import CheckedRequest
from outrider.core.hidden_request import HiddenOutput, HiddenTask
from outrider.core.outputs import RequestOutput

Output: TypeAlias = RequestOutput | HiddenOutput


def empty_output(request_id: str, request: CheckedRequest) -> Output:
    """Make the output of a request that has just been added and has no tokens yet."""
    token_ids = list(request.token_ids)
    if isinstance(request.params, HiddenTask):
        return request.params.make_output(request_id, request.text, token_ids)
    return RequestOutput.empty(request_id, request.text, token_ids, request.sampling)
