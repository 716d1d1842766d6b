"""Tables of all tool formats and reasoning formats, under vLLM's names for them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.server.parsers.gemma4 import FUNCTION_GEMMA, GEMMA4_CALLS, GEMMA4_THOUGHTS
from outrider.server.parsers.json_calls import (
    APERTUS,
    COHERE,
    DEEPSEEK,
    FORCED_LIST,
    GIGACHAT3,
    GRANITE,
    GRANITE_20B,
    HARMONY_CALLS,
    HERMES,
    INTERNLM,
    KIMI_K2,
    LLAMA3,
    LONGCAT,
    MISTRAL,
    PHI4_MINI,
    TOOL_CALLS_LIST,
    XLAM,
)
from outrider.server.parsers.machine import (
    OutputParser,
    ReasoningRegion,
    Region,
    Schemas,
    Skipped,
    StrayEnd,
)
from outrider.server.parsers.pythonic import LFM2, OLMO3, PYTHONIC
from outrider.server.parsers.tag_calls import (
    DSML,
    GLM,
    HY_V3,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
)

__all__ = ["FORCED_LIST", "REASONING_FORMATS", "TOOL_FORMATS", "output_parser"]

TOOL_FORMATS: dict[str, Sequence[Region]] = {
    "apertus": APERTUS, "cohere_command3": COHERE, "cohere_command4": COHERE,
    "deepseek_v3": DEEPSEEK, "deepseek_v31": DEEPSEEK, "deepseek_v32": DSML,
    "deepseek_v4": DSML, "ernie45": HERMES, "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4_CALLS, "gigachat3": GIGACHAT3, "glm45": GLM, "glm47": GLM,
    "granite": GRANITE, "granite-20b-fc": GRANITE_20B, "granite4": HERMES,
    "hermes": HERMES, "hunyuan_a13b": TOOL_CALLS_LIST, "hy_v3": HY_V3,
    "internlm": INTERNLM, "jamba": TOOL_CALLS_LIST, "kimi_k2": KIMI_K2,
    "lfm2": LFM2, "llama3_json": LLAMA3, "llama4_json": LLAMA3,
    "llama4_pythonic": PYTHONIC, "longcat": LONGCAT, "mimo": QWEN3_CODER,
    "minimax_m2": MINIMAX_M2, "mistral": MISTRAL,
    "olmo3": OLMO3, "openai": HARMONY_CALLS, "phi4_mini_json": PHI4_MINI,
    "poolside_v1": GLM, "pythonic": PYTHONIC, "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER, "seed_oss": SEED_OSS, "step3": STEP3,
    "step3p5": QWEN3_CODER, "xlam": XLAM,
}

_THINK = (ReasoningRegion("<think>", "</think>", stray_end=StrayEnd.DROPPED_AT_START),)
_COHERE = (ReasoningRegion("<|START_THINKING|>", "<|END_THINKING|>"), Skipped("<|START_RESPONSE|>"),
           Skipped("<|END_RESPONSE|>"), Skipped("<|START_TEXT|>"), Skipped("<|END_TEXT|>"))
# Harmony: every message has a channel. `analysis` is reasoning, `commentary to=functions.F` a call, the rest content.
_HARMONY = (ReasoningRegion("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>",
                            "<|start|>assistant"), Skipped("<|start|>assistant"),
            Skipped("<|channel|>final<|message|>"), Skipped("<|channel|>commentary<|message|>"), Skipped("<|end|>"),
            Skipped("<|return|>"))
REASONING_FORMATS: dict[str, Sequence[Region]] = {
    "cohere_command3": _COHERE, "cohere_command4": _COHERE, "deepseek_r1": _THINK, "deepseek_v3": _THINK,
    "deepseek_v4": _THINK, "ernie45": (*_THINK, Skipped("<response>"), Skipped("</response>")),
    "gemma4": GEMMA4_THOUGHTS, "glm45": _THINK, "glm47": _THINK,
    "granite": (ReasoningRegion("Here is my thought process:", "Here is my response:"),
                ReasoningRegion("Here's my thought process:", "Here's my response:")),
    "holo2": _THINK, "hunyuan_a13b": (*_THINK, Skipped("<answer>"), Skipped("</answer>")), "hy_v3": _THINK,
    "kimi_k2": _THINK, "mimo": _THINK, "minimax_m2": _THINK, "minimax_m3": (ReasoningRegion("<mm:think>",
    "</mm:think>", stray_end=StrayEnd.DROPPED_AT_START),), "mistral": (ReasoningRegion("[THINK]", "[/THINK]",
    stray_end=StrayEnd.DROPPED),), "nemotron_v3": _THINK, "olmo3": _THINK,
    "openai_gptoss": _HARMONY, "poolside_v1": _THINK, "qwen3": _THINK,
    "seed_oss": (ReasoningRegion("<seed:think>", "</seed:think>"),), "step3": _THINK, "step3p5": _THINK,
}


def output_parser(tool_format: str | None, reasoning_format: str | None, *, schemas: Schemas | None = None,
                  prompt_end: str = "", calls: Sequence[Region] = ()) -> OutputParser | None:
    """Make the parser for a tool format and a reasoning format. None if neither is given: all text is content. `calls`:
    for forced calls, the regions that replace those of the tool format."""
    regions = [*(calls or (TOOL_FORMATS[tool_format] if tool_format else ())),
               *(REASONING_FORMATS[reasoning_format] if reasoning_format else ())]
    return OutputParser(regions, schemas, prompt_end) if regions else None
