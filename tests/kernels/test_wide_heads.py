"""Float32 attention with heads of several pieces, whose scores are added up piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the triton package")

from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from outrider.kernels.triton import decode_attention, prefill_attention, query_tiles  # noqa: E402
from outrider.kernels.triton.attention_core import PIECE  # noqa: E402


@pytest.mark.parametrize("dim", [PIECE.value + 64, 2 * PIECE.value, 4 * PIECE.value])
def test_heads_of_several_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Columns behind the head's own are left out, and so are slots that hold no key."""
    lengths_of_chains = []
    create_dot = InterpreterBuilder.create_dot

    def watched(self: Any, a: Any, *args: Any) -> Any:
        lengths_of_chains.append(a.data.shape[-1])
        return create_dot(self, a, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", watched)
    num_tokens, heads = 7, 2
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(num_tokens, h, dim, generator=generator).to(device) for h in (heads, 1, 1))
    cache = torch.full((2, 1, 16, 1, dim), torch.nan, device=device)
    cache[0, 0, :num_tokens], cache[1, 0, :num_tokens] = k, v
    table, starts, lengths, live = (torch.tensor(ints, dtype=torch.int32, device=device)
                                    for ints in ([[0]], [0, num_tokens], [num_tokens], [num_tokens]))
    wide = [x.double().transpose(0, 1) for x in (q, k.expand(-1, heads, -1), v.expand(-1, heads, -1))]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.1).transpose(0, 1)
    tiles = query_tiles([num_tokens], heads, 1, dim, device)
    tensors = (q, cache[0], cache[1], table, starts, lengths, live)
    for made in (prefill_attention(*tensors, tiles, scale=0.1),
                 decode_attention(*tensors, max_query=num_tokens, max_length=num_tokens, scale=0.1)):  # fmt: skip
        torch.testing.assert_close(made.double(), expected, atol=2e-6, rtol=2e-6)
    assert device.type == "cuda" or max(lengths_of_chains) == PIECE.value
