"""outrider.inputs.llm: the place of prompts in vLLM."""

from outrider.core.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
