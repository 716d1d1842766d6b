"""Prompts that give embeddings (`prompt_embeds`) in place of token ids, at all positions or at some."""
