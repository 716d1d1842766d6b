"""FileHead: a draft head that is published as a separate checkpoint, such as EAGLE heads and block drafters.

The embedding, the output and a reduced vocabulary are optional in its file; the head uses the target's tensors for
missing ones. If its config sets `target_output_rows`, a head with a reduced vocabulary copies the rows of its tokens
from the target's output matrix, so the file contains only the head's layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch

from outrider.formats import StoredFormat, WeightSlot
from outrider.layers import Embedding, Linear
from outrider.models.base import Model
from outrider.models.config import ConfigReader, Sizes
from outrider.models.head import DraftHead
from outrider.models.loader import Stored
from outrider.models.sources.model_source import ModelSource, WeightError
from outrider.models.target_rows import TargetRows

EMBEDDING, OUTPUT, OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
WEIGHT_ENDINGS = ".weight", ".weight_packed"  # of the names of matrices: as numbers or codes, and as packed codes
OTHER_SIZE = "the target's hidden size is {}"
OTHER_HEAD = "Use a head that was made for this target."


class FileHead(DraftHead):
    renamed: tuple[tuple[str, str], ...] = ()  # patterns in the names of a file's tensors, and the names used here
    unused: tuple[str, ...] = ("t2d",)  # tensors that a file may have; t2d is the inverse of d2t

    def __init__(self, source: str, config: ConfigReader, sizes: Sizes, target: Model, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        """source: the config file. config: the section of the file that describes the head's layers, from which `sizes`
        were read."""
        super().__init__(target, sizes.hidden_size, dtype=dtype, device=device)
        self.sizes, self._source = sizes, source
        self.has_own_embedding = False
        self._uses_target_rows = False
        self._target_rows: TargetRows | None = None
        if sizes.vocab_size != target.vocab_size:
            raise config.refusal("vocab_size", f"the target's vocabulary has {target.vocab_size} tokens", OTHER_HEAD)

    def read_vocabulary(self, config: ConfigReader) -> None:
        """Read the size of the head's vocabulary, which may be smaller than the target's."""
        self.num_outputs = config.get("draft_vocab_size", int, self.sizes.vocab_size)
        if not 0 < self.num_outputs <= self.target.vocab_size:
            raise config.refusal("draft_vocab_size", "it must be from 1 to the target's vocabulary of "
                                                     f"{self.target.vocab_size} tokens", OTHER_HEAD)
        self._uses_target_rows = config.get("target_output_rows", bool, False)
        if self._uses_target_rows and self.hidden_size != self.target.hidden_size:
            raise config.refusal("target_output_rows", OTHER_SIZE.format(self.target.hidden_size), OTHER_HEAD)
        if self._uses_target_rows and self.target.group is not None:
            raise config.refusal("target_output_rows", "the target's output layer is split over several ranks, and "
                                                       "this head would copy rows of it",
                                 "Use a head with an output layer of its own, or tensor_parallel_size=1.")

    def read_target_size(self, config: ConfigReader, layer: ConfigReader) -> int:
        """Read the size of the target's hidden states, which may differ from the head's."""
        wide = config.get("target_hidden_size", int, self.hidden_size)
        if wide != self.target.hidden_size:
            is_said = config.has("target_hidden_size")
            key, reader = ("target_hidden_size", config) if is_said else ("hidden_size", layer)
            raise reader.refusal(key, OTHER_SIZE.format(self.target.hidden_size), OTHER_HEAD)
        return wide

    def name_here(self, name: str) -> str:
        """Return this class's name for a tensor or matrix of the file."""
        for pattern, ours in self.renamed:
            name = re.sub(pattern, ours, name)
        return name

    def stored_format(self, source: ModelSource) -> Callable[[str], StoredFormat | None]:
        in_files = {self.name_here(name).removesuffix(ending): name.removesuffix(ending)
                    for name in source.tensor_names() for ending in WEIGHT_ENDINGS if name.endswith(ending)}
        return lambda name: source.stored_format(in_files.get(name, name))

    def arrivals(self, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        for original, tensor in tensors:
            name = self.name_here(original)
            if name in (EMBEDDING, OUTPUT, OFFSETS) and not isinstance(tensor, torch.Tensor):
                tensor = tensor.dequantize()
            if not isinstance(tensor, torch.Tensor):
                yield name, tensor
            elif name == EMBEDDING:
                shape = (self.sizes.vocab_size, self.hidden_size)
                shared = self.target.embed_tokens.weight
                table = self._own(original, tensor, shape, shared)
                self.embedding = self.target.embed_tokens if table is shared else Embedding.from_weight(table)
                self.has_own_embedding = True
            elif name == OUTPUT:
                self._take_output(original, tensor)
            elif name == OFFSETS:
                self._take_offsets(tensor)
            elif name not in self.unused:
                yield name, tensor

    def check_loaded(self) -> None:
        target, source = self.target, self._source
        if not self.has_own_embedding and self.hidden_size != target.hidden_size:
            raise WeightError(
                f"{source}: the head has no {EMBEDDING} and cannot use the target's: its hidden size is "
                f"{self.hidden_size}, the target's {target.hidden_size}; use a head that was made for this target"
            )
        if self.num_outputs < target.vocab_size and self.target_ids is None:
            raise WeightError(
                f"{source}: the head knows {self.num_outputs} of the target's {target.vocab_size} tokens and has no "
                f"tensor {OFFSETS} that says which; fetch the whole checkpoint, or convert it again"
            )
        if self._uses_target_rows:
            self._make_target_rows()
        if self.own_output is None and self.target_ids is not None and self.num_outputs == target.vocab_size:
            raise WeightError(f"{source}: {OFFSETS} gives the head's tokens another order than the target's, and the "
                              f"head has no {OUTPUT} in that order; fetch the whole checkpoint")
        if self.own_output is None and (self.num_outputs, self.hidden_size) != (target.vocab_size, target.hidden_size):
            raise WeightError(
                f"{source}: the head has no {OUTPUT} and the target's does not fit it ({self.num_outputs} tokens, "
                f"hidden size {self.hidden_size}); fetch the whole checkpoint"
            )

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        """Return the tensors that the file must have. The output is not one of them if the head uses the target's
        output."""
        return {name: slot for name, slot in super().weights(prefix).items() if name != OUTPUT}

    def follow_target(self) -> None:
        super().follow_target()
        if self._target_rows is not None:
            self._target_rows.take()

    def _make_target_rows(self) -> None:
        if self.own_output is not None:
            raise WeightError(f"{self._source}: target_output_rows=true means that the head has no {OUTPUT} of its "
                              "own, but its files hold one: remove one of the two")
        if self.target_ids is not None:  # with the whole vocabulary the target's output serves as it is
            self._target_rows = TargetRows(self.target.lm_head, self.target_ids, self.dtype, self.keeps_bits)
            self.own_output = self._target_rows.linear
            self.own_tensors += self._target_rows.tensors()

    def _take_output(self, name: str, tensor: torch.Tensor) -> None:
        shared = self.target.lm_head.format.dense()
        weight = self._own(name, tensor, (self.num_outputs, self.hidden_size), shared)
        self.own_output = None if weight is shared else Linear.from_weight(weight)

    def _take_offsets(self, offsets: torch.Tensor) -> None:
        if tuple(offsets.shape) != (self.num_outputs,) or offsets.is_floating_point():
            raise WeightError(f"{self._source}: tensor {OFFSETS} must hold {self.num_outputs} integers "
                              f"(draft_vocab_size), but has shape {list(offsets.shape)} and dtype {offsets.dtype}; "
                              "fetch the file again")
        ids = torch.arange(self.num_outputs) + offsets.long()
        if not bool(((ids >= 0) & (ids < self.target.vocab_size)).all()):
            raise WeightError(f"{self._source}: tensor {OFFSETS} names tokens outside the target's vocabulary of "
                              f"{self.target.vocab_size} tokens; use a head that was made for this target")
        is_whole = self.num_outputs == self.target.vocab_size and not bool(offsets.any())
        self.target_ids = None if is_whole else ids.to(self.device)
