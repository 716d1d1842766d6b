"""Prompts as dicts, importable from the path that vLLM uses."""

from outrider.core.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
