"""Images in prompts."""
