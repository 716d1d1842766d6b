"""Prefill attention on a card that works for other processes as well, and stops this one's programs for them.

What is stopped and resumed must go on as if nothing had happened: docs/decisions.md has the illegal access that showed
otherwise ("Every barrier that a kernel makes is used"). An illegal access leaves a process without its card, so that
all of this happens in others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import HAS_CARD

pytestmark = pytest.mark.skipif(not HAS_CARD, reason="needs a card")
pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu.attention.prefill import choose_prefill, device_query_tiles, prefill_attention
from tests.kernels.test_triton_attention import assert_close, make_batch

NUM_OTHERS, SECONDS, MOST_SECONDS = 3, 4.0, 120.0
HEADS, KV_HEADS, DIM = 32, 8, 128
ROOT = Path(__file__).resolve().parents[2]


def test_results_stay_the_same() -> None:
    others = [start("work") for _ in range(NUM_OTHERS)]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline() == "working\n"
        attends = start("attend")
        said, _ = attends.communicate(timeout=MOST_SECONDS)
        assert attends.returncode == 0, said
        launches, differing = map(int, said.split()[-2:])
        assert launches > 100 and differing == 0, said
    finally:
        for other in others:
            other.kill()
            other.wait()


def start(role: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "tests.gpu.test_stopped", role], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def work() -> None:
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        print("working", flush=True)


def attend() -> tuple[int, int]:
    """(launches, those whose result was another)"""
    device = torch.device("cuda")
    lengths = [3 + index * 61 % 394 for index in range(64)]
    batch = make_batch(device, torch.bfloat16, [(n, n, n) for n in lengths], heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
    tiles = device_query_tiles(batch.query_starts, sum(lengths), 0, HEADS, KV_HEADS, DIM,
                               config=choose_prefill(HEADS, batch.k_cache))
    scale = DIM**-0.5
    first = prefill_attention(*batch.args, tiles, scale=scale)
    assert_close(first, reference.paged_attention(*batch.args, scale, 0, 0.0))
    launches = differing = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        results = [prefill_attention(*batch.args, tiles, scale=scale) for _ in range(20)]
        differing += sum(not torch.equal(result, first) for result in results)
        launches += len(results)
    return launches, differing


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work()
    else:
        print(*attend())
