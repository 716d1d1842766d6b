"""Native CPU kernels: builds native.c once with the machine's C compiler, keeps it in the user's cache, calls it.

Every function has the contract of its twin in reference.py and hands over to it whatever the C code does not take:
other types or devices, unusual strides, gradients, no compiler, OUTRIDER_NATIVE=0. Knows no layers or models.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from outrider.kernels import reference

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
BUILD_SECONDS = 120  # a compiler that hangs must not hang the engine

# Limits of native.c (MAX_DIM, MAX_TILE_ROWS); a head is also a whole number of the widest vectors.
MAX_HEAD_DIM = 512
MAX_GROUP = 64
HEAD_DIM_STEP = 16

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rms_norm": (None, [_P, _L, _P, _L, _P, _P, _L, _L, _F, _F, _I]),
    "gated": (None, [_P, _L, _P, _L, _L, _I, _I]),
    "rope_write": (_L, [_P, _L, _P, _P, _L, _P, _P, _P, _I]),
    "product": (None, [_P, _L, _P, _L, _P, _P, _L, _L, _L, _L, _I, _I]),
    "paged_attention": (_I, [_P, _I]),
}
# The structs Rope and Attention of native.c. Packing bytes is several times cheaper than a ctypes.Structure.
_ROPE = struct.Struct("@PP qqqqq qqqqqqq PP ff")
_ATTENTION = struct.Struct("@PPPP qqq PPPPP qqqq qqqqqq ff iiii")
_ATTENTION_ERRORS = {
    1: "query starts, lengths and live counts do not fit each other",
    2: "a page table is too short for its length, or names a page that does not exist",
    3: "out of memory",
}


class BuildError(RuntimeError):
    """Why there is no native library; its text is for `outrider env`."""


def cache_folder() -> Path:
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def build() -> Path:
    """The library's path, compiling only if this source, compiler and processor have not met before."""
    compiler = _compiler()
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        ).stdout
        identity = "\n".join([SOURCE.read_text(), version, *compiler, *FLAGS, _processor()])
        target = cache_folder() / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{shlex.join(compiler)}: {error}") from error
    return target


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler (cc, gcc or clang) found")


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(fields)})])


def _compile(compiler: list[str], target: Path) -> None:
    """Compiles beside the target and renames, so that other processes see all of it or nothing."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        for flags in (FLAGS, [flag for flag in FLAGS if flag != "-fopenmp"]):  # one thread is better than none
            command = [*compiler, *flags, str(SOURCE), "-o", name, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
            if done.returncode == 0:
                return os.replace(name, target)
        raise BuildError(f"{shlex.join(compiler)} failed: {done.stderr.strip()[-500:]}")
    finally:
        Path(name).unlink(missing_ok=True)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why."""
    if os.environ.get("OUTRIDER_NATIVE") == "0":
        return None, "switched off by OUTRIDER_NATIVE=0"
    try:
        lib = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return None, str(error)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib, ""


def available() -> bool:
    return _load()[0] is not None


def reason() -> str:
    """Why the native kernels are not available; empty if they are."""
    return _load()[1]


def _is_matrix(x: Tensor) -> bool:
    """Float32 token rows at any row stride. Gradients are not recorded here, so they go to the reference."""
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 2 and x.stride(1) == 1 and not x.requires_grad


def _is_vector(x: Tensor | None, width: int) -> bool:
    if x is None:
        return True
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 1 and x.shape[0] == width and x.stride(0) == 1


def _output(out: Tensor | None, *shape: int) -> Tensor | None:
    """A contiguous result tensor, or None if the caller's cannot be written directly."""
    if out is None:
        return torch.empty(shape)
    good = out.dtype is torch.float32 and out.is_cpu and out.shape == shape and out.is_contiguous()
    return out if good else None


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, plus_one: bool = False) -> Tensor:
    lib = _load()[0]
    if lib is not None and _is_matrix(x) and _is_vector(weight, x.shape[1]):
        tokens, width = x.shape
        result = _output(out, tokens, width)
        if result is not None:
            lib.rms_norm(
                x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), result.data_ptr(), tokens, width, eps,
                float(plus_one), torch.get_num_threads(),
            )  # fmt: skip
            return result
    return reference.rms_norm(x, weight, eps, out, plus_one)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    lib = _load()[0]
    if lib is not None and _is_matrix(x) and _is_matrix(residual) and _is_vector(weight, x.shape[1]):
        tokens, width = x.shape
        result = _output(out, tokens, width)
        if result is not None and residual.shape == x.shape:
            lib.rms_norm(
                x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
                result.data_ptr(), tokens, width, eps, float(plus_one), torch.get_num_threads(),
            )  # fmt: skip
            return result, residual
    return reference.add_rms_norm(x, residual, weight, eps, out, plus_one)


def _gated(gate_up: Tensor, out: Tensor | None, gelu: bool) -> Tensor | None:
    lib = _load()[0]
    if lib is None or not _is_matrix(gate_up) or gate_up.shape[1] % 2:
        return None
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = _output(out, tokens, width)
    if result is not None:
        lib.gated(
            gate_up.data_ptr(), gate_up.stride(0), result.data_ptr(), tokens, width, gelu, torch.get_num_threads()
        )
    return result


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    result = _gated(gate_up, out, gelu=False)
    return reference.silu_mul(gate_up, out) if result is None else result


def gelu_tanh_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    result = _gated(gate_up, out, gelu=True)
    return reference.gelu_tanh_mul(gate_up, out) if result is None else result


