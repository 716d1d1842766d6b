"""Drafting with a one-layer EAGLE-3 head: all passes of a proposal are planned and run by one call of the C code."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.attention import check_attention, check_rows, pack_cache
from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.checks import is_angles, is_cache, is_matrix, is_vector, takes_heads
from outrider.kernels.cpu.draft_plan import PLAN_ERRORS, pack_plan, takes_plan
from outrider.kernels.cpu.matrix import FLOATS, PACKED, Matrix
from outrider.kernels.cpu.packed import PackedMatrix, PackedRows
from outrider.kernels.cpu.structures import CHAIN_STEP, DRAFT_HEAD, MATRIX
from outrider.kernels.drafting import CommittedRequests, DrafterCacheState, DraftingRows
from outrider.kernels.gguf_kinds import PACKED_8

MIN_COARSE_OUTPUTS = 1024  # below it a coarse output saves less than it costs
_UNKNOWN_TOKEN = 4  # an error of the C code; those above it are the plan's, less this number


class ChainWeights(NamedTuple):
    """The weights of an EAGLE-3 head, and the settings that its arithmetic depends on."""

    fc: Matrix
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    output: Matrix
    aux_norms: Sequence[Tensor]  # a norm for each auxiliary state, or none
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # of the embedding, the hidden state, the MLP's input, the output
    head_norms: tuple[Tensor, Tensor] | None  # of q and k
    embedding: Tensor | PackedRows  # the target's rows, or the head's own
    target_ids: Tensor | None
    cos: Tensor  # [positions, half of the rotated columns]
    sin: Tensor
    num_aux: int
    eps: float
    norm_eps: float  # of the head norms
    scale: float
    window: int  # 0: all keys
    gelu: bool
    norm_before_residual: bool
    feeds_back_normed: bool


class ChainInputs(NamedTuple):
    """The inputs of a proposal: the committed step, its rows, and the state of the head's cache."""

    requests: CommittedRequests
    rows: DraftingRows
    page_table: Tensor  # [requests, width] int32, of the head's layer
    state: DrafterCacheState
    aux_states: Sequence[Tensor]  # each [tokens, hidden of the target]
    tails: Tensor  # [pages, hidden] hidden states of pages' last tokens, which the proposal writes too
    num_wanted: int  # most drafts for a request


class EmbeddingTable(NamedTuple):
    """A table of embeddings as the C code reads it."""

    data: Tensor  # the numbers, or the description of packed rows
    kind: int
    row_bytes: int  # from row to row; 0 if rows are packed
    num_rows: int
    width: int

    @classmethod
    def from_rows(cls, rows: Tensor | PackedRows) -> EmbeddingTable:
        if isinstance(rows, PackedRows):
            described = torch.frombuffer(bytearray(rows.describe()), dtype=torch.uint8)
            return cls(described, PACKED, 0, rows.outputs, rows.inputs)
        return cls(rows, FLOATS, rows.stride(0) * rows.element_size(), *rows.shape)


