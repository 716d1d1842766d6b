"""SamplingRows: the sampling parameters of all running requests on the device, one row for each request.

A row is written once, when a request is admitted, by host-to-device copies only; every stage of the sampler reads it.
`lists` holds lists of any length, `counts` the token counts for penalties, `masks` the tokens that features allow.
SamplingRows does not depend on batches: each stage picks the rows that it needs."""

from __future__ import annotations

import math
import struct

import torch

from outrider.core import Admission, Axis, Limits
from outrider.core.checked_request import CheckedRequest
from outrider.core.params import SamplingParams
from outrider.kernels import sampling_flags as flags
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.sample.counts import TokenCounts
from outrider.sample.lists import ListPlaces, RowLists
from outrider.sample.row_masks import RowMasks

FLOAT_FIELDS = ("temperature", "top_p", "min_p_floor", "presence", "frequency", "repetition")
INT_FIELDS = ("top_k", "seed", "sample_index", "min_tokens", "prompt_len", "end_len", "num_stop_ids", "flags",
              "num_logprobs", "bias_start", "bias_len", "words_start", "num_words")
NO_LOGPROBS = -2  # a value of num_logprobs
_ALIGNED = 16  # fields begin at multiples of so many elements: kernels are compiled once for all of them


class SamplingRows:
    """The sampling parameters of all rows: every field has one element per row. The null row is greedy and sets no
    parameter."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        self.device = device
        num_rows = limits.extent(Axis.ROWS)
        padded = -(-num_rows // _ALIGNED) * _ALIGNED
        self._floats = torch.zeros(len(FLOAT_FIELDS), padded, dtype=torch.float32, device=device)
        self._ints = torch.zeros(len(INT_FIELDS), padded, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p_floor, self.presence, self.frequency, self.repetition = (
            self._floats[:, :num_rows]
        )
        self.top_p.fill_(1)
        self.min_p_floor.fill_(-torch.inf)  # log of min_p
        self.repetition.fill_(1)
        (
            self.top_k,  # 0: all
            self.seed, self.sample_index, self.min_tokens, self.prompt_len,
            self.end_len,  # known tokens at which the device ends the request
            self.num_stop_ids,
            self.flags,  # see kernels/sampling_flags
            self.num_logprobs,  # NO_LOGPROBS: none are asked for; -1: those of the whole vocabulary
            self.bias_start, self.bias_len, self.words_start, self.num_words,  # in `lists`
        ) = self._ints[:, :num_rows]
        self.num_logprobs.fill_(NO_LOGPROBS)
        self.stop_ids = buffer(limits, Axis.ROWS, Axis.STOP_IDS, dtype=torch.int64, device=device)
        self.lists = RowLists(limits, device)
        self.counts = TokenCounts(limits, device)
        self.masks = RowMasks(limits, device)

    def admit(self, admissions: list[Admission]) -> None:
        """Write the rows of the admitted requests: two copies to the device, then one indexed copy for each kind of
        field."""
        if not admissions:
            return
        stops = [a.request.stop_ids(a.eos_ids) for a in admissions]
        width = self.stop_ids.shape[1]
        assert all(len(ids) <= width for ids in stops), f"more than {width} stop ids passed the request check"
        ints = [
            [a.row, *_int_fields(a, len(ids), self.lists.admit(a.row, a.params), self.limits.vocab_size), *ids,
             *[0] * (width - len(ids))]
            for a, ids in zip(admissions, stops, strict=True)
        ]
        packed_ints = to_device(ints, torch.int64, self.device)  # [n, 1 + fields + stop ids]
        packed_floats = to_device([_float_fields(a.params) for a in admissions], torch.float32, self.device)
        row, fields = packed_ints[:, 0], packed_ints[:, 1:]
        self._floats.index_copy_(1, row, packed_floats.t())
        self._ints.index_copy_(1, row, fields[:, : len(INT_FIELDS)].t())
        self.stop_ids.index_copy_(0, row, fields[:, len(INT_FIELDS) :])
        self.counts.admit(admissions)
        self.masks.admit(admissions)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the fields of all rows."""
        return [self._floats, self._ints, self.stop_ids]

    @property
    def later_bytes(self) -> int:
        """Bytes that the first request with a penalty or with masks allocates for all rows."""
        return self.counts.num_bytes + self.masks.num_bytes

    @property
    def keys(self) -> SamplingKeys:
        return SamplingKeys(self.temperature, self.seed, self.sample_index)

    def stop_mask(self, row: torch.Tensor) -> torch.Tensor:
        """Return [n, stop ids] bool for rows [n]: which entries of `stop_ids[row]` are stop ids and which are padding
        (False)."""
        return torch.arange(self.stop_ids.shape[1], device=self.device) < self.num_stop_ids[row][:, None]


def _float_fields(params: SamplingParams) -> list[float]:
    """Return the values of FLOAT_FIELDS, in their order. A greedy row gets no filters: they cannot change its token,
    and a batch of greedy requests should not pay for them."""
    top_p, min_p = (1.0, 0.0) if params.is_greedy else (params.top_p, params.min_p)
    (min_p,) = struct.unpack("f", struct.pack("f", min_p))
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return [params.temperature, top_p, math.log(min_p) if min_p > 0 else -math.inf, *penalties]


def _int_fields(admission: Admission, num_stop_ids: int, places: ListPlaces, vocab: int) -> list[int]:
    """Return the values of INT_FIELDS, in their order."""
    params = admission.params
    top_k = 0 if params.is_greedy else max(params.top_k, 0)
    counts = (admission.request.min_tokens, admission.prompt_len, admission.max_len, num_stop_ids)
    num_logprobs = NO_LOGPROBS if params.num_reported is None else params.num_reported
    asked = flags_of(admission.request, vocab)
    return [top_k, admission.request.seed, admission.sample_index, *counts, asked, num_logprobs, places.bias_start,
            places.bias_len, places.words_start, places.num_words]


def flags_of(request: CheckedRequest, vocab: int) -> int:
    """Return the sampler stages that a request needs, as bits of `sampling_flags`."""
    params = request.sampling
    is_sampled = not params.is_greedy
    asked = {
        flags.ALLOWED: params.allowed_token_ids is not None,
        flags.BIAS: bool(params.logit_bias),
        flags.BAD_WORDS: bool(params.bad_words_token_ids),
        flags.MIN_TOKENS: request.min_tokens > 0,
        flags.PENALTIES: params.has_penalties,
        flags.TOP_K: is_sampled and 0 < params.top_k < vocab,
        flags.TOP_P: is_sampled and params.top_p < 1,
        flags.MIN_P: is_sampled and params.min_p > 0,
        flags.MASKED: request.is_masked,
    }
    return sum(flag for flag, is_asked in asked.items() if is_asked)
