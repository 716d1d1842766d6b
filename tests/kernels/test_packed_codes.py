"""The instructions that make numbers of several codes at once, carried out one by one: no interpreter runs them."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu.linear.scaled_codes import E2M1_TO_SCALED_BF16
from outrider.kernels.scaled import E2M1


def of_pairs(words: torch.Tensor) -> torch.Tensor:
    """int64 words as pairs of bfloat16, the lower half first."""
    halves = torch.stack([words & 0xFFFF, words >> 16], -1)
    return torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16).view(torch.bfloat16)


def to_words(pairs: torch.Tensor) -> torch.Tensor:
    halves = pairs.view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One rounding to the nearest, and numbers below the normal ones are kept, as `mul.rn.bf16x2` does."""
    return to_words((of_pairs(a).double() * of_pairs(b).double()).float().bfloat16())


def execute(text: str, registers: dict[str, torch.Tensor]) -> None:
    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in re.findall(r"^\s*([a-z][^;{}]*);", text, re.MULTILINE):
        operation, operands = line.split(None, 1)
        to, *given = operands.split(", ")
        match operation, [value(name) for name in given]:
            case "mov.b32", [a]:
                registers[to] = a
            case "shl.b32", [a, b]:
                registers[to] = a << b & 0xFFFFFFFF
            case "and.b32", [a, b]:
                registers[to] = a & b
            case "lop3.b32", [a, b, c, table]:
                assert int(table) == 0xEA
                registers[to] = a & b | c
            case "prmt.b32", [a, b, chosen]:
                both = a | b << 32
                registers[to] = sum((both >> 8 * (int(chosen) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
            case "mul.rn.bf16x2", [a, b]:
                registers[to] = multiply(a, b)
            case unknown:
                raise AssertionError(unknown)


def test_e2m1_codes_times_their_scales() -> None:
    """Every byte in every place, with scales of MXFP4, of NVFP4 and ones that are rounded."""
    at = torch.arange(4)
    codes = (torch.arange(256)[:, None] * torch.tensor([1, 3, 5, 7]) + 11 * at) & 0xFF
    numbers = torch.tensor([*E2M1, *(-value for value in E2M1)])
    for first in (1.0, 2.0**-12, 2.0**40, 2.0**-130, 0.4375, 1.3359375):
        scales = (torch.tensor([first, first, 2 * first, 2 * first])).bfloat16().expand(256, 4)
        registers = {"$4": (codes << 8 * at).sum(-1), "$5": to_words(scales[:, :2]), "$6": to_words(scales[:, 2:])}
        execute(E2M1_TO_SCALED_BF16.value.replace(".reg .b32 b<2>, n<4>, s<4>, most;", ""), registers)
        for names, nibble in ((("$0", "$1"), codes & 15), (("$2", "$3"), codes >> 4)):
            found = torch.cat([of_pairs(registers[name]) for name in names], -1)
            assert torch.equal(found.float(), (numbers[nibble] * scales.float()).bfloat16().float())
