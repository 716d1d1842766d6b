"""Code that the Triton kernels share: small device functions, programmatic dependent launch, and checks on the host.

This file does not depend on models, caches or steps. The functions that launch kernels take `pdl` (programmatic
dependent launch): a kernel starts while the previous kernel drains, does work that depends on no other kernel (fetching
weights), then waits until the previous kernel's writes are visible. None leaves the choice to `uses_pdl`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

DEFAULT_SMS = 132  # assumed where there is no card to ask (the interpreter)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernels before this one have finished. Every program must call this, even one that exits early: if
    a grid ended without waiting, the next kernel could overtake the previous one."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next kernel start once every program of this kernel has reached this call. The next kernel still sees all
    writes of this kernel after its own wait."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tanh(x):
    # exp overflows to inf for large x, which gives exactly 1.
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or tanh-gelu(gate) * up; float32 in and out."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + tanh(inner)) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def limited(gate, up, LIMIT: tl.constexpr):
    """Clamp gate to at most LIMIT, and up to -LIMIT .. LIMIT. This selects between numbers, because a minimum would
    turn NaN into a number."""
    return tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@triton.jit
def add_product(acc, a, b):
    """Return acc + a @ b. In float32 the product is summed by itself and then added, because one chain of additions
    over all tiles would round more. The code subtracts the negated product: Triton would fuse an addition into the
    chain."""
    if a.dtype == tl.float32:
        return acc - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@lru_cache(maxsize=16)
def uses_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch makes small kernels faster on this device. On Hopper and later it saves 1
    to 3 us per layer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_PDL_OPTIONS: tuple[dict[str, Any], dict[str, Any]] = ({}, {"launch_pdl": True})


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Return the launch options for a kernel's PDL flag; the interpreter has no such option."""
    return _PDL_OPTIONS[pdl]


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def padded_requests(num_requests: int) -> int:
    """Return the padded number of requests for a vector over all requests. It is the same for all usual numbers of
    requests, so that one compiled kernel serves them."""
    return max(512, next_power_of_two(num_requests))


def cdiv(n: int, size: int) -> int:
    """Divide n by size, rounded up. For use on the host: `triton.cdiv` takes longer than all checks of a launch."""
    return -(-n // size)


@lru_cache(maxsize=16)
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def refuse(kernel: str, argument: str, message: str) -> NoReturn:
    """Raise ValueError. Checks run before every launch, so the message is formatted only when one fails."""
    raise ValueError(f"{kernel}: {argument} {message}")


def require(ok: bool, kernel: str, argument: str, message: str) -> None:
    if not ok:
        refuse(kernel, argument, message)


def require_tensor(
    kernel: str,
    argument: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    inner_contiguous: int = 1,
) -> None:
    """Check shape (None: any size), device and dtype, and that the last `inner_contiguous` axes are packed. This runs
    before every launch, so one cheap test covers everything, and the error message is built only if that test fails."""
    got = tensor.shape
    is_right = (
        tensor.dtype in dtypes
        and tensor.device == device
        and (got == shape or _fits(got, shape))
        and (tensor.is_contiguous() or _is_packed(tensor, inner_contiguous))
    )
    if not is_right:
        _explain(kernel, argument, tensor, shape, device, dtypes, inner_contiguous)


def _fits(got: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(got) != len(shape):
        return False
    for have, want in zip(got, shape, strict=False):
        if have != want and want is not None:
            return False
    return True


def _explain(kernel: str, argument: str, tensor: torch.Tensor, shape: tuple[int | None, ...], device: torch.device,
             dtypes: tuple[torch.dtype, ...], inner_contiguous: int) -> None:
    got = tuple(tensor.shape)
    ok = len(got) == len(shape) and all(want is None or want == have for want, have in zip(shape, got, strict=False))
    require(ok, kernel, argument, f"has shape {list(got)}, expected {['*' if s is None else s for s in shape]}")
    require(tensor.device == device, kernel, argument, f"is on {tensor.device}, expected {device}")
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    require(tensor.dtype in dtypes, kernel, argument, f"has dtype {tensor.dtype}, expected {names}")
    require(_is_packed(tensor, inner_contiguous), kernel, argument,
            f"has strides {tensor.stride()}, expected {inner_contiguous} packed inner axes")


def _is_packed(tensor: torch.Tensor, inner_axes: int) -> bool:
    packed, shape, strides = 1, tensor.shape, tensor.stride()
    for axis in range(len(shape) - 1, len(shape) - 1 - inner_axes, -1):
        if shape[axis] > 1 and strides[axis] != packed:
            return tensor.numel() == 0  # strides of what is not there say nothing
        packed *= shape[axis]
    return True


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
