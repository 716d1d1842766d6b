"""Images in prompts: preprocessing, encoding and the places where their embeddings stand."""
