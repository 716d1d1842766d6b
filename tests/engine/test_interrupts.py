"""Ctrl-C on any line of the host: the next call gives the reference's tokens, nothing is held, nothing hangs.

A trace function counts the lines that `LLM.generate`, `stream` and `chat` run in the main thread, and raises on one of
them. Another caller's stream is open meanwhile and goes on afterwards as if nothing had happened.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.core.outputs import RequestOutput
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.assembly import engine_around
from outrider.engine.text import Tokenizer
from outrider.runner.worker import Worker
from tests.engine.harness import CONFIGS as PLAIN
from tests.engine.harness import SETTINGS, byte_tokenizer, greedy, prompt_of, random_model
from tests.engine.recurrent_rig import HYBRIDS

LIMIT_SECONDS = 200  # whatever is not done by then hangs, however busy the machine is
CONFIGS = {name: (PLAIN | HYBRIDS)[name] | {"vocab_size": 259, "eos_token_id": 257}
           for name in ("llama", "gemma3", "mamba2", "gated_delta")}
PROMPTS = [prompt_of(1, 36), [*prompt_of(1, 36)[:33], 9], prompt_of(2, 6) * 3, prompt_of(3, 11)]
PARAMS = [greedy(9), SamplingParams(seed=1, max_tokens=8, logprobs=2), greedy(7, stop="q"),
          SamplingParams(seed=2, max_tokens=6, n=2)]
CHAT = [{"role": "user", "content": "hello there"}]


def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    made.chat_templates["default"] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    return made


def make_llm(family: str, *, drafts: bool) -> LLM:
    import torch

    config = EngineConfig("tiny", **SETTINGS | {"max_num_seqs": 3, "max_num_batched_tokens": 24, "num_pages": 80})
    drafter = NgramDrafter(3, min_n=1, max_n=4) if drafts else None
    worker = Worker(config, random_model(CONFIGS[family], torch.float64, 3), eos_ids=(257,), drafter=drafter)
    return LLM.around(engine_around(config, worker, tokenizer()))


Answer = list[tuple[list[int], str, str | None]]


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    return [[(s.token_ids, s.text, s.finish_reason) for s in output.outputs] for output in outputs]


def generate(llm: LLM) -> list[Answer]:
    return answers(llm.generate([list(p) for p in PROMPTS], PARAMS))


def stream(llm: LLM) -> list[Answer]:
    *_, last = llm.stream(list(PROMPTS[0]), PARAMS[0])
    return answers([last])


def chat(llm: LLM) -> list[Answer]:
    return answers(llm.chat(CHAT, greedy(6)))


CALLS: dict[str, Callable[[LLM], list[Answer]]] = {"generate": generate, "stream": stream, "chat": chat}


class Tracer:
    """Counts lines of the package and raises KeyboardInterrupt on number `stop`."""

    def __init__(self, stop: int = -1) -> None:
        self.stop, self.count, self.where = stop, 0, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/outrider/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.stop:
                self.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


@contextmanager
def traced(tracer: Tracer) -> Iterator[Tracer]:
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(None)


@contextmanager
def within_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def interrupt_at_random_lines(family: str, num_cases: int, seed: int) -> int:
    """Returns how many interrupts landed."""
    rng = Random(seed)
    num_landed = 0
    with make_llm(family, drafts=family in ("llama", "mamba2")) as llm:
        expected = {name: call(llm) for name, call in CALLS.items()}
        for name, call in CALLS.items():  # again: with hits, as it will be
            with traced(Tracer()) as tracer:
                assert call(llm) == expected[name]
            lines = tracer.count
            for case in range(num_cases // len(CALLS)):
                other = llm.stream(list(PROMPTS[3]), PARAMS[1]) if case % 3 == 0 else None
                seen = [] if other is None else answers([next(other)])
                start = time.monotonic()
                with within_limit():
                    try:
                        with traced(Tracer(rng.randint(1, lines))) as tracer:
                            call(llm)
                    except KeyboardInterrupt:
                        num_landed += 1
                    where = (name, tracer.where)
                    if other is not None:
                        *_, last = other
                        (wanted,) = answers(llm.generate(list(PROMPTS[3]), PARAMS[1]))
                        assert answers([last]) == [wanted], where
                        assert last.outputs[0].logprobs is not None
                        assert len(last.outputs[0].logprobs) == len(last.outputs[0].token_ids)
                        assert seen[0][0][0] == wanted[0][0][: len(seen[0][0][0])], where
                    for check, again in CALLS.items() if case % 5 == 0 else [(name, call)]:
                        assert again(llm) == expected[check], where
                    assert not llm.engine.num_requests and not llm._loop._followed and not llm._loop._changed, where
                    assert not llm.engine.has_work, where
                    llm.engine.scheduler.check_integrity()
                    assert llm.engine.scheduler.cache.usage() == 0, where
                assert time.monotonic() - start < LIMIT_SECONDS, where
    return num_landed


@pytest.mark.parametrize("family", CONFIGS)
def test_an_interrupt_on_any_line_harms_nothing(family: str) -> None:
    assert interrupt_at_random_lines(family, 15, 1) > 9


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("family", CONFIGS)
def test_many_interrupts(family: str, seed: int) -> None:
    assert interrupt_at_random_lines(family, 75, seed) > 50
