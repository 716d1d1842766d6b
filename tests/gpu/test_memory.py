"""Memory of the card: what the plan says, settings that cannot work, and a step that runs out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core import ScheduledBatch
from outrider.runner.memory import StepMemory
from tests.engine.harness import Ask, greedy, prompt_of
from tests.gpu.rig import DEVICE, GpuRig, loaded
from tests.gpu.test_engines import folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.together("memory")]
AUTO: dict[str, Any] = {"num_pages": None}


def test_the_plan_leaves_room_for_steps() -> None:
    """Measured before the pool is made, and enough: the largest step then takes no more than was set aside."""
    model = loaded(folder_of("llama"))
    with GpuRig(model, poison=False, max_num_batched_tokens=256, **AUTO) as rig:
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        asked = [Ask(prompt_of(i, 100), greedy(4)) for i in range(8)]
        assert not any(output.outputs[0].error for output in rig.run(asked))
        assert torch.cuda.max_memory_allocated(DEVICE) - before < 64 << 20
        assert rig.step.pool.data.shape[0] > 8


def test_too_little_memory_says_which_setting_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(folder_of("llama"))
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="gpu_memory_utilization") as caught:
        patched.setattr("outrider.runner.graphs.measure_step_memory", lambda *args, **options: StepMemory(1 << 44, 0))
        GpuRig(model, **AUTO)
    assert "max_num_batched_tokens" in str(caught.value) and "missing" in str(caught.value)
    with pytest.raises(ValueError, match="is less than one page"):
        GpuRig(model, kv_cache_memory_bytes=100, **AUTO)


def test_too_much_memory_says_which_setting_to_lower() -> None:
    model = loaded(folder_of("llama"))
    with pytest.raises(ValueError, match="no memory for the cache: lower gpu_memory_utilization, num_pages"):
        GpuRig(model, num_pages=1 << 30)


def test_a_step_without_memory_ends_its_requests_and_no_others() -> None:
    model = loaded(folder_of("llama"))
    with GpuRig(model, poison=False) as rig:
        expected = rig.run([Ask(prompt_of(1, 20), greedy(6))])[0].outputs[0].token_ids
        queue = rig.runner._queue

        def greedy_for_memory(batch: ScheduledBatch) -> Any:
            torch.empty(1 << 44, dtype=torch.uint8, device=DEVICE)
            return queue(batch)

        rig.runner._queue = greedy_for_memory
        (failed,) = rig.run([Ask(prompt_of(2, 20), greedy(6))])
        for setting in ("max_num_batched_tokens", "gpu_memory_utilization", "max_num_seqs"):
            assert setting in (failed.outputs[0].error or "")
        rig.runner._queue = queue
        assert rig.run([Ask(prompt_of(1, 20), greedy(6))])[0].outputs[0].token_ids == expected
