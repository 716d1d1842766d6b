"""Memory of a device: the largest step, what is set aside for it, and errors that say which setting to change."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from outrider.cache.groups import plan_groups
from outrider.config import EngineConfig
from outrider.core import Admission, Limits, SamplingParams, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.runner.graphs.cuda_runner import CudaRunner
from outrider.runner.graphs.warm_up import graph_bytes, largest_step, run_dead, run_kinds
from outrider.runner.memory import StepMemory, enough_memory, plan_memory
from outrider.sample.extras import StepNeeds
from tests.engine.harness import Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS

MIB, GIB = 1 << 20, 1 << 30
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")


@pytest.mark.parametrize(("requests", "tokens", "length", "drafts"), [
    (256, 8192, 4096, 3), (4, 64, 96, 3), (8, 4096, 100, 0), (5, 7, 50, 3), (3, 2, 50, 4), (2, 512, 3, 5),
])
def test_the_largest_step_is_as_large_as_limits_allow(requests: int, tokens: int, length: int, drafts: int) -> None:
    limits = Limits(requests, tokens, length, drafts, vocab_size=100)
    lens, checked = largest_step(limits)
    assert 1 <= len(lens) <= requests and sum(lens) <= tokens and max(lens) <= length
    assert sum(lens) == min(tokens, len(lens) * length), "no room is left"
    assert checked <= drafts and min(lens) >= 1 + checked


@pytest.mark.parametrize("family", ["gemma3", "mamba2"])
def test_dead_steps_change_nothing(family: str) -> None:
    model = random_model(HYBRIDS[family], torch.float32, 3) if family in HYBRIDS else tiny_model(family, torch.float32)
    with Rig(model, speculative_config=NGRAM, poison=False) as rig:
        state, limits = rig.step.state, rig.engine.limits
        asks = [Ask(prompt_of(1, 20), greedy(8))]
        before = tokens_of(rig.run(asks))
        rows = [t[1:] for own in rig.step.recurrent.layers.values() for t in (own.state, own.tail, own.conv_in)]
        kept = [t.clone() for t in (*state.page_tables, state.known, state.tokens, rig.step.pool.data, *rows)]
        lens, drafts = largest_step(limits)
        needs = StepNeeds(any_sampled=True, any_top_p=True, any_top_p_alone=True)
        run_dead(rig.step, lens, drafts=drafts, num_wanted=3, bound=limits.max_len, needs=needs)
        with mock.patch.object(rig.step, "whole", wraps=rig.step.whole) as whole:
            run_kinds(rig.step, limits)
        assert whole.call_count > 10
        after = (*state.page_tables, state.known, state.tokens, rig.step.pool.data, *rows)
        assert all(torch.equal(one, two) for one, two in zip(kept, after, strict=True))
        assert tokens_of(rig.run(asks)) == before


def plan(
    monkeypatch: pytest.MonkeyPatch, free: int, step: StepMemory, *, max_requests: int = 1 << 20, **settings: Any
) -> Any:
    """For a card of 10 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * GIB))
    model = tiny_model("llama")
    limits = Limits(max_requests=max_requests, max_batched_tokens=64, max_len=4096, max_drafts=0, vocab_size=256)
    return plan_memory(EngineConfig("tiny", **settings), plan_groups(model.cache_layers()), limits,
                       torch.device("cuda"), weight_bytes=3 * GIB, step=step)


def test_steps_and_graphs_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = plan(monkeypatch, 8 * GIB, StepMemory())
    step = StepMemory(activation_bytes=GIB, state_bytes=300 * MIB, graph_bytes=200 * MIB)
    made = plan(monkeypatch, 8 * GIB, step)
    assert (bare.num_pages - made.num_pages) * made.page_bytes == pytest.approx(step.total, abs=2 * made.page_bytes)
    assert bare.num_pages * bare.page_bytes == pytest.approx(7 * GIB, rel=1e-3)
    assert "steps 1024 MiB, their graphs about 200 MiB, rows 300 MiB" in made.report()


@dataclass(frozen=True)
class _Masks(RequestPart):
    masks_tokens = True


