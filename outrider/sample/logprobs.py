"""Computes log-probabilities of chosen tokens and of the most likely ones, for sampled tokens and for prompts.

All of them are computed by `report_tokens`, which sampling kernels call too. It adds the terms of a logit row in one
fixed order on each kind of device. The lowest id wins a tie among the most likely tokens. `HostLogprobs` makes the
tuples that a step's result contains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from outrider.core import TokenLogprobs
from outrider.core.params import MAX_LOGPROBS_ALL
from outrider.kernels.ops import FLOAT32, Exactness, Operation, native_kernel, triton_kernel
from outrider.kernels.reported_logprobs import ReportedLogprobs

KERNEL_MAX_LOGPROBS = 128  # most likely tokens that kernels report


@dataclass(frozen=True)
class LogprobRows:
    """The log-probabilities of L logit rows: of the chosen token and of the N likeliest tokens. They are packed into
    two tensors, because copying each tensor to the host costs time in every step."""

    ids: torch.Tensor  # [L, 2 + N] int64: the chosen token's rank, the chosen token, the likeliest first
    values: torch.Tensor  # [L, 1 + N]: of the chosen token, of the likeliest first

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens that each logit row reports."""
        return self.values.shape[1] - 1

    @property
    def rank(self) -> torch.Tensor:
        """Ranks [L] of the chosen tokens: 1 + the number of likelier tokens."""
        return self.ids[:, 0]

    @property
    def chosen(self) -> torch.Tensor:
        return self.values[:, 0]

    @property
    def top_ids(self) -> torch.Tensor:
        return self.ids[:, 2:]

    @property
    def top(self) -> torch.Tensor:
        return self.values[:, 1:]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LogprobRows:
        return LogprobRows(change(self.ids), change(self.values))

    def to(self, device: torch.device | str) -> LogprobRows:
        return self.map(lambda field: field.to(device))

    @staticmethod
    def join(parts: list[LogprobRows]) -> LogprobRows:
        if len(parts) == 1:
            return parts[0]
        return LogprobRows(torch.cat([part.ids for part in parts]), torch.cat([part.values for part in parts]))


def logprob_rows(logits: torch.Tensor, chosen_ids: torch.Tensor, num: int) -> LogprobRows:
    """Compute the log-probabilities of the chosen tokens [L], and of the `num` likeliest tokens (-1: all), from logits
    [L, V].

    This needs scratch memory as large as the logits, so callers with many logit rows pass them in chunks."""
    vocab = logits.shape[1]
    width = vocab if num == MAX_LOGPROBS_ALL else min(num, vocab)
    if width > KERNEL_MAX_LOGPROBS:
        return many_logprob_rows(logits, chosen_ids, width, report_tokens(logits, chosen_ids, 0))
    found = report_tokens(logits, chosen_ids, width)
    return LogprobRows(found.ids, found.values)


def many_logprob_rows(logits: torch.Tensor, chosen_ids: torch.Tensor, num: int, found: ReportedLogprobs) -> LogprobRows:
    """Compute log-probabilities when more likeliest tokens are asked for than kernels can report. The bits equal those
    of the kernels. found: the kernels' report of the same logit rows."""
    ids = rank_tokens(logits, chosen_ids, num)
    return LogprobRows(ids, logits.gather(1, ids[:, 1:]) - found.most[:, None] - found.norm[:, None])


def _report_tokens(logits: torch.Tensor, tokens: torch.Tensor, num: int) -> ReportedLogprobs:
    """Compute the log-probabilities of tokens [L], and of the `num` likeliest tokens, from logits [L, V]."""
    most = logits.amax(dim=1)
    norm = sum_by_halves((logits.double() - most[:, None].double()).exp_()).log().to(logits.dtype)
    ids = rank_tokens(logits, tokens, num)
    return ReportedLogprobs(ids, logits.gather(1, ids[:, 1:]) - most[:, None] - norm[:, None], most, norm)


