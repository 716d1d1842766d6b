"""GgufLinear: a weight that stays quantised as in its GGUF file, for float32 models on the CPU. Its matrices may be of
several GGUF kinds.

The file's blocks are packed in another order while they are loaded, and take about as many bytes. Products are as exact
as in float32 unless `activation_bits` is 8. The result of a token row is the same, bit for bit, in every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.formats.declared import InputShard, LinearDeclaration, Segment, StoredFormat, StoredTensor
from outrider.formats.linear_format import EmbeddingFormat, NativeProduct
from outrider.formats.slots import WeightSlot, join_names
from outrider.kernels import cpu as native
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.quantized import (
    ACTIVATION_BITS,
    draw_rows,
    empty_rows,
    grouped_heads,
    kept_bits_are_fast,
    rounding_error,
)


@dataclass(frozen=True)
class TransposedHeads(StoredFormat):
    """GGUF blocks whose input features are heads in the file's order [heads of a group, groups, size]. The model orders
    heads group by group, so products reorder their input."""

    groups: int
    heads: int
    size: int


@dataclass(frozen=True)
class PackedSlot(WeightSlot):
    """A slot for GGUF blocks of a file. They are packed in another order when they are copied to the target."""

    rows: native.PackedRows | None = None
    stored_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Skip the base class's check of shapes: the target has another shape than the file's tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape

    def fill(self, generator: torch.Generator) -> None:
        """Fill the target with random codes. Ranks draw different numbers of codes, so this slot uses its own
        generator: the shared one must stay equal on all ranks."""
        seed = int(torch.randint(2**31, (), generator=generator))
        self.draw(self.target, torch.Generator(self.target.device).manual_seed(seed))

    def store(self, tensor: torch.Tensor) -> None:
        assert self.rows is not None and self.kind is not None
        native.pack_blocks(self.kind, self.own_part(tensor), self.rows)


def packed_slot(declared: LinearDeclaration, segment: Segment, kind: str, rows: native.PackedRows) -> PackedSlot:
    """Return the slot that the file's blocks of one segment fill."""
    block = KINDS[kind].block
    shape = declared.num_outputs, declared.num_inputs // block, KINDS[kind].block_bytes
    blocks = StoredTensor("weight", torch.empty(shape, dtype=torch.uint8, device="meta"), kind, inputs_per_column=block)
    slot = declared.slot(segment, blocks)
    return PackedSlot(rows.data, slot.layout, slot.shard, kind, partial(draw_rows, kind), rows=rows,
                      stored_shape=slot.shape)


def keeps_blocks(declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
    """Whether native products serve a weight that stays in GGUF blocks. This rank's input features must be whole
    blocks."""
    inputs = declared.inputs
    are_whole = all(edge % KINDS[held.kind].block == 0 for held in stored for edge in (inputs.start, inputs.stop))
    is_sharded = isinstance(declared.shard, InputShard)
    if is_sharded and any(isinstance(held, TransposedHeads) for held in stored):
        return False  # a rank's heads are not neighbours in the file
    return are_whole and declared.dtype == torch.float32 and device.type == "cpu" and kept_bits_are_fast()


class GgufLinear(EmbeddingFormat):
    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared, stored)
        self._kinds = [held.kind for held in stored]
        self._rows = [empty_rows(kind, len(segment.rows), declared.num_inputs, declared.device)
                      for kind, segment in zip(self._kinds, declared.segments, strict=True)]
        self._matrix: native.PackedMatrix | None = None
        self._activation_bits = ACTIVATION_BITS
        self._transposed = next((held for held in stored if isinstance(held, TransposedHeads)), None)

    @classmethod
    def serves(cls, declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        return keeps_blocks(declared, stored, device)

    def tensors(self) -> Sequence[StoredTensor]:
        return ()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        held = zip(self.declared.segments, self._kinds, self._rows, strict=True)
        packed: dict[str, WeightSlot] = {join_names(prefix, segment.name, "weight"): packed_slot(
            self.declared, segment, kind, rows) for segment, kind, rows in held}
        return packed | super().slots(prefix)

    @property
    def weight_bytes(self) -> int:
        return sum(rows.data.nbytes for rows in self._rows)

    def finalize(self) -> None:
        self._matrix = native.PackedMatrix(self._rows, self._bias, self._activation_bits)

    def set_exact(self, exact: bool) -> None:
        """Do nothing: the products are exact in any mode."""

    def with_outputs(self, declared: LinearDeclaration) -> GgufLinear:
        """Return an empty weight of the same kind for other outputs, which `take_rows` fills. This weight must be a
        single matrix."""
        (kind,) = self._kinds
        return GgufLinear(declared, [StoredFormat(kind)])

    def take_rows(self, source: GgufLinear, outputs: torch.Tensor) -> None:
        """Copy some outputs of a weight of the same kind, bit for bit."""
        (own,), (rows,) = self._rows, source._rows
        rows.take(outputs, own)
        self.finalize()

    def round_activations(self) -> None:
        self._activation_bits = 8
        self.finalize()

    def use_activation_bits(self, bits: int) -> float:
        self._activation_bits = bits
        self.finalize()
        return rounding_error(self._rows, self._bias, bits)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        heads = self._transposed
        if heads is not None:
            x = grouped_heads(x, heads.heads, heads.groups, heads.size)
        return native.product(x, self._finalized)

    @property
    def packed_rows(self) -> native.PackedRows | None:
        return self._rows[0] if len(self._rows) == 1 and self._transposed is None else None

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        (rows,) = self._rows  # an embedding is one matrix
        return rows.look_up(tokens)

    def dense(self) -> torch.Tensor:
        weight = torch.cat([rows.look_up(torch.arange(rows.outputs)) for rows in self._rows])
        heads = self._transposed
        return weight if heads is None else grouped_heads(weight, heads.groups, heads.heads, heads.size)

    def native_product(self) -> NativeProduct | None:
        return None if self._transposed is not None else NativeProduct(self._finalized, sys.maxsize)

    @property
    def _finalized(self) -> native.PackedMatrix:
        assert self._matrix is not None, "the weights are not loaded"
        return self._matrix
