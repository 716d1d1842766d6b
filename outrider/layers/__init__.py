"""Layers: plain objects that hold tensors and apply a few torch operations to them.

A layer declares the names of its tensors in checkpoints. It does not depend on pages, batches or requests.

In some model families each token has several residual streams instead of one. There are two designs:

- *Gates* (`layers/streams.py`, `kernels/streams.py`). A layer has a gate before its attention and one before its MLP.
  The gate norms the streams and mixes them into the one hidden state that the part reads. The next gate adds the part's
  result to every stream, in one kernel with its norm. MTP modules of these families read the streams themselves;
  auxiliary hidden states for drafters are the mean of the streams.
- *Hyper-connections* (`layers/hyper_connections.py`, GLM5-Next and HY-V4). Attention and MLP each read a weighted sum
  of the streams. When a result is added, the streams may also be mixed with each other. One kernel computes all these
  weights for a token. After the last layer the streams are averaged (GLM5-Next) or summed with weights (HY-V4). MTP
  modules have one stream and read the final state.

Qwen4-Exp adds n-gram embeddings (`layers/ngram_embedding.py`), which depend only on a token's last few ids. These ids
are in the request's history, and ids of drafts are in the step (`TokenHistory`), so the table needs no cache. Only the
convolution behind the table keeps a state."""

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
