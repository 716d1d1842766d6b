"""Tables of the input number for each of the 256 values of a pixel's colour.

Patches are kept as bytes, which take a quarter of the memory of float32. The tower converts them by a table, which
gives equal numbers on every device. The tables are rounded as transformers rounds: a product in float64, then
float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]  # [256]
RESCALE = 1 / 255


def unit_levels() -> Levels:
    """Return a table of numbers from 0 to 1."""
    return (np.arange(256, dtype=np.float64) * RESCALE).astype(np.float32)


def centered_levels() -> Levels:
    """Return a table of numbers from -1 to 1, normalised by a mean and a deviation of a half."""
    half = np.float32(0.5)
    return ((unit_levels() - half) / half).astype(np.float32)


def doubled_levels() -> Levels:
    """Return a table of numbers from -1 to 1: twice the difference between the unit level and a half."""
    return (np.float32(2) * (unit_levels() - np.float32(0.5))).astype(np.float32)
