"""Conversion of GGUF weights to the codes with scales that products on a GPU read (`kernels.scaled.Scaled`).

Codes are kept as they are. A group's scale, and in kinds with minimum values the value at the middle of the group's
codes, are computed in float32 and rounded to bfloat16 once. A weight differs from the file's by at most 2**-8 of |code
* scale| + |offset|. Products in bfloat16 round the sum of both once more, as they round any number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.code_kinds import FP4, INT4, INT8
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.scaled import Scaled, by_outputs, pack_nibbles


class CodedForm(NamedTuple):
    """The form in which weights of one GGUF kind are stored as codes: the codes' type, how many inputs share a scale,
    and which code of the file becomes 0."""

    code: str
    group: int
    middle: int = 0


FORMS = {
    "Q4_0": CodedForm(INT4, 32, 8),
    "Q4_1": CodedForm(INT4, 32, 8),
    "Q4_K": CodedForm(INT4, 32, 8),
    "Q3_K": CodedForm(INT4, 16, 4),
    "Q2_K": CodedForm(INT4, 16, 2),
    "Q5_0": CodedForm(INT8, 32, 16),
    "Q5_1": CodedForm(INT8, 32, 16),
    "Q5_K": CodedForm(INT8, 32, 16),
    "Q6_K": CodedForm(INT8, 16, 32),
    "Q8_0": CodedForm(INT8, 32),
    "IQ4_NL": CodedForm(INT8, 32),
    "IQ4_XS": CodedForm(INT8, 32),
    "MXFP4": CodedForm(FP4, 32),
}


def has_offsets(kind: str) -> bool:
    """Whether weights of a kind have a minimum value in every group."""
    return len(KINDS[kind].halves) == 2


def to_codes(kind: str, data: Tensor) -> Scaled:
    """Convert rows of one GGUF kind, data [outputs, bytes of a row] as in the file, to codes with scales, on the device
    of `data`."""
    return by_outputs(lambda rows: _to_codes(kind, rows), data)


def _to_codes(kind: str, data: Tensor) -> Scaled:
    read, (code, group, middle) = KINDS[kind], FORMS[kind]
    parts = read.unpack(data.view(data.shape[0], -1, read.block_bytes))
    num_groups = parts.codes.shape[1] // group
    scale = _by_group(parts.scale, parts.inner_scale, num_groups)
    offset = None
    if parts.least is not None:
        offset = (_by_group(parts.least, parts.inner_least, num_groups) + middle * scale).bfloat16()
    if code == INT4:
        codes = pack_nibbles(parts.codes + (8 - middle), group)
    elif code == FP4:
        codes, scale = pack_nibbles(parts.codes, group), 2 * scale  # the kind's table holds twice the values
    elif read.table is not None:
        codes = torch.tensor(read.table, dtype=torch.int8, device=data.device)[parts.codes.int()]
    else:
        codes = parts.codes.view(torch.int8) - middle
    return Scaled(code, group, codes, scale.bfloat16(), offsets=offset)


def _by_group(outer: Tensor, inner: Tensor | None, num_groups: int) -> Tensor:
    """Combine the numbers of blocks [outputs, blocks] with the integers of their groups: [outputs, groups] in
    float32."""
    numbers = outer if inner is None else (outer.unsqueeze(-1) * inner).flatten(1)
    assert numbers.shape[1] == num_groups
    return numbers
