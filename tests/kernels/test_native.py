"""The native CPU kernels against their plain torch twins, with unused pages and slots poisoned."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels import ops, reference
from outrider.kernels.cpu import build as native_build
from outrider.kernels.cpu import structures
from outrider.kernels.cpu.build import library
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.quantized import QuantizedRows
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.runner.target import warn_without_native_kernels
from outrider.sample.draw import draw_tokens

NAN = float("nan")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "switched off"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test that uses this runs with the C code and without it."""
    if request.param == "switched off":
        monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    look_again()
    if request.param == "native" and not native.available():
        pytest.skip(f"no native kernels here: {native.reason()}")
    yield request.param
    monkeypatch.undo()
    look_again()


def look_again() -> None:
    """Whether there is a library is asked once by those who load it, and once by each operation."""
    native_build.load.cache_clear()
    for operation in ops.operations().values():
        operation.force("")


def refuse_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a silent hand-over to torch fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("handed over to the reference")

    for operation in ops.operations().values():
        monkeypatch.setattr(operation, "reference", refuse)


# Norms and activations


@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_norms(kernels: str, width: int) -> None:
    x = torch.randn(5, width + 3)[:, :width]  # rows at a distance
    weight, residual = torch.randn(width), torch.randn(5, width)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    want_residual = residual.clone()
    want = reference.add_rms_norm(x, want_residual, weight, 1e-5)
    got = ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close((got, residual), (want, want_residual))


def test_a_column_stride_goes_to_the_reference(kernels: str) -> None:
    wide, weight = torch.randn(3, 16), torch.randn(8)
    residual = wide.clone()[:, ::2]
    torch.testing.assert_close(ops.rms_norm(wide[:, ::2], weight, 1e-5), reference.rms_norm(residual, weight, 1e-5))
    want = reference.rms_norm(2 * residual, weight, 1e-5)
    torch.testing.assert_close(ops.add_rms_norm(residual.clone(), residual, weight, 1e-5), want)
    assert not torch.equal(residual, wide[:, ::2]), "the sum is where the residual was"


@pytest.mark.parametrize("width", [1, 31, 64, 1536])
def test_activations(kernels: str, width: int) -> None:
    gate_up = torch.randn(4, 2 * width + 1)[:, : 2 * width] * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0], gate_up[3, 0] = 100.0, -100.0, -1e30, 0.0
    torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    torch.testing.assert_close(ops.gelu_tanh_mul(gate_up), reference.gelu_tanh_mul(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 31, 64])
def test_scales_and_caps(kernels: str, width: int) -> None:
    x, gate, one = torch.randn(4, width) * 4, torch.randn(4, width) * 4, torch.randn(4, 1)
    for each in (gate, one):
        torch.testing.assert_close(ops.sigmoid_scale(x, each), reference.sigmoid_scale(x, each))
    torch.testing.assert_close(ops.gelu_scale(gate, x), reference.gelu_scale(gate, x), rtol=1e-5, atol=1e-5)
    wanted = reference.cap_logits(x.clone(), 3.0)
    torch.testing.assert_close(ops.cap_logits(x.clone(), 3.0), wanted, rtol=1e-5, atol=1e-5)


def test_activations_keep_nan(kernels: str) -> None:
    gate_up = torch.tensor([[NAN, 1.0, 1.0, 2.0]])
    assert ops.silu_mul(gate_up).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("width", [1, 15, 64, 577, 49152])
