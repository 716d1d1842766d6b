"""Embeddings in place of prompts: a body has base64 of a safetensors file with one tensor.

The file consists of a JSON header and numbers, so reading it runs no code of a client. Sizes are checked before
anything is decoded or allocated.
"""

from __future__ import annotations

import base64
import json
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.fields import shown
from outrider.server.errors import ApiError

NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # as numpy reads them; it has no bfloat16
MAX_HEADER_BYTES = 1 << 16
LENGTH_BYTES = 8  # of the number that a file begins with: the length of its header
PICKLES = (b"PK\x03\x04", b"\x80")  # how files of torch.save begin
PARAM = "prompt_embeds"


def read_embeds_file(text: str, max_tokens: int, hidden_size: int) -> NDArray[np.floating]:
    """Read the tensor [tokens, hidden size] of a file. Raise ApiError if it is anything else."""
    max_bytes = LENGTH_BYTES + MAX_HEADER_BYTES + max_tokens * hidden_size * 8
    if len(text) > max_bytes // 3 * 4 + 4:
        raise _wrong(f"has {len(text)} characters, more than {max_tokens} tokens of {hidden_size} numbers need: send "
                     "at most that many tokens")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise _wrong("is not valid base64: encode a safetensors file as base64") from None
    num_header = int.from_bytes(data[:LENGTH_BYTES], "little")
    if not 2 <= num_header <= min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES):
        if data.startswith(PICKLES):
            raise _wrong("is a file of torch.save, which is a pickle and is never read: send a safetensors file, as "
                         "safetensors.torch.save({'embeds': tensor}) returns it")
        raise _wrong("is not a safetensors file: write one with safetensors.torch.save({'embeds': tensor})")
    begin = LENGTH_BYTES + num_header
    dtype, shape = _tensor(data[LENGTH_BYTES:begin], len(data) - begin, max_tokens, hidden_size)
    values = np.frombuffer(data, dtype, offset=begin).reshape(shape)
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def _tensor(header: bytes, num_bytes: int, max_tokens: int, hidden_size: int) -> tuple[str, tuple[int, int]]:
    """Return the dtype and shape of the file's only tensor, from the header. num_bytes: the size of the numbers after
    the header."""
    try:
        named = json.loads(header)
    except (ValueError, RecursionError):
        named = None
    tensors: list[Any] = [] if not isinstance(named, dict) else [
        tensor for name, tensor in named.items() if name != "__metadata__"]
    match tensors:
        case [{"dtype": str() as kind, "shape": [int() as num_tokens, int() as width],
               "data_offsets": [0, int() as end]}]:
            if kind not in NUMBERS:
                raise _wrong(f"must be of one of the types {', '.join(NUMBERS)}, got {shown(kind)}")
            if width != hidden_size or not 1 <= num_tokens <= max_tokens:
                raise _wrong(f"must have the shape [tokens, {hidden_size}] with at most {max_tokens} tokens, got "
                             f"{shown([num_tokens, width])}")
            if end != num_bytes or prod((num_tokens, width, np.dtype(NUMBERS[kind]).itemsize)) != num_bytes:
                raise _wrong(f"has {num_bytes} bytes of numbers, and its shape and dtype need another number: write "
                             "the file again")
            return NUMBERS[kind], (num_tokens, width)
    raise _wrong(f"must be a safetensors file with one tensor of the shape [tokens, {hidden_size}]")


def _wrong(why: str) -> ApiError:
    return ApiError(400, f"{PARAM} {why}", param=PARAM)
