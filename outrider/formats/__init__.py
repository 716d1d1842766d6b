"""Formats: how the weights of linear layers, embeddings and experts are stored, and every product with them.

A format is one file. It is built empty from a layer's declaration, and only it reads the weight's tensors.
"""

from outrider.formats.base import EmbeddingFormat, LinearFormat, NativeProduct, activate
from outrider.formats.declared import (
    ExpertsDeclaration,
    InputCut,
    LinearDeclaration,
    ModelSize,
    OutputCut,
    PackedPart,
    Ranks,
    RankSize,
    StoredFormat,
    StoredTensor,
    VocabularyCut,
)
from outrider.formats.dense import DenseLinear
from outrider.formats.expansion import DenseExpansion, ExpansionDeclaration, ExpansionFormat
from outrider.formats.experts import DenseExperts, ExpertsFormat
from outrider.formats.gguf import TransposedHeads
from outrider.formats.ranks import RankGroup, UnsummedRanks
from outrider.formats.registry import FormatChoice, register_format
from outrider.formats.slots import HeadLayout, PairedHeads, StoredWeight, TensorCut, WeightSlot, join_names
from outrider.formats.summed import build_format
from outrider.formats.weight_format import WeightFormat

__all__ = [
    "DenseExpansion",
    "DenseExperts",
    "DenseLinear",
    "EmbeddingFormat",
    "ExpansionDeclaration",
    "ExpansionFormat",
    "ExpertsDeclaration",
    "ExpertsFormat",
    "FormatChoice",
    "HeadLayout",
    "InputCut",
    "LinearDeclaration",
    "LinearFormat",
    "ModelSize",
    "NativeProduct",
    "OutputCut",
    "PackedPart",
    "PairedHeads",
    "RankGroup",
    "RankSize",
    "Ranks",
    "StoredFormat",
    "StoredTensor",
    "StoredWeight",
    "TensorCut",
    "TransposedHeads",
    "UnsummedRanks",
    "VocabularyCut",
    "WeightFormat",
    "WeightSlot",
    "activate",
    "build_format",
    "join_names",
    "register_format",
]
