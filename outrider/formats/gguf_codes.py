"""GGUF weights on a GPU: the file's blocks become codes with scales while they are read, and `ScaledLinear` keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.formats.declared import StoredFormat
from outrider.formats.scaled import ScaledFormat, ScaledWeight
from outrider.formats.slots import StoredWeight
from outrider.formats.upload import upload
from outrider.kernels.gguf_codes import FORMS, has_offsets, to_codes
from outrider.kernels.quantized import QuantizedRows


@dataclass(frozen=True)
class Recoding:
    """Converts a file's GGUF blocks to codes with scales while they are read. A slot holds it; `kind` is the kind of
    the blocks."""

    kind: str

    def __call__(self, stored: StoredWeight, device: torch.device) -> ScaledWeight:
        assert isinstance(stored, QuantizedRows) and stored.kind == self.kind
        return ScaledWeight(to_codes(self.kind, upload(stored.data, device)))


def as_codes(stored: StoredFormat, device: torch.device) -> StoredFormat:
    """Return the stored format in which a model on this device keeps a weight. On a GPU, GGUF kinds become codes with
    scales; other formats are unchanged, and so are weights whose input features are in another order than the model's.
    """
    if device.type != "cuda" or type(stored) is not StoredFormat or stored.kind not in FORMS:
        return stored
    form = FORMS[stored.kind]
    return ScaledFormat(form.code, form.group, torch.bfloat16, has_offsets=has_offsets(stored.kind),
                        recode=Recoding(stored.kind))
