"""CheckedRequest: a request that the engine has checked: prompt, parameters and its features' parts. No torch.

`engine/request_checks.py` makes these values, and only for requests that the engine can serve. Everything that belongs
to a request is a field here, so that all code between the API and the worker passes on one value."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.feature_parts import Part, RequestPart, find_part
from outrider.core.hidden_params import HiddenParams, HiddenReport, RequestParams
from outrider.core.input_part import NO_INPUTS, InputPart, InputParts
from outrider.core.params import SamplingParams

# A request for hidden states samples and drafts nothing; its row has parameters all the same.
NOTHING_SAMPLED = SamplingParams(temperature=0, max_tokens=1, seed=0, detokenize=False, speculative=False)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    token_ids: tuple[int, ...]  # zeros if the prompt has none
    params: RequestParams  # the request's own copy, with its words as tokens
    text: str | None = None  # the prompt's, if the caller gave any
    priority: int = 0  # within its tenant
    cache_salt: str | None = None
    has_ids: bool = True  # False: the prompt is input parts without ids
    parts: tuple[RequestPart, ...] = ()  # what it asks of features, at most one of each kind
    tenant: str | None = None  # whose share of rows, pages and steps the request takes; None: that of all without one

    @property
    def sampling(self) -> SamplingParams:
        return self.params if isinstance(self.params, SamplingParams) else NOTHING_SAMPLED

    @property
    def hidden(self) -> HiddenReport:
        return self.params.report if isinstance(self.params, HiddenParams) else HiddenReport.NONE

    @property
    def seed(self) -> int:
        """The caller's seed, or the seed that the engine drew when it accepted the request."""
        assert self.sampling.seed is not None, "the engine has not taken the request yet"
        return self.sampling.seed

    @property
    def num_samples(self) -> int:
        return self.sampling.n

    @property
    def generates(self) -> bool:
        return self.hidden is HiddenReport.NONE

    @property
    def is_masked(self) -> bool:
        """Whether a feature restricts, by token masks, which tokens may be sampled."""
        return any(part.masks_tokens for part in self.parts)

    @property
    def is_ended_by_masks(self) -> bool:
        """Whether a feature's masks decide where the text ends."""
        return any(part.decides_end for part in self.parts)

    @property
    def min_tokens(self) -> int:
        """Return the number of tokens before which the sampler forbids the ids that end the request."""
        return 0 if self.is_ended_by_masks else self.sampling.min_tokens

    def stop_ids(self, eos_ids: Sequence[int]) -> list[int]:
        """Return the token ids that end the request, each once. eos_ids: those of the model."""
        is_endless = self.sampling.ignore_eos and not self.is_ended_by_masks
        return list(dict.fromkeys([*(() if is_endless else eos_ids), *(self.sampling.stop_token_ids or ())]))

    @property
    def cache_keys(self) -> tuple[str, ...]:
        """Return values that must be equal for requests to share pages, in addition to their tokens."""
        parts = [part.cache_key for part in self.parts]
        salt = None if self.cache_salt is None else f"salt={self.cache_salt}"
        return tuple(key for key in (*parts, salt) if key is not None)

    @property
    def input_parts(self) -> InputParts:
        """Return the inputs of the prompt in addition to its token ids, such as embeddings."""
        if not self.parts:
            return NO_INPUTS
        return InputParts(part for part in self.parts if isinstance(part, InputPart))

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may take prefix hits. One that has to compute its whole prompt may not, such as one
        for prompt logprobs."""
        if self.hidden.covers_prompt or any(part.needs_whole_prompt for part in self.parts):
            return False
        return self.sampling.prompt_logprobs is None and not self.sampling.skip_reading_prefix_cache

    def part(self, kind: type[Part]) -> Part | None:
        """Return the request's part of this kind, which says what the request asks of one feature. None if it asks for
        nothing."""
        return find_part(self.parts, kind)

    def with_part(self, part: RequestPart) -> CheckedRequest:
        """Return a copy of the request with this part, which replaces a part of the same kind."""
        others = [own for own in self.parts if type(own) is not type(part)]
        return replace(self, parts=(*others, part))

    def with_seed(self, seed: int) -> CheckedRequest:
        """Return this request if it has a seed or samples nothing, else a copy with the given seed."""
        if self.sampling.seed is not None:
            return self
        params = copy.copy(self.sampling)  # its lists are the request's own already
        params.seed = seed
        return replace(self, params=params)


NO_REQUEST = CheckedRequest((0,), NOTHING_SAMPLED)  # of the null row
