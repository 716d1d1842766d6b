"""outrider.inputs.data: the place of prompts in earlier versions of vLLM."""

from outrider.core.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
