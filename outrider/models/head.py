"""DraftHead: the base class of heads, which draft from the target's hidden states. SlotHead: heads that draft token by
token, such as EAGLE heads and MTP modules.

A head is loaded and run like a model: it turns token rows into hidden states, and does not depend on pages, rows or
drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from outrider.formats import StoredFormat
from outrider.layers import Angles, LayeredModule, Linear, Rotary, StepContext
from outrider.mixers import WantedRows
from outrider.models.base import Hidden, Model
from outrider.models.loader import Stored, declare_formats, load_dummy, load_weights
from outrider.models.sources.model_source import ModelSource, WeightError
from outrider.models.target_rows import RoundedOutput


class DraftHead(LayeredModule):
    """A head that uses the target's embedding and output unless its checkpoint has its own."""

    aux_layers: tuple[int, ...] = ()  # the target's residual streams that it reads
    num_outputs: int  # size of its vocabulary
    target_ids: torch.Tensor | None = None  # its tokens as the target's ids; None if they are the same
    follows_components = False  # its rope rotates by the components of the target's positions
    keeps_bits = False  # weights stay in the format of their files, and copies of the target's may be rounded likewise
    made_for: int | None = None  # drafts per step that it was trained for; None if its config does not say

    def __init__(self, target: Model, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.target = target
        self.hidden_size = hidden_size
        self.dtype, self.device = dtype, device
        self.num_outputs = target.vocab_size
        self.embedding = target.embed_tokens
        self.own_output: Linear | None = None
        self.own_tensors: list[torch.Tensor] = []  # tensors that `weights` does not name
        self.rounded_output: RoundedOutput | None = None  # a copy of the target's, for few token rows
        self._borrows_output = False  # the copy is another head's

    def arrivals(self, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        """Yield the checkpoint's tensors that the loader stores, under their names in `weights`. Subclasses leave out
        tensors that they store themselves."""
        return iter(tensors)

    def stored_format(self, source: ModelSource) -> Callable[[str], StoredFormat | None]:
        """Return a function that says how `source` stores a matrix, given the head's name for the matrix."""
        return source.stored_format

    def follow_target(self) -> None:
        """Refresh the head's copies of the target's weights, because these weights may have changed."""
        if self.rounded_output is not None and not self._borrows_output:
            self.rounded_output.take()

    def borrow_output(self, other: DraftHead) -> None:
        """Share the copy of the target's output that another head has made."""
        self.rounded_output, self._borrows_output = other.rounded_output, True

    def check_loaded(self) -> None:
        """Refuse a checkpoint that makes the head unusable with this target."""

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        if self.own_output is not None:
            return self.own_output.wide(hidden, context)
        if self.rounded_output is not None and self.rounded_output.serves(hidden):
            return self.rounded_output.logits(hidden, context)
        return self.target.logits(hidden, context)

    def _table(self, tokens: torch.Tensor, scale: float | None,
               context: StepContext) -> tuple[torch.Tensor, torch.Tensor, float | None]:
        """Return (row indices, the table to look them up in, its scale). By default this is the embedding's table. If
        the request gives vectors instead of token ids, or the embedding has no plain table, a table is made for this
        pass."""
        table = self.embedding.format.table
        if context.given_rows is None and table is not None:
            return tokens, table, scale
        found = self.embedding.format.look_up(tokens)
        found = found if scale is None else found * scale
        found = found if context.given_rows is None else context.given_rows.put_into(found)
        return torch.arange(len(tokens), device=tokens.device), found, None

    def module(self) -> DraftHead:
        """Return the module that a drafter runs: the head itself."""
        return self

    def weight_bytes(self) -> int:
        held = [slot.target for slot in self.weights().values()] + self.own_tensors
        held += [] if self.rounded_output is None or self._borrows_output else self.rounded_output.tensors()
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _own(self, name: str, tensor: torch.Tensor, shape: tuple[int, int],
             shared: torch.Tensor | None) -> torch.Tensor:
        """Return an optional tensor of the checkpoint in the head's dtype, or the target's tensor if both are equal."""
        if tuple(tensor.shape) != shape:
            raise WeightError(f"tensor {name} has shape {list(tensor.shape)}, and the head's config needs "
                              f"{list(shape)}: fetch the head's files again")
        own = tensor.to(device=self.device, dtype=self.dtype, copy=True)
        if not bool(torch.isfinite(torch.stack(torch.aminmax(own))).all()):
            raise WeightError(f"tensor {name} holds NaN or Inf (as {own.dtype}): fetch the head's files again")
        if shared is not None and own.shape == shared.shape and torch.equal(own, shared):
            return shared
        self.own_tensors.append(own)
        return own


class SlotHead(DraftHead, ABC):
    """A head that drafts token by token. Slot p of its cache is computed from token p and the target's hidden state at
    p - 1, with rope position p - 1."""

    @abstractmethod
    def consume(self, hidden: Hidden) -> torch.Tensor:
        """Return the head's input [tokens, hidden], from the hidden states of the target's forward."""

    @abstractmethod
    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head for one draft of each token row. Returns two tensors: the input of `logits`, and the `hidden` of
        the next draft's pass.

        hidden [tokens, hidden size]: the result of `consume` in the pass for the first draft, and in later passes the
        second tensor of the pass before. rows: the token rows that the two tensors have; None means all."""


class SlotRotary(Rotary):
    """The rope of a `SlotHead`: position p uses the angles of p - 1, as in the head's training. Only dead token rows
    (padding and warm-up) have position 0."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary, table = rotary, rotary.table
        # Joining tensors without numbers would import a second or more of torch's Python code.
        self.table = table if table.is_meta else torch.cat((table[:1], table[:-1]))

    def of_step(self, positions: torch.Tensor, components: torch.Tensor | None) -> Angles:
        """Return the angles of a step's token rows. components: the position components of the token before each slot,
        by which the slot's token is rotated."""
        return self.at(positions) if components is None else self._rotary.of_step(positions, components)


def load_head(head: DraftHead, find_source: Callable[[], ModelSource], *, load_format: str, seed: int,
              keep_quantized: bool = False, rounds_output: bool = False) -> None:
    """Fill a head from a source's tensors. load_format "dummy" needs no source and draws weights from `seed`.
    `keep_quantized`: weights stay in the format of their files where possible. `rounds_output`: the head may use a
    rounded copy of the target's output. A head on the meta device is not filled. A head is sharded like its target."""
    if head.target.group is not None:
        head.shard(head.target.group)
    if head.device.type == "meta":
        return
    if load_format == "dummy":
        load_dummy_head(head, seed)
    else:
        _read_head(head, find_source(), keep_quantized)
    if rounds_output and head.own_output is None and not hasattr(head, "lm_head"):
        head.rounded_output = RoundedOutput.try_build(head.target)


def _read_head(head: DraftHead, source: ModelSource, keep_quantized: bool) -> None:
    head.keeps_bits = keep_quantized
    loadable: Any = head  # the loader only uses methods of a model that a head has too
    if keep_quantized:
        declare_formats(loadable, head.stored_format(source))
    tensors: Any = source.read() if keep_quantized else source.tensors()
    load_weights(loadable, head.arrivals(tensors))
    head.check_loaded()


def load_dummy_head(head: DraftHead, seed: int) -> None:
    """Fill a head with random weights. A reduced vocabulary contains the target's first tokens."""
    loadable: Any = head
    load_dummy(loadable, seed)
    if head.num_outputs < head.target.vocab_size and head.target_ids is None:
        head.target_ids = torch.arange(head.num_outputs, device=head.device)
        weight = torch.empty(head.num_outputs, head.hidden_size, dtype=head.dtype, device=head.device)
        generator = torch.Generator(head.device).manual_seed(seed)
        head.own_output = Linear.from_weight(weight.uniform_(-1e-3, 1e-3, generator=generator))
