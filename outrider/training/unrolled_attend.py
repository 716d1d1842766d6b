"""UnrolledAttend: attention of a draft head's passes over whole texts, as torch operations with gradients.

It replaces an engine's caches while a head that drafts token by token is trained. Passes are unrolled as in
`trainable.eagle3_network`. The query of pass s at place p sees the keys of pass 0 up to p. It also sees one key of each
pass from 1 to s, that of the draft chain which begins at p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.mixers import AttentionLayer


class UnrolledAttend:
    def __init__(self, layers: Sequence[AttentionLayer], num_texts: int) -> None:
        self._layers = {layer.index: UnrolledLayer(layer, num_texts) for layer in layers}

    def mixer(self, layer: int) -> UnrolledLayer:
        return self._layers[layer]


class UnrolledLayer:
    """One attention layer, called once for each pass. Token rows are grouped by text, and all texts have equally many.
    A later pass has only the first rows of each text."""

    def __init__(self, layer: AttentionLayer, num_texts: int) -> None:
        assert not layer.is_chunked, "draft heads attend to their whole context, or slide"
        self.layer, self._num_texts = layer, num_texts
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def fused(self, *_: object) -> None:
        """Return None, because no operation is fused here: norms and rope are applied before the call."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend. q [tokens, heads, dim], k and v [tokens, kv heads, dim]. Returns [tokens, heads * dim]."""
        query, key, value = (part.unflatten(0, (self._num_texts, -1)).transpose(1, 2) for part in (q, k, v))
        self._keys.append(key)
        self._values.append(value)
        count = query.shape[2]
        keys = [one[:, :, :count] for one in self._keys]
        values = [one[:, :, :count] for one in self._values]
        grouped = query.unflatten(1, (key.shape[1], -1))  # [texts, kv heads, group, count, dim]
        first = torch.einsum("tkgqd,tksd->tkgqs", grouped, keys[0])
        at = torch.arange(count, device=q.device)
        is_hidden = at > at[:, None]
        if self.layer.window is not None:
            is_hidden = is_hidden | (at <= at[:, None] + len(keys) - 1 - self.layer.window)
        scores = [first.masked_fill(is_hidden, float("-inf"))]
        scores += [(grouped * one[:, :, None]).sum(dim=-1, keepdim=True) for one in keys[1:]]
        shares = (torch.cat(scores, dim=-1) * self.layer.scale).softmax(dim=-1)
        mixed = torch.einsum("tkgqs,tksd->tkgqd", shares[..., :count], values[0])
        for index, one in enumerate(values[1:]):
            mixed = mixed + shares[..., count + index, None] * one[:, :, None]
        return mixed.flatten(1, 2).transpose(1, 2).reshape(q.shape[0], -1)
