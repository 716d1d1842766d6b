"""AsyncLLM on a tiny model: the same tokens as the engine alone, streams, aborts, and errors where they belong."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outrider
from outrider.async_llm import AsyncLLM, EngineError, RequestError
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine import templates
from outrider.runner.interface import WorkerDied
from tests.engine.harness import Ask, Rig, byte_tokenizer, greedy, prompt_of, tiny_model, tokens_of

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "num_pages": 128}
ASKS = [Ask(prompt_of(i, 6 + 3 * i), greedy(12) if i % 2 else SamplingParams(seed=i, max_tokens=12)) for i in range(10)]


def with_llm(body: Callable[[AsyncLLM, Rig], Awaitable[None]], **settings: Any) -> None:
    """Runs body in an event loop; afterwards the engine's accounts must be even."""

    async def main() -> None:
        rig = Rig(tiny_model("llama", torch.float32), tokenizer=byte_tokenizer(), **(SETTINGS | settings))
        async with AsyncLLM.around(rig.engine) as llm:
            await asyncio.wait_for(body(llm, rig), timeout=300)
        assert not llm.is_running

    asyncio.run(main())


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in outputs:
        last = output
    assert last is not None and last.finished
    return last


async def idle(rig: Rig) -> None:
    while rig.engine.has_work:
        await asyncio.sleep(0.005)
    rig.assert_clean()


def expected(asks: list[Ask]) -> list[list[list[int]]]:
    with Rig(tiny_model("llama", torch.float32), tokenizer=byte_tokenizer(), **SETTINGS) as rig:
        return tokens_of(rig.run(asks))


def test_it_is_exported() -> None:
    assert outrider.AsyncLLM is AsyncLLM


def test_many_requests_at_once_give_the_engines_tokens() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        outputs = await asyncio.gather(*(last_of(llm.generate(ask.prompt, ask.params)) for ask in ASKS))
        assert tokens_of(outputs) == expected(ASKS)
        await idle(rig)

    with_llm(body)


def test_outputs_grow_and_are_the_readers_own() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        seen = []
        async for output in llm.generate(ASKS[1].prompt, greedy(12), request_id="mine"):
            assert output.request_id == "mine"
            seen.append((output, list(output.outputs[0].token_ids)))
        lengths = [len(tokens) for _, tokens in seen]
        assert lengths == sorted(set(lengths)) and lengths[-1] == 12 and len(seen) > 2
        assert all(output.outputs[0].token_ids == tokens for output, tokens in seen), "an output changed later"

    with_llm(body)


def test_a_slow_reader_gets_the_newest_output_only() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        stream = llm.generate(ASKS[1].prompt, greedy(30))
        first = await anext(stream)
        await idle(rig)  # the engine does not wait for its reader
        rest = [output async for output in stream]
        assert len(first.outputs[0].token_ids) < 30 and len(rest) == 1
        assert len(rest[0].outputs[0].token_ids) == 30 and rest[0].finished

    with_llm(body)


def test_abort_ends_a_stream_with_what_there_is() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        stream = llm.generate(prompt_of(3, 8), greedy(80), request_id="long")
        await anext(stream)
        await llm.abort("long")
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort" and len(rest[-1].outputs[0].token_ids) < 80
        await llm.abort(["nobody", "long"])
        await llm.check_health()
        assert llm.is_running and not llm.errored
        await idle(rig)

    with_llm(body)


def test_cancelling_or_leaving_the_reader_aborts_the_request() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate(prompt_of(3, 8), greedy(80)):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(rig)
        async for _ in llm.generate(prompt_of(4, 8), greedy(80)):
            break
        gc.collect()
        await idle(rig)
        assert rig.engine.stats.num_generation_tokens < 160

    with_llm(body)


def test_a_refused_request_raises_where_it_is_read_and_nowhere_else() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        good = asyncio.create_task(last_of(llm.generate(ASKS[1].prompt, ASKS[1].params, request_id="a")))
        await asyncio.sleep(0)
        for prompt, message in (([], "empty"), ([10**6], "outside the vocabulary"), ([1] * 96, "max_model_len")):
            with pytest.raises(ValueError, match=message):
                await last_of(llm.generate(prompt, greedy(4)))
        odd: Any
        for odd, message in (({"text": "a"}, "'prompt_embeds', got text"), (7, "a prompt is a")):
            with pytest.raises(ValueError, match=message):
                await last_of(llm.generate(odd, greedy(4)))
        with pytest.raises(ValueError, match="in use"):
            await last_of(llm.generate([5], greedy(4), request_id="a"))
        assert tokens_of([await good]) == expected(ASKS[1:2]), "the request that had the id first goes on"

    with_llm(body)


def test_a_request_that_fails_on_the_way_raises_in_its_own_stream() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        nothing_allowed = SamplingParams(temperature=0, allowed_token_ids=[7], bad_words_token_ids=((7,),))
        bad, good = await asyncio.gather(
            last_of(llm.generate([5, 6], nothing_allowed)), last_of(llm.generate(ASKS[1].prompt, ASKS[1].params)),
            return_exceptions=True)
        assert isinstance(bad, RequestError) and "no token is allowed" in str(bad)
        assert isinstance(good, RequestOutput) and tokens_of([good]) == expected(ASKS[1:2])
        await idle(rig)

    with_llm(body)


