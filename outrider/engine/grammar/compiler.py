"""GrammarCompiler: compiles what requests ask for, within limits of size and time, and computes masks.

An engine has one to check requests with; the worker has one next to the device, because masks are needed between a
step's forward and its sampler. Where both are in one process they share it. A form is tried in the compile process
first, where it can be stopped; only one that stays within its limits there is compiled here or in the worker. The
engine's compiler leases compiled forms to requests and says which are dropped (`leases.py`), also in the worker: a step
finds its form compiled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from outrider.core.checked_request import CheckedRequest
from outrider.core.lazy_exports import LateModule
from outrider.core.request_keeper import RequestKeeper
from outrider.core.structured import FormClient, FormLease, StructuredOutputsParams
from outrider.engine.text import Tokenizer
from outrider.runner.interface import WorkerDied

if TYPE_CHECKING:
    from outrider.engine.grammar import check_threads, deep_thread, texts, trial
    from outrider.engine.grammar import leases as form_leases
    from outrider.engine.grammar import matcher as matchers
else:  # none of them before the first grammar
    check_threads = LateModule("outrider.engine.grammar.check_threads")
    deep_thread = LateModule("outrider.engine.grammar.deep_thread")
    form_leases = LateModule("outrider.engine.grammar.leases")
    matchers = LateModule("outrider.engine.grammar.matcher")
    texts = LateModule("outrider.engine.grammar.texts")
    trial = LateModule("outrider.engine.grammar.trial")

COMPILE_SECONDS = 10.0  # of one grammar
VOCABULARY_SECONDS = 300.0  # of the tokenizer, once: 1 to 3 seconds, and more on a busy machine
NUM_COMPILING = 4  # grammars that are compiled at the same time
NUM_STARTING = 4  # matchers that are made at the same time
MAX_LEXER_STATES = 50_000  # each takes one or two kilobytes
MAX_ITEMS_IN_ROW = 2_500  # places of a grammar where a text may stand at once: 4 for an optional property
T = TypeVar("T")
INSTALL = "structured output needs the package llguidance: pip install 'outrider[grammar]'"


class RemoteForms(Protocol):
    """A worker in another process, where forms are compiled and matchers are made."""

    def prepare_form(self, form: StructuredOutputsParams | None) -> tuple[int, Future[None]]:
        """Have the worker compile a form. Returns the number under which it keeps the form, and a future that is done
        when the form is compiled. None: the worker reads the tokenizer, for the first form to come."""

    def drop_form(self, number: int) -> None: ...


class GrammarCompiler(RequestKeeper):
    """Compiles grammars, makes their matchers and computes masks. May be used by several threads."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_ids: Sequence[int],
                 remote: RemoteForms | None = None) -> None:
        """load_tokenizer: called when the first grammar comes. remote: the forms' interface to a worker in another
        process, or None."""
        self._own_tokenizer = cache(load_tokenizer)
        self._eos_ids = tuple(eos_ids)
        self._remote = remote
        self._lock = threading.Lock()  # a matcher is for one thread at a time
        self._reading = threading.Lock()  # the tokenizer
        # Threads of their own, so that nothing but another grammar waits for a grammar that takes seconds.
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, thread_name_prefix="outrider-grammar")
        self._starting = ThreadPoolExecutor(NUM_STARTING, thread_name_prefix="outrider-matcher")
        self._tokenizer: Any = None  # an LLTokenizer
        self._executor: Any = None  # an LLExecutor
        self._has_announced = False
        self._numbers = count()
        self._compiled: dict[int, Future[Any]] = {}  # forms by number: LLMatchers at the start of their texts
        self._drop = partial(_drop, self._compiled) if remote is None else remote.drop_form
        self._made_leases: form_leases.FormLeases | None = None
        self._made_checks: check_threads.CheckThreads | None = None
        self._made_trial: trial.GrammarTrial | None = None

    @property
    def leases(self) -> form_leases.FormLeases:
        if self._made_leases is None:
            with self._lock:
                if self._made_leases is None:
                    self._made_leases = form_leases.FormLeases(self._drop)
        return self._made_leases

    @property
    def _checks(self) -> check_threads.CheckThreads:
        with self._lock:
            if self._made_checks is None:
                self._made_checks = check_threads.CheckThreads()
            return self._made_checks

    @property
    def _trial(self) -> trial.GrammarTrial:
        """Holds no reference to this compiler: the compile process ends when the last one is gone."""
        with self._lock:
            if self._made_trial is None:
                self._made_trial = trial.GrammarTrial(partial(_describe, self._own_tokenizer), self._eos_ids)
            return self._made_trial

    # Checks, before a request is taken

    def check(self, asked: StructuredOutputsParams, caller: FormClient | None = None) -> FormLease:
        """Have a form compiled. Raises a ValueError that says what is wrong with the form, or FormsBusy if the caller's
        requests hold too many forms. May take seconds the first time. caller: None stands for the program itself."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(INSTALL) from None
        if not self._eos_ids:
            raise ValueError("structured_outputs: this model has no end token, so no text could end")
        client = None if caller is None else caller.name
        form = trial.NewForm(asked, _text(asked), parser_limits(), COMPILE_SECONDS, VOCABULARY_SECONDS,
                             caller or FormClient())
        if (lease := self.leases.take(form.digest, client)) is not None:
            return lease
        self.leases.check_room(client)
        self._begin()
        return self._trial.admit(form, lambda: self.leases.is_kept(form.digest),
                                 lambda num_bytes: self._lease(form, num_bytes, client))

    def start_check(self, check: Callable[[], T], client: str = "") -> Future[T]:
        """Run a check that may compile a grammar in a thread of its own, for callers that must not wait."""
        return self._checks.start(check, client)

    # Requests of the engine

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        if any(asked.part(FormLease) is not None for asked in requests):
            self.leases.enter(requests)

    def leave(self, asked: CheckedRequest) -> None:
        if asked.part(FormLease) is not None:
            self.leases.leave(asked)

    def forget_requests(self) -> None:
        if self._made_leases is not None:
            self._made_leases.forget_requests()

    def drop_unused(self) -> None:
        if self._made_leases is not None:
            self._made_leases.drop_unused()

    def close(self) -> None:
        if self._made_leases is not None:
            self._made_leases.close()

    # Matchers, next to the device

    def prepare(self, number: int, asked: StructuredOutputsParams | None) -> Future[Any]:
        """Compile a form that has passed its trial, and keep it under this number until it is dropped. With None only
        the tokenizer is read."""
        if asked is None:
            return self._compiling.submit(self._need_vocabulary)
        compiled = self._compiled[number] = self._compiling.submit(self._compile_in_time, asked)
        return compiled

    def drop(self, number: int) -> None:
        """Forget a form that was prepared."""
        _drop(self._compiled, number)

    def start(self, number: int) -> Future[matchers.TokenMatcher]:
        """Begin to make a matcher of a compiled form that stands at the start of its text. Returns a future, because
        the worker's own thread must not wait for it."""
        return self._starting.submit(self._start, self._compiled.get(number))

    def _start(self, compiled: Future[Any] | None) -> matchers.TokenMatcher:
        if compiled is None or not compiled.done():  # a step waits for this, and must not wait for a compiler
            raise RuntimeError("the form was not compiled before the step")
        with self._lock:
            own = compiled.result().deep_copy()
        return matchers.TokenMatcher(own, self._tokenizer, self._eos_ids)

    def fill(self, wanted: Sequence[tuple[matchers.TokenMatcher, list[int], int]], masks: np.ndarray) -> None:
        """Fill masks [n, words]. Each matcher fills the mask at its index and one after each of its drafts; its grammar
        must allow all these drafts. A mask in which something went wrong has no bit set."""
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

    # Inside

    def _begin(self) -> None:
        """Read the tokenizer in the process that makes matchers, while the compile process reads it too."""
        if self._remote is None:
            self._need_vocabulary(self._trial.begin)
            return
        self._trial.begin()
        if not self._has_announced:
            self._has_announced = True
            self._remote.prepare_form(None)

    def _lease(self, form: trial.NewForm, num_bytes: int, client: str | None) -> FormLease:
        """Lease a form that has passed its trial. If it is not kept, it is compiled where matchers are made."""
        if (lease := self.leases.take(form.digest, client)) is not None:
            return lease
        number, compiled = self._prepare(form.asked)
        try:
            with suppress(WorkerDied):  # the engine says so where the request is read
                compiled.result()
            return self.leases.keep(form.digest, number, num_bytes, client)
        except BaseException:
            if not self.leases.holds(number):
                self._drop(number)
            raise

    def _prepare(self, asked: StructuredOutputsParams) -> tuple[int, Future[Any]]:
        if self._remote is not None:
            return self._remote.prepare_form(asked)
        number = next(self._numbers)
        return number, self.prepare(number, asked)

    def _compile_in_time(self, asked: StructuredOutputsParams) -> Any:
        """An LLMatcher at the start of its text."""
        text, where = _text(asked), f"structured_outputs.{asked.form}"
        self._need_vocabulary()  # before the grammar's own time begins
        try:
            matcher, wrong = deep_thread.run_deep(lambda: self._compile(text), COMPILE_SECONDS)
        except TimeoutError:
            raise ValueError(f"{where} takes longer than {COMPILE_SECONDS:g} seconds to compile: make it "
                             "simpler") from None
        except RuntimeError as error:
            raise ValueError(f"{where} cannot be compiled: {trial.short(str(error))}") from None
        if wrong:
            raise ValueError(f"{where} cannot be compiled: {trial.short(wrong)}")
        return matcher

    def _compile(self, text: str) -> tuple[Any, str]:
        """Compile a form. Returns (a matcher, what is wrong with the grammar)."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=LLParserLimits(**parser_limits()))
        return matcher, matcher.get_error() if matcher.is_error() else ""

    def _need_vocabulary(self, begin: Callable[[], object] = lambda: None) -> None:
        """Load the tokenizer, if that has not been done. `begin` is called as soon as it is loaded."""
        if self._tokenizer is None:
            deep_thread.run_deep(lambda: self._vocabulary(begin), VOCABULARY_SECONDS)

    def _vocabulary(self, begin: Callable[[], object] = lambda: None) -> Any:
        """The tokenizer as llguidance wants it: texts of all tokens, in the order of their bytes."""
        with self._reading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                own = self._own_tokenizer()
                begin()
                self._tokenizer = LLTokenizer(own.backend.to_str(), n_vocab=own.vocab_size,
                                              eos_token=list(self._eos_ids))
            return self._tokenizer


def _drop(compiled: dict[int, Future[Any]], number: int) -> None:
    compiled.pop(number, None)


def parser_limits() -> dict[str, Any]:
    """llguidance's limits of a grammar and of the computing of a mask."""
    return {"max_lexer_states": MAX_LEXER_STATES, "max_items_in_row": MAX_ITEMS_IN_ROW, "verbose_errors": False}


def _describe(load_tokenizer: Callable[[], Tokenizer]) -> tuple[str, int]:
    """The text of tokenizer.json, and the number of tokens."""
    own = load_tokenizer()
    return own.backend.to_str(), own.vocab_size


def _text(asked: StructuredOutputsParams) -> str:
    try:
        return texts.grammar_text(asked)
    except ValueError as error:
        raise ValueError(f"structured_outputs.{asked.form} cannot be read: {trial.short(str(error))}") from None
