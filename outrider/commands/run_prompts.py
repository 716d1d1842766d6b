"""run_prompts: runs prompts through an LLM for commands, with a progress bar, a clock, and Ctrl-C between steps.

An engine must not be left in the middle of a step, so the first Ctrl-C waits for the step's end; a second does not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from outrider.core import RequestOutput, SamplingParams
from outrider.core.params import RequestOutputKind
from outrider.core.prompts import Prompt
from outrider.engine.progress import bar
from outrider.engine.text import Tokenizer
from outrider.llm import LLM
from outrider.lora_request import LoRARequest


@dataclass(frozen=True)
class Ask:
    """One request that a command makes, before it is checked."""

    token_ids: list[int]  # with a placeholder for each image
    params: SamplingParams
    text: str | None = None
    cache_salt: str | None = None  # requests of different salts share no pages
    inputs: Mapping[str, Any] = field(default_factory=dict)  # of the prompt, beside its tokens: images


@dataclass
class PromptResults:
    outputs: list[RequestOutput]  # in the order of the asks
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for output in self.outputs for sample in output.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def num_steps(self) -> int:
        return sum(output.metrics.num_steps for output in self.outputs)

    @property
    def mean_run_length(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


class Interrupted(KeyboardInterrupt):
    """Raised between two steps after the first Ctrl-C."""


class Interrupt:
    """A flag that the first Ctrl-C sets."""

    is_set = False

    def check(self) -> None:
        if self.is_set:
            raise Interrupted


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Within this context the first Ctrl-C only sets the Interrupt."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if interrupt.is_set:
            raise KeyboardInterrupt
        interrupt.is_set = True

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def run_prompts(llm: LLM, asks: Sequence[Ask], *, on_output: Callable[[RequestOutput], None] | None = None,
                label: str | None = None, may_fail: bool = False, priority: int = 0,
                adapter: LoRARequest | None = None) -> PromptResults:
    """Run all requests to their ends, and return their outputs and the time. If a request cannot be served, an error is
    raised before any is started. If a request fails later, an error is raised at the end, unless `may_fail` is set.
    `label`: show a bar of finished requests. `adapter`: the adapter of all requests."""
    done: list[RequestOutput] = []
    params = [ask.params for ask in asks]
    if on_output is None:
        params = [replace(own, output_kind=RequestOutputKind.FINAL_ONLY) for own in params]
    prompts: list[Prompt] = [{"prompt": ask.text, "cache_salt": ask.cache_salt, **ask.inputs,
                              "prompt_token_ids": ask.token_ids} for ask in asks]
    start = time.perf_counter()
    with interruptible() as interrupt, _bar(len(asks), label) as progress:
        outputs = llm.follow(prompts, params, priority=priority, before_step=interrupt.check,
                             lora_request=adapter)
        with closing(outputs):
            for output in outputs:
                if output.finished:
                    done.append(output)
                    if progress is not None:
                        progress.update()
                if on_output is not None:
                    on_output(output)
    done.sort(key=lambda output: int(output.request_id))  # ids are given in the order of the prompts
    ran = PromptResults(done, time.perf_counter() - start)
    if not may_fail:
        raise_failed(ran.outputs)
    return ran


def _bar(num_asks: int, label: str | None) -> Any:
    return nullcontext() if label is None else bar(total=num_asks, desc=label, unit="req")


def raise_failed(outputs: Sequence[RequestOutput]) -> None:
    errors = [sample.error for output in outputs for sample in output.outputs if sample.finish_reason == "error"]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(outputs)} requests failed: {errors[0]}")


def num_known_tokens(prompt: Prompt) -> int:
    """Return the number of a prompt's token ids, in which an image counts as one."""
    return len(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt)


def chat_ids(tokenizer: Tokenizer, text: str, system: str | None = None, template: str | None = None) -> list[int]:
    """Return the token ids of a user's message, after a system message if there is one. `template`: the chat template;
    None is the model's own."""
    messages = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": text}], chat_template=template)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text. It is rendered as a chat message if the model has a template, and is plain text
    otherwise."""
    return chat_ids(tokenizer, text) if tokenizer.chat_templates else tokenizer.encode(text)