report_tokens = Operation(
    _report_tokens,
    native_kernel("outrider.kernels.cpu:report_tokens", FLOAT32, "outrider.kernels.cpu.checks:takes_report"),
    triton_kernel("outrider.kernels.gpu.sampling.logprobs:report_tokens", FLOAT32),
    name="report_tokens", exact=Exactness.ROW_BY_ROW,
)


def sum_by_halves(terms: torch.Tensor) -> torch.Tensor:
    """Sum the terms [L, V] of each row: the second half of the terms is added to the first half until one term is left.
    A library's sum would add in an order that depends on the number of rows and threads, and on where a row begins."""
    width = 1 << (terms.shape[1] - 1).bit_length()
    sums = torch.nn.functional.pad(terms, (0, width - terms.shape[1]))
    while width > 1:
        width //= 2
        sums = sums[:, :width] + sums[:, width:]
    return sums[:, 0]


def rank_tokens(logits: torch.Tensor, chosen_ids: torch.Tensor, num: int) -> torch.Tensor:
    """Return [L, 2 + num]: the chosen token's rank, the chosen token, and the `num` likeliest tokens."""
    at = chosen_ids[:, None]
    rank = (logits > logits.gather(1, at)).sum(dim=1, keepdim=True) + 1
    return torch.cat([rank, at, _top_ids(logits, min(num, logits.shape[1]))], dim=1)


def _top_ids(logits: torch.Tensor, num: int) -> torch.Tensor:
    """Return the ids [L, num] of the greatest logits, the lowest id first among ties. topk alone leaves the order of
    ties open, so float32 logits and their ids are packed into integers without ties; wider logits, and whole
    vocabularies, are sorted."""
    vocab = logits.shape[1]
    if logits.dtype != torch.float32 or num == vocab:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :num]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: one zero, not two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    ids = torch.arange(vocab, device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | (vocab - 1 - ids)
    return vocab - 1 - (keys.topk(num, dim=1).values & 0xFFFFFFFF)


_entry = partial(tuple.__new__, TokenLogprobs)  # from an iterable; the type's own call takes thrice as long


class HostLogprobs:
    """The log-probabilities of a step as Python tuples on the host. Whole tensors are converted at once: a step has
    hundreds of logit rows, and reading them one by one would take longer than the step."""

    def __init__(self, rows: LogprobRows, num: int, count: int | None = None) -> None:
        """Convert the first `count` logit rows (None: all), each with its `num` likeliest tokens (-1: all). The tensors
        of `rows` must be on the CPU."""
        assert rows.values.device.type == "cpu", "copy the log-probabilities to the host first"
        width = rows.num_top if num == MAX_LOGPROBS_ALL else min(num, rows.num_top)
        ids, values = rows.ids.numpy()[:count], rows.values.numpy()[:count]  # whose tolist is the faster one
        fields = zip(map(tuple, ids[:, 1 : 2 + width].tolist()), map(tuple, values[:, : 1 + width].tolist()),
                     ids[:, 0].tolist(), repeat(None))
        self._entries: list[TokenLogprobs] = list(map(_entry, fields))
        self._num = num

    def between(self, start: int, stop: int, num: int) -> list[TokenLogprobs]:
        """Return the entries of logit rows start to stop for a request that asked for `num` tokens: first the chosen
        token, then the `num` likeliest, among which the chosen one may come again."""
        entries = self._entries[start:stop]
        if num in (self._num, MAX_LOGPROBS_ALL):
            return entries
        return [TokenLogprobs(ids[: 1 + num], values[: 1 + num], rank) for ids, values, rank, _ in entries]


def to_host(rows: LogprobRows, start: int, stop: int, num: int) -> list[TokenLogprobs]:
    """Convert logit rows start to stop for a request that asked for `num` tokens."""
    return HostLogprobs(rows.map(lambda field: field[start:stop]), num).between(0, stop - start, num)
