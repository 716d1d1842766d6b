"""The limits of compiling a grammar, in the compile process and in workers."""

from __future__ import annotations

from typing import Any

COMPILE_SECONDS = 10.0  # of one grammar
VOCABULARY_SECONDS = 300.0  # of the tokenizer, once: 1 to 3 seconds, and more on a busy machine
MAX_LEXER_STATES = 50_000  # each takes one or two kilobytes
MAX_ITEMS_IN_ROW = 2_500  # places of a grammar where a text may stand at once: 4 for an optional property


def parser_limits() -> dict[str, Any]:
    """llguidance's limits on the size of a grammar and on the work for a mask."""
    return {"max_lexer_states": MAX_LEXER_STATES, "max_items_in_row": MAX_ITEMS_IN_ROW, "verbose_errors": False}
