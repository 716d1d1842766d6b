"""GrammarCompiler: compiles the grammars of requests within limits of size and time, and leases them. No torch.

A grammar is tried in the compile process first, where it can be stopped (`trial.py`). Only a grammar that stays within
its limits there is compiled again in the workers, because a step makes masks there, between its forward pass and its
sampler. A compiled grammar is dropped only when no request leases it (`leases.py`), so no step waits for a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from itertools import count
from typing import TypeVar

from outrider.core.structured import INSTALL, StructuredOutputsParams
from outrider.engine.engine_feature import Caller
from outrider.engine.text import Tokenizer
from outrider.features.grammars import limits
from outrider.features.grammars.check_threads import CheckThreads
from outrider.features.grammars.compiled_forms import Vocabulary
from outrider.features.grammars.errands import CompileForm, DropForm, ReadVocabulary
from outrider.features.grammars.form_lease import FormLease
from outrider.features.grammars.leases import FormLeases
from outrider.features.grammars.matcher import short
from outrider.features.grammars.trial import GrammarTrial, NewForm
from outrider.runner.commands import Errand
from outrider.runner.interface import WorkerDied

T = TypeVar("T")
Begin = Callable[[Errand], Future[None]]  # gives the workers an errand


class GrammarCompiler:
    """Tests, compiles and leases grammars. May be used by several threads."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_ids: Sequence[int], begin: Begin) -> None:
        """load_tokenizer: loads the tokenizer; it is called when the first grammar comes."""
        self._describe = partial(_describe, cache(load_tokenizer))
        self._eos_ids, self._begin = tuple(eos_ids), begin
        self._has_announced = False  # the workers have the vocabulary
        self._numbers = count()
        self.leases = FormLeases(partial(_drop, begin))
        self._checks = CheckThreads()
        # Holds no reference to this compiler: the compile process ends when the last one is gone.
        self._trial = GrammarTrial(self._describe, self._eos_ids)

    # Checks, before a request is taken

    def check(self, asked: StructuredOutputsParams, caller: Caller | None = None) -> FormLease:
        """Have a request's grammar compiled, and lease it. Raises a ValueError that says what is wrong with the
        grammar, or FormsBusy if the caller's requests hold too many grammars. The first check of a grammar may take
        seconds. caller: the client; None is the program itself."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(INSTALL) from None
        if not self._eos_ids:
            raise ValueError("structured_outputs: this model has no end token, with which a grammar ends an answer: "
                             "leave structured_outputs out")
        client = None if caller is None else caller.name
        form = NewForm(asked, _text(asked), limits.parser_limits(), limits.COMPILE_SECONDS, limits.VOCABULARY_SECONDS,
                       caller or Caller())
        if (lease := self.leases.take(form.digest, client)) is not None:
            return lease
        self.leases.check_room(client)
        self._begin_reading()
        return self._trial.admit(form, lambda: self.leases.is_kept(form.digest),
                                 lambda num_bytes: self._lease(form, num_bytes, client))

    def start_check(self, check: Callable[[], T], client: str = "") -> Future[T]:
        """Run a check that may compile a grammar in a separate thread, for callers that must not wait."""
        return self._checks.start(check, client)

    # Inside

    def _begin_reading(self) -> None:
        """Read the tokenizer in the workers, while the compile process reads it too."""
        self._trial.begin()
        if not self._has_announced:
            self._begin(ReadVocabulary(Vocabulary(*self._describe(), self._eos_ids)))
            self._has_announced = True

    def _lease(self, form: NewForm, num_bytes: int, client: str | None) -> FormLease:
        """Lease a grammar that has passed its trial. If the workers do not keep it compiled, they compile it first."""
        if (lease := self.leases.take(form.digest, client)) is not None:
            return lease
        number = next(self._numbers)
        try:
            with suppress(WorkerDied):  # the engine says so where the request is read
                self._begin(CompileForm(number, form.text, form.asked.where)).result()
            return self.leases.keep(form.digest, number, num_bytes, client)
        except BaseException:
            if not self.leases.holds(number):
                _drop(self._begin, number)
            raise


def _drop(begin: Begin, number: int) -> None:
    with suppress(WorkerDied):  # its forms are gone with it
        begin(DropForm(number))


def _describe(load_tokenizer: Callable[[], Tokenizer]) -> tuple[str, int]:
    """Return the text of tokenizer.json, and the number of tokens."""
    own = load_tokenizer()
    return own.backend.to_str(), own.vocab_size


def _text(asked: StructuredOutputsParams) -> str:
    from outrider.features.grammars.texts import grammar_text  # with llguidance

    try:
        return grammar_text(asked)
    except ValueError as error:
        raise ValueError(f"{asked.where} cannot be read: {short(str(error))}") from None
