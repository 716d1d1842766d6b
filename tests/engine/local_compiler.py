"""A compiler of forms whose worker is nothing but compiled forms, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from outrider.core.structured import StructuredOutputsParams
from outrider.engine.engine import Engine
from outrider.engine.text import Tokenizer
from outrider.features.grammars.compiled_forms import CompiledForms, Vocabulary
from outrider.features.grammars.compiler import GrammarCompiler
from outrider.features.grammars.in_engine import GrammarsInEngine
from outrider.features.grammars.texts import grammar_text


class LocalCompiler(GrammarCompiler):
    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_ids: Sequence[int]) -> None:
        forms = self.forms = CompiledForms()
        super().__init__(load_tokenizer, eos_ids, lambda errand: errand.begin(worker_with(forms)))

    def prepare(self, number: int, asked: StructuredOutputsParams) -> Future[Any]:
        """Compile a form without a trial."""
        self.forms.read(Vocabulary(*self._describe(), self._eos_ids)).result()
        return self.forms.prepare(number, grammar_text(asked), asked.where)


def worker_with(forms: CompiledForms) -> Any:
    return SimpleNamespace(feature=lambda name: SimpleNamespace(forms=forms))


def compiler_of(engine: Engine) -> GrammarCompiler:
    feature = engine.checks.features.need("grammars")
    assert isinstance(feature, GrammarsInEngine)
    return feature.compiler


def forms_of(engine: Engine) -> CompiledForms:
    """The compiled forms of an engine whose worker is in this process."""
    worker: Any = engine.worker.runner
    forms: CompiledForms = worker.feature("grammars").forms
    return forms
