"""Checked requests and admissions that tests make without an engine to check them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from outrider.core import Admission, SamplingParams
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart

PLAIN = SamplingParams()


class Masks(RequestPart):
    """The part of a request whose tokens a test masks."""

    masks_tokens = decides_end = True


def made_request(token_ids: Sequence[int], params: SamplingParams = PLAIN, *, seed: int = 0,
                 **fields: Any) -> CheckedRequest:
    """As an engine takes it, with a seed, and with masks if it asks for a form."""
    own = copy.copy(params)
    own.seed = seed
    if own.structured_outputs is not None:
        fields.setdefault("parts", (Masks(),))
    return CheckedRequest(tuple(token_ids), own, **fields)


def made_admission(row: int, token_ids: Sequence[int], max_len: int, params: SamplingParams = PLAIN, *, seed: int = 0,
                   prompt_len: int | None = None, computed: int = 0, **fields: Any) -> Admission:
    """token_ids: all known tokens, of which the first `prompt_len`, or all, are the prompt."""
    prompt_len = len(token_ids) if prompt_len is None else prompt_len
    return Admission(row, made_request(token_ids[:prompt_len], params, seed=seed), computed, max_len,
                     output_ids=list(token_ids[prompt_len:]), **fields)
