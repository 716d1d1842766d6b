"""The engines that `outrider bench cpu` compares: this one, and llama.cpp or ik_llama.cpp by their own programs.

Every engine measures a case in the same way: a prompt of random tokens is read, and behind it so many requests decode,
each step one token of each request. Several requests share a long prompt. llama.cpp's `llama-batched-bench` does just
this and counts no sampling, so its figures are its best.
"""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.benchmarks.busy_time import Mark, Span, mark_own, mark_process
from outrider.commands.parser import UsageError
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.core import RequestOutput
from outrider.core.params import SamplingParams
from outrider.llm import LLM

TOOL = "llama-batched-bench"
PLACES = (".", "bin", "build/bin")  # of the tool, in a release or a build
SHORT_PROMPT = 16  # tokens before an answer behind "no" context
CONTEXT_UNIT = 256  # to which llama.cpp pads a sequence's cache
SAMPLE_SECONDS = 0.02
LONGEST_SECONDS = 3600
WARM_UP_TOKENS = 4
ROW = re.compile(r"^\|\s*\d+ \|.*\|\s*$")  # of the tool's table


@dataclass(frozen=True)
class Case:
    context: int
    requests: int
    new_tokens: int

    @property
    def prompt_len(self) -> int:
        return max(self.context, SHORT_PROMPT)


@dataclass(frozen=True)
class Measured:
    """The time to read a case's prompt, and the time of its decode steps."""

    prompt: Span
    decode: Span
    num_decoded: int  # tokens of all requests


class EngineFails(RuntimeError):
    """Raised when an engine cannot run a model. The message says why, in the engine's words."""


class MeasuredEngine(Protocol):
    name: str

    def measure(self, case: Case) -> Measured: ...


class OwnEngine:
    """This engine in this process. Prompts are new every time, so that none is found in the prefix cache but the one
    that several requests share."""

    def __init__(self, name: str, llm: LLM, vocab_size: int) -> None:
        self.name = name
        self._llm, self._random, self._vocab_size = llm, random.Random(0), vocab_size
        self.measure(Case(0, 1, WARM_UP_TOKENS))

    def measure(self, case: Case) -> Measured:
        prompt = [self._random.randrange(self._vocab_size) for _ in range(case.prompt_len)]
        prompt_read = self._run([prompt], 1)[0]
        # The last token differs between requests, so that they do not go the same way through experts.
        asked = [[*prompt[:-1], self._random.randrange(self._vocab_size)] for _ in range(case.requests)]
        return Measured(prompt_read, self._run(asked, case.new_tokens + 1)[1], case.requests * case.new_tokens)

    def _run(self, prompts: list[list[int]], max_tokens: int) -> tuple[Span, Span]:
        """The time until all requests have their first token, and the time until all have their last."""
        marks: dict[tuple[str, int], Mark] = {}

        def note(output: RequestOutput) -> None:
            marks.setdefault((output.request_id, len(output.outputs[0].token_ids)), mark_own())

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        begin = mark_own()
        run_prompts(self._llm, [Ask(prompt, params) for prompt in prompts], on_output=note)
        first, last = (max((mark for (_, number), mark in marks.items() if number == count), key=lambda mark: mark.wall)
                       for count in (1, max_tokens))
        return Span.between(begin, first), Span.between(first, last)


class LlamaEngine:
    """llama.cpp or ik_llama.cpp. Every measurement is a process of its own, whose start and end are not counted."""

    def __init__(self, name: str, folder: str, model: Path, threads: int) -> None:
        self.name = name
        self._tool, self._model, self._threads = find_tool(folder), model, threads

    def command(self, case: Case) -> list[str]:
        longest = case.prompt_len + case.new_tokens + 1
        room = case.requests * -(-longest // CONTEXT_UNIT) * CONTEXT_UNIT
        sizes = {"-c": room, "-npp": case.prompt_len, "-ntg": case.new_tokens, "-npl": case.requests,
                 "-t": self._threads}
        # Recurrent states cannot be shared, so a short prompt is read by every request.
        shared = ["-pps"] if case.requests > 1 and case.context else []
        return [str(self._tool), "-m", str(self._model), *(str(word) for pair in sizes.items() for word in pair),
                *shared]

    def measure(self, case: Case) -> Measured:
        process = subprocess.Popen(self.command(case), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
        watch = _Watch(process.pid)
        timer = threading.Timer(LONGEST_SECONDS, process.kill)
        timer.start()
        try:
            said, row = self._read(process, watch)
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            watch.stop()
        if row is None:
            raise EngineFails(next((line for line in reversed(said) if "error" in line.lower()),
                                   said[-1] if said else f"it ended with status {process.returncode}"))
        prompt_seconds, decode_seconds = float(row[4]), float(row[6])
        middle = watch.end - decode_seconds
        return Measured(watch.span(middle - prompt_seconds, middle), watch.span(middle, watch.end),
                        case.requests * case.new_tokens)

    @staticmethod
    def _read(process: subprocess.Popen[str], watch: _Watch) -> tuple[list[str], list[str] | None]:
        """Read what the tool says up to its row of figures. The row comes right after the last token."""
        said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            if ROW.match(line):
                watch.stop()
                return said, line.strip(" |\n").split("|")
            said += [line.strip()] if line.strip() else []
        process.wait()
        return said, None


class _Watch(threading.Thread):
    """Marks the time of a process again and again."""

    def __init__(self, process_id: int) -> None:
        super().__init__(daemon=True)
        self._process_id, self._over = process_id, threading.Event()
        self._marks = [mark_process(process_id)]
        self.end = 0.0
        self.start()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._marks.append(mark_process(self._process_id))

    def stop(self) -> None:
        if not self._over.is_set():
            self.end = time.perf_counter()
            self._over.set()
            self.join()
            self._marks.append(mark_process(self._process_id))

    def span(self, first: float, last: float) -> Span:
        return Span.between(self._at(first), self._at(last))

    def _at(self, wall: float) -> Mark:
        for earlier, later in zip(self._marks, self._marks[1:], strict=False):
            if earlier.wall <= wall <= later.wall:
                return earlier.towards(later, wall)
        return Mark(wall, None, None)


def find_tool(folder: str) -> Path:
    for place in PLACES:
        tool = Path(folder).expanduser() / place / TOOL
        if tool.is_file():
            return tool.resolve()
    raise UsageError(f"{folder} has no {TOOL}: name a folder in which llama.cpp was built (`cmake -B build && cmake "
                     f"--build build --target {TOOL}`), or that of a release")
