"""The sampler's kernels compile for an H200 that is not there: the interpreter takes what the compiler may refuse.

Triton decides when it is imported whether it interprets, so the compiler runs in a process of its own: this file as a
script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

KERNELS = {"_edit_kernel", "_bound_kernel", "_score_filtered_kernel", "_pick_filtered_kernel", "_weigh_kernel",
           "_settle_kernel", "_tiles_kernel", "_count_kernel", "_report_kernel"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert script.returncode == 0, script.stdout + script.stderr
    compiled: dict[str, int] = json.loads(script.stdout.splitlines()[-1])
    assert set(compiled) == KERNELS
    widely = {"_edit_kernel", "_score_filtered_kernel", "_weigh_kernel", "_settle_kernel", "_tiles_kernel",
              "_count_kernel"}
    assert all(compiled[name] > 0 for name in widely), "logits are read four at a time"


class Card:
    """What the compiler asks of one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_sampler() -> dict[str, int]:
    """The vector loads in the code of each kernel."""
    from triton.runtime import driver

    from outrider.core import Limits
    from outrider.core.params import SamplingParams
    from outrider.kernels import ops
    from outrider.kernels.gpu.launch import triton_kernel as launch
    from outrider.kernels.gpu.sampling import filtered_draw
    from outrider.sample import StepNeeds, sampler
    from tests.unit.test_sample_reference import Case, make_batch

    driver.set_active(Card())  # type: ignore[arg-type]
    found: dict[str, int] = {}

    def compile_one(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernel = function.run(*args, grid=(1,), warmup=True, **options)
        name = function.fn.__name__
        found[name] = max(found.get(name, 0), kernel.asm["ptx"].count("v4.b32"))

    limits = Limits(max_requests=2, max_batched_tokens=8, max_len=8, max_drafts=2, vocab_size=4096)
    logits = torch.zeros(2, limits.vocab_size).numpy()
    batch = make_batch([Case(SamplingParams(presence_penalty=1.0), (1, 2), 1, (3,), logits, max_len=8)], limits=limits)
    needs, modes = StepNeeds.everything(5), ("raw", "processed")
    with launch.collecting(compile_one), ops.using("triton", sampler.sample_chunk):
        for mode, many_rows in zip(modes, (1, 16), strict=True):  # both kinds of rounds
            filtered_draw._MANY_ROWS = many_rows
            sampler.sample(batch.logits, batch.logit_rows, batch.rows, batch.history, needs, batch.extras,
                           logprobs=mode)  # type: ignore[arg-type]
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    print(json.dumps(compile_sampler()))