def test_what_later_requests_allocate_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts for penalties and masks of grammars are allocated when the first request asks for them."""
    bare = plan(monkeypatch, 8 * GIB, StepMemory())
    made = plan(monkeypatch, 8 * GIB, StepMemory(later_bytes=600 * MIB))
    assert (bare.num_pages - made.num_pages) * made.page_bytes == pytest.approx(600 * MIB, abs=2 * made.page_bytes)
    with Rig(tiny_model("llama"), poison=False) as rig:
        sampling = rig.step.state.sampling
        assert sampling.counts.packed is None and sampling.masks.words is None
        planned = sampling.later_bytes
        asked = CheckedRequest((3,), SamplingParams(presence_penalty=0.5, seed=1), parts=(_Masks(),))
        rig.step.state.admit([Admission(1, asked, computed=0, max_len=4)])
        assert sampling.counts.packed is not None and sampling.masks.words is not None
        assert planned == sampling.counts.packed.nbytes + sampling.masks.words.nbytes > 0
        rig.step.reset()


def test_a_report_on_a_prompt_makes_no_more_logits_at_once_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tiny_model("llama"), max_num_seqs=20, poison=False) as rig:
        heights: list[int] = []
        logits = rig.step.model.logits
        monkeypatch.setattr(rig.step.model, "logits", lambda hidden, context: (
            heights.append(len(hidden)), logits(hidden, context))[1])
        (output,) = rig.run([Ask(prompt_of(1, 50), SamplingParams(max_tokens=1, prompt_logprobs=1))])
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 50
        assert max(heights) == 20 and sum(heights) >= 50


def test_beginnings_of_ended_prompts_get_memory_that_was_given_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    most = plan(monkeypatch, 8 * GIB, StepMemory(), max_requests=2)
    assert most.num_pages * most.page_bytes < GIB
    given = plan(monkeypatch, 8 * GIB, StepMemory(), max_requests=2, kv_cache_memory_bytes=2 * GIB)
    assert given.num_pages * given.page_bytes == pytest.approx(2 * GIB, rel=1e-3)
    unused = plan(monkeypatch, 8 * GIB, StepMemory(), max_requests=2, kv_cache_memory_bytes=2 * GIB,
                  enable_prefix_caching=False)
    assert unused.num_pages == most.num_pages


def test_no_room_says_what_takes_it_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepMemory(activation_bytes=2 * GIB)
    with pytest.raises(ValueError, match="gpu_memory_utilization=0.5 allows 5120, .*3072, .*2048, and 1024 are miss"):
        plan(monkeypatch, 6 * GIB, step, gpu_memory_utilization=0.5)
    with pytest.raises(ValueError, match="lower max_num_batched_tokens or max_num_seqs"):
        plan(monkeypatch, GIB, step)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes=10 is less than one page"):
        plan(monkeypatch, 8 * GIB, step, kv_cache_memory_bytes=10)
    with pytest.raises(ValueError, match="no memory for the cache: lower num_pages .CUDA out of memory."):
        with enough_memory("the cache", "lower num_pages"):
            raise OUT_OF_MEMORY


def test_graphs_take_no_more_than_the_largest_step_and_their_nodes() -> None:
    limits = Limits(max_requests=64, max_batched_tokens=8192, max_len=4096, max_drafts=3, vocab_size=1000)
    small, large = (graph_bytes(limits, n * MIB, has_prompts=False) for n in (64, 6400))
    assert small < large < 6400 * MIB * 256 / 8192 + 200 * MIB
    assert 6400 * MIB < graph_bytes(limits, 6400 * MIB, has_prompts=True) < 7000 * MIB


class _SameThread(CudaRunner):
    """A CudaRunner whose queueing is done by another runner, so that it needs no card."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.device_step, Limits(1, 1, 1, 0, 1), use_graphs=False)
        self._inner = inner
        self.error: Exception | None = None

    def _queue(self, batch: ScheduledBatch) -> Future[StepResult]:
        if self.error is not None:
            raise self.error
        return self._inner.submit(batch)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("something else")], ids=["memory", "other"])
def test_a_step_that_cannot_be_queued_ends_its_requests_and_not_the_engine(error: Exception) -> None:
    with Rig(tiny_model("llama"), poison=False) as rig:
        asks = [Ask(prompt_of(1, 20), greedy(6)), Ask(prompt_of(2, 9), greedy(6))]
        expected = tokens_of(rig.run(asks))
        runner = rig.engine.worker.runner = _SameThread(rig.runner)
        runner.error = error
        for output in rig.run(asks):
            message = output.outputs[0].error or ""
            settings = ("max_num_batched_tokens", "gpu_memory_utilization", "max_num_seqs")
            assert all(name in message for name in settings) == (error is OUT_OF_MEMORY)
            assert output.outputs[0].finish_reason == "error" and "a step failed" in message
        runner.error = None
        assert tokens_of(rig.run(asks)) == expected


RESIDENT = """
import torch
from outrider.kernels.buffers import lazy_zeros

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

before = resident()
pool = lazy_zeros(1 << 12, 1 << 16, dtype=torch.float32, device=torch.device("cpu"))  # 1 GiB
unused = resident() - before
pool[:64] = 1
assert float(pool[64:70].sum()) == 0
print(unused, resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_pool_takes_memory_on_the_cpu_only_where_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    unused, used = map(int, done.stdout.split())
    assert unused < 8 << 10 and 16 << 10 <= used < 64 << 10  # KiB


def test_a_pool_that_shortens_the_longest_request_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="outrider"), \
            Rig(tiny_model("llama"), num_pages=5, max_model_len=None) as rig:
        limits = rig.engine.limits
    assert f"max_model_len is lowered to that from the model's {tiny_model('llama').max_positions}" in caplog.text
    assert limits.max_len < 128 and limits.max_list_ints == 1 << 20
