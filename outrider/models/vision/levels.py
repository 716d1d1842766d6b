"""The numbers that stand for the 256 levels of a pixel's colour.

Patches are kept as bytes and become numbers in the tower, by a look-up: a patch of bytes is a quarter of its float32
numbers, and a table is exact whatever device makes the numbers. Each table is rounded as transformers rounds: a product
in float64, then float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]  # [256]
RESCALE = 1 / 255


def unit_levels() -> Levels:
    """Levels from 0 to 1."""
    return (np.arange(256, dtype=np.float64) * RESCALE).astype(np.float32)


def centered_levels() -> Levels:
    """Levels from -1 to 1, normalised by a mean and a deviation of a half."""
    half = np.float32(0.5)
    return ((unit_levels() - half) / half).astype(np.float32)


def doubled_levels() -> Levels:
    """Levels from -1 to 1: twice the distance of the unit levels from a half."""
    return (np.float32(2) * (unit_levels() - np.float32(0.5))).astype(np.float32)
