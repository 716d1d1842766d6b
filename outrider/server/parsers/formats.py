"""All formats by the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.server.parsers.gemma4 import GEMMA4_CALLS, GEMMA4_THOUGHTS
from outrider.server.parsers.harmony import HARMONY_CALLS, HARMONY_THOUGHTS
from outrider.server.parsers.json_calls import DEEPSEEK, FORCED_LIST, HERMES, LLAMA3, MISTRAL, PYTHONIC
from outrider.server.parsers.machine import OutputParser, ReasoningRegion, Region, Schemas
from outrider.server.parsers.tag_calls import DSML, GLM, QWEN3_CODER

__all__ = ["FORCED_LIST", "REASONING_FORMATS", "TOOL_FORMATS", "output_parser"]

_THINK = (ReasoningRegion("<think>", "</think>"),)
TOOL_FORMATS: dict[str, Sequence[Region]] = {
    "hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA3, "pythonic": PYTHONIC, "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK, "deepseek_v31": DEEPSEEK, "deepseek_v32": DSML, "glm45": GLM, "gemma4": GEMMA4_CALLS,
    "openai": HARMONY_CALLS,
}  # fmt: skip
REASONING_FORMATS: dict[str, Sequence[Region]] = {
    "qwen3": _THINK, "deepseek_r1": _THINK, "glm45": _THINK, "mistral": (ReasoningRegion("[THINK]", "[/THINK]"),),
    "gemma4": GEMMA4_THOUGHTS, "openai_gptoss": HARMONY_THOUGHTS,
}  # fmt: skip


def output_parser(tool_format: str | None, reasoning_format: str | None, *, schemas: Schemas | None = None,
                  prompt_end: str = "", calls: Sequence[Region] = ()) -> OutputParser | None:
    """None if neither is asked for: then all text is content. `calls`: regions of forced calls, instead of the tool
    format's own."""
    regions = [*(calls or (TOOL_FORMATS[tool_format] if tool_format else ())),
               *(REASONING_FORMATS[reasoning_format] if reasoning_format else ())]
    return OutputParser(regions, schemas, prompt_end) if regions else None
