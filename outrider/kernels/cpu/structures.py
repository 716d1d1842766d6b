"""The structs that Python passes to the C code, declared once here. When the library is loaded, they are compared with
the layout that the compiler gave them (native.h, sampling.h).

Packing bytes is several times faster than a ctypes.Structure.
"""

from __future__ import annotations

import ctypes
import struct
from operator import itemgetter

POINTER, INT64, INT32, FLOAT = "P", "q", "i", "f"


class LayoutError(RuntimeError):
    """A struct declared in this file has another layout than the struct of that name in native.h."""


class Structure:
    """A struct of native.h: its name there, and its fields in order, each with its type or the nested struct."""

    def __init__(self, name: str, **kinds: str | Structure) -> None:
        self.name, self.kinds = name, kinds
        # Fields are aligned as C does it; a structure within another starts like a pointer, and so ends every one.
        codes = [f"0P{kind.size}s" if isinstance(kind, Structure) else kind for kind in kinds.values()]
        starts = [f"0{'P' if isinstance(kind, Structure) else kind}" for kind in kinds.values()]
        self.offsets = [struct.calcsize("@" + "".join(codes[:at]) + start) for at, start in enumerate(starts)]
        self._packer = struct.Struct("@" + "".join(codes) + "0P")
        self._in_order = itemgetter(*kinds)

    @property
    def size(self) -> int:
        return self._packer.size

    def pack(self, **values: int | float | bytes) -> bytes:
        """Pack all fields, given by name. A nested struct is given as bytes that are already packed."""
        assert len(values) == len(self.kinds), f"{self.name}: {sorted(set(values) ^ set(self.kinds))}"
        return self._packer.pack(*self._in_order(values))

    def layout_source(self) -> str:
        """Return C code that reports the struct's size and the offsets of its fields."""
        offsets = ", ".join(f"offsetof({self.name}, {field})" for field in self.kinds)
        return f"const int64_t layout_{self.name}[] = {{sizeof({self.name}), {offsets}}};\n"

    def check(self, library: ctypes.CDLL) -> None:
        here = [self.size, *self.offsets]
        stated = list((ctypes.c_int64 * len(here)).in_dll(library, f"layout_{self.name}"))
        if stated != here:
            raise LayoutError(f"{self.name} has size and offsets {stated} in C, and {here} in Python. This is a bug: "
                              "please report it")


MATRIX = Structure(
    "Matrix", data=POINTER, bias=POINTER, row_bytes=INT64, inputs=INT64, outputs=INT64, kind=INT64,
    scales=POINTER, group=INT64,
)

PACKED_PART = Structure("PackedPart", data=POINTER, table=POINTER, first=INT64, outputs=INT64, form=INT64)
PACKED_PARTS = Structure("PackedParts", parts=POINTER, count=INT64, digits=INT64)
UNPACKED_ROWS = Structure(
    "UnpackedRows", codes=POINTER, scale=POINTER, least=POINTER, inner_scale=POINTER, inner_least=POINTER, rows=INT64,
    inputs=INT64,
)

REQUESTS = Structure(
    "Requests", page_table=POINTER, query_starts=POINTER, lengths=POINTER, live=POINTER, key_starts=POINTER,
    table_stride=INT64, table_width=INT64, count=INT64, wide_table=INT32, wide_starts=INT32, wide_lengths=INT32,
    wide_live=INT32,
)

CACHE = Structure(
    "Cache", k=POINTER, v=POINTER, k_stride=INT64, v_stride=INT64, num_pages=INT64, page_size=INT64, kv_heads=INT64,
    dim=INT64,
)

ROPE = Structure(
    "Rope", cache=CACHE, cos=POINTER, sin=POINTER, positions=POINTER, slots=POINTER, cos_stride=INT64,
    sin_stride=INT64, max_len=INT64, rotary=INT64, second=INT64, heads=INT64, q_norm=POINTER, k_norm=POINTER,
    eps=FLOAT,
)

ATTENTION = Structure(
    "Attention", requests=REQUESTS, cache=CACHE, q=POINTER, out=POINTER, q_stride=INT64, tokens=INT64, heads=INT64,
    window=INT64, scale=FLOAT, softcap=FLOAT, sinks=POINTER, chunked=INT32,
)

LAYER = Structure(
    "Layer", qkv=MATRIX, out=MATRIX, gate_up=MATRIX, down=MATRIX, input_norm=POINTER, mlp_norm=POINTER, eps=FLOAT,
    gelu=INT32,
)

