"""All drafting passes of an EAGLE-3 head with one layer, as one call of the C code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.drafting import DraftPasses
from outrider.kernels.native.attention import check_attention, check_rows, pack_cache
from outrider.kernels.native.build import library
from outrider.kernels.native.checks import is_angles, is_cache, is_matrix, is_vector, takes_heads
from outrider.kernels.native.matrix import FLOATS, PACKED, Matrix
from outrider.kernels.native.packed import PackedRows
from outrider.kernels.native.structures import DRAFT_BATCH, DRAFT_HEAD, REQUESTS

_UNKNOWN_TOKEN = 4


class ChainWeights(NamedTuple):
    """The weights of a head and the numbers that its arithmetic depends on."""

    fc: Matrix
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    output: Matrix
    tap_norms: Sequence[Tensor]  # a norm for each tap, or none
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # of the embedding, the hidden state, the MLP's input, the output
    head_norms: tuple[Tensor, Tensor] | None  # of q and k
    embedding: Tensor | PackedRows  # the target's rows, or the head's own
    target_ids: Tensor | None
    cos: Tensor  # [positions, half of the rotated columns]
    sin: Tensor
    num_taps: int
    eps: float
    norm_eps: float  # of the head norms
    scale: float
    window: int  # 0: all keys
    gelu: bool
    norm_before_residual: bool
    feeds_back_normed: bool


class DraftChain:
    """A head with its cache, ready for any step. Keeps the weights alive. Make it with `bind`."""

    def __init__(self, weights: ChainWeights, packed: bytes, owners: tuple[object, ...]) -> None:
        self.weights, self.packed, self._owners = weights, packed, owners

    @classmethod
    def bind(cls, weights: ChainWeights, k_cache: Tensor, v_cache: Tensor) -> DraftChain | None:
        """None if the C code does not take this head or this cache."""
        own, (kv_heads, dim) = weights, k_cache.shape[2:]
        hidden, heads = own.fc.outputs, own.out.inputs // dim
        q_norm, k_norm = own.head_norms or (None, None)
        is_taken = (
            is_cache(k_cache) and is_cache(v_cache) and takes_heads(heads, kv_heads, dim)
            and is_vector(q_norm, dim) and is_vector(k_norm, dim) and all(is_vector(x, hidden) for x in own.norms)
            and all(is_vector(x, own.fc.inputs // own.num_taps) for x in own.tap_norms)
            and is_angles(own.cos, 2 * own.cos.shape[1]) and is_angles(own.sin, 2 * own.cos.shape[1])
            and (isinstance(own.embedding, PackedRows) or is_matrix(own.embedding))
        )
        if not is_taken:
            return None
        assert own.qkv.inputs == 2 * hidden and own.qkv.outputs == (heads + 2 * kv_heads) * dim
        assert own.out.outputs == own.gate_up.inputs == own.down.outputs == own.output.inputs == hidden
        assert own.gate_up.outputs == 2 * own.down.inputs and own.fc.inputs % own.num_taps == 0
        assert own.target_ids is None or own.target_ids.shape == (own.output.outputs,)
        assert len(own.tap_norms) in (0, own.num_taps) and own.cos.shape == own.sin.shape
        tap_norms = torch.tensor([norm.data_ptr() for norm in own.tap_norms], dtype=torch.int64)
        if isinstance(own.embedding, PackedRows):
            described = torch.frombuffer(bytearray(own.embedding.describe()), dtype=torch.uint8)
            table, kind, num_bytes, count, width = (described, PACKED, 0, own.embedding.outputs, own.embedding.inputs)
        else:
            table, kind = own.embedding, FLOATS
            num_bytes, (count, width) = table.stride(0) * table.element_size(), table.shape
        assert width == hidden
        ids = None if own.target_ids is None else own.target_ids.contiguous()
        packed = DRAFT_HEAD.pack(
            fc=own.fc.packed, qkv=own.qkv.packed, out=own.out.packed, gate_up=own.gate_up.packed,
            down=own.down.packed, output=own.output.packed, cache=pack_cache(k_cache, v_cache),
            tap_norms=tap_norms.data_ptr() if own.tap_norms else 0, embedding_norm=own.norms[0].data_ptr(),
            hidden_norm=own.norms[1].data_ptr(), mlp_norm=own.norms[2].data_ptr(), norm=own.norms[3].data_ptr(),
            q_norm=0 if q_norm is None else q_norm.data_ptr(), k_norm=0 if k_norm is None else k_norm.data_ptr(),
            embedding=table.data_ptr(), target_ids=0 if ids is None else ids.data_ptr(), cos=own.cos.data_ptr(),
            sin=own.sin.data_ptr(), taps=own.num_taps, embedding_kind=kind, embedding_bytes=num_bytes,
            num_embeddings=count, cos_stride=own.cos.stride(0), sin_stride=own.sin.stride(0),
            max_len=own.cos.shape[0], rotary=2 * own.cos.shape[1], heads=heads, window=own.window, eps=own.eps,
            norm_eps=own.norm_eps, scale=own.scale, gelu=own.gelu, norm_before_residual=own.norm_before_residual,
            feeds_back_normed=own.feeds_back_normed,
        )
        return cls(weights, packed, (tap_norms, table, ids, k_cache, v_cache))

    def takes(self, taps: Sequence[Tensor], passes: DraftPasses, page_table: Tensor, tails: Tensor) -> bool:
        tokens, own = passes.tokens.shape[0], self.weights
        shape = tokens, own.fc.inputs // own.num_taps
        return (
            len(taps) == own.num_taps and len(passes.first.slots) == 1
            and all(is_matrix(tap) and tap.is_contiguous() and tap.shape == shape for tap in taps)
            and page_table.dtype is torch.int32 and page_table.stride(1) == 1
            and tails.dtype is torch.float32 and tails.dim() == 2 and tails.stride(1) == 1
        )

    def draft(self, taps: Sequence[Tensor], passes: DraftPasses, page_table: Tensor, tails: Tensor,
              any_sampled: bool) -> tuple[Tensor, Tensor]:
        """Run all passes and keep the hidden states of pages' last tokens in `tails` [pages, hidden]. Returns the
        drafts [drafts, requests] and their levels [requests]. Call this only if `takes`."""
        keys, first, further = passes.keys, passes.first, passes.further
        num_drafts, requests = keys.positions.shape
        assert page_table.shape[0] == requests == keys.last.shape[0], "rows of the page table and of the passes differ"
        drafts = torch.empty(num_drafts, requests, dtype=torch.int64)
        levels = torch.empty(requests, dtype=torch.int64)
        # The passes behind the first lie one after the other in memory, or are put so.
        positions, slots, lengths, live = (
            _in_a_row(parts) for parts in ([own.positions for own in further], [own.slots[0] for own in further],
                                           [own.lengths for own in further], [own.live for own in further]))
        addresses = torch.tensor([tap.data_ptr() for tap in taps], dtype=torch.int64)
        contexts = REQUESTS.pack(
            page_table=page_table.data_ptr(), query_starts=0, lengths=0, live=0,
            key_starts=passes.key_starts.data_ptr(), table_stride=page_table.stride(0),
            table_width=page_table.shape[1], count=requests, wide_table=0, wide_starts=1, wide_lengths=1, wide_live=1,
        )
        batch = DRAFT_BATCH.pack(
            contexts=contexts, taps=addresses.data_ptr(), token_ids=passes.tokens.data_ptr(),
            positions=first.positions.data_ptr(), slots=first.slots[0].data_ptr(),
            tail_page=passes.tail_page.data_ptr(), last=keys.last.data_ptr(), lengths=first.lengths.data_ptr(),
            live=first.live.data_ptr(), seed=keys.seed.data_ptr(), sample_index=keys.sample_index.data_ptr(),
            draft_positions=keys.positions.data_ptr(), further_positions=positions.data_ptr(),
            further_slots=slots.data_ptr(), further_lengths=lengths.data_ptr(), further_live=live.data_ptr(),
            temperature=keys.temperature.data_ptr(), tails=tails.data_ptr(), drafts=drafts.data_ptr(),
            levels=levels.data_ptr(), tail_stride=tails.stride(0), tokens=passes.tokens.shape[0], requests=requests,
            num_drafts=num_drafts, any_sampled=any_sampled,
        )
        error = library().draft_chain(self.packed, batch, torch.get_num_threads())
        if error == _UNKNOWN_TOKEN:
            raise IndexError("draft_chain: a token is outside of the embedding")
        if error:
            check_rows(max(0, -error))
            check_attention(max(0, error))
        return drafts, levels


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """The parts, of equal length, as one run of memory."""
    if not parts:
        return torch.empty(0, dtype=torch.int64)
    first = parts[0]
    step = first.shape[0] * first.element_size()
    is_run = all(part.data_ptr() == first.data_ptr() + at * step for at, part in enumerate(parts))
    return first if is_run else torch.cat(list(parts))
