"""Converts the data of pooling outputs to torch tensors, for callers who expect vLLM's type."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.pooling_outputs import PoolingRequestOutput


def as_tensors(outputs: Sequence[PoolingRequestOutput]) -> None:
    """Replace the data of pooling outputs by torch tensors, in place."""
    for output in outputs:
        if output.outputs.data is not None:
            output.outputs.data = torch.from_numpy(output.outputs.data)
