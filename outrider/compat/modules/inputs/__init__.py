"""Stands for `vllm.inputs`: types of prompts that are given as dicts."""

from outrider.core.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
