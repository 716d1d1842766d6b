"""Grammars of structured output: texts that llguidance compiles, and matchers that follow one output each. No torch.

llguidance is an optional package (`outrider[grammar]`), imported when the first grammar is compiled.
"""

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from outrider.engine.grammar.compiler import GrammarCompiler
    from outrider.engine.grammar.matcher import TokenMatcher
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["GrammarCompiler", "TokenMatcher"]