def _is_cache(cache: Tensor) -> bool:
    """[pages, page_size, kv heads, dim] float32, contiguous within a page, pages at any distance."""
    if cache.dtype is not torch.float32 or not cache.is_cpu or cache.dim() != 4:
        return False
    _, _, heads, dim = cache.shape
    return bool(cache.stride()[1:] == (heads * dim, dim, 1))


def _is_index(x: Tensor) -> bool:
    return x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()


def _is_table(table: Tensor, rotary_dim: int) -> bool:
    return _is_matrix(table) and table.shape[1] in (rotary_dim // 2, rotary_dim)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    rotary_dim: int | None = None,
) -> None:
    lib = _load()[0]
    num_pages, page_size, kv_heads, dim = k_cache.shape
    tokens = qkv.shape[0]
    assert v_cache.shape == k_cache.shape, "keys and values have caches of one shape"
    assert positions.shape == slots.shape == (tokens,), "one position and one slot per token row"
    rotary = rotary_dim or dim
    if (
        lib is None
        or not (_is_matrix(qkv) and _is_cache(k_cache) and _is_cache(v_cache))
        or not (_is_index(positions) and _is_index(slots) and _is_vector(q_norm, dim) and _is_vector(k_norm, dim))
        or not (_is_table(cos, rotary) and _is_table(sin, rotary) and cos.shape == sin.shape)
    ):
        arguments = (qkv, positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, eps, plus_one, rotary_dim)
        return reference.rope_write(*arguments)
    heads = qkv.shape[1] // dim - 2 * kv_heads
    assert heads > 0 and qkv.shape[1] % dim == 0, f"qkv has {qkv.shape[1]} columns for heads of {dim}"
    settings = _ROPE.pack(
        cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0), cos.shape[0], rotary,
        cos.shape[1] - rotary // 2, heads, kv_heads, dim, page_size, num_pages, k_cache.stride(0), v_cache.stride(0),
        _pointer(q_norm), _pointer(k_norm), eps, float(plus_one),
    )  # fmt: skip
    bad = lib.rope_write(
        qkv.data_ptr(), qkv.stride(0), positions.data_ptr(), slots.data_ptr(), tokens, k_cache.data_ptr(),
        v_cache.data_ptr(), settings, torch.get_num_threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"rope_write: {bad} token rows have a position or slot outside the tables or the cache")
    return None


def _is_counts(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and x.is_cpu and x.dim() == 1 and x.stride(0) == 1


def _takes_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, *counts: Tensor) -> bool:
    _, heads, dim = q.shape
    return (
        q.dtype is torch.float32
        and q.is_cpu
        and q.stride()[1:] == (dim, 1)
        and dim % HEAD_DIM_STEP == 0
        and dim <= MAX_HEAD_DIM
        and heads <= MAX_GROUP * k_cache.shape[2]
        and _is_cache(k_cache)
        and _is_cache(v_cache)
        and page_table.dtype in (torch.int32, torch.int64)
        and page_table.stride(1) == 1
        and all(map(_is_counts, counts))
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    live: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> Tensor:
    requests, columns = page_table.shape
    rows = (requests, lengths.shape[0], live.shape[0], query_starts.shape[0] - 1)
    assert rows == (requests,) * 4, f"rows of table, lengths, live counts and query starts differ: {rows}"
    tokens, heads, dim = q.shape
    num_pages, page_size, kv_heads, _ = k_cache.shape
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == dim and heads % kv_heads == 0
    assert key_starts is None or key_starts.shape == (requests,), "one first key per request"
    lib = _load()[0]
    result = None
    if key_starts is not None and not (key_starts.dtype is torch.int64 and key_starts.is_contiguous()):
        key_starts = key_starts.long().contiguous()
    if lib is not None and _takes_attention(q, k_cache, v_cache, page_table, query_starts, lengths, live):
        result = _output(out, tokens, heads, dim)
    if lib is None or result is None:
        arguments = (q, k_cache, v_cache, page_table, query_starts, lengths, live, scale, window, softcap, out)
        return reference.paged_attention(*arguments, key_starts)
    settings = _ATTENTION.pack(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), result.data_ptr(), q.stride(0), k_cache.stride(0),
        v_cache.stride(0), page_table.data_ptr(), query_starts.data_ptr(), lengths.data_ptr(), live.data_ptr(),
        _pointer(key_starts), page_table.stride(0), columns, num_pages, page_size, tokens, requests, heads, kv_heads,
        dim, window, scale, softcap, page_table.dtype is torch.int64, query_starts.dtype is torch.int64,
        lengths.dtype is torch.int64, live.dtype is torch.int64,
    )  # fmt: skip
    error = lib.paged_attention(settings, torch.get_num_threads())
    if error:
        raise IndexError(f"paged_attention: {_ATTENTION_ERRORS[error]}")
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product whose cost is nearly flat up to eight token rows and whose rows do not depend on each other.

    weight [outputs, inputs] is float32, or bfloat16 that stands for the same numbers in float32 (half the reading).
    """
    lib = _load()[0]
    outputs, inputs = weight.shape
    halves = weight.dtype is torch.bfloat16
    if (
        lib is None
        or not (_is_matrix(x) and x.shape[1] == inputs and _is_vector(bias, outputs))
        or not (weight.dtype is torch.float32 or halves)
        or not (weight.is_cpu and weight.stride(1) == 1)
    ):
        return reference.linear(x, weight.to(x.dtype) if halves else weight, bias)
    tokens = x.shape[0]
    out = torch.empty(tokens, outputs)
    lib.product(
        x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), _pointer(bias), out.data_ptr(), outputs,
        tokens, inputs, outputs, halves, torch.get_num_threads(),
    )  # fmt: skip
    return out
