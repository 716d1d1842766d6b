"""Attention to the stretches of a context that an indexer chooses."""
