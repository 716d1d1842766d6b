"""Single tensors of a GGUF file: the supported tensor kinds, and the bytes of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.core.fields import shown
from outrider.core.lazy_exports import LateModule
from outrider.models.sources.gguf_header import Header, TensorEntry
from outrider.models.sources.model_source import SourceError

if TYPE_CHECKING:
    from outrider.models.sources import file_reads
else:
    file_reads = LateModule("outrider.models.sources.file_reads")

FLOAT_KINDS = ("F32", "F16", "BF16")
# Kinds that a layer can keep in the file's own bits, and those of which only the gguf library knows what the bits mean.
KEPT_KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
              "IQ4_XS")
EXPANDED_KINDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4")
KINDS = (*FLOAT_KINDS, *KEPT_KINDS, *EXPANDED_KINDS)


def raw_bytes(header: Header, entry: TensorEntry) -> np.ndarray:
    """Return a tensor's bytes. If the file is mapped, the system reads them at first use, and keeps one copy for all
    processes. Writing into the array does not change the file."""
    if not header.maps_file:
        return file_reads.FileReader(header.path).read(entry.offset, entry.num_bytes, f"tensor {shown(entry.name)}")
    if header.path.stat().st_size < entry.offset + entry.num_bytes:  # the file was cut after its header was read
        raise SourceError(f"{header.path} is cut off: tensor {shown(entry.name)} is not complete. Fetch it again.")
    return np.asarray(np.memmap(header.path, np.uint8, "c", entry.offset, entry.num_bytes))


def dequantised(raw: np.ndarray, kind: int) -> np.ndarray:
    """Return the numbers of stored rows, computed by the gguf library."""
    from gguf.constants import GGMLQuantizationType  # with YAML and more, which most files do not need
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType(kind))
