"""GrammarTrial: finds out whether a grammar can be compiled within its limits, and what is wrong with it if not.

The trial runs in the compile process, one grammar of each client at a time, before the workers compile the grammar. The
result is kept for later requests with the same grammar.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeVar

from outrider.core.structured import StructuredOutputsParams
from outrider.engine.engine_feature import Caller
from outrider.features.grammars.compile_process import CompileFailure, CompileProcess, Found, JobLimits
from outrider.features.grammars.compile_program import TIME
from outrider.features.grammars.form_lease import FormsBusy
from outrider.features.grammars.matcher import short
from outrider.features.grammars.schemas import subschemas
from outrider.features.grammars.turns import LOOK_SECONDS, CompileTurns

CPU_SECONDS = 3  # of one grammar: the largest useful schemas take half a second
SLOW_CPU_SECONDS = 1.5  # of a grammar that was not compiled in time, from which it is not tried again
TRIAL_BYTES = 256 << 20  # of memory while a grammar is compiled
MAX_FORM_BYTES = 64 << 20  # of a compiled grammar: each sample has one
PLACE_SECONDS = 2.0  # to find the place of a mistake
MAX_PROBES = 200  # schemas that are compiled for that
NUM_KEPT = 1024  # grammars of which is kept what was found out
T = TypeVar("T")


@dataclass(frozen=True)
class NewForm:
    """The grammar of a request that is being checked, and the limits within which it must compile."""

    asked: StructuredOutputsParams
    text: str  # the grammar
    parser_limits: dict[str, Any]
    seconds: float  # to compile it
    ready_seconds: float  # to read the tokenizer before that
    caller: Caller

    @cached_property
    def digest(self) -> bytes:
        return sha256(self.text.encode()).digest()


class GrammarTrial:
    """Tries grammars in the compile process, and keeps the result for each. May be used by several threads."""

    def __init__(self, tokenizer: Callable[[], tuple[str, int]], eos_ids: Sequence[int]) -> None:
        self._process = CompileProcess(tokenizer, eos_ids)
        self._turns = CompileTurns()
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # (error, bytes) by digest of the grammar
        # Forms whose turn some request has, or waits for. By client: none may wait for the turns of another.
        self._in_hand: dict[tuple[str, bytes], Future[None]] = {}

    def begin(self) -> None:
        """Start the compile process if it does not run, and return without waiting for it."""
        self._process.start()

    def admit(self, form: NewForm, is_ready: Callable[[], bool], make_ready: Callable[[int], T]) -> T:
        """Try a grammar, then call `make_ready` with the bytes that it takes when compiled, and return the result.
        `make_ready` compiles the grammar in the workers. The caller holds its turn during both, so that tenants do not
        delay each other (`turns.py`). A known grammar that is compiled already (`is_ready`) needs no turn. Raises a
        ValueError that says what is wrong with the grammar."""
        own_key = form.caller.name, form.digest
        while True:
            num_bytes = self._known(form.digest)
            if num_bytes is not None and is_ready():
                return make_ready(num_bytes)
            with self._lock:
                other = self._in_hand.get(own_key)
                if other is None:
                    own = self._in_hand[own_key] = Future[None]()
            if other is not None:
                _wait(other, form.caller)
                continue
            try:
                with self._turns.turn(form.caller.name, form.caller.is_gone):
                    return make_ready(self._try(form) if num_bytes is None else num_bytes)
            finally:
                with self._lock:
                    del self._in_hand[own_key]
                own.set_result(None)

    def _try(self, form: NewForm) -> int:
        """Try a grammar in the compile process. Returns the bytes of the compiled grammar. Raises a ValueError that
        says what is wrong."""
        where, found = form.asked.where, self._run("prove", form.text, form, form.seconds)
        if found.exceeded == TIME:
            error = f"{where} takes longer than {form.seconds:g} seconds to compile: make it simpler"
            if found.cpu_seconds < SLOW_CPU_SECONDS:  # the machine is busy: another time it may be fast enough
                raise ValueError(error)
        elif found.exceeded is not None or found.num_bytes > MAX_FORM_BYTES:
            error = f"{where} takes too much memory to compile: make it simpler"
        elif found.error:
            error = f"{where}{self._place(form, found.error)} cannot be compiled: {short(found.error)}"
        else:
            error = ""
        with self._lock:
            self._found[form.digest] = (error, found.num_bytes)
            while len(self._found) > NUM_KEPT:
                self._found.popitem(last=False)
        if error:
            raise ValueError(error)
        return found.num_bytes

    def _run(self, kind: str, text: str, form: NewForm, seconds: float) -> Found:
        limits = JobLimits(seconds, CPU_SECONDS, TRIAL_BYTES)
        for attempt in range(2):
            try:
                found = self._process.run(kind, text, limits, form.parser_limits, form.ready_seconds,
                                          form.caller.is_gone)
            except CompileFailure as error:  # another program may have ended the process
                if attempt:
                    raise ValueError(f"structured_outputs cannot be compiled now: {error}") from None
            except TimeoutError:
                raise ValueError("structured_outputs cannot be compiled now: the tokenizer takes longer than "
                                 f"{form.ready_seconds:g} seconds to read") from None
            else:
                if found is None:
                    raise FormsBusy("the request was cancelled before its grammar was compiled")
                return found
        raise AssertionError

    def _place(self, form: NewForm, error: str) -> str:
        """Find the smallest part of a JSON schema that fails alone with the same error. Returns its path of keys, for
        the error message."""
        if form.asked.json is None:
            return ""
        schema = json.loads(form.asked.json) if isinstance(form.asked.json, str) else form.asked.json
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        place, num_left, until = "", MAX_PROBES, time.monotonic() + PLACE_SECONDS
        while True:
            for path, child in subschemas(schema):
                num_left -= 1
                if num_left < 0 or time.monotonic() > until:
                    return place
                if isinstance(child, dict) and self._fails_alike(form, shared | child, error):
                    schema, place = child, place + "".join(f"[{part!r}]" for part in path)
                    break
            else:
                return place

    def _fails_alike(self, form: NewForm, schema: dict[str, Any], error: str) -> bool:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return self._run("validate", grammar, form, PLACE_SECONDS).error == error

    def _known(self, digest: bytes) -> int | None:
        with self._lock:
            if digest not in self._found:
                return None
            self._found.move_to_end(digest)
            error, num_bytes = self._found[digest]
        if error:
            raise ValueError(error)
        return num_bytes


def _wait(other: Future[None], caller: Caller) -> None:
    """Wait until another request of the same client has tried the same grammar, so that it is tried only once. Raises
    FormsBusy if the caller has gone."""
    while not caller.is_gone():
        with suppress(TimeoutError):
            other.result(LOOK_SECONDS)
            return
    raise FormsBusy("the request was cancelled before its grammar was compiled")
