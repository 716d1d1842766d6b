"""What a caller sees when one request goes wrong: an answer for that one, and the right tokens for everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import decoders

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.core import Admission, ScheduledBatch
from outrider.engine.text import TokenizerError
from outrider.engine.worker_line import EngineError
from tests.engine.harness import Ask, Rig, byte_tokenizer, greedy, prompt_of, tiny_model, tokens_of

CURSED = 77
PROMPTS = [prompt_of(1, 34), [*prompt_of(2, 12), CURSED, 5], prompt_of(3, 9), [*prompt_of(1, 34)[:32], 8]]


@pytest.fixture
def rig() -> Any:
    with Rig(tiny_model("llama"), tokenizer=byte_tokenizer()) as rig:
        yield rig


def fail_admission_of(rig: Rig, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """The device refuses rows with this token, as it would integers that it cannot hold."""
    admit = rig.step.state.sampling.admit

    def refuse(admissions: list[Admission]) -> None:
        if any(token in admission.token_ids for admission in admissions):
            raise OverflowError("int too large")
        admit(admissions)

    monkeypatch.setattr(rig.step.state.sampling, "admit", refuse)


def test_a_failed_admission_spoils_no_cached_prefix(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row had an owner before, whose pages are a cached prefix now; the step after it was queued already."""
    asks = [Ask(prompt, greedy(8)) for prompt in (PROMPTS[0], PROMPTS[1])]
    expected = tokens_of(rig.run(asks[:1]))
    with monkeypatch.context() as patch:
        fail_admission_of(rig, patch, CURSED)
        (failed,) = rig.run(asks[1:])
    assert "int too large" in (failed.outputs[0].error or "")
    again = rig.run(asks[:1])
    assert tokens_of(again) == expected and again[0].metrics.num_cached_tokens == 32


def test_one_of_four_makes_every_step_fail(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask(prompt, greedy(8)) for prompt in PROMPTS]
    expected = tokens_of(rig.run(asks))
    forward = rig.step.forward

    def fails(view: Any, *others: Any) -> Any:
        if bool((view.token_ids == CURSED).any()):
            raise IndexError("no such row")
        return forward(view, *others)

    with monkeypatch.context() as patch:
        patch.setattr(rig.step, "forward", fails)
        patch.setattr(rig.scheduler.cache, "enable_prefix_caching", False)
        outputs = rig.run(asks)
    assert [output.outputs[0].error is not None for output in outputs] == [False, True, False, False]
    assert "no such row" in (outputs[1].outputs[0].error or "")
    others = [expected[i] for i in (0, 2, 3)]
    assert tokens_of([outputs[i] for i in (0, 2, 3)]) == others
    assert tokens_of(rig.run(asks)) == expected


