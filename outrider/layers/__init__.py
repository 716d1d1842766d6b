"""Layers: plain objects that hold tensors and apply a few torch operations to them.

Layers know the names of their tensors in checkpoints, and nothing of pages, batches or requests.

Some families have several residual streams in a token row. They come in two forms:

- *Gates* (`layers/streams.py`, `kernels/streams.py`). A gate in front of each half of a layer norms the streams and
  mixes them into one hidden state. The next gate adds the half's result to every stream, in one kernel with its norm.
  MTP modules of these families consume the streams; auxiliary states are the mean of the streams.
- *Hyper-connections* (`layers/hyper_connections.py`, GLM5-Next and HY-V4). A half reads a weighted sum of the streams,
  and the streams may mix among themselves where the half writes. One kernel makes all weights of a token row. The last
  streams are averaged (GLM5-Next) or summed with weights (HY-V4). MTP modules have one stream and read the final state.

The n-gram embeddings of Qwen4-Exp (`layers/ngram_embedding.py`) are a function of the last ids of a token. These ids
are in the row's history, and those of drafts in the step (`TokenHistory`), so the table needs no cache; only the
convolution behind it keeps a state.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.core.ranks import ShardSize
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
        NO_DELTAS,
        AuxRecord,
        DeltaSource,
        NothingAttends,
        RowDeltas,
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
    from outrider.layers.gated_delta import GatedDelta, GatedDeltaShape, SplitGatedDelta
    from outrider.layers.given_rows import GivenRows
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
        OutputGatedAttention,
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
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ACTIVATIONS", "Angles", "AttentionMLPLayer", "AuxRecord", "CenteredHeadNorm", "CenteredNorm",
    "CenteredNormAttention", "ShardSize", "DecoderLayer", "Delta", "DeltaSource", "Embedding", "ExpertTally", "Experts",
    "FREQUENCIES", "FeedForward", "FusedLinear", "GatedDelta", "GatedDeltaShape", "GatedMLP", "GivenRows", "HeadNorm",
    "INNER_KEYS", "Injection", "KDA", "KDANames", "KDAShape", "LateNormAttention", "LatentAttention", "LatentShape",
    "LayerNames", "LayeredModule", "Linear", "Mamba2", "Mamba2Shape", "MoE", "Module", "NO_DELTAS", "NothingAttends",
    "OutputGatedAttention", "ParallelLayer", "Parameter", "PostNormLayer", "PreNormLayer", "RMSNorm", "RopeParams",
    "Rotary", "Router", "RowDeltas", "ScaledInputMoE", "ScaledLayer", "SelfAttention", "ShortConv", "SplitGatedDelta",
    "SpreadRouting", "StepContext", "StillRotary", "StreamEnd", "StreamGate", "StreamLayer", "StreamNorm",
    "TemperedAttention", "TemperedRotary", "TiedLinear", "TokenHistory", "TokenMixer", "Unnormed", "Unrotated",
    "UnscaledHeadNorm", "WidthNormAttention", "check_ranks", "copy_stream", "find_modules", "rope_table", "rotate",
    "yarn_mscale",
]
