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
from outrider.layers.context import (
    LoadedAdapters,
    NothingAttends,
    RecordedTaps,
    RowAdapters,
    StandIns,
    StepContext,
    TokenHistory,
)
from outrider.layers.decoder import (
    AttentionMLPLayer,
    LayerNames,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    ScaledLayer,
)
from outrider.layers.embedding import Embedding
from outrider.layers.gated_delta import GatedDelta, GatedDeltaShape
from outrider.layers.kda import KDA, KDANames, KDAShape
from outrider.layers.latent_attention import LatentAttention, LatentShape
from outrider.layers.linear import FusedLinear, Linear, TiedLinear
from outrider.layers.mamba2 import Mamba2, Mamba2Shape
from outrider.layers.mlp import ACTIVATIONS, INNER_KEYS, GatedMLP
from outrider.layers.moe import Experts, MoE, ScaledInputMoE
from outrider.layers.norm import CenteredNorm, Delta, HeadNorm, RMSNorm, Unnormed, UnscaledHeadNorm, copy_stream
from outrider.layers.normed_attention import (
    CenteredHeadNorm,
    CenteredNormAttention,
    LateNormAttention,
    WidthNormAttention,
)
from outrider.layers.rotary import (
    FREQUENCIES,
    Angles,
    RopeParams,
    Rotary,
    StillRotary,
    Unrotated,
    rope_table,
    rotate,
    yarn_mscale,
)
from outrider.layers.router import ExpertTally, Router, SpreadRouting
from outrider.layers.short_conv import ShortConv
from outrider.layers.streams import Injection, StreamEnd, StreamGate, StreamLayer, StreamNorm
from outrider.layers.tempered_attention import TemperedAttention, TemperedRotary

__all__ = [
    "ACTIVATIONS", "Angles", "AttentionMLPLayer", "CenteredHeadNorm", "CenteredNorm", "CenteredNormAttention",
    "CutSize", "DecoderLayer", "Delta", "Embedding", "ExpertTally", "Experts", "FREQUENCIES", "FeedForward",
    "FusedLinear", "GatedDelta", "GatedDeltaShape", "GatedMLP", "HeadNorm", "INNER_KEYS", "Injection", "KDA",
    "KDANames", "KDAShape", "LateNormAttention", "LatentAttention", "LatentShape", "LayerNames", "LayeredModule",
    "Linear", "LoadedAdapters", "Mamba2", "Mamba2Shape", "MoE", "Module", "NothingAttends", "ParallelLayer",
    "Parameter", "PostNormLayer", "PreNormLayer", "RMSNorm", "RecordedTaps", "RopeParams", "Rotary", "Router",
    "RowAdapters", "ScaledInputMoE", "ScaledLayer", "SelfAttention", "ShortConv", "SpreadRouting", "StandIns",
    "StepContext", "StillRotary", "StreamEnd", "StreamGate", "StreamLayer", "StreamNorm", "TemperedAttention",
    "TemperedRotary", "TiedLinear", "TokenHistory", "TokenMixer", "Unnormed", "Unrotated", "UnscaledHeadNorm",
    "WidthNormAttention", "check_ranks", "copy_stream", "find_modules", "rope_table", "rotate", "yarn_mscale",
]
