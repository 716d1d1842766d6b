"""Stands for `vllm.inputs.data`, where earlier versions of vLLM have the types of prompts."""

from outrider.core.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