class DraftChain:
    """An EAGLE-3 head with its cache, checked and packed for any step. Keeps the weights alive. Made by `bind`."""

    def __init__(self, weights: ChainWeights, packed: bytes, owners: tuple[object, ...]) -> None:
        self.weights, self.packed, self._owners = weights, packed, owners

    @classmethod
    def bind(cls, weights: ChainWeights, k_cache: Tensor, v_cache: Tensor) -> DraftChain | None:
        """Check and pack a head with its cache. Returns None if the C code does not take this head or this cache."""
        own, (kv_heads, dim) = weights, k_cache.shape[2:]
        heads = own.out.inputs // dim
        if not (is_cache(k_cache) and is_cache(v_cache) and _takes_weights(own, heads, kv_heads, dim)):
            return None
        _check_sizes(own, heads, kv_heads, dim)
        q_norm, k_norm = own.head_norms or (None, None)
        aux_norms = torch.tensor([norm.data_ptr() for norm in own.aux_norms], dtype=torch.int64)
        table = EmbeddingTable.from_rows(own.embedding)
        assert table.width == own.fc.outputs
        ids = None if own.target_ids is None else own.target_ids.contiguous()
        coarse = _coarse_output(own.output)
        packed = DRAFT_HEAD.pack(
            fc=own.fc.packed, qkv=own.qkv.packed, out=own.out.packed, gate_up=own.gate_up.packed,
            down=own.down.packed, output=own.output.packed,
            coarse=bytes(MATRIX.size) if coarse is None else coarse.packed, cache=pack_cache(k_cache, v_cache),
            aux_norms=aux_norms.data_ptr() if own.aux_norms else 0, embedding_norm=own.norms[0].data_ptr(),
            hidden_norm=own.norms[1].data_ptr(), mlp_norm=own.norms[2].data_ptr(), norm=own.norms[3].data_ptr(),
            q_norm=0 if q_norm is None else q_norm.data_ptr(), k_norm=0 if k_norm is None else k_norm.data_ptr(),
            embedding=table.data.data_ptr(), target_ids=0 if ids is None else ids.data_ptr(), cos=own.cos.data_ptr(),
            sin=own.sin.data_ptr(), num_aux=own.num_aux, embedding_kind=table.kind, embedding_bytes=table.row_bytes,
            num_embeddings=table.num_rows, cos_stride=own.cos.stride(0), sin_stride=own.sin.stride(0),
            max_len=own.cos.shape[0], rotary=2 * own.cos.shape[1], heads=heads, window=own.window, eps=own.eps,
            norm_eps=own.norm_eps, scale=own.scale, gelu=own.gelu, norm_before_residual=own.norm_before_residual,
            feeds_back_normed=own.feeds_back_normed,
        )
        return cls(weights, packed, (aux_norms, table.data, ids, coarse, k_cache, v_cache))

    def takes(self, inputs: ChainInputs) -> bool:
        requests, rows, page_table, state, aux_states, tails, num_wanted = inputs
        own = self.weights
        shape = requests.request_of.shape[0], own.fc.inputs // own.num_aux
        return (
            len(aux_states) == own.num_aux
            and all(is_matrix(state) and state.is_contiguous() and state.shape == shape for state in aux_states)
            and tails.dtype is torch.float32 and tails.dim() == 2 and tails.stride(1) == 1
            and takes_plan(requests, rows, (page_table,), state, num_wanted=num_wanted)
        )

    def propose(self, inputs: ChainInputs, *, any_sampled: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Plan all passes as `plan_draft_passes` does, run them, and store the hidden states of pages' last tokens in
        `inputs.tails`. Returns the drafts [drafts, requests], how many of them each request has room for [requests],
        and their packed confidence levels [requests]. Call this only if `takes`."""
        requests, rows, page_table, state, aux_states, tails, num_wanted = inputs
        count = page_table.shape[0]
        plan = pack_plan(requests, rows, (page_table,), state, num_wanted=num_wanted)
        drafts = torch.empty(num_wanted, count, dtype=torch.int64)
        counts, levels = torch.empty(2, count, dtype=torch.int64).unbind()
        step = CHAIN_STEP.pack(
            pages=page_table.data_ptr(), tails=tails.data_ptr(), drafts=drafts.data_ptr(), levels=levels.data_ptr(),
            counts=counts.data_ptr(), table_stride=page_table.stride(0), table_width=page_table.shape[1],
            page_tokens=state.page_tokens[0], tail_stride=tails.stride(0), any_sampled=any_sampled,
        )
        addresses = struct.pack(f"{len(aux_states)}P", *(each.data_ptr() for each in aux_states))
        error = library().propose_chain(self.packed, plan, step, addresses, torch.get_num_threads())
        if error > _UNKNOWN_TOKEN:
            raise IndexError(f"propose_chain: {PLAN_ERRORS[error - _UNKNOWN_TOKEN]}")
        if error == _UNKNOWN_TOKEN:
            raise IndexError("propose_chain: a token is outside of the embedding")
        if error:
            check_rows(max(0, -error))
            check_attention(max(0, error))
        return drafts, counts, levels


def _takes_weights(own: ChainWeights, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the C code reads weights of these types and strides, and heads of these sizes."""
    hidden, aux_width = own.fc.outputs, own.fc.inputs // own.num_aux
    q_norm, k_norm = own.head_norms or (None, None)
    return (
        takes_heads(heads, kv_heads, dim) and is_vector(q_norm, dim) and is_vector(k_norm, dim)
        and all(is_vector(x, hidden) for x in own.norms) and all(is_vector(x, aux_width) for x in own.aux_norms)
        and is_angles(own.cos, 2 * own.cos.shape[1]) and is_angles(own.sin, 2 * own.cos.shape[1])
        and (isinstance(own.embedding, PackedRows) or is_matrix(own.embedding))
    )


def _check_sizes(own: ChainWeights, heads: int, kv_heads: int, dim: int) -> None:
    hidden = own.fc.outputs
    assert own.qkv.inputs == 2 * hidden and own.qkv.outputs == (heads + 2 * kv_heads) * dim
    assert own.out.outputs == own.gate_up.inputs == own.down.outputs == own.output.inputs == hidden
    assert own.gate_up.outputs == 2 * own.down.inputs and own.fc.inputs % own.num_aux == 0
    assert own.target_ids is None or own.target_ids.shape == (own.output.outputs,)
    assert len(own.aux_norms) in (0, own.num_aux) and own.cos.shape == own.sin.shape


def _coarse_output(output: Matrix) -> Matrix | None:
    """Copy a head's 8-bit output weight in 4 bits, because reading that weight is half of the time of a draft. The copy
    finds the largest logits; only these are then computed from all bits. Returns None if the weight is in another form
    or small."""
    if not isinstance(output, PackedMatrix) or output.outputs < MIN_COARSE_OUTPUTS:
        return None
    rows, *others = output.parts
    return None if others or rows.form != PACKED_8 else PackedMatrix([rows.coarsened()], output.bias, activation_bits=8)
