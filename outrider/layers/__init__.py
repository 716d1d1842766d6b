"""Layers: plain objects that hold tensors and apply a few torch operations to them.

Layers know nothing of checkpoints beyond the names of their tensors, and nothing of pages, batches or requests.
"""

from outrider.core.ranks import CutSize
from outrider.layers.attention import SelfAttention
from outrider.layers.base import (
    DecoderLayer,
    FeedForward,
    LayeredModule,
    Module,
    Parameter,
    TokenMixer,
    check_ranks,
    find_modules,
)
from outrider.layers.context import LoadedAdapters, NothingAttends, RowAdapters, StandIns, StepContext
from outrider.layers.decoder import AttentionMLPLayer, LayerNames, PreNormLayer
from outrider.layers.embedding import Embedding
from outrider.layers.gated_delta import GatedDelta, GatedDeltaShape
from outrider.layers.latent_attention import LatentAttention, LatentShape
from outrider.layers.linear import FusedLinear, Linear, TiedLinear
from outrider.layers.mamba2 import Mamba2, Mamba2Shape
from outrider.layers.mlp import ACTIVATIONS, INNER_KEYS, GatedMLP
from outrider.layers.moe import Experts, MoE
from outrider.layers.norm import Delta, HeadNorm, RMSNorm, Unnormed, copy_stream
from outrider.layers.rotary import FREQUENCIES, Angles, RopeParams, Rotary, rope_table, rotate, yarn_mscale
from outrider.layers.router import ExpertTally, Router, SpreadRouting

__all__ = [
    "ACTIVATIONS", "Angles", "AttentionMLPLayer", "CutSize", "DecoderLayer", "Delta", "Embedding", "ExpertTally",
    "Experts", "FREQUENCIES", "FeedForward", "FusedLinear", "GatedDelta", "GatedDeltaShape", "GatedMLP", "HeadNorm",
    "INNER_KEYS", "LatentAttention", "LatentShape", "LayerNames", "LayeredModule", "Linear", "LoadedAdapters", "Mamba2",
    "Mamba2Shape", "MoE", "Module", "NothingAttends", "Parameter", "PreNormLayer", "RMSNorm", "RopeParams", "Rotary",
    "Router", "RowAdapters", "SelfAttention", "SpreadRouting", "StandIns", "StepContext", "TiedLinear", "TokenMixer",
    "Unnormed", "check_ranks", "copy_stream", "find_modules", "rope_table", "rotate", "yarn_mscale",
]  # fmt: skip
