"""Grammar rules for a whole answer in which only a part must follow the grammar that a request asks for, such as the
arguments of a tool call."""

from __future__ import annotations

import json

from outrider.core.structured import StructuredOutputsParams
from outrider.features.grammars.schemas import asked_schema, json_options
from outrider.features.grammars.structural import regex_terminal


def form_rule(asked: StructuredOutputsParams) -> str:
    """The Lark rule `form` for the part of the answer that `asked` describes, with the rules that it needs. `asked` is
    the result of `to_plain`. Raises ValueError if `asked` cannot be read, and ImportError if reading it needs
    llguidance, which is not installed."""
    if asked.is_json:
        return f"form: %json {json.dumps(asked_schema(asked) | {'x-guidance': json_options(asked)})}"
    if asked.choice is not None:
        return "form: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, asked.choice))
    if asked.regex is not None:
        return f"form: {regex_terminal(asked.regex)}"
    from outrider.features.grammars.texts import lark_text

    return f"form: %lark {{\n{lark_text(asked)}\n}}"
