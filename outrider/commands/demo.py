"""`outrider demo`: the default model answers four prompts at once, streamed. Then it answers one prompt, and copies a
list, each with and without drafts in turns."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from typing import Any

from outrider.commands.loading import Loaded, load
from outrider.commands.run_prompts import Ask, chat_ids, run_prompts
from outrider.commands.turns import Turns
from outrider.commands.word_wrap import wrapped
from outrider.config import AUTO_DRAFTER, EngineConfig
from outrider.core import RequestOutput, SamplingParams
from outrider.core.status_line import is_terminal, status_line

MODEL = "smollm2"
PROMPTS = [
    "What causes the tides? Answer in two sentences.",
    "Give me three names for a grey cat.",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
]
COPY = (
    "1. Wash the apples and cut them into quarters.\n2. Mix the flour, the sugar and the butter in a large bowl.\n"
    "3. Put the apples into a baking dish and spread the mixture over the apples.\n"
    "4. Bake in the oven at 180 degrees for forty minutes.\n5. Let it cool for ten minutes and serve with cream.\n\n"
    "Copy the text above word for word."
)
FREE = "Explain in a few sentences why the sky is blue."


@dataclass(frozen=True)
class Shown:
    """A request that the demo runs both without and with drafts."""

    title: str
    prompt: str
    drafter: str
    drafts: dict[str, Any] | str


SHOWN = (
    Shown("A question", FREE, "its own drafter", AUTO_DRAFTER),
    Shown("A list to copy", COPY, "n-gram drafts", {"method": "ngram", "num_speculative_tokens": 4}),
)
SAME, OTHER = "The text is the same every time.", "THE TEXTS DIFFER."
WIDTH = 88
COLORS = (36, 33, 32, 35)


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    config = EngineConfig(MODEL, max_model_len=1024, max_num_seqs=len(PROMPTS))
    loaded = load(config)
    _answer_four(loaded, config, args.max_tokens, start)
    for shown in SHOWN:
        _with_drafts(loaded, config, shown)
    return 0


def _answer_four(loaded: Loaded, config: EngineConfig, max_tokens: int, start: float) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    asks = [Ask(chat_ids(loaded.need_tokenizer(), text), params, text) for text in PROMPTS]
    print(f"{MODEL} answers {len(asks)} prompts at once:\n")
    for index, text in enumerate(PROMPTS):
        print(_mark(index, f"[{index + 1}] {text}"))
    print()
    lines = _Lines(start)
    with loaded.llm(config) as llm:
        ran = run_prompts(llm, asks, on_output=lines.show)
    print(f"\n{ran.num_tokens} tokens in {ran.seconds:.1f} s: {ran.tokens_per_second:.1f} tokens/s; first token "
          f"{lines.first_token_seconds:.1f} s after the start, loading included\n")


class _Lines:
    """Prints several texts that grow at the same time, line by line, each line with the number of its text."""

    def __init__(self, start: float) -> None:
        self.first_token_seconds = 0.0
        self._start = start
        self._shown: dict[str, int] = {}

    def show(self, output: RequestOutput) -> None:
        self.first_token_seconds = self.first_token_seconds or time.perf_counter() - self._start
        text = output.outputs[0].text
        begin = self._shown.get(output.request_id, 0)
        while end := _line_end(text, begin, output.finished):
            for line in textwrap.wrap(text[begin:end], WIDTH):
                print(_mark(int(output.request_id), f"[{int(output.request_id) + 1}] {line}"), flush=True)
            begin = end
        self._shown[output.request_id] = begin


def _line_end(text: str, begin: int, is_last: bool) -> int:
    """Return the index at which the next line to print ends; 0 if the line is not complete yet."""
    newline = text.find("\n", begin)
    if 0 <= newline <= begin + WIDTH:
        return newline + 1
    if len(text) - begin > WIDTH:
        return max(text.rfind(" ", begin, begin + WIDTH) + 1, begin + 1)
    return len(text) if is_last and len(text) > begin else 0


def _mark(index: int, line: str) -> str:
    return f"\033[{COLORS[index % len(COLORS)]}m{line}\033[0m" if is_terminal(sys.stdout) else line


def _with_drafts(loaded: Loaded, config: EngineConfig, shown: Shown) -> None:
    """Run one request without drafts and with them, in turns. Short runs come first, so that start-up costs are in no
    measured turn."""
    params = SamplingParams(temperature=0.0, max_tokens=96)
    ids = chat_ids(loaded.need_tokenizer(), shown.prompt)
    config = replace(config, enable_prefix_caching=False)
    turns, shows, texts = Turns(), _Steps(), set()
    with (loaded.llm(config.without_drafts()) as plain,
          loaded.llm(replace(config, speculative_config=shown.drafts)) as drafting):
        for llm in (plain, drafting):
            run_prompts(llm, [Ask(ids, replace(params, max_tokens=4))])
        begin = time.perf_counter()
        while not turns.is_over(time.perf_counter() - begin):
            with status_line(f"{shown.title}: turn {len(turns.speeds) + 1} without drafts and with them"):
                # Who goes first alternates, so that work that comes and goes favours neither.
                order = (plain, drafting) if len(turns.speeds) % 2 == 0 else (drafting, plain)
                steps = {llm: _Steps() for llm in order}
                ran = {llm: run_prompts(llm, [Ask(ids, params)], on_output=steps[llm].add) for llm in order}
            turns.add(ran[plain].tokens_per_second, ran[drafting].tokens_per_second)
            texts |= {own.outputs[0].outputs[0].text for own in ran.values()}
            shows = steps[drafting]
    last = ran[drafting]
    accepted = last.outputs[0].metrics.num_accepted_tokens / max(1, last.num_steps)
    print(wrapped(f"{shown.title}: {turns.line(shown.drafter)}. {SAME if len(texts) == 1 else OTHER}", sys.stdout))
    print(f"{last.num_tokens} tokens in {last.num_steps} steps, {accepted:.2f} accepted guesses a step; | ends a step:"
          "\n")
    print(textwrap.indent("\n".join(part for line in shows.text.strip().splitlines()
                                    for part in textwrap.wrap(line, WIDTH)), "    ") + "\n")


class _Steps:
    """The text of one request, with a mark at the end of each step's tokens."""

    def __init__(self) -> None:
        self.text = ""
        self._num_shown = 0

    def add(self, output: RequestOutput) -> None:
        text = output.outputs[0].text
        self.text += text[self._num_shown :] + ("" if output.finished else "|")
        self._num_shown = len(text)
