"""The Hopper kernel of prefill attention as far as no card is needed: it compiles, fits, and is chosen where it runs.

It has no interpreter. `tests/gpu/test_attention.py` and `bench/prefill.py` check its results on a card.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.attention import decode as attention
from outrider.kernels.gpu.attention.prefill import PrefillConfig, choose_prefill
from outrider.kernels.gpu.attention.windows import CHUNKED, NO_WINDOW, SLIDING
from outrider.kernels.gpu.hopper import prefill as hopper
from outrider.kernels.gpu.hopper.prefill import CONFIGS, HopperConfig, takes_cache
from outrider.kernels.gpu.launch import collected as collected_launch
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers

SHARED_BYTES = 232448  # that a program may have on a Hopper card
PAGES = gl.NVMMASharedLayout(128, 16, rank=3)
POINTERS = {"q": "*bf16", "out": "*bf16"}


def compile_kernel(head_dim: int, config: HopperConfig, **options: Any) -> Any:
    constants = {
        "GROUP": 4, "GROUP_PAD": 4, "D": head_dim, "PAGE": 16, "Q_TILE": config.block_m // 4,
        "BLOCK_N": config.block_n, "STAGES": config.num_stages, "SPLIT": config.value_split, "KV_HEADS": 8,
        "WINDOW_KIND": NO_WINDOW.value, "HAS_SOFTCAP": False, "HAS_STARTS": False, "HAS_SINKS": False, "SEARCH": 256,
        "PRODUCER_REGS": config.producer_regs, "CONSUMER_REGS": config.consumer_regs,
    } | options
    function = hopper._prefill_kernel.function
    kinds = {"k_pages": f"tensordesc<bf16[1,16,64],{PAGES}>", "v_pages": f"tensordesc<bf16[1,16,64],{PAGES}>",
             "scale": "fp32", "softcap": "fp32", "sinks": "*fp32"} | POINTERS
    numbers = ("window", "fill_to", "num_requests", "num_tiles")
    signature = {}
    for name in function.arg_names:
        is_number = name in numbers or name.endswith("stride")
        signature[name] = "constexpr" if name in constants else kinds.get(name, "i32" if is_number else "*i32")
    source = GluonASTSource(function, signature, constants)
    launch = {"num_warps": 4, "maxnreg": hopper.REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


COMPILED: list[tuple[int, dict[str, int]]] = [
    (128, {}), (512, {"WINDOW_KIND": SLIDING.value, "HAS_STARTS": True}), (256, {"WINDOW_KIND": CHUNKED.value}),
    (64, {"WINDOW_KIND": SLIDING.value, "HAS_SINKS": True}),
]


@pytest.mark.long
def test_compiles_for_the_card() -> None:
    kernels = found_without_interpreter(__file__)
    assert len(kernels) == len(COMPILED)
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES
        assert kernel["multiplies"] and kernel["copies"]
        assert kernel["overwritten"] == [], "the card puts barriers back when it resumes a program that it had stopped"
        assert kernel["size"] > kernel["decode_size"], "it takes longest to compile, and so it is the first"
    for (head_dim, options), kernel in zip(COMPILED, kernels, strict=True):
        each = CONFIGS[head_dim].block_n // 2 + 2  # of the tile's weights, and of what was summed before, in a thread
        of_sinks = 2 * 2 * options.get("HAS_SINKS", False)  # of each group, for both rows that a thread has
        assert kernel["exponentials"] == 2 * 2 * each + of_sinks, (
            "a group weighs tiles in two places, no more: starts wait for it")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=[str(dim) for dim in CONFIGS])
def test_registers_are_shared_out(config: HopperConfig) -> None:
    """The card gives registers in eights, and not more of them than the program has."""
    assert config.consumer_regs % 8 == config.producer_regs % 8 == 0
    assert 2 * config.consumer_regs + config.producer_regs <= 3 * hopper.REGISTERS


def make_cache(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, page: int = 16) -> torch.Tensor:
    return torch.zeros(3, 2, page, 2, head_dim, dtype=dtype)[:, 1]


def test_takes_what_it_can_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_prefill(8, make_cache()), PrefillConfig)  # no card
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    for head_dim, config in CONFIGS.items():
        assert choose_prefill(8, make_cache(head_dim)) is config
    others = [(8, make_cache(dtype=torch.float32)), (8, make_cache(96)), (8, make_cache(page=8)), (258, make_cache()),
              (8, make_cache()[..., :64]), (8, make_cache().flip(3).transpose(2, 3).contiguous().transpose(2, 3))]
    for num_heads, cache in others:
        assert not takes_cache(num_heads, cache)
        assert isinstance(choose_prefill(num_heads, cache), PrefillConfig)


def test_descriptors_compile_ahead_by_their_form_alone() -> None:
    first, second = (TensorDescriptor(torch.zeros(n, 16, 64, dtype=torch.bfloat16), [n, 16, 64], [1024, 64, 1],
                                      [1, 16, 64], PAGES) for n in (3, 5))
    assert collected_launch.specialization(first) == collected_launch.specialization(second)
    smaller = dataclasses.replace(first, block_shape=[1, 8, 64])
    assert collected_launch.specialization(first) != collected_launch.specialization(smaller)
    stand_in = collected_launch.stand_in(first)
    assert not isinstance(stand_in.base, torch.Tensor) and stand_in.shape == first.shape


if __name__ == "__main__":
    made = [compile_kernel(head_dim, CONFIGS[head_dim], **options) for head_dim, options in COMPILED]
    sizes = [collected_launch.source_size(own.function) for own in (hopper._prefill_kernel, attention._decode_kernel)]
    found = [{"size": sizes[0], "decode_size": sizes[1], "shared": kernel.metadata.shared,
              "multiplies": "wgmma.mma_async" in kernel.asm["ptx"],
              "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"],
              "exponentials": kernel.asm["ptx"].count("ex2.approx"),
              "overwritten": overwritten_barriers(kernel.asm["ptx"])} for kernel in made]
    print(json.dumps(found))
