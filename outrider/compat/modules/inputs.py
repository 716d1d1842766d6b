"""Prompts as dicts, importable from the path that vLLM uses."""

from outrider.core.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