def explode(*_: Any) -> None:
    raise MemoryError("no pages left")


def test_a_failed_step_raises_in_the_requests_that_were_in_it() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        streams = [llm.generate(ask.prompt, greedy(60)) for ask in ASKS[:3]]
        for stream in streams:
            await anext(stream)
        rig.runner._before_step = explode
        found = await asyncio.gather(*(last_of(stream) for stream in streams), return_exceptions=True)
        assert all(isinstance(error, RequestError) and "no pages left" in str(error) for error in found)
        rig.runner._before_step = None
        output = await last_of(llm.generate(ASKS[1].prompt, ASKS[1].params))
        assert tokens_of([output]) == expected(ASKS[1:2]) and llm.is_running

    with_llm(body)


def test_a_failed_engine_raises_everywhere_with_the_cause() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        streams = [llm.generate(ask.prompt, greedy(60)) for ask in ASKS[:3]]
        for stream in streams:
            await anext(stream)
        rig.scheduler.schedule = explode  # type: ignore[assignment]
        found = await asyncio.gather(*(last_of(stream) for stream in streams), return_exceptions=True)
        assert all(isinstance(error, EngineError) and isinstance(error.__cause__, MemoryError) for error in found)
        with pytest.raises(EngineError, match="no pages left") as later:
            await last_of(llm.generate([5], greedy(4)))
        assert isinstance(later.value.__cause__, MemoryError)

    with_llm(body)


def test_requests_that_waited_to_be_added_when_the_worker_died_hear_of_the_engine() -> None:
    """Whatever the engine itself would say to them: a reader must be able to tell its own fault from the engine's."""

    async def body(llm: AsyncLLM, rig: Rig) -> None:
        running, died = threading.Event(), threading.Event()

        def die(batch: object) -> None:
            running.set()
            died.wait(300)
            raise WorkerDied("killed")

        rig.runner._before_step = die
        first = asyncio.ensure_future(last_of(llm.generate(ASKS[0].prompt, greedy(60))))
        await asyncio.to_thread(running.wait)
        waiting = [asyncio.ensure_future(last_of(llm.generate(ask.prompt, greedy(4)))) for ask in ASKS[1:4]]
        await asyncio.sleep(0.05)  # their commands are queued behind the step
        died.set()
        found = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [type(error) for error in found] == [EngineError] * 4 and "killed" in str(found[-1])

    with_llm(body)


def test_an_idle_engine_can_be_made_to_fail() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        llm.fail("its worker has died")
        while llm.is_running:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineError, match="its worker has died"):
            await last_of(llm.generate([5], greedy(4)))

    with_llm(body)


def test_shutdown_ends_what_still_runs() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        stream = llm.generate(prompt_of(3, 8), greedy(80))
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineError, match="shut down"):
            await last_of(stream)
        with pytest.raises(EngineError, match="shut down"):
            await last_of(llm.generate([5], greedy(4)))
        llm.shutdown()

    with_llm(body)


def test_text_and_chat_go_through_the_tokenizer() -> None:
    async def body(llm: AsyncLLM, rig: Rig) -> None:
        output = await last_of(llm.generate("hello", greedy(4)))
        assert output.prompt == "hello" and output.prompt_token_ids == list(b"hello")
        long = "a" * 30_000
        with pytest.raises(ValueError, match="max_model_len"):
            await last_of(llm.generate({"prompt": long}, greedy(4)))
        with pytest.raises(ValueError, match="chat template"):
            await last_of(llm.chat([{"role": "user", "content": "hi"}]))

    with_llm(body)


def test_a_template_that_does_not_end_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The templates' clock jumps once the other request has its answer, however long that took."""
    has_begun, jump = threading.Event(), [0.0]

    def clock() -> float:
        has_begun.set()
        return time.monotonic() + jump[0]

    monkeypatch.setattr(templates, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setattr(templates, "MAX_SECONDS", 300.0)
    monkeypatch.setattr(templates, "MAX_ROUNDS", 10**9)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    async def body(llm: AsyncLLM, rig: Rig) -> None:
        chat = asyncio.create_task(last_of(llm.chat([{"role": "user", "content": "hi"}], chat_template=endless)))
        await asyncio.to_thread(has_begun.wait)
        output = await last_of(llm.generate([5, 6], greedy(4)))
        assert output.finished and not chat.done(), "others are served meanwhile"
        jump[0] = 1000.0
        with pytest.raises(ValueError, match="the chat template was stopped: it takes more than 300 seconds"):
            await chat

    with_llm(body)


def test_requests_of_several_event_loops() -> None:
    rig = Rig(tiny_model("llama", torch.float32), **SETTINGS)
    llm = AsyncLLM.around(rig.engine)
    for ask in ASKS[:3]:
        output = asyncio.run(last_of(llm.generate(ask.prompt, ask.params)))
        assert tokens_of([output]) == expected([ask])

    async def leave() -> None:
        await anext(llm.generate(prompt_of(3, 8), greedy(80)))

    asyncio.run(leave())  # the loop is closed with a request in it
    asyncio.run(idle(rig))
    llm.shutdown()
