"""Parsers of model output: reasoning, tool calls and content, from text that comes in pieces of any length."""

from outrider.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, output_parser
from outrider.server.parsers.machine import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
    settled,
)

__all__ = ["REASONING_FORMATS", "TOOL_FORMATS", "CallArguments", "CallBegin", "CallEnd", "Content", "Event",
           "OutputParser", "Reasoning", "output_parser", "settled"]