def test_tokens_are_drawn(kernels: str, width: int) -> None:
    """The greatest logit, the first of equals. Rows with a NaN or +inf, and rows with -inf alone, are bad."""
    logits = torch.randn(11, width + 3)[:, :width].round(decimals=1)  # rows at a distance, with equals
    logits[1] = 0
    logits[2, width // 2], logits[3, width - 1] = NAN, float("inf")
    logits[4], logits[5] = -float("inf"), NAN
    logits[6, : width - 1] = -float("inf")
    logits[7, [0, width // 2, width - 1]] = 9.0
    place = torch.arange(len(logits))
    keys = SamplingKeys(torch.zeros(len(logits)), place, place)
    for num in (1, len(logits)):
        got = draw_tokens(logits[:num], place[:num], place[:num], keys, False)
        torch.testing.assert_close(got, draw_tokens.reference(logits[:num], place[:num], place[:num], keys, False))
    assert got[1].tolist() == [i in (2, 3, 4, 5) for i in range(len(logits))]
    assert got[0][7] == 0 and got[0][6] == width - 1


# Rope and cache write


@dataclass
class RopeCase:
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    full_table: bool = False
    normed: bool = False
    rotary_dim: int | None = None


def page_views(num_pages: int, page_size: int, kv_heads: int, dim: int, fill: float) -> tuple[Tensor, Tensor]:
    """Two layers' keys and values in one page, as the pool keeps them: the views have a wide page stride."""
    pool = torch.full((num_pages, 2, 2, page_size, kv_heads, dim), fill)
    return pool[:, 1, 0], pool[:, 1, 1]


@pytest.mark.parametrize(
    "case",
    [
        RopeCase(),
        RopeCase(full_table=True),
        RopeCase(4, 4, 16, normed=True),
        RopeCase(8, 1, 128, rotary_dim=32),
        RopeCase(2, 1, 6, full_table=True, normed=True),
    ],
)
def test_rope_write(kernels: str, case: RopeCase) -> None:
    tokens, page_size = 7, 16
    rotary = case.rotary_dim or case.dim
    width = rotary if case.full_table else rotary // 2
    cos, sin = torch.randn(40, width), torch.randn(40, width)
    qkv = torch.randn(tokens, (case.heads + 2 * case.kv_heads) * case.dim + 5)[:, :-5]
    positions = torch.tensor([3, 39, 0, 7, 7, 20, 39])
    slots = torch.tensor([5, 16, -1, 79, -1, 33, 0])
    norms = [torch.randn(case.dim), torch.randn(case.dim)] if case.normed else [None, None]
    caches = page_views(5, page_size, case.kv_heads, case.dim, NAN)
    want, want_caches = qkv.clone(), page_views(5, page_size, case.kv_heads, case.dim, NAN)
    reference.rope_write(want, positions, cos, sin, slots, *want_caches, *norms, 1e-5, case.rotary_dim)
    ops.rope_write(qkv, positions, cos, sin, slots, *caches, *norms, 1e-5, case.rotary_dim)
    torch.testing.assert_close(qkv, want)
    torch.testing.assert_close(caches, want_caches, equal_nan=True)
    written = [slot for slot in slots.tolist() if slot >= 0]
    assert (~caches[0].flatten(0, 1).isnan().flatten(1).all(1)).nonzero().flatten().tolist() == sorted(written)
    value_columns = qkv.view(tokens, -1, case.dim)[:, -case.kv_heads :]
    torch.testing.assert_close(caches[1].flatten(0, 1)[slots[slots >= 0]], value_columns[slots >= 0])


def test_rope_writes_nothing_without_slots(kernels: str) -> None:
    caches = page_views(2, 4, 1, 16, NAN)
    table, none = torch.ones(4, 8), torch.full((3,), -1)
    ops.rope_write(torch.randn(3, 48), torch.arange(3), table, table, none, *caches)
    assert caches[0].isnan().all() and caches[1].isnan().all()


@pytest.mark.parametrize(("position", "slot"), [(4, 0), (-1, 0), (0, 8)])
def test_rope_refuses_what_is_out_of_range(kernels: str, position: int, slot: int) -> None:
    if kernels != "native":
        pytest.skip("torch has its own range checks, and wraps negative positions")
    caches, table = page_views(2, 4, 1, 16, 0.0), torch.ones(4, 8)
    with pytest.raises(IndexError, match="1 token rows"):
        ops.rope_write(
            torch.randn(1, 48), torch.tensor([position]), table, table, torch.tensor([slot]), *caches
        )


# Paged attention


@dataclass
class Batch:
    """Requests with shuffled pages; every cell that no live token may see holds NaN."""

    scheduled: list[int]
    live: list[int]
    lengths: list[int]
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    page_size: int = 16
    window: int = 0
    padding: int = 0  # token rows beyond the last request's
    integer: torch.dtype = torch.int32
    dtype: torch.dtype = torch.float32

    def build(self) -> tuple[Tensor, ...]:
        columns = max(max(self.lengths) // self.page_size + 2, 1)
        counts = [-(-length // self.page_size) for length in self.lengths]
        num_pages = sum(counts) + 3
        pages = (torch.randperm(num_pages - 1) + 1).tolist()
        pool = torch.full((num_pages, 3, 2, self.page_size, self.kv_heads, self.dim), NAN, dtype=self.dtype)
        k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
        table = torch.zeros(len(self.lengths), columns + 4, dtype=self.integer)[:, :columns]
        for request, length in enumerate(self.lengths):
            owned = [pages.pop() for _ in range(counts[request])]
            oldest = length - self.live[request] - self.window + 1 if self.window else 0
            for key in range(max(oldest, 0), length):
                table[request, key // self.page_size] = owned[key // self.page_size]
                for cache in (k_cache, v_cache):
                    cell = torch.randn(self.kv_heads, self.dim, dtype=self.dtype)
                    cache[owned[key // self.page_size], key % self.page_size] = cell
        starts = torch.tensor([0, *torch.tensor(self.scheduled).cumsum(0).tolist()], dtype=self.integer)
        tokens = int(starts[-1]) + self.padding
        fused = torch.randn(tokens, (self.heads + 2) * self.dim, dtype=self.dtype) * 2
        q = fused[:, : self.heads * self.dim].view(tokens, self.heads, self.dim)
        counts_of = [torch.tensor(values, dtype=self.integer) for values in (self.lengths, self.live)]
        return q, k_cache, v_cache, table, starts, *counts_of


BATCHES = {
    "decode": Batch([1], [1], [1]),
    "decode, long, split among threads": Batch([1], [1], [777]),
    "verify with dead drafts": Batch([5, 3, 8], [2, 3, 8], [130, 3, 256]),
    "padded requests and tokens": Batch([2, 0, 1, 0, 0], [2, 0, 1, 0, 0], [40, 0, 17, 0, 0], padding=3),
    "many requests": Batch([1] * 9, [1] * 9, [1, 300, 16, 17, 128, 129, 64, 5, 77]),
    "a request that ended": Batch([2, 2], [0, 2], [0, 19]),
    "prefill": Batch([75], [75], [75], page_size=32),
    "prefill chunk beside decode": Batch([1, 67, 1], [1, 67, 1], [300, 200, 129]),
    "window within a page": Batch([1, 4], [1, 4], [100, 23], window=5),
    "window across tiles": Batch([3, 150], [3, 150], [400, 290], window=133),
    "one kv head, group of 8": Batch([3], [3], [150], heads=8, kv_heads=1, dim=128),
    "no groups, odd page": Batch([2], [1], [50], heads=3, kv_heads=3, dim=16, page_size=7),
    "head of 80": Batch([2, 1], [2, 1], [33, 140], heads=4, kv_heads=2, dim=80, integer=torch.int64),
    "head the C code does not take": Batch([2, 1], [2, 1], [33, 14], heads=4, kv_heads=2, dim=24),
    "float64": Batch([2, 1], [2, 1], [33, 14], heads=4, kv_heads=2, dim=16, dtype=torch.float64),
}


def dense_attention(batch: Batch, arguments: tuple[Tensor, ...], scale: float, softcap: float) -> Tensor:
    """One token at a time over a plain list of keys: the naive twin of the reference itself."""
    q, k_cache, v_cache, table, starts = arguments[:5]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for request, (length, live) in enumerate(zip(batch.lengths, batch.live, strict=True)):
        for i in range(live):
            token, position = int(starts[request]) + i, length - live + i
            keys = range(max(0, position - batch.window + 1) if batch.window else 0, position + 1)
            cells = [(int(table[request, key // batch.page_size]), key % batch.page_size) for key in keys]
            k, v = (torch.stack([cache[cell] for cell in cells]).double() for cache in (k_cache, v_cache))
            for head in range(batch.heads):
                kv_head = head // (batch.heads // batch.kv_heads)
                scores = k[:, kv_head] @ q[token, head].double() * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[token, head] = torch.softmax(scores, 0) @ v[:, kv_head]
    return out.to(q.dtype)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("name", BATCHES)
def test_paged_attention(kernels: str, name: str, softcap: float) -> None:
    batch = BATCHES[name]
    arguments = batch.build()
    scale = batch.dim**-0.5
    got = ops.paged_attention(*arguments, scale, batch.window, softcap)
    assert got.isfinite().all()
    torch.testing.assert_close(got, dense_attention(batch, arguments, scale, softcap), rtol=2e-5, atol=2e-6)
    assert not got[int(arguments[4][-1]) :].any()
    for start, live, end in zip(arguments[4], arguments[6], arguments[4][1:], strict=False):
        assert not got[int(start + live) : int(end)].any()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_its_batch(threads: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding one token at a time, verifying some and prefilling all: the same bits."""
    if not native.available():
        pytest.skip(native.reason())
    batch = Batch([300], [300], [300], window=window)
    q, k_cache, v_cache, table, starts, lengths, live = batch.build()
    refuse_reference(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = ops.paged_attention(q, k_cache, v_cache, table, starts, lengths, live, 0.125, window)
        for first, count in ((0, 1), (127, 1), (128, 1), (130, 5), (255, 8), (299, 1)):
            part = ops.paged_attention(
                q[first : first + count], k_cache, v_cache, table, torch.tensor([0, count]),
                torch.tensor([first + count]), torch.tensor([count]), 0.125, window,
            )
            assert torch.equal(part, whole[first : first + count]), (first, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_request_does_not_depend_on_the_others(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take all heads of one of many requests at once, and of few requests every tile of keys by itself."""
    if not native.available():
        pytest.skip(native.reason())
    lengths = [1, 300, 16, 129, 128, 64, 640, 77, 31, 33, 256, 90]
    q, k_cache, v_cache, table, starts, *counts = Batch([1] * 12, [1] * 12, lengths).build()
    refuse_reference(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = ops.paged_attention(q, k_cache, v_cache, table, starts, *counts, 0.125)
        for i in range(len(lengths)):
            rows, ends = slice(i, i + 1), torch.tensor([0, 1])
            alone = ops.paged_attention(q[rows], k_cache, v_cache, table[rows], ends, *(n[rows] for n in counts), 0.125)
            assert torch.equal(alone, whole[rows]), lengths[i]
    finally:
        torch.set_num_threads(before)


def test_attention_refuses_a_table_that_is_too_short() -> None:
    if not native.available():
        pytest.skip(native.reason())
    q, k_cache, v_cache, table, starts, lengths, live = Batch([1], [1], [100]).build()
    with pytest.raises(IndexError, match="page table is too short"):
        ops.paged_attention(q, k_cache, v_cache, table[:, :2], starts, lengths, live, 1.0)
    with pytest.raises(IndexError, match="do not fit"):
        ops.paged_attention(q, k_cache, v_cache, table, starts, lengths, live + 1, 1.0)
    with pytest.raises(AssertionError, match="differ"):
        ops.paged_attention(q, k_cache, v_cache, table, starts, lengths, torch.ones(2, dtype=torch.int32), 1.0)


# Hand-over and building


def test_gradients_go_to_the_reference() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    ops.rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad is not None


def test_common_shapes_stay_native(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip(native.reason())
    refuse_reference(monkeypatch)
    x, weight = torch.randn(3, 32), torch.randn(32)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x.clone(), weight, 1e-5)
    ops.silu_mul(x)
    ops.gelu_tanh_mul(x)
    native.linear(x, torch.randn(5, 32))
    table = torch.ones(4, 8)
    ops.rope_write(torch.randn(1, 48), torch.zeros(1).long(), table, table, torch.zeros(1).long(),
                      *page_views(2, 4, 1, 16, 0.0))
    ops.paged_attention(*Batch([1], [1], [9]).build(), 1.0)


TO_OUTPUT = 'while [ "$1" != -o ]; do shift; done;'


def compiling(script: str) -> str:
    """A compiler that knows its version, makes empty objects and runs the script to join them."""
    return f'case "$*" in *--version*) echo one;; *-shared*) {script};; *) {TO_OUTPUT} : > "$2";; esac'


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_second_build_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """The compiler here notes each compilation, so a needless second one shows."""
    notes = tmp_path / "notes"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, compiling(f'echo x >> {notes}; {TO_OUTPUT} : > "$2"')))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    first, second = native_build.build(), native_build.build()
    assert first == second and first.parent == tmp_path / "cache"
    assert capsys.readouterr().err == "outrider: building the CPU kernels, once, in about 10 s\n", "no terminal here"
    assert notes.read_text() == "x\n"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr(native_build, "_processor", lambda: "another")
    assert native_build.build() != first


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no licence >&2; exit 1", "version ended with status 1: no licence"),
        (compiling("echo broken header >&2; exit 1"), "broken header"),
        (compiling("kill -9 $$"), "failed: it said nothing and ended with status -9"),
        (compiling(f'{TO_OUTPUT} echo no > "$2"'), "ELF|file too short|invalid"),
    ],
)
def test_broken_compiler_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    look_again()
    try:
        assert not native.available()
        assert re.search(message, native.reason()), native.reason()
        x, weight = torch.randn(2, 8), torch.randn(8)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    finally:
        monkeypatch.undo()
        look_again()


def test_missing_compiler_and_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(native_build.BuildError, match="none"):
        native_build.build()
    with monkeypatch.context() as slow:
        slow.setenv("CC", fake_compiler(tmp_path, "exec sleep 60"))
        slow.setattr(native_build, "BUILD_SECONDS", 0.1)
        with pytest.raises(native_build.BuildError, match="took over 0.1 s; the next start tries again$"):
            native_build.build(tmp_path)
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "echo one"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(native_build.BuildError):
        native_build.build()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(native_build.BuildError, match="no C compiler"):
        native_build.build()


def test_the_limit_of_time_is_that_of_all_compilers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that starts when another one has run out of time has none left, on however few cores."""
    given: list[float] = []

    def times_out(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, "one", "")
        given.append(timeout)
        now[0] += timeout
        if len(given) == 1:
            return subprocess.CompletedProcess(command, 0, "", "")
        raise subprocess.TimeoutExpired(command, timeout)

    now = [100.0]
    monkeypatch.setattr(native_build, "num_cores", lambda: 1)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("subprocess.run", times_out)
    with pytest.raises(native_build.BuildError, match="took over 600 s"):
        native_build.build(tmp_path)
    assert given[0] == 600 and set(given[1:]) == {0} and not list(tmp_path.iterdir())


@pytest.fixture
def copying_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compiling takes no time here: it copies the library that this machine has built. Notes each time in a file."""
    if not native.available():
        pytest.skip(native.reason())
    built, notes = native_build.build(), tmp_path / "notes"
    script = compiling(f'echo x >> {notes}; {TO_OUTPUT} cp {built} "$2"')
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    look_again()
    yield notes
    monkeypatch.undo()
    look_again()


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
def test_a_library_that_lost_its_end_is_built_again(copying_compiler: Path, num_bytes: int) -> None:
    """To load a part of one would end the process by a signal, at every start."""
    path = native_build.build()
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert native.available(), native.reason()
    assert copying_compiler.read_text() == "x\nx\n" and native_build.build() == path
    assert copying_compiler.read_text() == "x\nx\n"


def test_a_cache_that_cannot_be_written_costs_a_build_and_says_so(
    tmp_path: Path, copying_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    assert native.available(), native.reason()
    assert "set OUTRIDER_CACHE" in caplog.text and "below cannot be written" in caplog.text
    assert set(tmp_path.iterdir()) == before | {copying_compiler}, "nothing is left behind"
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("has_compiler", "said"), [(False, "install cc, gcc or clang"), (True, "status 1")])
def test_an_engine_on_a_cpu_says_why_it_has_no_native_kernels(
    has_compiler: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    if has_compiler:
        monkeypatch.setenv("CC", fake_compiler(tmp_path, "exit 1"))
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", os.devnull)
    try:
        look_again()
        warn_without_native_kernels()
        assert said in caplog.text and "more time" in caplog.text
        caplog.clear()
        monkeypatch.setenv("OUTRIDER_NATIVE", "0")
        look_again()
        warn_without_native_kernels()
        assert not caplog.text, "it was asked for"
    finally:
        monkeypatch.undo()
        look_again()


@pytest.mark.parametrize("inputs", [32, 45, 1600])
def test_a_row_of_a_product_does_not_depend_on_the_others(inputs: int) -> None:
    """Also where rows are more than are packed at once, and with a tail of inputs, of weight rows and of token rows."""
    if not native.available():
        pytest.skip(native.reason())
    x, weight = torch.randn(135, inputs + 1)[:, 1:], torch.randn(61, inputs)
    together = native.linear(x, weight)
    one_by_one = torch.cat([native.linear(row, weight) for row in x.split(1)])
    assert torch.equal(together, one_by_one)
    torch.testing.assert_close(together, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 40])
def test_attention_sees_no_key_before_its_start(window: int) -> None:
    """A drafter's slots before its valid range were never written: NaN there must not reach an output."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(30, 16, 2, 32, generator=generator) for _ in range(2))
    table = torch.randperm(29, generator=generator)[:27].view(3, 9).add(1).int()
    lengths, live, starts = torch.tensor([130, 70, 33]), torch.tensor([3, 1, 2]), torch.tensor([0, 3, 5, 7])
    first = torch.tensor([37, 0, 31])
    for request in range(3):
        for position in range(int(first[request])):
            k[table[request, position // 16], position % 16] = torch.nan
            v[table[request, position // 16], position % 16] = torch.nan
    q = torch.randn(7, 4, 32, generator=generator)
    arguments = (q, k, v, table, starts, lengths, live, 0.2, window)
    got = ops.paged_attention(*arguments, key_starts=first)
    torch.testing.assert_close(got, reference.paged_attention(*arguments, key_starts=first))
    assert got.isfinite().all()


# A whole decoder layer


@dataclass
class LayerCase:
    scheduled: list[int]
    lengths: list[int]
    has_bias: bool = False
    has_norms: bool = False
    window: int = 0
    is_chunked: bool = False
    gelu: bool = False
    heads: int = 9
    kv_heads: int = 3
    dim: int = 16
    inner: int = 112
    kind: str | None = None  # of GGUF, of gates and what they are for; token rows are rounded to `bits` for them
    bits: int = 8

    def build(self) -> tuple[native.LayerWeights, native.RopeWrite, native.Attention]:
        hidden, inner, heads = 96, self.inner, (self.heads, self.kv_heads, self.dim)
        width = (heads[0] + 2 * heads[1]) * heads[2]
        shapes = [(width, hidden), (hidden, heads[0] * heads[2]), (2 * inner, hidden), (hidden, inner)]
        matrices = []
        for shape in shapes:
            matrix = native.dense_matrix(torch.randn(shape) * 0.1, torch.randn(shape[0]) if self.has_bias else None)
            assert matrix is not None
            matrices.append(matrix)
        if self.kind is not None:
            blocks = torch.randint(0, 256, (2 * inner, 3, KINDS[self.kind].block_bytes), dtype=torch.uint8)
            for half in KINDS[self.kind].halves:
                blocks[..., half + 1] &= 31  # scales of less than a hundredth
            rows = QuantizedRows(self.kind, blocks.view(2 * inner, -1)).pack()
            matrices[2] = native.PackedMatrix([rows], None, self.bits)
        weights = native.LayerWeights(torch.rand(hidden), torch.rand(hidden), 1e-5, *matrices, gelu=self.gelu,
                                      max_tokens=32)
        tokens, longest = sum(self.scheduled), max(self.lengths)
        k_cache, v_cache = page_views(64, 16, heads[1], heads[2], 0.5)
        columns = -(-longest // 16)
        table = (torch.randperm(63)[: len(self.lengths) * columns] + 1).view(-1, columns)
        positions = torch.cat([torch.arange(n - s, n) for s, n in zip(self.scheduled, self.lengths, strict=True)])
        request = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.scheduled))
        slots = table[request, positions // 16] * 16 + positions % 16
        slots[-1] = -1 if tokens > 1 else slots[-1]
        norms = (torch.rand(heads[2]), torch.rand(heads[2])) if self.has_norms else (None, None)
        rope = native.RopeWrite(positions, torch.randn(longest, heads[2] // 2), torch.randn(longest, heads[2] // 2),
                                slots, k_cache, v_cache, *norms)
        counts = torch.tensor(self.scheduled)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        requests = native.Requests(table, starts, torch.tensor(self.lengths), counts)
        return weights, rope, native.Attention(requests, 0.2, self.window, is_chunked=self.is_chunked)


def layer_in_parts(
    weights: native.LayerWeights, delta: Tensor | None, residual: Tensor, rope: native.RopeWrite,
    attention: native.Attention,
) -> Tensor:
    """The same layer, one native operation at a time."""
    input_norm, mlp_norm, gate_up, down = weights._owners
    dim, gelu = rope.k_cache.shape[3], weights.packed[-4] == 1
    if delta is None:
        x = ops.rms_norm(residual, input_norm, 1e-5)
    else:
        x = ops.add_rms_norm(delta, residual, input_norm, 1e-5)
    qkv = native.product(x, weights.qkv)
    ops.rope_write(qkv, *rope)
    q = qkv[:, : weights.out.inputs].view(qkv.shape[0], -1, dim)
    table, starts, lengths, live, _ = attention.requests._owners
    mixed = ops.paged_attention(q, rope.k_cache, rope.v_cache, table, starts, lengths, live, *attention[1:4],
                                is_chunked=attention.is_chunked)
    x = ops.add_rms_norm(native.product(mixed.flatten(1), weights.out), residual, mlp_norm, 1e-5)
    gated = ops.gelu_tanh_mul if gelu else ops.silu_mul
    return native.product(gated(native.product(x, gate_up)), down)


def whole_layer(
    weights: native.LayerWeights, delta: Tensor | None, residual: Tensor, rope: native.RopeWrite,
    attention: native.Attention,
) -> Tensor | None:
    norms = None if rope.q_norm is None or rope.k_norm is None else (rope.q_norm, rope.k_norm)
    _, scale, window, softcap, _, is_chunked = attention
    bound = native.BoundLayer.bind(weights, rope.k_cache, rope.v_cache, norms, rope.eps, scale=scale, window=window,
                                   is_chunked=is_chunked, softcap=softcap)
    step = native.LayerStep.build(attention.requests, rope.positions, rope.slots, rope.cos, rope.sin)
    assert bound is not None and step is not None
    return native.decoder_layer(bound, step, delta, residual)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        LayerCase([1], [200]),
        LayerCase([5], [40], has_bias=True),
        LayerCase([1, 3, 4], [33, 3, 150], has_norms=True),
        LayerCase([1, 2], [50, 70], window=30, gelu=True),
        LayerCase([1, 5], [50, 63], window=30, is_chunked=True),
        LayerCase([9, 21], [9, 140]),
        LayerCase([1, 2], [50, 70], inner=101),
        LayerCase([1, 2], [50, 70], inner=208, kind="Q4_1"),
        LayerCase([1, 2], [50, 70], inner=48, kind="Q5_0", bits=24),
        LayerCase([9, 21], [9, 140], inner=101, kind="Q8_0"),
    ],
)
def test_a_whole_layer_has_the_bits_of_its_parts(case: LayerCase, has_delta: bool, threads: int) -> None:
    if not native.available():
        pytest.skip(native.reason())
    weights, rope, attention = case.build()
    tokens = sum(case.scheduled)
    delta, residual = torch.randn(tokens, 96) if has_delta else None, torch.randn(tokens, 96)
    apart, own_cache = residual.clone(), (rope.k_cache.clone(), rope.v_cache.clone())
    own_rope = rope._replace(k_cache=own_cache[0], v_cache=own_cache[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want = layer_in_parts(weights, None if delta is None else delta.clone(), apart, own_rope, attention)
        got = whole_layer(weights, delta, residual, rope, attention)
    finally:
        torch.set_num_threads(before)
    assert got is not None
    assert torch.equal(got, want) and torch.equal(residual, apart)
    assert torch.equal(rope.k_cache, own_cache[0]) and torch.equal(rope.v_cache, own_cache[1])


def test_a_whole_layer_declines_what_it_does_not_take_and_does_nothing() -> None:
    if not native.available():
        pytest.skip(native.reason())
    weights, rope, attention = LayerCase([33], [33]).build()
    residual = torch.randn(33, 96)
    assert whole_layer(weights, None, residual, rope, attention) is None, "more rows than native products take"
    weights, rope, attention = LayerCase([2], [20]).build()
    wide = torch.randn(2, 160)
    kept = wide.clone()
    assert whole_layer(weights, None, wide[:, ::2], rope, attention) is None
    assert whole_layer(weights, None, wide[:, :96], rope, attention) is None
    assert torch.equal(wide, kept)


def test_a_step_that_took_one_tensor_still_declines_another() -> None:
    if not native.available():
        pytest.skip(native.reason())
    weights, rope, attention = LayerCase([2], [20]).build()
    bound = native.BoundLayer.bind(weights, rope.k_cache, rope.v_cache, scale=0.2)
    step = native.LayerStep.build(attention.requests, rope.positions, rope.slots, rope.cos, rope.sin)
    assert bound is not None and step is not None
    residual, wide = torch.randn(2, 96), torch.randn(2, 160)
    delta = native.decoder_layer(bound, step, None, residual)
    assert delta is not None and native.decoder_layer(bound, step, delta, residual) is delta
    assert native.decoder_layer(bound, step, delta, wide[:, :96]) is None
    assert native.decoder_layer(bound, step, wide[:, :96], residual) is None
    assert native.decoder_layer(bound, step, delta, torch.randn(3, 96)) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_whole_layer_refuses_bad_slots_and_tables(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads leave it together, and the next call finds them."""
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weights, rope, attention = LayerCase([2], [20]).build()
    table, *counts = attention.requests._owners
    residual = torch.randn(2, 96)
    with pytest.raises(IndexError, match="1 token rows have a position or slot outside"):
        whole_layer(weights, None, residual, rope._replace(slots=torch.tensor([1024, -1])), attention)
    with pytest.raises(IndexError, match="page table is too short"):
        short = native.Requests(table[:, :1], *counts)
        whole_layer(weights, None, residual, rope, attention._replace(requests=short))
    with pytest.raises(AssertionError, match="differ"):
        native.Requests(table, counts[0], counts[1], torch.ones(2, dtype=torch.int64))


def test_loading_compares_the_structures_with_c(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip(native.reason())
    narrow = structures.Structure("Cache", **dict.fromkeys(structures.CACHE.kinds, structures.INT32))
    monkeypatch.setattr(native_build, "STRUCTURES", (structures.MATRIX, narrow))
    native_build.load.cache_clear()
    with pytest.raises(structures.LayoutError, match="Cache has size"):
        native.available()
    monkeypatch.undo()
    look_again()


@pytest.mark.parametrize("structure", structures.STRUCTURES, ids=lambda structure: structure.name)
def test_fields_in_another_order_are_noticed(structure: structures.Structure, tmp_path: Path) -> None:
    if not native.available():
        pytest.skip(native.reason())
    structure.check(library())
    first, second, *rest = structure.kinds
    kinds = {name: structure.kinds[name] for name in (second, first, *rest)}
    wrong = structures.Structure(structure.name, **kinds)
    source = f'#include <stddef.h>\n#include "sampling.h"\n{wrong.layout_source()}'
    subprocess.run([*native_build._compiler(), "-shared", "-fPIC", f"-I{native_build.HERE}", "-x", "c", "-", "-o",
                    str(tmp_path / "layout.so")], input=source, text=True, check=True)
    with pytest.raises(structures.LayoutError, match=structure.name):
        wrong.check(ctypes.CDLL(str(tmp_path / "layout.so")))


def test_a_structure_is_packed_by_names() -> None:
    pair = structures.Structure("Pair", flag=structures.INT32, value=structures.INT64)
    assert pair.offsets == [0, 8] and pair.size == 16
    assert pair.pack(value=2, flag=1) == struct.pack("@iq", 1, 2)
    both = structures.Structure("Both", small=structures.INT32, first=pair, last=structures.FLOAT)
    assert both.offsets == [0, 8, 24] and both.size == 32
    with pytest.raises(AssertionError, match="value"):
        pair.pack(flag=1)
    with pytest.raises(KeyError):
        pair.pack(flag=1, worth=2)


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("dim", [8, 16, 32, 64])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_token_that_is_not_finite_touches_only_who_sees_it(kind: str, dim: int, part: str) -> None:
    """The third of four tokens that are computed together: 0 x NaN is NaN, so its values must not be weighed at all."""
    heads, kv_heads, starts = 4, 2, {"q": 0, "k": 4, "v": 6}
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(0))
    qkv[2, starts[part] * dim + 1] = torch.inf if part == "v" else torch.nan
    caches = [torch.zeros(3, 16, kv_heads, dim) for _ in range(2)]
    lens = [torch.tensor([0, 4]), torch.tensor([4]), torch.tensor([4])]
    with ops.using(kind):
        ops.rope_write(qkv, torch.arange(4), torch.ones(8, dim // 2), torch.zeros(8, dim // 2), torch.arange(16, 20),
                       *caches, None, None, 1e-6, dim)
        q = qkv[:, : heads * dim].view(4, heads, dim)
        out = ops.paged_attention(q, *caches, torch.tensor([[1, 2]], dtype=torch.int32), *lens, 0.3, 0, 0.0, None)
    is_finite = [bool(row.isfinite().all()) for row in out]
    assert is_finite == [True, True, False, part == "q"], "nobody before it, and whoever sees it"