BOUND_LAYER = Structure(
    "BoundLayer", weights=LAYER, cache=CACHE, q_norm=POINTER, k_norm=POINTER, heads=INT64, window=INT64,
    norm_eps=FLOAT, scale=FLOAT, softcap=FLOAT, chunked=INT32,
)

LAYER_STEP = Structure(
    "LayerStep", requests=REQUESTS, positions=POINTER, slots=POINTER, cos=POINTER, sin=POINTER, cos_stride=INT64,
    sin_stride=INT64, max_len=INT64, rotary=INT64, tokens=INT64,
)

ADAPTERS = Structure(
    "Adapters", numbers=POINTER, places=POINTER, scales=POINTER, bounds=POINTER, order=POINTER, segments=POINTER,
    rows=INT64, num_targets=INT64, max_rank=INT64,
)
TARGETS = Structure("Targets", first=INT64, count=INT64)
LAYER_TARGETS = Structure("LayerTargets", qkv=TARGETS, out=TARGETS, gate_up=TARGETS, down=TARGETS)

ROW_STATE = Structure(
    "RowState", tokens=POINTER, known=POINTER, computed=POINTER, drafts=POINTER, num_drafts=POINTER, alive=POINTER,
    end_len=POINTER, num_stop_ids=POINTER, stop_ids=POINTER, rows=INT64, length=INT64, token_stride=INT64,
    draft_stride=INT64, stop_stride=INT64, stop_width=INT64,
)

STEP_INPUTS = Structure(
    "StepInputs", rows=POINTER, num_known=POINTER, num_drafts=POINTER, samples=POINTER, query_starts=POINTER,
    request_of=POINTER, offset=POINTER, logit_request=POINTER, logit_draft=POINTER, requests=INT64, tokens=INT64,
    logit_rows=INT64, max_drafts=INT64, max_len=INT64, groups=INT64, null_row=INT64,
)

PAGE_TABLE = Structure(
    "PageTable", **{"from": POINTER}, to=POINTER, slots=POINTER, stride=INT64, width=INT64, page_tokens=INT64
)

PREPARED_REQUESTS = Structure(
    "PreparedRequests", computed=POINTER, num_known=POINTER, num_drafts=POINTER, live=POINTER, lengths=POINTER,
    first_logit=POINTER, drafts=POINTER, samples=POINTER, lengths32=POINTER, live32=POINTER, starts32=POINTER,
)

PREPARED_TOKENS = Structure(
    "PreparedTokens", positions=POINTER, token_ids=POINTER, logit_row=POINTER, logit_position=POINTER
)

SAMPLED_STEP = Structure(
    "SampledStep", sampled=POINTER, rows=POINTER, num_known=POINTER, num_drafts=POINTER, first_logit=POINTER,
    drafts=POINTER, bad=POINTER, samples=POINTER, requests=INT64, logit_rows=INT64, max_drafts=INT64,
    draft_stride=INT64,
)

COMMITTED = Structure(
    "Committed", run=POINTER, run_len=POINTER, finish=POINTER, num_computed=POINTER, num_accepted=POINTER,
    counts=POINTER, goes_on=POINTER,
)

PROPOSAL = Structure("Proposal", tokens=POINTER, counts=POINTER, levels=POINTER, request_stride=INT64,
                     index_stride=INT64)

STORED_DRAFTS = Structure(
    "StoredDrafts", rows=POINTER, is_on=POINTER, goes_on=POINTER, drafts=POINTER, num_drafts=POINTER, levels=POINTER,
    counts=POINTER, requests=INT64, num_proposals=INT64, num_wanted=INT64, num_rows=INT64, draft_stride=INT64,
    counts_stride=INT64, vocab_size=INT64, fills=INT64,
)

DRAFT_PLAN = Structure(
    "DraftPlan", rows=POINTER, query_starts=POINTER, request_of=POINTER, computed_before=POINTER, num_computed=POINTER,
    goes_on=POINTER, row_tokens=POINTER, known=POINTER, seed=POINTER, sample_index=POINTER, temperature=POINTER,
    valid_from=POINTER, filled=POINTER, page_valid=POINTER, requests=INT64, tokens=INT64, num_rows=INT64, length=INT64,
    token_stride=INT64, num_pages=INT64, page_stride=INT64, groups=INT64, tail_group=INT64, first_position=INT64,
    max_len=INT64, num_wanted=INT64,
)

