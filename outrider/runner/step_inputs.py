"""Inputs of a step, beside token ids, from the parts of its requests. Imported for the first step that has any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from outrider.core import Admission
from outrider.kernels.buffers import to_device
from outrider.layers.given_rows import GivenRows
from outrider.mixers.batch import NO_EXTRA_KEYS, ExtraKeys, NoExtraKeys
from outrider.runner.input_encoder import Encoders, vectors_of
from outrider.runner.row_inputs import PromptChunk
from outrider.runner.row_state import RowState


class ComponentRows(NamedTuple):
    """Positions of several components, for some of a step's token rows."""

    token_rows: torch.Tensor  # [n]
    positions: torch.Tensor  # [3, n]


def find_given_rows(chunks: Sequence[PromptChunk], query_lens: Sequence[int], device: torch.device, *, ahead: int,
                    encoders: Encoders) -> GivenRows | None:
    """Find the vectors that replace embeddings in a step. query_lens: the number of tokens of each request. ahead: 0
    for the vectors of the step's token rows, 1 for those of the position after each, as a drafter needs them."""
    first_row = [0, *accumulate(query_lens)]
    found = [(vectors, first_row[chunk.request] - chunk.start - ahead) for chunk in chunks for part in chunk.parts
             for vectors in vectors_of(part, chunk.start + ahead, chunk.end + ahead, encoders)]
    return GivenRows.try_build(found, device)


def first_given_rows(admissions: Sequence[Admission], state: RowState) -> GivenRows | None:
    """Find the vectors in place of the embedding of the first token that each admitted row computes."""
    encoders = state.params.inputs.encoders
    found = [(vectors, index - own.computed) for index, own in enumerate(admissions)
             for part in own.request.input_parts
             for vectors in vectors_of(part, own.computed, own.computed + 1, encoders)]
    return GivenRows.try_build(found, state.device)


def components_before(admissions: Sequence[Admission], num_rows: int, device: torch.device) -> torch.Tensor:
    """Find the components [3, rows] of the position before the first token that each admitted row computes. num_rows:
    with rows that pad the batch."""
    found = np.zeros((3, num_rows), dtype=np.int64)
    for row, own in enumerate(admissions):
        before = own.computed - 1
        found[:, row] = max(0, before + sum(part.rope_shift for part in own.request.input_parts))
        for part in own.request.input_parts:
            if (given := part.rope_positions(before, own.computed)) is not None:
                found[:, row] = given[:, 0]
    return torch.from_numpy(found).to(device)


def find_extra_keys(chunks: Sequence[PromptChunk], query_lens: Sequence[int], num_tokens: int,
                    device: torch.device) -> ExtraKeys | NoExtraKeys:
    """Find the ranges of keys that tokens of a step may attend to beyond causal attention. query_lens: the number of
    tokens of each request. num_tokens: the number of all tokens, with padding."""
    ranges = [(chunk, start, end) for chunk in chunks for part in chunk.parts
              for start, end in part.two_way_ranges(chunk.start, chunk.end)]
    if not ranges:
        return NO_EXTRA_KEYS
    first_row = [0, *accumulate(query_lens)]
    starts, ends = [0] * num_tokens, [0] * num_tokens
    for chunk, start, end in ranges:
        row = first_row[chunk.request] + start - chunk.start
        starts[row : row + end - start] = [start] * (end - start)
        ends[row : row + end - start] = [end] * (end - start)
    return ExtraKeys(to_device(starts, torch.int64, device), to_device(ends, torch.int64, device))


def find_component_rows(chunks: Sequence[PromptChunk], query_lens: Sequence[int],
                        device: torch.device) -> ComponentRows | None:
    """Find the token rows whose ropes rotate by positions of several components."""
    first_row = [0, *accumulate(query_lens)]
    rows: list[int] = []
    positions = []
    for chunk in chunks:
        for part in chunk.parts:
            if (own := part.rope_positions(chunk.start, chunk.end)) is not None:
                rows += range(first_row[chunk.request], first_row[chunk.request] + chunk.end - chunk.start)
                positions.append(own)
    if not rows:
        return None
    joined = torch.from_numpy(np.concatenate(positions, axis=1))
    return ComponentRows(to_device(rows, torch.int64, device), joined.to(device))
