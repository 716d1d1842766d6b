"""Messages to workers (`Errand`) that compile a grammar there or drop it. No torch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outrider.features.grammars.compiled_forms import Vocabulary
from outrider.runner.commands import Errand, done_errand


@dataclass(frozen=True)
class ReadVocabulary(Errand):
    """Read the vocabulary, before the first form comes."""

    vocabulary: Vocabulary

    def begin(self, worker: Any) -> Future[Any]:
        own: Future[Any] = worker.feature("grammars").forms.read(self.vocabulary)
        return own


@dataclass(frozen=True)
class CompileForm(Errand):
    """Compile a grammar for a request that may come, and keep it under this number."""

    number: int
    text: str  # the grammar
    where: str  # the form's name in messages

    def begin(self, worker: Any) -> Future[Any]:
        own: Future[Any] = worker.feature("grammars").forms.prepare(self.number, self.text, self.where)
        return own


@dataclass(frozen=True)
class DropForm(Errand):
    """Forget a compiled grammar that no request needs any more."""

    number: int

    def begin(self, worker: Any) -> Future[Any]:
        worker.feature("grammars").forms.drop(self.number)
        return done_errand()
