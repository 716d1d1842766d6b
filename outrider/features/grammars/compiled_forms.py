"""CompiledForms: the grammars that a worker keeps compiled, with the matchers and masks made from them.

Only a grammar that has stayed within its limits in the compile process comes here. Grammars are compiled on threads
beside the steps, before a step needs them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.core import deep_thread
from outrider.features.grammars import limits
from outrider.features.grammars.matcher import TokenMatcher, short

NUM_COMPILING = 4  # grammars that are compiled at the same time
NUM_STARTING = 4  # matchers that are made at the same time


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the tokenizer, for which grammars are compiled."""

    tokenizer: str  # the text of tokenizer.json
    num_tokens: int
    eos_ids: tuple[int, ...]


class CompiledForms:
    """The compiled grammars of a worker. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a matcher is for one thread at a time
        self._reading = threading.Lock()  # the tokenizer
        # Threads of their own, so that nothing but another grammar waits for a grammar that takes seconds.
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="outrider-grammar")
        self._starting = ThreadPoolExecutor(NUM_STARTING, thread_name_prefix="outrider-matcher")
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None  # an LLTokenizer
        self._executor: Any = None  # an LLExecutor
        self._compiled: dict[int, Future[Any]] = {}  # forms by number: LLMatchers at the start of their texts

    def read(self, vocabulary: Vocabulary) -> Future[None]:
        """Read the vocabulary, which compiling a grammar needs. Must be called first."""
        self._vocabulary = vocabulary
        return self._compiling.submit(self._need_tokenizer)

    def prepare(self, number: int, text: str, where: str) -> Future[Any]:
        """Compile a grammar that has passed its trial, and keep it under this number until it is dropped. text: the
        grammar. where: its name in messages."""
        compiled = self._compiled[number] = self._compiling.submit(self._compile_in_time, text, where)
        return compiled

    def drop(self, number: int) -> None:
        """Forget the compiled grammar of this number."""
        self._compiled.pop(number, None)

    def start(self, number: int) -> Future[TokenMatcher]:
        """Begin to make a matcher of a compiled grammar, at the start of its text. Returns a future, because the
        worker's own thread must not wait for the matcher."""
        return self._starting.submit(self._start, self._compiled.get(number))

    def fill(self, wanted: Sequence[tuple[TokenMatcher, list[int], int]], masks: np.ndarray) -> None:
        """Fill masks [n, words], in which a set bit allows a token. Each matcher fills the mask at its index, and one
        more for each of its drafts, which its grammar must allow. A mask whose computation failed has no bit set."""
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

    # Inside

    def _threads(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(8, (os.cpu_count() or 2) - 1)))
        return self._executor

    def _start(self, compiled: Future[Any] | None) -> TokenMatcher:
        if compiled is None or not compiled.done():  # a step waits for this, and must not wait for a compiler
            raise RuntimeError("the request's grammar was not compiled before its step. This is a bug: please report "
                               "it")
        with self._lock:
            own = compiled.result().deep_copy()
        assert self._vocabulary is not None
        return TokenMatcher(own, self._tokenizer, self._vocabulary.eos_ids)

    def _compile_in_time(self, text: str, where: str) -> Any:
        """Compile a grammar within the limits, and return an LLMatcher at the start of its text."""
        self._need_tokenizer()  # before the grammar's own time begins
        try:
            matcher, wrong = deep_thread.run_deep(lambda: self._compile(text), limits.COMPILE_SECONDS)
        except TimeoutError:
            raise ValueError(f"{where} takes longer than {limits.COMPILE_SECONDS:g} seconds to compile: make it "
                             "simpler") from None
        except RuntimeError as error:
            raise ValueError(f"{where} cannot be compiled: {short(str(error))}. Correct it") from None
        if wrong:
            raise ValueError(f"{where} cannot be compiled: {short(wrong)}. Correct it")
        return matcher

    def _compile(self, text: str) -> tuple[Any, str]:
        """Compile a grammar. Returns the matcher, and an error message if the grammar is wrong."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._read_tokenizer(), text, log_level=0, limits=LLParserLimits(**limits.parser_limits()))
        return matcher, matcher.get_error() if matcher.is_error() else ""

    def _need_tokenizer(self) -> None:
        """Read the tokenizer, if that has not been done."""
        if self._tokenizer is None:
            deep_thread.run_deep(self._read_tokenizer, limits.VOCABULARY_SECONDS)

    def _read_tokenizer(self) -> Any:
        """The tokenizer in llguidance's form: the texts of all tokens, in the order of their bytes."""
        with self._reading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                assert self._vocabulary is not None, "a form has come before the vocabulary"
                own = self._vocabulary
                self._tokenizer = LLTokenizer(own.tokenizer, n_vocab=own.num_tokens, eos_token=list(own.eos_ids))
            return self._tokenizer
