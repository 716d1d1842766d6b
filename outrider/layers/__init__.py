"""Layers: plain objects that hold tensors and apply a few torch operations to them.

They know nothing of checkpoints beyond the names of their tensors, and nothing of pages, batches or requests.
"""

from outrider.layers.attention import SelfAttention
from outrider.layers.embedding import Embedding
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.mlp import ACTIVATIONS, GatedMLP
from outrider.layers.norm import HeadNorm, RMSNorm
from outrider.layers.rotary import Angles, RopeParams, Rotary, rotate

__all__ = [
    "ACTIVATIONS",
    "Angles",
    "Embedding",
    "FusedLinear",
    "GatedMLP",
    "HeadNorm",
    "Linear",
    "RMSNorm",
    "RopeParams",
    "Rotary",
    "SelfAttention",
    "rotate",
]
