"""The memory that a rank takes while it loads: its share of the weights, and one tensor of the files at a time."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.formats import RankGroup
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from tests.engine.harness import CONFIGS, save_folder
from tests.ranks.families import weight_bytes
from tests.ranks.pool import RankPool

STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not STATM.exists(), reason="needs Linux's account of a process's memory")
MIB = 1 << 20
NOISE = 6 * MIB  # objects of Python, and memory that the allocator keeps
# 70 to 80 MiB in float32, in tensors of 4 MiB at most.
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
         "vocab_size": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"] | SIZES | {"intermediate_size": 2048},
    "experts": CONFIGS["llama"] | SIZES | {
        "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
        "head_dim": 64,
    },
}


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's: weights are read from files that are mapped."""
    _, resident, shared, *_ = map(int, STATM.read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched_peak() -> Iterator[list[int]]:
    """The list gets the bytes by which this process grew within, at most."""
    gc.collect()
    before, peaks, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0005):
            peaks[0] = max(peaks[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peaks
    peaks[0] = max(peaks[0], anonymous_bytes() - before)
    is_over.set()
    thread.join()


def load_part(group: RankGroup | None, folder: Path) -> tuple[int, int, int]:
    """(bytes of the weights that the rank holds, of the largest tensor in the files, that loading took at most)"""
    with watched_peak() as peaks:
        model = load_model(resolve(folder), dtype=torch.float32, device="cpu", group=group)
    largest = max(4 * int(torch.Size(slot.shape).numel()) for slot in model.weights().values())
    return sum(weight_bytes(model).values()), largest, peaks[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_takes_the_memory_of_a_ranks_share(ranks: RankPool, tmp_path: Path, family: str) -> None:
    folder = save_folder(tmp_path / family, FAMILIES[family])
    (whole, largest, peak), _ = ranks.run(2, load_alone, folder)
    assert whole > 60 * MIB and whole <= peak + NOISE, "the watch sees what is loaded"
    for count in (2, 4):
        for held, _, peak in ranks.run(count, load_part, folder):
            assert held < 1.1 * whole / count
            assert peak < held + 2 * largest + NOISE < whole, (count, held, peak)


def load_alone(_: RankGroup, folder: Path) -> tuple[int, int, int]:
    return load_part(None, folder)
