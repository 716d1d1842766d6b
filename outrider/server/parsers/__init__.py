"""Parsers of what models write: reasoning, tool calls and content, from text that comes in pieces of any length."""

from outrider.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, output_parser
from outrider.server.parsers.machine import Call, Content, Event, OutputParser, Reasoning

__all__ = ["REASONING_FORMATS", "TOOL_FORMATS", "Call", "Content", "Event", "OutputParser", "Reasoning",
           "output_parser"]
