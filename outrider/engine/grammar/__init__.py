"""Grammars of structured output: texts that llguidance compiles, and matchers that follow one output each. No torch.

llguidance is an optional package (`outrider[grammar]`), imported when the first grammar is compiled.
"""

from outrider.engine.grammar.compiler import GrammarCompiler
from outrider.engine.grammar.matcher import TokenMatcher

__all__ = ["GrammarCompiler", "TokenMatcher"]
