"""Arrays as texts in JSON: base64 of the bytes of a .npy file, as vLLM writes them. No torch."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_array(array: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_array(text: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array
