"""Memory of recurrent hybrids: a request's row grows with the number of drafts by their inputs and by nothing else, the
start-up report says so, and what is allocated is what was planned.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from outrider.cache.groups import plan_groups
from outrider.cache.kinds import CHECKPOINT_INTERVAL
from outrider.config import EngineConfig
from outrider.core import Axis
from outrider.engine.assembly import engine_around
from outrider.models.registry import build_model
from outrider.runner.memory import plan_memory
from outrider.runner.worker import Worker
from tests.drafters.hybrid_rig import FAMILIES, hybrid_of, mtp_of
from tests.engine.harness import CPU, SETTINGS

MOST = 7
ID_BYTES = 8
# As large as a published one in what a row keeps, with few layers.
LARGE: dict[str, Any] = FAMILIES["nemotron_h"] | {
    "hidden_size": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
}


def tensor_bytes(holder: object) -> int:
    """The bytes of every tensor that an object holds, directly, in lists or in its parts."""
    if isinstance(holder, torch.Tensor):
        return holder.numel() * holder.element_size()
    if isinstance(holder, (list, tuple)):
        return sum(tensor_bytes(part) for part in holder)
    if type(holder).__module__.startswith("outrider") and hasattr(holder, "__dict__"):
        return sum(tensor_bytes(part) for part in vars(holder).values())
    return 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_grows_with_the_drafts_by_their_inputs_alone(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid_of(family)
    inputs = sum(mixer.spec.input_bytes for mixer in model.recurrent_layers.values())
    planned, rows_of_state, pools = [], [], set()
    for k in range(MOST + 1):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="outrider"):
            config = EngineConfig("tiny", **SETTINGS)
            worker = Worker(config, model, drafter=mtp_of(model, k) if k else None)
            engine = engine_around(config, worker)
        assert f"for {k} drafts" in caplog.text
        step = worker.device_step
        cache, num_rows = engine.scheduler.cache, engine.limits.extent(Axis.ROWS)
        capacity = cache.layout.recurrent.capacity(engine.limits)
        assert engine.limits.max_drafts == k and capacity.window_bytes == k * inputs
        assert step.recurrent.num_bytes == num_rows * capacity.row_bytes, "what is there is what was planned"
        assert step.pool.num_bytes == SETTINGS["num_pages"] * cache.layout.page_bytes
        planned.append(capacity.row_bytes - k * inputs)
        rows_of_state.append(tensor_bytes(step.state) - num_rows * k * ID_BYTES)  # the drafts' ids
        pools.add((capacity.checkpoint_pages * cache.layout.page_bytes >= cache.layout.recurrent.checkpoint_bytes,
                   capacity.max_checkpoints))
        engine.close()
    assert len(set(planned)) == len(set(rows_of_state)) == 1
    assert planned[0] == cache.layout.recurrent.checkpoint_bytes, "without drafts: state and tail, as in a checkpoint"
    assert len(pools) == 1 and pools.pop()[0], "checkpoints know nothing of drafts"


def test_the_interval_of_checkpoints_is_a_setting() -> None:
    for given, kept in ((16, 16), (50, 48), (1024, 1024)):
        worker = Worker(EngineConfig("tiny", **SETTINGS, checkpoint_interval=given), hybrid_of("qwen3_5"))
        assert worker.info.layout.recurrent.interval == kept, "whole pages"
        worker.close()
    assert EngineConfig("tiny").checkpoint_interval == CHECKPOINT_INTERVAL


def test_the_report_of_a_large_model() -> None:
    """In figures: the row's size, and what of it the drafts take."""
    model = build_model(LARGE, dtype=torch.bfloat16, device="meta")
    layout = plan_groups(model.cache_layers())
    config = EngineConfig("large", max_num_seqs=64, num_pages=1000)
    inputs = sum(spec.input_bytes for _, spec in layout.recurrent.layers)
    for k in range(MOST + 1):
        limits = config.limits(gpu_bytes=None, max_positions=model.max_positions, vocab_size=model.vocab_size,
                               max_drafts=k)
        report = plan_memory(config, layout, limits, CPU, weight_bytes=0).report()
        found = re.search(r"(\d+) rows of (\d+) KiB, of which (\d+) for (\d+) drafts; (\d+) pages a checkpoint", report)
        assert found is not None, report
        rows, row, window, drafts, pages = map(int, found.groups())
        state = layout.recurrent.checkpoint_bytes
        assert (rows, drafts, pages) == (65, k, -(-state // layout.page_bytes))
        assert row == round((state + k * inputs) / 1024) and window == round(k * inputs / 1024)
        assert state > 4 << 20 and k * inputs < state / 20
