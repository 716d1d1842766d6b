"""Recurrent layers keep a state in every batch row, which each token overwrites, so a running request's state is not
stored in pages. A checkpoint is a list of pages with the states and convolution tails of all layers, one after the
other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from outrider.cache.kinds.kind import pages_for
from outrider.core import Limits

CHECKPOINT_INTERVAL = 1024  # tokens


@dataclass(frozen=True)
class RecurrentSpec:
    """The sizes of a recurrent layer's data in every batch row: the state, the tail (last inputs of the convolution)
    and the inputs of drafts."""

    conv_dim: int  # inputs of the causal convolution per token
    conv_width: int  # kernel width; the tail holds the last conv_width - 1 inputs, before the convolution
    state_shape: tuple[int, ...]  # float32, or float64 in a float64 model
    gate_sizes: tuple[int, ...]  # widths of the further inputs per token that a fold needs
    out_dim: int  # outputs per token
    itemsize: int  # bytes of one input in the model's dtype

    @property
    def state_itemsize(self) -> int:
        """Return the bytes of one element of the state. A narrower state would be rounded at the end of each step, so
        that the text would depend on how many drafts are accepted."""
        return max(4, self.itemsize)

    @property
    def state_bytes(self) -> int:
        return math.prod(self.state_shape) * self.state_itemsize

    @property
    def tail_bytes(self) -> int:
        return (self.conv_width - 1) * self.conv_dim * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Return the bytes of state and tail, which a checkpoint contains for the layer."""
        return self.state_bytes + self.tail_bytes

    @property
    def input_bytes(self) -> int:
        """Return the bytes of inputs that a batch row keeps for each draft until the draft is folded into the state or
        rejected."""
        return (self.conv_dim + sum(self.gate_sizes)) * self.itemsize


@dataclass(frozen=True)
class RowCapacity:
    """Bytes that all recurrent layers of a model keep for one request, and the number of its checkpoints and their
    pages."""

    row_bytes: int  # state, tail and window of the request in all layers
    window_bytes: int  # the windows' part of `row_bytes`, which alone grows with the number of drafts
    checkpoint_pages: int  # pages of one checkpoint
    max_checkpoints: int  # checkpoints that the request can hold at once


@dataclass(frozen=True)
class RecurrentKind:
    """The recurrent layers of a model, and the boundaries at which their states are saved. For a model without
    recurrent layers `layers` is empty."""

    layers: tuple[tuple[int, RecurrentSpec], ...] = ()
    page_tokens: int = 1  # checkpoints are taken at multiples of this, where the pages of all the target's groups end
    page_bytes: int = 1
    interval: int = CHECKPOINT_INTERVAL

    @property
    def checkpoint_bytes(self) -> int:
        return sum(spec.row_bytes for _, spec in self.layers)

    def capacity(self, limits: Limits) -> RowCapacity:
        window = limits.max_drafts * sum(spec.input_bytes for _, spec in self.layers)
        # A step may pass several intervals, a branch, a prompt's end and a last boundary; one more was written before.
        per_step = limits.max_batched_tokens // self.interval + 3
        return RowCapacity(
            row_bytes=self.checkpoint_bytes + window,
            window_bytes=window,
            checkpoint_pages=pages_for(self.checkpoint_bytes, self.page_bytes),
            max_checkpoints=limits.steps_in_flight * per_step + 1 if self.layers else 0,
        )

    def starts(self) -> dict[int, int]:
        """Return the byte at which each layer begins in a checkpoint."""
        sizes = [spec.row_bytes for _, spec in self.layers]
        return {layer: start for (layer, _), start in zip(self.layers, accumulate(sizes, initial=0), strict=False)}

    def is_kept(self, boundary: int, prompt_len: int) -> bool:
        """Whether a checkpoint is published as soon as it is written: at every interval, and at the last boundary
        before the prompt's end. Other checkpoints live only until the row's next one."""
        return boundary % self.interval == 0 or boundary == self.last_boundary(prompt_len)

    def last_boundary(self, tokens: int) -> int:
        """Return the last boundary before the end of the tokens, so that at least one token is left to compute."""
        return max(0, tokens - 1) // self.page_tokens * self.page_tokens

    def serves(self, has_checkpoint: Callable[[int], bool], candidate: int) -> int:
        """Return the length of the longest prefix of at most `candidate` tokens after which there is a checkpoint;
        `candidate` if there are no layers."""
        if not self.layers:
            return candidate
        for boundary in range(candidate // self.page_tokens * self.page_tokens, 0, -self.page_tokens):
            if has_checkpoint(boundary):
                return boundary
        return 0
