"""CompileProcess: compiles grammars in a process whose memory and time are bounded (`compile_program.py`).

llguidance can take hours and all memory for a grammar of a few hundred bytes, and a thread cannot be stopped. So each
new grammar is compiled in that process first. A grammar that stays within the limits is compiled again in the process
that uses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from outrider.features.grammars.compile_program import MEMORY, TIME, read_frame, write_frame

PROGRAM = Path(__file__).with_name("compile_program.py")
POLL_SECONDS = 0.05  # between two looks at whether a caller has gone
READY = 0  # the number of the first answer, before any job's


class CompileFailure(Exception):
    """Raised if the compile process ended in the middle of a job, or did not start."""


@dataclass(frozen=True)
class JobLimits:
    seconds: float
    cpu_seconds: int
    num_bytes: int  # of memory beside that of the process


@dataclass(frozen=True)
class Found:
    """The findings of one job of the compile process about a grammar."""

    error: str = ""  # what is wrong with the grammar
    num_bytes: int = 0  # of the compiled grammar
    exceeded: str | None = None  # TIME or MEMORY: the limit that ended the job
    cpu_seconds: float = 0.0  # that the job took


class _Link:
    """A running compile process, and the answers that callers wait for. It has no reference to its CompileProcess, so
    that the thread which reads answers does not keep the CompileProcess alive."""

    def __init__(self, tokenizer: str, num_tokens: int, eos_ids: Sequence[int]) -> None:
        # A session of its own: a Ctrl-C is for the program that asked. No `site`: the paths are given.
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # each further arena takes address space from the limit
        self._process = subprocess.Popen([sys.executable, "-I", "-S", str(PROGRAM), json.dumps(sys.path)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         start_new_session=True, env=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._sending, self._waiting = threading.Lock(), threading.Lock()
        self.is_alive = True
        self._answers: dict[int, Future[dict[str, Any]]] = {READY: Future()}
        self.ready = self._answers[READY]
        threading.Thread(target=self._read, name="outrider-grammar-answers", daemon=True).start()
        self.send({"tokenizer": tokenizer, "num_tokens": num_tokens, "eos_ids": list(eos_ids)})

    def ask(self, number: int, job: dict[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._waiting:
            if not self.is_alive:
                answer.set_exception(CompileFailure("the compile process has ended: send the request again"))
                return answer
            self._answers[number] = answer
        self.send(job | {"job": number})
        return answer

    def send(self, message: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # it has ended; the thread that reads says so
            write_frame(self._to.fileno(), message)

    def _read(self) -> None:
        while True:
            try:
                message = read_frame(self._from.fileno())
            except (OSError, ValueError):  # closed
                message = None
            if message is None:
                break
            with self._waiting:
                answer = self._answers.pop(message["job"], None)
            if answer is not None:
                answer.set_result(message)
        with self._waiting:
            self.is_alive = False
            left, self._answers = list(self._answers.values()), {}
        for answer in left:
            answer.set_exception(CompileFailure("the compile process has ended: send the request again"))
        self._process.wait()

    def close(self) -> None:
        with self._sending, suppress(OSError):
            self._to.close()  # which ends the process


class CompileProcess:
    """Compiles grammars in a separate process. The process starts when the first grammar comes, and again after it has
    ended. May be used by several threads."""

    def __init__(self, tokenizer: Callable[[], tuple[str, int]], eos_ids: Sequence[int]) -> None:
        """tokenizer: the text of tokenizer.json, and the number of tokens."""
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._starting = threading.Lock()
        self._link: _Link | None = None
        self._numbers = count(READY + 1)

    def start(self) -> None:
        """Start the process if it does not run, and return without waiting for it."""
        self._running()

    def run(self, kind: str, text: str, limits: JobLimits, parser_limits: dict[str, Any], ready_seconds: float,
            is_gone: Callable[[], bool] = lambda: False) -> Found | None:
        """Run one job. kind: "prove" compiles a grammar and follows a text for some tokens; "validate" only reads the
        grammar. Returns None if the caller no longer waits for the result. Raises TimeoutError if the process is not
        ready in time."""
        link = self._running()
        link.ready.result(ready_seconds)
        number = next(self._numbers)
        answer = link.ask(number, {"kind": kind, "text": text, "seconds": limits.seconds, "limits": parser_limits,
                                   "cpu_seconds": limits.cpu_seconds, "bytes": limits.num_bytes})
        try:
            while True:
                with suppress(TimeoutError):
                    message = answer.result(POLL_SECONDS)
                    break
                if is_gone():
                    return None
        finally:  # also when a Ctrl-C interrupts the wait
            if not answer.done():
                link.send({"cancel": number})
        ended = message.get("ended")
        assert ended in (None, TIME, MEMORY), ended
        return Found(message.get("error", ""), message.get("bytes", 0), ended, message["cpu_seconds"])

    def _running(self) -> _Link:
        with self._starting:
            if self._link is None or not self._link.is_alive:
                link = self._link = _Link(*self._tokenizer(), self._eos_ids)
                weakref.finalize(self, link.close)
            return self._link
