"""GrammarCompiler: compiles what requests ask for, within limits of size and time, and computes masks.

An engine has one to check requests with; the worker has one next to the device, because masks are needed between a
step's forward and its sampler. Where both are in one process they share it. A form is tried in the compile process
first, where it can be stopped; only one that stays within its limits there is compiled here or in the worker.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from outrider.core.lazy_exports import LateModule
from outrider.core.structured import FormClient, StructuredOutputsParams
from outrider.engine.text import Tokenizer
from outrider.runner.interface import WorkerDied

if TYPE_CHECKING:
    from outrider.engine.grammar import check_threads, deep_thread, trial
    from outrider.engine.grammar import matcher as matchers
else:  # none of them before the first grammar
    check_threads = LateModule("outrider.engine.grammar.check_threads")
    deep_thread = LateModule("outrider.engine.grammar.deep_thread")
    matchers = LateModule("outrider.engine.grammar.matcher")
    trial = LateModule("outrider.engine.grammar.trial")

COMPILE_SECONDS = 10.0  # of one grammar
VOCABULARY_SECONDS = 300.0  # of the tokenizer, once: 1 to 3 seconds, and more on a busy machine
NUM_KEPT = 64  # compiled grammars
KEPT_BYTES = 48 << 20  # of compiled grammars; the last one is kept whatever its size
NUM_STARTING = 4  # matchers that are made at the same time
MAX_LEXER_STATES = 50_000  # each takes one or two kilobytes
MAX_ITEMS_IN_ROW = 2_500  # places of a grammar where a text may stand at once: 4 for an optional property
T = TypeVar("T")
# Has the worker compile a form that takes so many bytes. None: it reads the tokenizer, for the first form to come.
Announce: TypeAlias = Callable[[StructuredOutputsParams | None, int], Future[None]]
INSTALL = "structured output needs the package llguidance: pip install 'outrider[grammar]'"


class KeptGrammar(NamedTuple):
    matcher: Any  # an LLMatcher at the start of its text; None: it is in the worker
    num_bytes: int


class GrammarCompiler:
    """Compiles grammars, makes their matchers and computes masks. May be used by several threads."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_ids: Sequence[int],
                 announce: Announce | None = None) -> None:
        """load_tokenizer: called when the first grammar comes. announce: for a worker in another process."""
        self._own_tokenizer = cache(load_tokenizer)
        self._eos_ids = tuple(eos_ids)
        self._announce = announce
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # the tokenizer
        # Threads of their own, so that nothing but another grammar waits for a grammar that takes seconds.
        self._starting = ThreadPoolExecutor(NUM_STARTING, thread_name_prefix="outrider-grammar")
        self._tokenizer: Any = None  # an LLTokenizer
        self._executor: Any = None  # an LLExecutor
        self._has_announced = False
        self._kept: OrderedDict[str, KeptGrammar] = OrderedDict()  # by grammar
        self._made_checks: check_threads.CheckThreads | None = None
        self._made_trial: trial.GrammarTrial | None = None

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

    def check(self, asked: StructuredOutputsParams, caller: FormClient | None = None) -> None:
        """Raises a ValueError that names what is wrong with a grammar. May take seconds the first time."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(INSTALL) from None
        if not self._eos_ids:
            raise ValueError("structured_outputs: this model has no end token, so no text could end")
        text = _text(asked)
        if self._announce is None and self._find(text) is not None:
            return
        self._begin()
        form = trial.NewForm(asked, text, parser_limits(), COMPILE_SECONDS, VOCABULARY_SECONDS, caller or FormClient())
        self._trial.admit(form, lambda: self._find(text) is not None, lambda size: self._make_ready(form, size))

    def start_check(self, check: Callable[[], T], client: str = "") -> Future[T]:
        """Run a check that may compile a grammar in a thread of its own, for callers that must not wait."""
        return self._checks.start(check, client)

    # Matchers, next to the device

    def prepare(self, asked: StructuredOutputsParams | None, num_bytes: int) -> Future[None]:
        """Compile a form before a step needs it. The form has passed its trial elsewhere and takes `num_bytes`. With
        None only the tokenizer is read."""
        if asked is None:
            return self._starting.submit(self._need_vocabulary)
        return self._starting.submit(lambda: self._compiled(asked, num_bytes) and None)

    def start(self, asked: StructuredOutputsParams) -> Future[matchers.TokenMatcher]:
        """Begin to make a matcher that stands at the start of its text. Returns a future, because the worker's own
        thread must not wait for it."""
        return self._starting.submit(self._start, asked)

    def _start(self, asked: StructuredOutputsParams) -> matchers.TokenMatcher:
        first = self._compiled(asked, 0)
        with self._lock:  # a matcher is for one thread at a time
            own = first.deep_copy()
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
        """Read the tokenizer where matchers are made, while the compile process reads it too."""
        if self._announce is None:
            self._need_vocabulary(self._trial.begin)
            return
        self._trial.begin()
        if not self._has_announced:
            self._has_announced = True
            self._announce(None, 0)

    def _make_ready(self, form: trial.NewForm, num_bytes: int) -> None:
        """Compile a form that has passed its trial where matchers are made."""
        if self._announce is None:
            self._compiled(form.asked, num_bytes)
            return
        with suppress(WorkerDied):  # the engine says so where the request is read
            self._announce(form.asked, num_bytes).result()
        self._keep(form.text, KeptGrammar(None, num_bytes))

    def _find(self, text: str) -> KeptGrammar | None:
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
            return self._kept.get(text)

    def _keep(self, text: str, grammar: KeptGrammar) -> None:
        with self._lock:
            self._kept[text] = grammar
            self._kept.move_to_end(text)
            while len(self._kept) > 1 and (len(self._kept) > NUM_KEPT or sum(
                    one.num_bytes for one in self._kept.values()) > KEPT_BYTES):
                self._kept.popitem(last=False)

    def _compiled(self, asked: StructuredOutputsParams, num_bytes: int) -> Any:
        text = _text(asked)
        if (kept := self._find(text)) is not None:
            return kept.matcher
        where = f"structured_outputs.{asked.form}"
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
        self._keep(text, KeptGrammar(matcher, num_bytes))
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


def parser_limits() -> dict[str, Any]:
    """llguidance's limits of a grammar and of the computing of a mask."""
    return {"max_lexer_states": MAX_LEXER_STATES, "max_items_in_row": MAX_ITEMS_IN_ROW, "verbose_errors": False}


def _describe(load_tokenizer: Callable[[], Tokenizer]) -> tuple[str, int]:
    """The text of tokenizer.json, and the number of tokens."""
    own = load_tokenizer()
    return own.backend.to_str(), own.vocab_size


def _text(asked: StructuredOutputsParams) -> str:
    from outrider.engine.grammar.texts import grammar_text

    try:
        return grammar_text(asked)
    except ValueError as error:
        raise ValueError(f"structured_outputs.{asked.form} cannot be read: {trial.short(str(error))}") from None
