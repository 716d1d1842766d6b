"""GrammarCompiler: compiles what requests ask for, within limits of size and time, and computes masks.

An engine has one to check requests with; the worker has one next to the device, because masks are needed between a
step's forward and its sampler. Where both are in one process they share it, and nothing is compiled twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from outrider.core.structured import StructuredOutputsParams
from outrider.engine.grammar.deep_thread import MOST_AT_ONCE, run_deep
from outrider.engine.grammar.matcher import TokenMatcher
from outrider.engine.grammar.schemas import subschemas
from outrider.engine.text import Tokenizer

COMPILE_SECONDS = 10.0  # of one grammar
VOCABULARY_SECONDS = 300.0  # of the tokenizer, once: 1 to 3 seconds, and more on a busy machine
NUM_KEPT = 64  # compiled grammars
NUM_STARTING = 4  # matchers that are made at the same time
MAX_LEXER_STATES = 50_000  # each takes one or two kilobytes
MAX_PROBES = 200  # schemas that are compiled to find the place of a mistake
MAX_MESSAGE = 400
T = TypeVar("T")
INSTALL = "structured output needs the package llguidance: pip install 'outrider[grammar]'"


class GrammarCompiler:
    """May be used by several threads."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_ids: Sequence[int],
                 announce: Callable[[StructuredOutputsParams], None] | None = None) -> None:
        """load_tokenizer: called when the first grammar comes. announce: tells a worker elsewhere of a new form, which
        it then compiles at the same time."""
        self._load_tokenizer = load_tokenizer
        self._eos_ids = tuple(eos_ids)
        self._announce = announce
        self._lock = threading.Lock()
        # Threads of their own, so that nothing but another grammar waits for a grammar that takes seconds.
        self._checking = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="outrider-grammar-check")
        self._starting = ThreadPoolExecutor(NUM_STARTING, thread_name_prefix="outrider-grammar")
        self._tokenizer: Any = None  # an LLTokenizer
        self._executor: Any = None  # an LLExecutor
        self._kept: OrderedDict[str, Any] = OrderedDict()  # LLMatchers at the start of their texts, by grammar

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raises a ValueError that names what is wrong with a grammar. May take seconds the first time."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(INSTALL) from None
        if not self._eos_ids:
            raise ValueError("structured_outputs: this model has no end token, so no text could end")
        self._compiled(asked)

    def start_check(self, check: Callable[[], T]) -> Future[T]:
        """Run a check that may compile a grammar in a thread, for callers that must not wait. Until the check has begun
        it can be cancelled."""
        return self._checking.submit(check)

    def start(self, asked: StructuredOutputsParams) -> Future[TokenMatcher]:
        """A matcher at the start of its text, in a while: a worker's own thread must not wait for it."""
        return self._starting.submit(self._start, asked)

    def _start(self, asked: StructuredOutputsParams) -> TokenMatcher:
        first = self._compiled(asked)
        with self._lock:  # a matcher is for one thread at a time
            own = first.deep_copy()
        return TokenMatcher(own, self._tokenizer, self._eos_ids)

    def fill(self, wanted: Sequence[tuple[TokenMatcher, list[int], int]], masks: np.ndarray) -> None:
        """Masks [n, words] of matchers: each fills its own at an index, then one after each of its drafts, all of which
        its grammar allows. A mask has no bit where something went wrong."""
        import llguidance.numpy as ll

        width = -(-self._tokenizer.vocab_size // 32)
        own = np.zeros((len(masks), width), dtype=np.int32)
        plain = [(matcher.inner, index) for matcher, drafts, index in wanted if not drafts and matcher.error is None]
        ahead = [(matcher.inner, index, drafts) for matcher, drafts, index in wanted if drafts]
        assert all(index + len(drafts) < len(masks) for _, drafts, index in wanted), "masks are too few"
        if len(plain) == 1 and not ahead:
            ll.fill_next_token_bitmask(plain[0][0], own, plain[0][1])
        elif plain:
            ll.fill_next_token_bitmask_par(self._threads(), plain, own)
        if ahead:
            ll.fill_next_token_bitmask_par_with_draft_tokens(self._threads(), ahead, own)
        for matcher, drafts, index in wanted:
            if matcher.error is not None:
                own[index : index + 1 + len(drafts)] = 0
        shared = min(width, masks.shape[1])
        masks[:, :shared], masks[:, shared:] = own[:, :shared], 0

    def _threads(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(8, (os.cpu_count() or 2) - 1)))
        return self._executor

    def _compiled(self, asked: StructuredOutputsParams) -> Any:
        from outrider.engine.grammar.texts import grammar_text

        where = f"structured_outputs.{asked.form}"
        try:
            text = grammar_text(asked)
        except ValueError as error:
            raise ValueError(f"{where} cannot be read: {_short(str(error))}") from None
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        if self._announce is not None:
            self._announce(asked)
        try:
            if self._tokenizer is None:  # before the grammar's own time begins
                run_deep(self._vocabulary, VOCABULARY_SECONDS)
            matcher, wrong = run_deep(lambda: self._compile(text), COMPILE_SECONDS)
        except TimeoutError:
            raise ValueError(f"{where} takes longer than {COMPILE_SECONDS:g} seconds to compile: make it "
                             "simpler") from None
        except RuntimeError as error:
            raise ValueError(f"{where} cannot be compiled: {_short(str(error))}") from None
        if wrong:
            raise ValueError(f"{where}{self._place(asked, wrong)} cannot be compiled: {_short(wrong)}")
        with self._lock:
            self._kept[text] = matcher
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, text: str) -> tuple[Any, str]:
        """(a matcher, what is wrong with the grammar)"""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=limits)
        if matcher.is_error():
            return matcher, matcher.get_error()
        first = matcher.deep_copy()
        is_possible = any(first.compute_bitmask()) and not first.is_error()
        return matcher, "" if is_possible else "no text has this form"

    def _vocabulary(self) -> Any:
        """The tokenizer as llguidance wants it: texts of all tokens, in the order of their bytes."""
        with self._lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                own = self._load_tokenizer()
                self._tokenizer = LLTokenizer(own.backend.to_str(), n_vocab=own.vocab_size,
                                              eos_token=list(self._eos_ids))
            return self._tokenizer

    def _place(self, asked: StructuredOutputsParams, error: str) -> str:
        """The smallest part of a schema that fails in the same way by itself, as a path of keys."""
        if asked.json is None:
            return ""
        schema = json.loads(asked.json) if isinstance(asked.json, str) else asked.json
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        place, num_left = "", MAX_PROBES
        while True:
            for path, child in subschemas(schema):
                num_left -= 1
                if num_left < 0:
                    return place
                if isinstance(child, dict) and _fails_alike(shared | child, error):
                    schema, place = child, place + "".join(f"[{part!r}]" for part in path)
                    break
            else:
                return place


def _fails_alike(schema: dict[str, Any], error: str) -> bool:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(schema)
    try:
        is_error, messages = run_deep(lambda: LLMatcher.validate_grammar_with_warnings(grammar), COMPILE_SECONDS)
    except TimeoutError:
        return False
    return is_error and messages == [error]


def _short(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE - 3]}..."
