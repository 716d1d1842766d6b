"""Formats: how the weights of linear layers and of experts are stored, and every product with them.

A format is one file. Nobody outside this package reads a weight tensor of a linear layer or of experts.
"""

from outrider.formats.base import KeptFormat, LinearFormat, NativeProduct, activate
from outrider.formats.dense import DenseLinear
from outrider.formats.experts import DenseExperts, ExpertsFormat
from outrider.formats.registry import register_format
from outrider.formats.slots import HeadLayout, StoredWeight, WeightSlot

__all__ = [
    "DenseExperts",
    "DenseLinear",
    "ExpertsFormat",
    "HeadLayout",
    "KeptFormat",
    "LinearFormat",
    "NativeProduct",
    "StoredWeight",
    "WeightSlot",
    "activate",
    "register_format",
]
