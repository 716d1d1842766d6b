"""Images in prompts: preprocessing, encoding, and the prompt tokens that image embeddings replace."""
