"""The Hopper kernels of sparse attention for many token rows, as far as no card is needed: they compile, fit, and are
chosen where they run.

They have no interpreter. `tests/gpu/test_latent.py` checks their results on a card.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels.gpu.hopper import index, index_decode, latent, latent_decode
from outrider.kernels.latent import TokenContexts
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers

PROGRAM_BYTES, PROCESSOR_BYTES, RESERVED_BYTES = 232448, 233472, 1024  # of shared memory on a Hopper card
PAGES = f"tensordesc<bf16[1,64,64],{gl.NVMMASharedLayout(128, 16, rank=3)}>"
KINDS = {"q": "*bf16", "cache": "*bf16", "out": "*bf16", "keys": PAGES, "weights": "*fp32", "scores": "*fp32",
         "scale": "fp32", "part_lse": "*fp32", "sinks": "*fp32"}
NUMBERS = ("max_count", "num_tokens", "top_k", "num_splits", "min_split")


def compile_kernel(kernel: Any, **constants: int) -> Any:
    kinds = KINDS | ({"out": "*fp32"} if constants.get("SPLIT") else {})
    launch = {"num_warps": 4} | ({"maxnreg": index.REGISTERS} if "SCORES" in constants else {})
    function, signature, known = kernel.function, {}, {}
    for place, name in enumerate(function.arg_names):
        is_number = name in NUMBERS or name.endswith("stride")
        signature[name] = "constexpr" if name in constants else kinds.get(name, "i32" if is_number else "*i32")
        if name in ("q", "cache", "out") or (name.endswith("stride") and not name.startswith(("table", "positions"))):
            known[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(GluonASTSource(function, signature, constants, known), target=GPUTarget("cuda", 90, 32),
                          options=launch)


def test_compile_for_the_card() -> None:
    attends, with_sinks, scores, few_scores, *decodes = found_without_interpreter(__file__)
    assert 2 * (attends["shared"] + RESERVED_BYTES) <= PROCESSOR_BYTES, "two programs share a multiprocessor"
    assert attends["copies"] == 9 * 4, "each of them of 16 bytes"
    for decode in (with_sinks, *decodes):
        assert decode["shared"] <= attends["shared"] and decode["copies"] == attends["copies"] and decode["multiplies"]
    assert scores["shared"] <= PROGRAM_BYTES and scores["overwritten"] == few_scores["overwritten"] == []
    assert index_decode.PROGRAMS * (few_scores["shared"] + RESERVED_BYTES) <= PROCESSOR_BYTES
    assert attends["multiplies"] and scores["multiplies"] and few_scores["multiplies"]


def make_contexts(tokens: int, requests: int = 1) -> TokenContexts:
    rows = torch.zeros(tokens, dtype=torch.int64)
    return TokenContexts(torch.zeros(requests, 8, dtype=torch.int32), rows, rows, rows)


def test_take_what_they_can_and_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def attends(tokens: int = 300, heads: int = 32, width: int = 576, latent_dim: int = 512) -> bool:
        q, cache = torch.zeros(tokens, heads, width), torch.zeros(3, 16, width)
        return latent.takes_many_rows(q, cache, make_contexts(tokens), None, 0.1, latent_dim)

    def scores(tokens: int = 300, heads: int = 64, dim: int = 128, requests: int = 1, scaled: bool = False) -> bool:
        q, keys = torch.zeros(tokens, heads, dim), torch.zeros(3, 16, dim)
        scales = torch.ones(3, 16, 1) if scaled else None
        chosen = torch.zeros(tokens, 5, dtype=torch.int32)
        return index.takes_prompts(q, torch.zeros(tokens, heads), keys, make_contexts(tokens, requests), chosen, scales)

    assert not attends() and not scores()  # no card
    for module in (latent, index):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    assert attends() and attends(heads=5) and scores() and scores(heads=16, dim=64) and scores(requests=4)
    assert not attends(tokens=64) and not attends(width=520) and not attends(width=192, latent_dim=128)
    assert not scores(tokens=64) and not scores(heads=24) and not scores(dim=96) and not scores(scaled=True)
    assert not scores(requests=100), "most tiles would have token rows of several requests"

    def few_scores(tokens: int = 8, heads: int = 64, dtype: torch.dtype = torch.bfloat16, scaled: bool = False) -> bool:
        q, keys = torch.zeros(tokens, heads, 128, dtype=dtype), torch.zeros(3, 16, 128, dtype=dtype)
        return index_decode.takes_few_rows(q, keys, torch.ones(3, 16, 1) if scaled else None)

    assert few_scores() and few_scores(tokens=64) and few_scores(heads=16)
    assert not few_scores(tokens=65) and not few_scores(dtype=torch.float32) and not few_scores(scaled=True)


def test_registers_are_shared_out() -> None:
    """The card gives registers in eights, and not more of them than the program has."""
    assert index.SCORE_REGISTERS % 8 == index.FETCH_REGISTERS % 8 == 0
    assert 2 * index.SCORE_REGISTERS + index.FETCH_REGISTERS <= 3 * index.REGISTERS


if __name__ == "__main__":
    made = (*(compile_kernel(latent._chosen_kernel, NUM_HEADS=32, HEADS=32, L=512, R=64, PAGE=64, HAS_SINKS=has_sinks)
              for has_sinks in (False, True)),
            compile_kernel(index._prompt_scores_kernel, HEADS=64, D=128, PAGE=64, FETCHES=index.FETCH_REGISTERS,
                           SCORES=index.SCORE_REGISTERS),
            compile_kernel(index_decode._decode_scores_kernel, HEADS=64, D=128, PAGE=64, KEYS=index_decode.TILE,
                           SLOTS=index_decode.STAGES, PDL=True),
            *(compile_kernel(latent_decode._split_kernel, NUM_HEADS=32, HEADS=32, L=512, R=64, PAGE=64, SPLIT=split,
                             HAS_SINKS=not split, PDL=True) for split in (False, True)))
    codes = [(kernel.metadata.shared, kernel.asm["ptx"]) for kernel in made]
    print(json.dumps([{"shared": shared, "multiplies": "wgmma.mma_async" in ptx, "copies": ptx.count("cp.async.cg"),
                       "overwritten": overwritten_barriers(ptx) if "mbarrier" in ptx else []}
                      for shared, ptx in codes]))
