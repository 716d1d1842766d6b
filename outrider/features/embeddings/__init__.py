"""Embeddings in place of a prompt's token ids: `prompt_embeds` of a prompt, at all positions or at some."""
