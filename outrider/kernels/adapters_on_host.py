"""What adapters add to the product of a linear layer on the CPU, by the products of exact mode."""

from __future__ import annotations

from functools import partial

from outrider.kernels.adapters import add_by
from outrider.kernels.ops import exact

add_adapters = partial(add_by, exact.linear)
