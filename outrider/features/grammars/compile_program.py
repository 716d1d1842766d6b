"""The program of the compile process. Run as a file; imports the standard library and llguidance, nothing of Outrider.

It reads the tokenizer once, then jobs: grammars to be compiled. Each job runs in a forked child. The system's kernel
limits the child's memory and CPU time, and the child is killed when its time is over, because llguidance cannot be
stopped in any other way. The findings of a job go back as JSON; the compiled grammar does not.

Frames on stdin and stdout are four bytes of length and JSON. The end of stdin ends the process and its children.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

STACK_BYTES = 512 << 20  # address space of the stack: a grammar of thousands of nested rules needs a deep one
KIND_SECONDS = 0.1  # of a job at ordinary priority: one that takes longer leaves the cores to others
LOW_PRIORITY = 15
WALK_TOKENS = 4  # of a text that is tried, so that limits which are met at its beginning are found here
WALK_SECONDS = 0.1
ERRORS_SHOWN = 2000  # characters

# What ended a job that could not end by itself.
TIME, MEMORY = "time", "memory"


@dataclass
class Child:
    job: int
    pid: int
    ends: float  # when its time is over
    slows: float  # when its priority falls
    is_late: bool = False
    answer: bytearray = field(default_factory=bytearray)


class Jobs:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._children: dict[int, Child] = {}  # by the pipe on which each answers

    def serve(self, first: int, last: int) -> None:
        """Read jobs from `first` and write answers to `last`, until there are no more jobs."""
        while True:
            ready, _, _ = select.select([first, *self._children], [], [], self._wait())
            for pipe in ready:
                if pipe == first:
                    asked = read_frame(first)
                    if asked is None:
                        self._end_all()
                        return
                    self._take(asked)
                elif pipe in self._children:
                    self._read(pipe, last)
            self._look_at_times()

    def _wait(self) -> float | None:
        times = [t for child in self._children.values() for t in (child.ends, child.slows) if t != float("inf")]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _take(self, asked: dict[str, Any]) -> None:
        if "cancel" in asked:
            for child in self._children.values():
                if child.job == asked["cancel"]:
                    kill(child.pid)
            return
        pipe, answers = os.pipe()
        now = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(pipe)
                run(self._tokenizer, asked, answers)
            finally:
                os._exit(1)
        os.close(answers)
        self._children[pipe] = Child(asked["job"], pid, now + asked["seconds"], now + KIND_SECONDS)

    def _read(self, pipe: int, last: int) -> None:
        child = self._children[pipe]
        if part := os.read(pipe, 1 << 16):
            child.answer += part
            return
        os.close(pipe)
        del self._children[pipe]
        _, status, used = os.wait4(child.pid, 0)
        answer = json.loads(child.answer) if child.answer else {"ended": cause(child, status)}
        answer |= {"job": child.job, "cpu_seconds": used.ru_utime + used.ru_stime}
        write_frame(last, answer)

    def _look_at_times(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.ends <= now:
                child.is_late, child.ends = True, float("inf")
                kill(child.pid)
            if child.slows <= now:
                child.slows = float("inf")
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, child.pid, LOW_PRIORITY)

    def _end_all(self) -> None:
        for child in self._children.values():
            kill(child.pid)


def cause(child: Child, status: int) -> str:
    """The limit that a child process exceeded, time or memory, if it ended without an answer."""
    over_time = child.is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    return TIME if over_time else MEMORY


def kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


# In a child


def run(tokenizer: Any, asked: dict[str, Any], answers: int) -> None:
    """Do one job in this forked child, within its limits, write the answer and end the process. Never returns."""
    limit(asked["cpu_seconds"], asked["bytes"])
    found: dict[str, Any] = {}

    def work() -> None:
        try:
            found.update(validate(asked["text"]) if asked["kind"] == "validate" else prove(tokenizer, asked))
        except MemoryError:
            pass  # no answer: a limit of memory
        except BaseException as error:  # a library in Rust that has failed raises one of these
            found["error"] = str(error)[:ERRORS_SHOWN]

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found:
        answer = memoryview(json.dumps(found).encode())
        while answer:
            answer = answer[os.write(answers, answer):]
    os._exit(0)


def limit(cpu_seconds: int, num_bytes: int) -> None:
    with suppress(OSError, ValueError):  # a system that knows no such limit
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        most = status_bytes("VmSize") + STACK_BYTES + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def prove(tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar and follow the beginning of a text with it. Returns what is wrong with the grammar, and what it
    cost."""
    from llguidance import LLMatcher, LLParserLimits

    before = status_bytes("VmRSS")
    matcher = LLMatcher(tokenizer, asked["text"], log_level=0, limits=LLParserLimits(**asked["limits"]))
    error = matcher.get_error() if matcher.is_error() else walk(matcher)
    if error.startswith("NoExtension"):
        error = "no text has this form"
    return {"error": error[:ERRORS_SHOWN], "bytes": max(0, status_bytes("VmRSS") - before)}


def walk(matcher: Any) -> str:
    """Follow a text of the grammar for some tokens. Returns a description of the failure, or an empty text."""
    until = time.process_time() + WALK_SECONDS
    for num_tokens in range(WALK_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        if not mask and num_tokens == 0:
            return "no text has this form"
        if not mask or matcher.is_stopped() or time.process_time() > until:
            return ""
        lowest = (mask & -mask).bit_length() - 1
        if not matcher.try_consume_tokens([lowest]) and not matcher.is_error():
            return ""  # an end token
    return str(matcher.get_error())


def validate(text: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    return {"error": messages[0] if is_error else ""}


def status_bytes(name: str) -> int:
    """A memory size of this process in bytes, or 0 if the system does not report it."""
    with suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


# Frames


def read_frame(pipe: int) -> dict[str, Any] | None:
    """Read one frame; None at the end of the stream."""
    head = read_bytes(pipe, 4)
    body = None if head is None else read_bytes(pipe, struct.unpack("<I", head)[0])
    return None if body is None else json.loads(body)


def read_bytes(pipe: int, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(pipe, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def write_frame(pipe: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    rest = memoryview(struct.pack("<I", len(body)) + body)
    while rest:
        rest = rest[os.write(pipe, rest):]


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    given = read_frame(0)
    if given is None:
        return
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["num_tokens"], eos_token=given["eos_ids"])
    del given
    gc.collect()
    gc.freeze()  # or a collection in a child copies every page
    write_frame(1, {"job": 0, "error": ""})
    Jobs(tokenizer).serve(0, 1)


if __name__ == "__main__":
    main()
