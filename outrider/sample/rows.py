"""SamplingRows: what the device keeps of every running request's sampling parameters.

Written once when a request takes a row, by host-to-device copies only; read by every stage of the sampler. It does
not know batches: a stage picks its rows itself.
"""

from __future__ import annotations

import torch

from outrider.core import Admission, Axis, Limits
from outrider.core.params import SamplingParams
from outrider.core.token_ids import stop_ids_of
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.sampling_keys import SamplingKeys

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_FIELDS = ("top_k", "seed", "sample_index", "min_tokens", "prompt_len", "end_len", "num_stop_ids")


class SamplingRows:
    """One element per row of every field. The null row is greedy and has no stop ids."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        self.device = device

        def floats(fill: float) -> torch.Tensor:
            return buffer(limits, Axis.ROWS, dtype=torch.float32, device=device, fill=fill)

        def ints() -> torch.Tensor:
            return buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)

        self.temperature = floats(0)  # 0: greedy
        self.top_p = floats(1)
        self.min_p = floats(0)
        self.presence = floats(0)
        self.frequency = floats(0)
        self.repetition = floats(1)
        self.top_k = ints()  # 0: all
        self.seed = ints()
        self.sample_index = ints()
        self.min_tokens = ints()
        self.prompt_len = ints()
        self.end_len = ints()  # known tokens at which the device ends the request
        self.num_stop_ids = ints()
        self.stop_ids = buffer(limits, Axis.ROWS, Axis.STOP_IDS, dtype=torch.int64, device=device)

    def admit(self, admissions: list[Admission]) -> None:
        """Writes the rows of `admissions`: two copies to the device, then one indexed copy per field."""
        if not admissions:
            return
        stops = [stop_ids_of(a.params, a.eos_ids) for a in admissions]
        width = self.stop_ids.shape[1]
        assert all(len(ids) <= width for ids in stops), f"more than {width} stop ids passed the request check"
        ints = [
            [a.row, *_int_fields(a, len(ids)), *ids, *[0] * (width - len(ids))]
            for a, ids in zip(admissions, stops, strict=True)
        ]
        packed_ints = to_device(ints, torch.int64, self.device)  # [n, 1 + fields + stop ids]
        packed_floats = to_device([_float_fields(a.params) for a in admissions], torch.float32, self.device)
        row = packed_ints[:, 0]
        for column, name in enumerate(FLOAT_FIELDS):
            getattr(self, name).index_copy_(0, row, packed_floats[:, column])
        for column, name in enumerate(INT_FIELDS, start=1):
            getattr(self, name).index_copy_(0, row, packed_ints[:, column])
        self.stop_ids.index_copy_(0, row, packed_ints[:, 1 + len(INT_FIELDS) :])

    @property
    def keys(self) -> SamplingKeys:
        return SamplingKeys(self.temperature, self.seed, self.sample_index)

    def stop_mask(self, row: torch.Tensor) -> torch.Tensor:
        """[n, stop ids] bool for rows [n]: which entries of `stop_ids[row]` count."""
        return torch.arange(self.stop_ids.shape[1], device=self.device) < self.num_stop_ids[row][:, None]


def _float_fields(params: SamplingParams) -> list[float]:
    """In the order of FLOAT_FIELDS. A greedy row has no filters: they cannot change its token, and a batch of
    greedy requests must not pay for them."""
    top_p, min_p = (1.0, 0.0) if params.is_greedy else (params.top_p, params.min_p)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return [params.temperature, top_p, min_p, *penalties]


def _int_fields(admission: Admission, num_stop_ids: int) -> list[int]:
    """In the order of INT_FIELDS."""
    params = admission.params
    top_k = 0 if params.is_greedy else max(params.top_k, 0)
    counts = (params.min_tokens, admission.prompt_len, admission.max_len, num_stop_ids)
    return [top_k, admission.seed, admission.sample_index, *counts]
