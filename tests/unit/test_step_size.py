"""Steps for which the device has no memory are scheduled again in smaller ones, and no request ends for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, ScheduledBatch
from outrider.core.input_part import InputPart
from outrider.runner.batch import PackedBatch
from outrider.runner.interface import StepOutOfMemory
from outrider.runner.memory import naming_lack_of_memory
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.sched.step_size import FIRST_WAIT, LEAST_TOKENS, StepSize
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS
from tests.engine.recurrent_rig import hybrid as hybrid_of
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request

LIMITS = Limits(max_requests=64, max_batched_tokens=512, max_len=256, max_drafts=0, vocab_size=100)
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes.")
ASKS = [Ask(prompt_of(i, 20 + 3 * i), greedy(6)) for i in range(8)]


def test_a_size_halves_and_grows_back() -> None:
    size = StepSize(LIMITS)
    assert size.is_whole and size.shrink(48, 400)
    assert (size.requests, size.tokens) == (24, 200) and not size.is_whole
    assert size.shrink(24, 200) and (size.requests, size.tokens) == (12, 100)
    for _ in range(2 * FIRST_WAIT - 1):
        size.pass_step()
    assert size.requests == 12, "it waits for longer after a second failure"
    size.pass_step()
    assert (size.requests, size.tokens) == (24, 200)
    for _ in range(10 * FIRST_WAIT):
        size.pass_step()
    assert size.is_whole


def test_a_size_has_a_least() -> None:
    size = StepSize(LIMITS)
    while size.shrink(size.requests, size.tokens):
        assert size.tokens >= size.requests >= 1
    assert (size.requests, size.tokens) == (1, LEAST_TOKENS)
    assert not size.shrink(1, 3)


class Uncut(InputPart):
    """A prompt whose first tokens must be computed in one step."""

    def __init__(self, end: int) -> None:
        self.end = end

    def last_cut(self, position: int) -> int:
        return 0 if position < self.end else position

    def next_cut(self, position: int) -> int:
        return self.end if 0 < position < self.end else position


def test_a_prompt_that_no_smaller_step_can_hold_waits_for_a_larger_one() -> None:
    """No step passes meanwhile, after which the size would grow by itself."""
    cache = CacheManager(make_layout((4, 0)), PagePool(500), LIMITS)
    sched = Scheduler(cache, LIMITS)
    sched.add(Request(0, made_request(range(90)), 100))
    assert sched.schedule() is not None
    sched.end(0, Finish.ABORT)
    sched.recover("no memory", lacked_memory=True)
    sched.add(Request(1, made_request(range(80), parts=(Uncut(80),)), 90))
    batch = next(filter(None, (sched.schedule() for _ in range(8))))
    assert batch.num_known == [80]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("none"), HOST])
def test_a_failed_allocation_has_one_name(error: Exception) -> None:
    with pytest.raises(StepOutOfMemory, match="lower max_num_batched_tokens"), naming_lack_of_memory():
        raise error
    with pytest.raises(RuntimeError, match="something else"), naming_lack_of_memory():
        raise RuntimeError("something else")


def model_of(family: str) -> Any:
    return hybrid_of(family) if family in HYBRIDS else tiny_model(family)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize(("most_requests", "most_tokens"), [(3, 40), (1, 17), (8, 24), (2, 200)])
def test_requests_go_on_when_others_take_memory(family: str, most_requests: int, most_tokens: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.sched.step_size.MOST_WAIT", 8)
    model = model_of(family)
    with Rig(model, max_num_seqs=8, max_num_batched_tokens=128) as rig:
        expected = tokens_of(rig.run(ASKS))
    with Rig(model, max_num_seqs=8, max_num_batched_tokens=128) as rig:
        run, failed, passed = rig.step.run, list[int](), list[int]()

        def run_if_small(batch: ScheduledBatch, packed: PackedBatch) -> Any:
            if batch.num_requests > most_requests or batch.num_tokens > most_tokens:
                failed.append(batch.num_tokens)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            passed.append(batch.num_tokens)
            return run(batch, packed)

        monkeypatch.setattr(rig.step, "run", run_if_small)
        assert tokens_of(rig.run(ASKS)) == expected
        assert failed and passed and len(failed) < 20
        monkeypatch.setattr(rig.step, "run", run)
        for _ in range(4):
            assert tokens_of(rig.run(ASKS)) == expected
        assert rig.engine.scheduler._size.is_whole, "with the memory the steps are as large as before"
        rig.engine.scheduler.check_integrity()


def test_a_request_that_no_step_has_memory_for_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tiny_model("llama"), max_num_seqs=8, max_num_batched_tokens=128) as rig:
        expected = tokens_of(rig.run(ASKS))
        run = rig.step.run

        culprits: list[int] = []

        def run_unless_named(batch: ScheduledBatch, packed: PackedBatch) -> Any:
            culprits[:] = culprits or [batch.request_ids[2]]
            if culprits[0] in batch.request_ids:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return run(batch, packed)

        monkeypatch.setattr(rig.step, "run", run_unless_named)
        outputs = rig.run(ASKS)
        errors = [i for i, output in enumerate(outputs) if output.outputs[0].error is not None]
        assert len(errors) == 1 and "max_num_seqs" in (outputs[errors[0]].outputs[0].error or "")
        others = [i for i in range(len(ASKS)) if i not in errors]
        assert tokens_of([outputs[i] for i in others]) == [expected[i] for i in others]
