"""The sampler in C code: a token for every logit row, log-probabilities, and the token counts that penalties read.

`sample/native.py` packs the parameters of the rows; a plain draw at a temperature needs only the sampling keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.structures import LOGIT_ROWS, SAMPLED_ROWS, SAMPLING_ROWS
from outrider.kernels.reported_logprobs import ReportedLogprobs
from outrider.kernels.sampling_keys import CountTable, SamplingKeys

_ERRORS = {1: "a row is out of range", 2: "there is no memory for its scratch", 3: "a token is out of range"}
_KEYS = "temperature", "seed", "sample_index", "rows"
_NO_FLAGS = {name: 0 for name in SAMPLING_ROWS.kinds if name not in _KEYS}  # a draw: nothing but the keys is read
_GREEDY = torch.zeros(1)  # the temperature of one row
_NO_REPORT = dict.fromkeys(("ids", "values", "most", "norm"), 0)
_NO_MORE = dict.fromkeys(("edited", "edited_stride", "draft_index", "tokens", "known", "drafts", "chosen",
                          "token_stride", "draft_stride", "max_drafts", "reports", "is_processed", "num_top"), 0)


class Text(NamedTuple):
    """Each row's tokens: tokens[row, :known[row]], then its drafts. All int64."""

    tokens: Tensor  # [rows, length]
    known: Tensor  # [rows]
    drafts: Tensor  # [rows, drafts]


class Report(NamedTuple):
    """The choice of log-probabilities to report."""

    num_top: int  # of the likeliest tokens of a logit row, at most
    is_processed: bool  # those of the logits that are drawn from, not of the model's own


class SampledRows(NamedTuple):
    tokens: Tensor  # [L] int64; 0 where bad
    bad: Tensor  # [L] bool
    reported: ReportedLogprobs | None  # zeros in logit rows that do not ask


def pack_rows(tensors: dict[str, Tensor], **sizes: int) -> bytes:
    """Pack the rows' parameters for the C code: tensors by field name, and sizes. A field that is left out becomes a
    null pointer."""
    given = {name: tensor.data_ptr() for name, tensor in tensors.items()} | sizes
    return SAMPLING_ROWS.pack(**(dict.fromkeys(SAMPLING_ROWS.kinds, 0) | given))


def draw_tokens(logits: Tensor, row: Tensor, position: Tensor, keys: SamplingKeys,
                any_sampled: bool) -> tuple[Tensor, Tensor]:
    temperature, seed, sample_index = keys
    rows = SAMPLING_ROWS.pack(**_NO_FLAGS, temperature=temperature.data_ptr(), seed=seed.data_ptr(),
                              sample_index=sample_index.data_ptr(), rows=temperature.shape[0])
    return sample_rows(logits, row, position, rows, any_sampled)[:2]


def report_tokens(logits: Tensor, tokens: Tensor, num: int) -> ReportedLogprobs:
    """Return the log-probabilities of given tokens [L], with the code that also serves sampled tokens."""
    asked = torch.tensor([num])
    rows = SAMPLING_ROWS.pack(**_NO_FLAGS | {"num_logprobs": asked.data_ptr()}, temperature=_GREEDY.data_ptr(), seed=0,
                              sample_index=0, rows=1)
    row = torch.zeros_like(tokens)
    found = sample_rows(logits, row, None, rows, any_sampled=False, report=Report(num, is_processed=False),
                        chosen=tokens)
    assert found.reported is not None
    return found.reported


def sample_rows(logits: Tensor, row: Tensor, position: Tensor | None, rows: bytes, any_sampled: bool, *,
                draft_index: Tensor | None = None, text: Text | None = None, edited: Tensor | None = None,
                report: Report | None = None, chosen: Tensor | None = None) -> SampledRows:
    """Sample tokens from logits [L, V]. rows: the result of `pack_rows`. draft_index and text are needed if flags ask
    for them. edited: logits that are already edited, for logit rows with edits. chosen: tokens to report in place of
    the sampled ones."""
    num, vocab = logits.shape
    tokens, bad = torch.empty(num, dtype=torch.int64), torch.empty(num, dtype=torch.bool)
    reported, more, places = None, _NO_MORE, _NO_REPORT
    if report is not None:
        width = report.num_top
        reported = ReportedLogprobs(torch.zeros(num, 2 + width, dtype=torch.int64), torch.zeros(num, 1 + width),
                                    *torch.zeros(2, num))
        places = {name: tensor.data_ptr() for name, tensor in reported._asdict().items()}
        more = more | {"reports": 1, "is_processed": report.is_processed, "num_top": width}
    if text is not None:
        more = more | {
            "tokens": text.tokens.data_ptr(), "known": text.known.data_ptr(), "drafts": text.drafts.data_ptr(),
            "token_stride": text.tokens.stride(0), "draft_stride": text.drafts.stride(0),
            "max_drafts": text.drafts.shape[1],
        }
    if draft_index is not None:
        more = more | {"draft_index": draft_index.data_ptr()}
    if edited is not None:
        more = more | {"edited": edited.data_ptr(), "edited_stride": edited.stride(0)}
    if chosen is not None:
        more = more | {"chosen": chosen.data_ptr()}
    inputs = LOGIT_ROWS.pack(**more, logits=logits.data_ptr(), stride=logits.stride(0), row=row.data_ptr(),
                             position=0 if position is None else position.data_ptr(), count=num, vocab=vocab,
                             any_sampled=any_sampled)
    outputs = SAMPLED_ROWS.pack(**places, tokens=tokens.data_ptr(), bad=bad.data_ptr())
    if error := library().sample_rows(rows, inputs, outputs, torch.get_num_threads()):
        raise (MemoryError if error == 2 else IndexError)(f"sample_rows: {_ERRORS[error]}")
    return SampledRows(tokens, bad, reported)


def count_runs(row: Tensor, run: Tensor, run_len: Tensor, counts: CountTable) -> None:
    if counts.packed is None:
        return
    if library().count_runs(row.data_ptr(), run.data_ptr(), run_len.data_ptr(), *run.shape, counts.packed.data_ptr(),
                            counts.packed.shape[0], counts.width):
        raise IndexError("count_runs: a row or a token is out of range")