def test_a_step_that_is_too_large_is_cut(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for three requests, and four want to run: all are served, in smaller steps."""
    asks = [Ask(prompt, greedy(24)) for prompt in PROMPTS]
    expected = tokens_of(rig.run(asks))
    poison = rig.runner._before_step
    assert poison is not None

    def too_large(batch: ScheduledBatch) -> None:
        if batch.num_requests > 3:
            raise MemoryError("out of memory")
        poison(batch)

    monkeypatch.setattr(rig.runner, "_before_step", too_large)
    assert tokens_of(rig.run(asks)) == expected
    assert rig.scheduler.generation > 0


def test_a_batch_that_never_reaches_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask(prompt, greedy(8)) for prompt in PROMPTS]
    expected = tokens_of(rig.run(asks))
    submit, calls = rig.runner.submit, iter(range(10**6))

    def fails(batch: ScheduledBatch) -> Any:
        if next(calls) % 5 == 3:
            raise TypeError("cannot be pickled")
        return submit(batch)

    monkeypatch.setattr(rig.engine.runner, "submit", fails)
    assert tokens_of(rig.run(asks)) == expected
    assert rig.scheduler.generation > 0


@pytest.mark.parametrize("when", [0, 1, 4])
def test_an_interrupt_between_scheduling_and_submitting(rig: Rig, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    llm = LLM.around(rig.engine)
    expected = tokens_of(llm.generate([list(prompt) for prompt in PROMPTS], greedy(8)))
    submit, calls = rig.runner.submit, iter(range(10**6))

    def interrupted(batch: ScheduledBatch) -> Any:
        if next(calls) == when:
            raise KeyboardInterrupt
        return submit(batch)

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.runner, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([list(prompt) for prompt in PROMPTS], greedy(8))
    assert not rig.engine.has_work and rig.engine.scheduler.cache.usage() == 0
    rig.runner._before_step = None  # the rig knows only the first scheduler
    assert tokens_of(llm.generate([list(prompt) for prompt in PROMPTS], greedy(8))) == expected


# Adding


def with_async(body: Callable[[AsyncLLM, Rig], Any]) -> None:
    async def main() -> None:
        rig = Rig(tiny_model("llama", torch.float32), tokenizer=byte_tokenizer())
        async with AsyncLLM.around(rig.engine) as llm:
            await asyncio.wait_for(body(llm, rig), timeout=300)

    asyncio.run(main())


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, 0, "greedy", [SamplingParams()]])
def test_parameters_of_another_kind_harm_their_sender_only(params: Any) -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        stream = llm.generate(PROMPTS[0], greedy(20))
        await anext(stream)
        with pytest.raises(ValueError, match="sampling_params must be a SamplingParams"):
            await anext(llm.generate([5, 6], params))
        assert [output async for output in stream][-1].finished and llm.is_running

    with_async(body)


def test_whatever_adding_raises_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        stream = llm.generate(PROMPTS[0], greedy(20))
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine._requests, "_make", lambda *_: {}["no such key"])
            with pytest.raises(KeyError, match="no such key"):
                await anext(llm.generate([5, 6], greedy(2)))
        await llm.abort([])
        for request_id in ([None], [5], None, ""):
            with pytest.raises(ValueError, match="request_id must be a text"):
                await llm.abort(request_id)  # type: ignore[arg-type]
            if request_id is not None:
                with pytest.raises(ValueError, match="request_id must be a text"):
                    await anext(llm.generate([5, 6], greedy(2), request_id=request_id))  # type: ignore[arg-type]
        assert [output async for output in stream][-1].finished and llm.is_running

    with_async(body)


def test_a_request_whose_text_cannot_be_made_leaves_nothing_behind() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.decoder = decoders.BPEDecoder()
    with Rig(tiny_model("llama"), tokenizer=tokenizer) as rig:
        llm = LLM.around(rig.engine)
        for prompts in ([PROMPTS[0]], PROMPTS):
            with pytest.raises(TokenizerError, match="text cannot be decoded in pieces"):
                llm.generate([list(prompt) for prompt in prompts], greedy(4))
            rig.assert_clean()
        (output,) = llm.generate(list(PROMPTS[0]), greedy(4, detokenize=False))
        assert len(output.outputs[0].token_ids) == 4


def test_several_prompts_of_which_the_last_is_refused_start_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.around(rig.engine)

    def refuse(tokens: int) -> None:
        if tokens == 1 + 4:
            raise LookupError("no room")

    monkeypatch.setattr(rig.scheduler.cache, "check_fits", refuse)
    with pytest.raises(LookupError, match="no room"):
        llm.generate([*PROMPTS, [5]], greedy(4))
    rig.assert_clean()
    assert rig.engine.stats.num_requests == 0 and not llm._loop._followed
    assert len(llm.generate(list(PROMPTS[2]), greedy(2))) == 1


# Ends


def test_a_closed_engine_says_so_at_once() -> None:
    rig = Rig(tiny_model("llama"))
    llm = LLM.around(rig.engine)
    stream = llm.stream(list(PROMPTS[0]), greedy(20))
    next(stream)
    llm.close()
    start = time.monotonic()
    for call in (lambda: llm.generate([5, 6], greedy(2)), lambda: next(stream), lambda: next(llm.stream([5, 6]))):
        with pytest.raises(EngineError, match="the engine was closed"):
            call()
    llm.close()
    assert time.monotonic() - start < 60
