"""The backend of steps in which tokens attend to later tokens, for models whose usual backend cannot compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.cache.groups import Group
from outrider.kernels import ops
from outrider.mixers.batch import BatchView, ExtraKeys, KeysFrom
from outrider.mixers.paged.backend import AttentionLayer, Backend, KeyValueCache, Rope
from outrider.mixers.paged.codecs import ModelCodec
from outrider.mixers.paged.flex_backend import FlexBackend
from outrider.mixers.paged.masks import RangeReach, first_seen
from outrider.mixers.paged.native_backend import NativeBackend, Plan
from outrider.mixers.paged.torch_backend import TorchBackend


def make_range_backend(device: torch.device, caches: Sequence[KeyValueCache], own: Backend) -> Backend:
    """Make the backend. caches: the layers' caches, which it must be able to read. own: the backend of other steps."""
    if isinstance(own, NativeBackend):
        return NativeRanges()
    if device.type != "cuda" or not all(isinstance(cache.codec, ModelCodec) for cache in caches):
        return TorchBackend()
    made = FlexBackend()
    try:
        for cache in caches:
            made.check_cache(cache)
    except ValueError:  # pages lie apart by other distances than FlexAttention can read
        return TorchBackend()
    return made


@dataclass(frozen=True)
class RangePlan(Plan):
    """A plan in which each token is a request of its own, with the keys that it sees. These form one interval: from the
    first one inside the window to the token itself, or to the end of its range."""

    ends: torch.Tensor = field(kw_only=True)  # [tokens] the end of the keys that each token sees
    live: torch.Tensor = field(kw_only=True)  # [tokens] 1 for live tokens

    def layer_step(self, rope: Rope) -> None:
        """A native call of a whole layer takes the window of all tokens from their positions."""


class NativeRanges(NativeBackend):
    """Attention of layers with windows by the C code, whose results for a token do not depend on other tokens. So a
    token has the same bits as in a step without ranges."""

    def plan(self, view: BatchView, group: Group) -> RangePlan:
        plain = super().plan(view, group)
        assert isinstance(view.extra_keys, ExtraKeys)
        offsets = torch.arange(view.num_tokens) - view.query_starts[view.request_of]
        ends = torch.maximum(view.positions + 1, view.extra_keys.ends)
        live = offsets < view.live[view.request_of]
        return RangePlan(view, plain.page_table[view.request_of], plain.slots,
                         ends=torch.where(live, ends, 0).to(view.lengths.dtype), live=live.to(view.live.dtype))

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        assert isinstance(plan, RangePlan) and layer.reach is RangeReach.WINDOW and layer.window is not None
        view = plan.view
        starts = first_seen(view.positions, layer.window, layer.is_chunked).clamp_min(0)
        if isinstance(view.visible, KeysFrom):
            starts = torch.maximum(starts, view.visible.starts[view.request_of])
        places = torch.arange(view.num_tokens + 1, dtype=view.query_starts.dtype)
        out = ops.paged_attention(q, cache.k, cache.v, plan.page_table, places, plan.ends, plan.live, layer.scale, 0,
                                  layer.softcap or 0.0, starts * plan.live, layer.sinks, False)
        return out.view(-1, layer.num_heads * layer.head_dim)