DRAFT_TABLE = Structure(
    "DraftTable", pages=POINTER, slots=POINTER, further_slots=POINTER, stride=INT64, width=INT64, page_tokens=INT64
)

PLANNED_PASSES = Structure(
    "PlannedPasses", positions=POINTER, tokens=POINTER, tail_page=POINTER, lengths=POINTER, live=POINTER,
    key_starts=POINTER, seed=POINTER, sample_index=POINTER, counts=POINTER, last=POINTER, draft_positions=POINTER,
    further_positions=POINTER, further_lengths=POINTER, further_live=POINTER, lengths32=POINTER, live32=POINTER,
    key_starts32=POINTER, further_lengths32=POINTER, further_live32=POINTER, temperature=POINTER,
)

DRAFT_HEAD = Structure(
    "DraftHead", fc=MATRIX, qkv=MATRIX, out=MATRIX, gate_up=MATRIX, down=MATRIX, output=MATRIX, coarse=MATRIX,
    cache=CACHE, aux_norms=POINTER, embedding_norm=POINTER, hidden_norm=POINTER, mlp_norm=POINTER, norm=POINTER,
    q_norm=POINTER, k_norm=POINTER, embedding=POINTER, target_ids=POINTER, cos=POINTER, sin=POINTER, num_aux=INT64,
    embedding_kind=INT64, embedding_bytes=INT64, num_embeddings=INT64, cos_stride=INT64, sin_stride=INT64,
    max_len=INT64, rotary=INT64, heads=INT64, window=INT64, eps=FLOAT, norm_eps=FLOAT, scale=FLOAT, gelu=INT32,
    norm_before_residual=INT32, feeds_back_normed=INT32,
)

CHAIN_STEP = Structure(
    "ChainStep", pages=POINTER, tails=POINTER, drafts=POINTER, levels=POINTER, counts=POINTER, table_stride=INT64,
    table_width=INT64, page_tokens=INT64, tail_stride=INT64, any_sampled=INT64,
)

SAMPLING_ROWS = Structure(
    "SamplingRows", temperature=POINTER, seed=POINTER, sample_index=POINTER, flags=POINTER, top_k=POINTER,
    min_tokens=POINTER, prompt_len=POINTER, num_stop_ids=POINTER, num_logprobs=POINTER, bias_start=POINTER,
    bias_len=POINTER, words_start=POINTER, num_words=POINTER, top_p=POINTER, min_p_floor=POINTER, presence=POINTER,
    frequency=POINTER, repetition=POINTER, stop_ids=POINTER, lists=POINTER, allowed=POINTER, counts=POINTER,
    masks=POINTER, rows=INT64, stop_stride=INT64, allowed_stride=INT64, count_stride=INT64, mask_stride=INT64,
    masks_per_row=INT64,
)

LOGIT_ROWS = Structure(
    "LogitRows", logits=POINTER, edited=POINTER, row=POINTER, position=POINTER, draft_index=POINTER, tokens=POINTER,
    known=POINTER, drafts=POINTER, chosen=POINTER, count=INT64, vocab=INT64, stride=INT64, edited_stride=INT64,
    token_stride=INT64, draft_stride=INT64, max_drafts=INT64, any_sampled=INT64, reports=INT64, is_processed=INT64,
    num_top=INT64,
)

SAMPLED_ROWS = Structure(
    "SampledRows", tokens=POINTER, bad=POINTER, ids=POINTER, values=POINTER, most=POINTER, norm=POINTER
)

STRUCTURES = (
    MATRIX, PACKED_PART, PACKED_PARTS, UNPACKED_ROWS, REQUESTS, CACHE, ROPE, ATTENTION, LAYER, BOUND_LAYER, LAYER_STEP,
    ADAPTERS, TARGETS, LAYER_TARGETS, ROW_STATE, STEP_INPUTS, PAGE_TABLE, PREPARED_REQUESTS, PREPARED_TOKENS,
    SAMPLED_STEP, COMMITTED, PROPOSAL, STORED_DRAFTS, DRAFT_PLAN, DRAFT_TABLE, PLANNED_PASSES, DRAFT_HEAD, CHAIN_STEP,
    SAMPLING_ROWS, LOGIT_ROWS, SAMPLED_ROWS,
)


def layout_source() -> str:
    """A C file that states how the compiler lays out every structure."""
    lines = [structure.layout_source() for structure in STRUCTURES]
    return "".join(["#include <stddef.h>\n", '#include "sampling.h"\n', *lines])
